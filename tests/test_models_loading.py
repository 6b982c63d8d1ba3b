"""Loading a model: what its folder must hold, what it then tells, and that nothing is in memory twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import (
    CheckpointError,
    MissingTensorError,
    ModelConfigError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
    UnknownArchitectureError,
)
from quire.models.registry import load_model
from quire.ops import Kernels
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint

PROMPT = random_prompt(20)
HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "llama", "llama")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)
    return folder


# What a model tells


def test_a_model_tells_its_sizes(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=24))
    assert (model.vocab_size, model.num_layers, model.num_kv_heads, model.head_dim) == (160, 3, 2, 24)
    assert (model.max_position_embeddings, model.windows) == (512, (None,) * 3)
    assert model.groups == ((None, (0, 1, 2), False),)
    assert model.dtype == torch.bfloat16
    assert model.notes == ()


@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_counted_once_and_bytes_are_those_that_a_step_reads(is_tied: bool, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16, tie_word_embeddings=is_tied)
    model = load_model(folder)
    stored = load_file(folder / "model.safetensors")
    assert model.num_parameters == sum(tensor.numel() for tensor in stored.values())
    mapped_only = 0 if is_tied else stored[TABLE].nbytes
    assert model.weight_bytes == sum(tensor.nbytes for tensor in stored.values()) - mapped_only


@pytest.mark.parametrize(
    ("options", "windows", "groups"),
    [
        ({"max_window_layers": 0}, (20, 20, 20), [(20, (0, 1, 2))]),
        ({"max_window_layers": 2}, (None, None, 20), [(None, (0, 1)), (20, (2,))]),
        ({"max_window_layers": 3}, (None, None, None), [(None, (0, 1, 2))]),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (20, None, 20),
            [(None, (1,)), (20, (0, 2))],
        ),
    ],
)
def test_what_must_be_kept_follows_from_the_windows(
    options: dict[str, Any], windows: tuple[int | None, ...], groups: list[Any], tmp_path: Path
) -> None:
    model = load_model(save_checkpoint(tmp_path, "qwen3", use_sliding_window=True, sliding_window=20, **options))
    assert (model.windows, [(group.window, group.layers) for group in model.groups]) == (windows, groups)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [7, 2], (7, 2)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_ends_of_text_come_from_both_files(
    config: Any, generation: Any, expected: tuple[int, ...], llama: Path
) -> None:
    edit_json(llama / "config.json", {"eos_token_id": config})
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_model(llama).eos_token_ids == expected


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_context_takes_rotary_scaling_into_account(scaling: Any, context: int, llama: Path) -> None:
    edit_json(llama / "config.json", {"rope_parameters": ..., "rope_scaling": scaling})
    assert load_model(llama).max_position_embeddings == context


def test_progress_counts_bytes_up_to_the_whole(tied: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(tied, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(tied / "model.safetensors").values())
    assert seen == sorted(seen)
    assert {whole for _, whole in seen} == {total}
    assert seen[-1] == (total, total)


# Data types


@pytest.mark.parametrize(
    ("stored", "field", "requested", "expected"),
    [
        (torch.bfloat16, {}, "auto", torch.bfloat16),
        (torch.float32, {}, "auto", torch.float32),
        (torch.bfloat16, {}, "float32", torch.float32),
        (torch.float16, {}, "float16", torch.float16),
        (torch.float16, {}, "bfloat16", torch.bfloat16),
        (torch.bfloat16, {"dtype": ...}, "auto", torch.bfloat16),
        (torch.float32, {"dtype": ..., "torch_dtype": "bfloat16"}, "auto", torch.bfloat16),
        (torch.bfloat16, {"dtype": "float32"}, "auto", torch.float32),
    ],
)
def test_the_data_type_is_the_one_asked_for_or_the_checkpoints(
    stored: torch.dtype, field: dict[str, Any], requested: str, expected: torch.dtype, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "llama", dtype=stored, edit=field)
    assert load_model(folder, requested).dtype == expected


def test_an_fp16_checkpoint_is_computed_in_fp32_unless_told_otherwise_and_says_so(
    tmp_path: Path,
) -> None:
    model = load_model(folder := save_checkpoint(tmp_path, "llama", dtype=torch.float16))
    assert model.dtype == torch.float32
    assert "fp16" in model.notes[0]
    assert "slow" in load_model(folder, "float16").notes[0]


@pytest.mark.parametrize("requested", ["auto", "float16"])
def test_on_a_gpu_an_fp16_checkpoint_is_computed_in_fp16(requested: str, tmp_path: Path) -> None:
    class Elsewhere(Kernels):
        device = torch.device("meta")

    model = load_model(save_checkpoint(tmp_path, "llama", dtype=torch.float16), requested, kernels=Elsewhere())
    assert model.dtype == torch.float16 and model.notes == ()


@pytest.mark.parametrize("dtype", ["fp8", "", "BF16"])
def test_an_unknown_data_type_is_refused(dtype: str, llama: Path) -> None:
    with pytest.raises(CheckpointError, match=f"auto, bfloat16.*{dtype!r}"):
        load_model(llama, dtype)


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_loading_only_the_embedding_table_is_still_mapped(llama: Path) -> None:
    model = load_model(llama)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len([line for line in maps if str(llama) in line]) == 1
    del model
    assert str(llama) not in Path("/proc/self/maps").read_text()


MEASURE = """
import re, sys
from pathlib import Path
from quire.models.registry import load_model
from quire.ops import Kernels
def field(name): return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
load_model(sys.argv[1])                                     # libraries and their buffers
before = field("VmRSS")
model = load_model(sys.argv[2])
print(field("VmHWM") - before, field("VmRSS") - before, model.weight_bytes)
"""


@pytest.mark.quick("True")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_tied", [False, True])
def test_loading_never_holds_the_weights_twice(is_tied: bool, tied: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    folder = save_checkpoint(tmp_path / "large", "qwen3", dtype=torch.bfloat16, tie_word_embeddings=is_tied, **sizes)
    command = [sys.executable, "-c", MEASURE, str(tied), str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    peak, after, weights = (int(number) for number in output.split())
    assert weights > 50_000_000
    assert after < 1.3 * weights
    assert peak < 1.5 * weights


# Tensors that do not fit the configuration


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(MissingTensorError, match=r"1 of the .* 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(llama)


def test_many_missing_tensors_are_counted(llama: Path) -> None:
    edit_json(llama / "config.json", {"num_hidden_layers": 5})
    with pytest.raises(MissingTensorError, match=r"18 of the 48 .*model\.layers\.3.* and 13 more"):
        load_model(llama)


def test_a_missing_head_points_to_tying(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(MissingTensorError, match="tie_word_embeddings: true"):
        load_model(llama)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    edit_json(llama / "config.json", {"intermediate_size": 95})
    with pytest.raises(TensorShapeError, match=r"9 tensors.*'model\.layers\.0\.mlp.*is \[96, 64\], not \[95, 64\]"):
        load_model(llama)


def test_a_tensor_left_over_is_named(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(UnexpectedTensorError, match=r"'model\.layers\.0\.adapter\.weight'"):
        load_model(llama)


def test_biases_that_the_configuration_denies_are_left_over(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", attention_bias=True, edit={"attention_bias": False})
    with pytest.raises(UnexpectedTensorError, match=r"12 tensors.*proj\.bias"):
        load_model(folder)


def test_quantized_tensors_are_refused(llama: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    edit_tensors(llama, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(TensorDtypeError, match=r"down_proj\.weight' \(I8\)"):
        load_model(llama)


def test_a_copy_of_a_tied_head_and_rotary_buffers_are_tolerated(tied: Path) -> None:
    expected = chunked_logits(load_model(tied), PROMPT, 20)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[TABLE].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(8)

    assert torch.equal(chunked_logits(load_model(edit_tensors(tied, add)), PROMPT, 20), expected)


def test_a_tied_head_that_differs_from_the_table_is_refused(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[TABLE] + 1}))
    with pytest.raises(UnexpectedTensorError, match=r"tie_word_embeddings: true.*differs"):
        load_model(tied)


def test_checks_come_before_any_weight_is_read(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({"zzz": torch.ones(2)}))
    seen: list[int] = []
    with pytest.raises(UnexpectedTensorError):
        load_model(llama, progress=lambda done, total: seen.append(done))
    assert seen == []


# config.json

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": ...}, "'hidden_size' must be a whole number from 1 to 16777216, found nothing"),
    ({"hidden_size": "64"}, "'hidden_size' must be a whole number from 1 to 16777216, found '64'"),
    ({"hidden_size": True}, "'hidden_size' must be a whole number from 1 to 16777216, found True"),
    ({"hidden_size": 64.0}, "found 64.0"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be a whole number from 1 to 1024, found 1000000000"),
    ({"vocab_size": 10**9}, "'vocab_size' must be a whole number from 1 to 16777216, found 1000000000"),
    ({"num_attention_heads": 10**9}, "'num_attention_heads' must be a whole number from 1 to 65536, found 1000000000"),
    (
        {"rms_norm_eps": 10**400},
        "'rms_norm_eps' must be a finite number greater than 1e-15 and at most 0.1, found 1000",
    ),
    ({"rms_norm_eps": 1e-300}, "found 1e-300"),
    ({"rms_norm_eps": 5.0}, "at most 0.1, found 5.0"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
        "'factor' must be a finite number greater than 0 and at most 1e+06, found 1e+308",
    ),
    (
        {"max_position_embeddings": 2**20, "rope_scaling": {"rope_type": "linear", "factor": 1e4}},
        "'factor' must be small enough for a context of at most 1073741824 tokens, found 10000",
    ),
    ({"vocab_size": 0}, "'vocab_size' must be a whole number from 1 to 16777216, found 0"),
    ({"num_hidden_layers": -1}, "'num_hidden_layers'"),
    ({"num_attention_heads": None}, "'num_attention_heads'"),
    ({"num_key_value_heads": 3}, "'num_key_value_heads' must be a divisor of num_attention_heads (4), found 3"),
    ({"head_dim": 15}, "'head_dim' must be even"),
    ({"head_dim": ..., "num_attention_heads": 6}, "'num_attention_heads' must be a divisor of hidden_size"),
    (
        {"rms_norm_eps": float("nan")},
        "'rms_norm_eps' must be a finite number greater than 1e-15 and at most 0.1, found nan",
    ),
    ({"rms_norm_eps": float("inf")}, "found inf"),
    ({"rms_norm_eps": 0}, "found 0"),
    ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false, found 1"),
    ({"attention_bias": "no"}, "'attention_bias'"),
    ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu', found 'gelu'"),
    ({"eos_token_id": 160}, "'eos_token_id' must be a token id or a list of them, each from 0 to 159, found 160"),
    ({"eos_token_id": [2, -1]}, "'eos_token_id'"),
    ({"eos_token_id": "</s>"}, "'eos_token_id'"),
    ({"dtype": "float8_e4m3fn"}, "'dtype' must be 'bfloat16' or 'float16' or 'float32'"),
    ({"architectures": ...}, "'architectures'"),
    ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of strings"),
    ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config: EXL2 weights, which Quire does not read"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
    ({"num_local_experts": 8}, "'num_local_experts'"),
    ({"sliding_window": 128}, "'sliding_window'"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "'layer_types'"),
]
BAD_ROTARY: list[tuple[Any, str]] = [
    ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
    ({"type": "dynamic", "factor": 2.0}, "keys already in the cache"),
    ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "'short_factor' must be 8 numbers"),
    ({"rope_type": "mrope", "mrope_section": [1]}, "'mrope'"),
    ({"rope_type": 3}, "found 3"),
    ({"rope_type": "linear"}, "'factor' must be a finite number greater than 0 and at most 1e+06, found nothing"),
    ({"rope_type": "default", "rope_theta": 1e300}, "'rope_theta' must be a finite number greater than 1 and at most"),
    ({"rope_type": "linear", "factor": 0.5}, "'factor' must be a number of at least 1, found 0.5"),
    ({"rope_type": "linear", "factor": "2"}, "'factor'"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "'beta_fast' must be absent"),
    ({"rope_type": "default", "mrope_section": [1]}, "'mrope_section' must be absent"),
    ({"rope_type": "default", "rope_theta": 1.0}, "'rope_theta' must be a finite number greater than 1"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "'truncate'"),
    ({"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "'low_freq_factor'"),
    ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "'high_freq_factor'"),
    ({"full_attention": {"rope_type": "default"}}, "'full_attention'"),
    ([1], "'rope_parameters' must be an object"),
]


@pytest.mark.parametrize(("edit", "words"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name_with_what_was_found(edit: dict[str, Any], words: str, llama: Path) -> None:
    edit_json(llama / "config.json", edit)
    with pytest.raises(ModelConfigError, match=re.escape(words)) as caught:
        load_model(llama)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(("settings", "words"), BAD_ROTARY, ids=lambda value: str(value)[:40])
def test_bad_rotary_settings_are_refused_by_name(settings: Any, words: str, llama: Path) -> None:
    edit_json(llama / "config.json", {"rope_parameters": settings})
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        load_model(llama)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"layer_types": ["full_attention"] * 2}, "'layer_types' must be 3 of"),
        ({"layer_types": ["linear_attention"] * 3}, "'layer_types'"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_window'"),
        ({"use_sliding_window": True, "sliding_window": 0, "layer_types": ...}, "'sliding_window'"),
        ({"max_window_layers": -1, "layer_types": ...}, "'max_window_layers'"),
    ],
)
def test_bad_windows_are_refused_by_name(edit: dict[str, Any], words: str, tied: Path) -> None:
    edit_json(tied / "config.json", edit)
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        load_model(tied)


def test_fields_that_change_nothing_are_accepted(llama: Path) -> None:
    expected = chunked_logits(load_model(llama), PROMPT, 20)
    neutral = {"partial_rotary_factor": 1.0, "num_experts": 0, "quantization_config": None, "pretraining_tp": 2}
    edit_json(llama / "config.json", neutral | {"layer_types": ["full_attention"] * 3, "my_own_field": {"x": 1}})
    assert torch.equal(chunked_logits(load_model(llama), PROMPT, 20), expected)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(llama: Path) -> None:
    edit_json(llama / "config.json", {"architectures": ["Qwen3VLForCausalLM"]})
    with pytest.raises(UnknownArchitectureError) as caught:
        load_model(llama)
    for name in ("Qwen3VL", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Did you mean Qwen3"):
        assert name in str(caught.value)


def test_a_head_alone_is_refused_with_the_model_for_which_it_drafts(llama: Path) -> None:
    verifier = {"speculators_config": {"verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}}}
    head = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    edit_json(llama / "config.json", head | verifier)
    with pytest.raises(UnknownArchitectureError, match=r"drafts for meta-llama/Llama-3.1-8B-Instruct\. Load that one"):
        load_model(llama)


NOT_THERE = {
    "DeepSeek V4": ["DeepseekV4ForCausalLM"],
    "MiniMax M3": ["MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"],
    "Qwen4-Exp": ["Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"],
    "GLM-5.3": ["Glm5NextForConditionalGeneration"],
    "Hy4": ["HYV4ForCausalLM"],
    "MiMo V2": ["MiMoV2FlashForCausalLM"],
    "Muse Spark": ["MuseSparkForConditionalGeneration"],
    "Mistral Large 4": ["MistralLarge4ForConditionalGeneration"],
    "Llama 4": ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    "LFM3, LFM2-VL": ["Lfm3ForCausalLM", "Lfm3VlForConditionalGeneration", "Lfm2VlForConditionalGeneration"],
    "Qwen3-VL-MoE": ["Qwen3VLMoeForConditionalGeneration"],
    "encoders": ["BertModel", "XLMRobertaModel", "NomicBertModel", "BertForSequenceClassification"],
}
"""By transformers' names."""


@pytest.mark.parametrize("family", NOT_THERE)
def test_families_that_are_not_there_are_refused_by_name_and_taken_for_no_other(family: str, llama: Path) -> None:
    known = auto_classes()
    for architecture in NOT_THERE[family]:
        assert architecture in known
        edit_json(llama / "config.json", {"architectures": [architecture]})
        with pytest.raises(UnknownArchitectureError, match=f"architecture {architecture} is not known") as caught:
            load_model(llama)
        assert "Did you mean" not in str(caught.value)


def auto_classes() -> set[str]:
    """Names of classes that transformers' auto classes know."""
    from transformers.models.auto import modeling_auto

    mappings = [mapping for name, mapping in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    return {
        name
        for mapping in mappings
        for found in mapping.values()
        for name in ([found] if isinstance(found, str) else found)
    }


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CustomForCausalLM"])
def test_a_checkpoints_own_code_is_never_run(architecture: str, llama: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for name in ("modeling_custom", "configuration_custom"):
        (llama / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nclass CustomForCausalLM: pass\n")
    auto_map = {"AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"}
    edit_json(llama / "config.json", {"architectures": [architecture], "auto_map": auto_map})
    if architecture == "LlamaForCausalLM":
        assert "auto_map" in load_model(llama).notes[0]
    else:
        with pytest.raises(UnknownArchitectureError, match="never run"):
            load_model(llama)
    assert not mark.exists()
