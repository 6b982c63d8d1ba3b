"""The families beside Llama's, Qwen's and DeepSeek's: transformers' logits and greedy tokens, and what is special."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import MissingTensorError, ModelConfigError, TensorShapeError, UnexpectedTensorError
from quire.layers.rotary import RopeConfig, RotaryEmbedding
from quire.models.fields import Fields
from quire.models.formats.fp8 import restore
from quire.models.layout import partly_turned
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import load_model, read_config
from quire.ops import Fp8Weight, Kernels, Product, StoredWeight
from quire.ops.elementwise import rotate
from tests import test_determinism as product
from tests import test_triton_engine as triton
from tests.oracle import (
    CLASSES,
    Driver,
    assert_errs_no_more,
    assert_parity,
    assert_same_when_quantized,
    chunked_logits,
    edit_json,
    greedy,
    load_reference,
    random_prompt,
    reference_choices,
    reference_logits,
    save_checkpoint,
    sizes_of,
)
from tests.test_models_deepseek import edit_tensors
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

PROMPT = random_prompt(90)
ORDER = list(range(len(product.prompts())))
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OLDER_YARN = {name: value for name, value in YARN.items() if name != "rope_theta"}
GROWING = {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}}
LONGROPE = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [1.0 + 0.9 * i for i in range(6)],
    },
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}
ATTENTION_ALONE = {**MULTIPLIERS, "layer_types": ["full_attention"] * 3}
SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2]}
ALPHA = {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"sliding_window": 20, "layer_types": MIXED, "query_pre_attn_scalar": 24}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "layer_types": [*MIXED[:2], *MIXED[:2]],
    "global_head_dim": 24,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
ONE_KEY_HEAD = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS_BESIDE = {
    **GEMMA4,
    **ONE_KEY_HEAD,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
SHARED_KV = {
    **GEMMA4,
    "num_hidden_layers": 5,
    "layer_types": [*MIXED[:2], *MIXED],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
}
OSS = {
    "sliding_window": 20,
    "rope_parameters": {**YARN, "truncate": False},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral3", {"text": "mistral", "sliding_window": None}),
    "mistral3-ministral3": ("mistral3", {"text": "ministral3", "tie_word_embeddings": True, **GROWING}),
    "mistral3-mistral4": ("mistral3", {"text": "mistral4", **GROWING}),
    "kimi_k25": ("kimi_k25", {"text": "deepseek_v3"}),
    "qwen3_vl": ("qwen3_vl", {"text": "qwen3_vl_text", "rope_parameters": SECTIONS | {"mrope_interleaved": True}}),
    "qwen2_5_vl": ("qwen2_5_vl", {"text": "qwen2_5_vl_text", "rope_parameters": SECTIONS}),
    "gemma3": ("gemma3", {"text": "gemma3_text", **GEMMA}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "gemma3_text-untied": ("gemma3_text", {**GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3_text-older": (
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window_pattern": 2,
            "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 7000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "edit": {
                "rope_parameters": ...,
                "rope_theta": 7000.0,
                "rope_local_base_freq": 300.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "layer_types": ...,
                "sliding_window_pattern": 2,
            },
        },
    ),
    "gemma4": ("gemma4", {"text": "gemma4_text", **EXPERTS_BESIDE}),
    "gemma4_unified": (
        "gemma4_unified",
        {"text": "gemma4_unified_text", **{k: v for k, v in GEMMA4.items() if "per_layer" not in k}, **ONE_KEY_HEAD},
    ),
    "gemma4_text": ("gemma4_text", {**GEMMA4, "tie_word_embeddings": False, "final_logit_softcapping": None}),
    "gemma4_text-shared": ("gemma4_text", SHARED_KV),
    "gemma4_text-older": (
        "gemma4_text",
        {
            **GEMMA4,
            **ONE_KEY_HEAD,
            "edit": {
                "per_layer_config": ...,
                "global_head_dim": 24,
                "num_global_key_value_heads": 1,
                "rope_parameters": ...,
            },
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite-layer-types": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "ministral3": ("ministral3", GROWING),
    "ministral3-beta-0": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0, "mscale_all_dim": 0.0}},
    ),
    "mistral4": ("mistral4", GROWING),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-qk-norm": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1}),
    "glm4": ("glm4", {}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 8}),
    "phi3": ("phi3", {}),
    "phi3-partly-turned": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 24}),
    "phi3-wide-window": ("phi3", {"sliding_window": 2048, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", LONGROPE),
    "phi3-longrope-short": ("phi3", {**LONGROPE, "original_max_position_embeddings": 512}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-windows": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 20}),
    "smollm3-interval": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 20, "layer_types": MIXED}),
    "olmo3-yarn": (
        "olmo3",
        {
            "sliding_window": 20,
            "layer_types": MIXED,
            "edit": {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": OLDER_YARN},
        },
    ),
    "olmo3-yarn-nested": (
        "olmo3",
        {
            "sliding_window": 20,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
            },
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 20, "layer_types": MIXED}),
    "exaone4-all": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gpt_oss": ("gpt_oss", OSS),
    "gpt_oss-older": (
        "gpt_oss",
        {
            **OSS,
            "attention_bias": False,
            "layer_types": MIXED[::-1],
            "edit": {"rope_parameters": ..., "rope_theta": 5000.0, "rope_scaling": {**OLDER_YARN, "truncate": False}},
        },
    ),
    "granite": ("granite", MULTIPLIERS),
    "granite-tied": ("granite", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", ATTENTION_ALONE | {"position_embedding_type": "rope"}),
    "granitemoehybrid-nope": ("granitemoehybrid", ATTENTION_ALONE),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "hunyuan_v1_dense-alpha": ("hunyuan_v1_dense", ALPHA),
    "hy_v3": ("hy_v3", {}),
}
"""Name of a case: the architecture, and options of its configuration."""


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


def test_what_is_special_shows_in_the_logits(tmp_path: Path) -> None:
    """Otherwise parity would not tell whether it is there."""
    changes: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "query scaling": ("ministral3", GROWING, {"llama_4_scaling_beta": 1e-6}),
        "long factors": ("phi3", LONGROPE, {"long_factor": LONGROPE["rope_scaling"]["short_factor"]}),
        "alpha": ("hunyuan_v1_dense", ALPHA, {"alpha": 1.0}),
    }
    for name, (architecture, options, inner) in changes.items():
        folder = save_checkpoint(tmp_path / name, architecture, **options)
        before = chunked_logits(load_model(folder), PROMPT, 90)
        fields = json.loads((folder / "config.json").read_text())
        edit_json(folder / "config.json", {"rope_parameters": {**fields["rope_parameters"], **inner}})
        assert (chunked_logits(load_model(folder), PROMPT, 90) - before).abs().max() > 0.05, name


def test_what_is_gemmas_shows_in_the_logits(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma3_text", **GEMMA)
    before = chunked_logits(load_model(folder), PROMPT, 90)
    fields = json.loads((folder / "config.json").read_text())
    turned = {kind: {"rope_theta": 500.0} for kind in fields["rope_parameters"]}
    for edit in (
        {"query_pre_attn_scalar": 16},
        {"sliding_window": 40},
        *({"rope_parameters": fields["rope_parameters"] | {kind: turned[kind]}} for kind in turned),
    ):
        edit_json(folder / "config.json", fields | edit)
        assert (chunked_logits(load_model(folder), PROMPT, 90) - before).abs().max() > 0.05, edit


def test_what_is_gpt_oss_shows_in_the_logits(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gpt_oss", **OSS)
    before, stored = chunked_logits(load_model(folder), PROMPT, 90), load_file(folder / "model.safetensors")
    for part in ("self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"):
        name = f"model.layers.1.{part}"
        save_file(stored | {name: stored[name] * 0.5}, folder / "model.safetensors", metadata={"format": "pt"})
        assert (chunked_logits(load_model(folder), PROMPT, 90) - before).abs().max() > 0.05, name


def test_multipliers_show_in_the_logits(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "granite", **MULTIPLIERS)
    before = chunked_logits(load_model(folder), PROMPT, 90)
    for name, value in MULTIPLIERS.items():
        edit_json(folder / "config.json", {name: value * 1.5})
        assert (chunked_logits(load_model(folder), PROMPT, 90) - before).abs().max() > 0.05, name
        edit_json(folder / "config.json", {name: value})


@pytest.mark.parametrize(
    "architecture", ["exaone4", "gemma3_text", "glm4", "gpt_oss", "granite", "hunyuan_v1_dense", "olmo3", "phi3"]
)
def test_a_half_precision_model_errs_no_more_than_transformers(architecture: str, tmp_path: Path) -> None:
    options = {
        "granite": MULTIPLIERS,
        "gemma3_text": GEMMA,
        "gpt_oss": OSS,
        "exaone4": {"sliding_window": 20, "layer_types": MIXED},
    }.get(architecture, {})
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **options)
    assert_errs_no_more(folder, PROMPT, 1.1)


def test_longrope_takes_the_factors_of_the_longest_context_that_was_asked_for(tmp_path: Path) -> None:
    """Those of short texts are transformers' for a text of at most the original length; keys differ, and their name."""
    folder = save_checkpoint(tmp_path, "phi3", **LONGROPE)
    short, long = load_model(folder, max_model_len=64), load_model(folder)
    expected = reference_logits(load_reference(folder), PROMPT[:60])
    torch.testing.assert_close(chunked_logits(short, PROMPT[:60], 37), expected, rtol=0, atol=1e-4)
    assert (chunked_logits(long, PROMPT[:60], 37) - expected).abs().max() > 0.05
    assert short.notes == () and "longer than 64 tokens" in long.notes[0]
    assert short.precision != long.precision
    engine = Engine(EngineConfig(model=str(folder), max_model_len=64, threads=1))
    assert engine.model.precision == short.precision


def test_longrope_takes_the_same_factors_in_all_layers(tmp_path: Path) -> None:
    """Also where layers have rotary embeddings of their own."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.9 * i for i in range(8)]}
    rope = {"type": "longrope", **factors, "original_max_position_embeddings": 64}
    options = {"no_rope_layers": [1, 0, 1], "edit": {"rope_parameters": ..., "rope_scaling": rope}}
    folder = save_checkpoint(tmp_path, "smollm3", **options)
    expected = reference_logits(load_reference(folder), PROMPT[:60])
    short = chunked_logits(load_model(folder, max_model_len=64), PROMPT[:60], 37)
    torch.testing.assert_close(short, expected, rtol=0, atol=1e-4)


# -- tensors -------------------------------------------------------------------------------------------------------


def test_tensors_of_other_towers_are_counted_and_told(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mistral3", text="mistral", sliding_window=None)
    stored = load_file(folder / "model.safetensors")
    others = [name for name in stored if not name.startswith("language_model.")]
    [note] = load_model(folder).notes
    assert f"{len(others)} tensors" in note and "images are refused" in note
    edit_tensors(folder, **{"audio_tower.weight": torch.zeros(3)})
    with pytest.raises(UnexpectedTensorError, match=r"audio_tower\.weight"):
        load_model(folder)


def test_a_text_tower_may_lie_where_transformers_has_it_in_memory(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mistral3", text="mistral", sliding_window=None)
    before = chunked_logits(load_model(folder), PROMPT, 37)
    moved = {
        re.sub("^language_model.model", "model.language_model", name).replace(
            "language_model.lm_head", "lm_head"
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(chunked_logits(load_model(folder), PROMPT, 37), before)


def test_qwen2_5_vls_fields_may_stand_among_the_outer_ones(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen2_5_vl", text="qwen2_5_vl_text", rope_parameters=SECTIONS)
    before = chunked_logits(load_model(folder), PROMPT, 37)
    inner = json.loads((folder / "config.json").read_text())["text_config"]
    older = {
        "rope_parameters": ...,
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    }
    edit_json(folder / "config.json", {**inner, **older, "text_config": ..., "model_type": "qwen2_5_vl"})
    assert torch.equal(chunked_logits(load_model(folder), PROMPT, 37), before)


def test_a_model_without_a_head_gives_transformers_hidden_states(tmp_path: Path) -> None:
    """Qwen3-Embedding: the embedding of a text is the hidden state of its last token."""
    tied = {**sizes_of("qwen3"), "tie_word_embeddings": True}
    torch.manual_seed(0)
    reference = transformers.Qwen3Model(transformers.Qwen3Config(**tied)).eval()
    reference.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", {"architectures": ["Qwen3ForCausalLM"]})
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).last_hidden_state[0]
        model = load_model(tmp_path)
        request = Driver(model, len(PROMPT))
        model.logits = lambda hidden: hidden  # type: ignore[method-assign]
        hidden = torch.cat([request.feed(PROMPT[:50]), request.feed(PROMPT[50:])])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "architecture",
    ["glm4_moe_lite", "ministral3", "mistral4", "smollm3", "olmo3", "phi3", "qwen3_vl", "hy_v3", "minimax_m2", "glm4"],
)
def test_a_published_models_shape_has_as_many_numbers_as_in_transformers(architecture: str) -> None:
    """transformers' default configuration is that of a published model."""
    config_name, model_name = CLASSES[architecture]
    config = getattr(transformers, config_name)()
    with torch.device("meta"):
        reference = getattr(transformers, model_name)(config)
    fields = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [model_name]}
    shapes = read_config(Fields(fields, "config.json"), Fields({}, "none")).tensor_shapes()
    theirs = {name: each.numel() for name, each in reference.named_parameters()}
    theirs |= {name: each.numel() for name, each in reference.named_buffers() if name.endswith("correction_bias")}
    expected = sum(size for name, size in theirs.items() if "visual" not in name)
    assert sum(math.prod(shape) for shape in shapes.values()) == expected > 2e9


def test_fields_that_gemma_3s_published_configurations_leave_out_are_those_of_transformers() -> None:
    published = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": published}
    filled = json.loads(transformers.Gemma3TextConfig(**copy.deepcopy(published)).to_json_string(use_diff=False))
    del filled["eos_token_id"]  # the outer one's are meant
    configs = [
        read_config(Fields(outer | {"text_config": text}, "config.json"), Fields({}, "none"))
        for text in (published, filled)
    ]
    assert configs[0] == configs[1]
    assert configs[0].windows == (1024, 1024, 1024, 1024, 1024, None) * 5 + (1024,) * 4
    assert configs[0].max_position_embeddings == 131072 and configs[0].eos_token_ids == (1, 106)
    assert configs[0].ropes is not None
    assert [(rope.theta, rope.factor) for rope in configs[0].ropes[4:6]] == [(1e4, 1.0), (1e6, 8.0)]


def test_what_is_tied_is_what_the_outer_configuration_says(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mistral3", text="mistral", sliding_window=None, tie_word_embeddings=True)
    fields = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", {"text_config": {**fields["text_config"], "tie_word_embeddings": False}})
    assert load_model(folder).config.tie_word_embeddings
    edit_json(folder / "config.json", {"tie_word_embeddings": ...})
    with pytest.raises(MissingTensorError, match="say tie_word_embeddings: true"):
        load_model(folder)


def test_a_joined_tensor_of_other_rows_is_refused_by_its_own_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "phi3")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    edit_tensors(folder, **{name: torch.zeros(120, 64)})
    with pytest.raises(TensorShapeError, match=rf"{re.escape(name)}.* is \[120, 64\].*128 rows"):
        load_model(folder)


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "hunyuan_v1_dense")
    edit_tensors(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)})
    with pytest.raises(UnexpectedTensorError, match=r"query_layernorm.*both hold"):
        load_model(folder)


FP8: dict[str, tuple[str, dict[str, Any], int]] = {
    "one scale": ("mistral3-ministral3", {"activation_scheme": "static", "weight_block_size": None}, 0),
    "blocks": ("minimax_m2", {"weight_block_size": [32, 32], "fmt": "float8_e4m3fn"}, 32),
}


class KeepsFp8(Kernels):
    """Stands for kernels that take such weights as they are stored.

    Attributes:
        kept: numbers of the weights so far.
    """

    kept = 0

    def keeps(self, weight: StoredWeight) -> bool:
        return True

    def pack_fp8(self, parts: Sequence[Fp8Weight], *more: Any) -> Product:
        self.kept += sum(part.codes.numel() for part in parts)
        return super().pack_fp8(parts, *more)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_weights_are_restored_before_they_are_laid_out(kind: str, tmp_path: Path) -> None:
    case, section, block = FP8[kind]
    architecture, options = FAMILIES[case]
    plain = save_checkpoint(tmp_path / "plain", architecture, **options)
    fp8 = save_checkpoint(tmp_path / "fp8", architecture, **options)
    edit_json(fp8 / "config.json", {"quantization_config": {"quant_method": "fp8", **section}})
    codes: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if re.search(r"layers.*(_proj|w[123])\.weight$", name) and "vision" not in name:
            shape = [-(-size // block) for size in weight.shape] if block else []
            scales = torch.rand(shape) + 0.5
            codes[name] = weight.to(torch.float8_e4m3fn)
            codes[f"{name}_scale_inv"] = scales
            numbers[name] = restore(codes[name], scales, (block, block) if block else tuple(weight.shape))
            if not block:
                codes[name.replace(".weight", ".activation_scale")] = torch.tensor(0.1)
    assert len(numbers) > 10
    edit_tensors(fp8, **codes)
    edit_tensors(plain, **numbers)
    assert torch.equal(chunked_logits(load_model(fp8), PROMPT, 37), chunked_logits(load_model(plain), PROMPT, 37))
    kernels = KeepsFp8()
    kept, whole = load_model(fp8, kernels=kernels), load_model(plain, kernels=Kernels())
    assert torch.equal(chunked_logits(kept, PROMPT, 37), chunked_logits(whole, PROMPT, 37))
    count = sum(numbers[name].numel() for name in numbers)
    assert kernels.kept == count
    assert 2 * count < whole.weight_bytes - kept.weight_bytes < 3 * count  # of 4 bytes each, but for the scales


@pytest.mark.parametrize("case", ["phi3-partly-turned", "mistral3", "minimax_m2", "glm4", "gemma3", "gpt_oss"])
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    assert_same_when_quantized(folder, tmp_path / "int4", PROMPT)


@pytest.mark.parametrize(
    "case",
    [
        "mistral3-ministral3",
        "mistral4",
        "glm4_moe-qk-norm",
        "phi3-longrope",
        "hy_v3",
        "olmo3",
        "gemma3_text",
        "gpt_oss",
    ],
)
def test_random_weights_are_those_of_a_model_that_runs(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "saved", architecture, **options)
    config = json.loads((folder / "config.json").read_text())
    made = write_checkpoint(tmp_path / "made", config)
    engine = Engine(EngineConfig(model=str(made), threads=1, max_model_len=128))
    greedily = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).resolved()
    engine.add(Request(0, PROMPT, greedily, max_tokens=4))
    tokens = [token for _ in range(20) for update in engine.step() for token in update.tokens]
    assert len(tokens) == 4
    assert engine.memory_plan.weights > 0 and engine.memory_plan.full_length_requests >= 1


def test_the_layer_after_glms_last_drafts_and_changes_no_token(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=4)
    shapes = {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}
    generator = torch.Generator().manual_seed(0)
    extra = {f"model.layers.3.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    edit_tensors(folder, **extra)
    edit_json(folder / "config.json", {"num_hidden_layers": 3})
    common = {"model": str(folder), "threads": 1, "max_model_len": 320}
    plain, spec = Engine(EngineConfig(**common)), {"method": "mtp", "adaptive": False}
    drafting = Engine(EngineConfig(**common, speculative_config=spec))
    order = ORDER[:4]
    assert product.run(drafting, order) == product.run(plain, order) and drafting.stats.drafted > 0
    assert "of layers that predict further tokens are not loaded" in plain.notes[0]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "text_config": ("mistral3", {"text_config": ...}, "'text_config' must be an object, the text model's"),
    "text model": (
        "mistral3",
        {"text_config": {"model_type": "llama"}},
        "'model_type' must be 'ministral3' or 'mistral'",
    ),
    "quantized": ("mistral3", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config: HQQ weights"),
    "inner field": ("mistral3", {"text_config": {"model_type": "mistral"}}, "text_config: field 'num_hidden_layers'"),
    "beta": ("ministral3", {"rope_parameters": YARN}, "'llama_4_scaling_beta' must be a finite number"),
    "beta of text": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": "0"}}, "'llama_4_scaling_beta'"),
    "steps of queries": (
        "ministral3",
        {
            "max_position_embeddings": 2**24,
            "rope_parameters": GROWING["rope_parameters"] | {"original_max_position_embeddings": 1},
        },
        "'original_max_position_embeddings' must be a whole number from 257 to",
    ),
    "experts of all layers": (
        "mixtral",
        {"num_hidden_layers": 128, "num_local_experts": 2048},
        "128 layers of 2048 experts; at most 131072",
    ),
    "route_norm": ("hy_v3", {"route_norm": False}, "'route_norm' is False"),
    "layer kinds": ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must be 3 of 'dense' or"),
    "turning part": ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.06}}, "an even part of head_dim (16)"),
    "whole norm": ("minimax_m2", {"use_qk_norm": False}, "'use_qk_norm' is False"),
    "linear attention": ("minimax_m2", {"attn_type_list": [0, 1, 1]}, "'attn_type_list'"),
    "rotary_dim": ("minimax_m2", {"rotary_dim": 40}, "'rotary_dim' must be a whole number from 1 to 16"),
    "yarn": ("phi3", {"rope_parameters": YARN}, "'rope_scaling' must be absent, or of type 'longrope'"),
    "factors": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [0.0] * 8}},
        "'short_factor' must be a list of numbers, each greater than 0",
    ),
    "no_rope_layers": ("smollm3", {"no_rope_layers": [1, 0]}, "'no_rope_layers' must be a list of at least 3"),
    "no_rope_layers of 2": ("smollm3", {"no_rope_layers": [1, 0, 2]}, "'no_rope_layers' must be a list of whole"),
    "layer_types": ("olmo3", {"layer_types": ["full_attention"]}, "'layer_types' must be 3 of"),
    "rope sections": ("olmo3", {"rope_parameters": {"full_attention": {}, "other": {}}}, "'other' must be absent"),
    "limit": ("gpt_oss", {"swiglu_limit": 6.0}, "'swiglu_limit' is 6.0"),
    "activation": ("gemma3_text", {"hidden_activation": "gelu"}, "'hidden_activation' must be 'gelu_pytorch_tanh'"),
    "soft cap of logits": ("gemma3_text", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0"),
    "soft cap of scores": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
    "ropes of layers": ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "'rope_theta' must be absent, beside"),
    "window": ("exaone4", {"sliding_window": None}, "'sliding_window' must be a number, since layer_types"),
    "multiplier": ("granite", {"residual_multiplier": 0.0}, "'residual_multiplier' must be a finite number greater"),
    "cla": ("hunyuan_v1_dense", {"use_cla": True}, "'use_cla' is True"),
    "alpha": ("hunyuan_v1_dense", {"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "recurrent": ("granitemoehybrid", {"layer_types": ["linear_attention"] * 3}, "at least one is attention"),
    "interleave": ("mistral4", {"rope_interleave": False}, "'rope_interleave' is False"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_is_not_supported_is_refused_by_the_fields_name(case: str, tmp_path: Path) -> None:
    architecture, edit, words = BAD[case]
    text: dict[str, Any] = {"text": "mistral"} if architecture == "mistral3" else {}
    text |= ATTENTION_ALONE if architecture == "granitemoehybrid" else {}
    folder = save_checkpoint(tmp_path, architecture, edit=edit, **text)
    with pytest.raises(ModelConfigError, match=re.escape(words)) as caught:
        load_model(folder)
    assert "config.json" in str(caught.value)


def test_a_part_of_each_head_turns_wherever_its_pairs_lie() -> None:
    """Against a rotation spelled out by pairs."""
    for head_dim, turning, interleaved in (
        (16, 8, False),
        (16, 8, True),
        (12, 4, True),
        (16, 16, True),
        (16, 6, False),
    ):
        order = partly_turned(head_dim, turning, interleaved)
        assert order is not None and sorted(order) == list(range(head_dim))
        rope = RotaryEmbedding(RopeConfig(turning, 100.0, still=head_dim - turning))
        x, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 5, 40, 300])
        out = rotate(x[..., list(order)], *rope.tables(positions))
        expected = x.clone()
        for pair in range(turning // 2):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turning // 2)
            angle = (positions.double() * 100.0 ** (-2 * pair / turning)).unsqueeze(1)
            expected[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
            expected[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
        torch.testing.assert_close(out, expected[..., list(order)], rtol=0, atol=1e-4)
        still = [place for place, dimension in enumerate(order) if dimension >= turning]
        assert torch.equal(out[..., still], x[..., list(order)][..., still])
    assert partly_turned(16, 16) is None


# -- the promise ---------------------------------------------------------------------------------------------------

DETERMINED = {
    "exaone4": {"sliding_window": 100, "layer_types": MIXED[:2]},
    "olmo3": {"sliding_window": 100, "layer_types": MIXED[:2]},
    "gemma3_text": {**GEMMA, "sliding_window": 100, "layer_types": MIXED[:2]},
    "gemma4_text": {**GEMMA4, **ONE_KEY_HEAD, "num_hidden_layers": 2, "sliding_window": 100, "layer_types": MIXED[:2]},
    "gemma4_text-experts": {
        **EXPERTS_BESIDE,
        "num_hidden_layers": 2,
        "sliding_window": 100,
        "layer_types": MIXED[:2],
    },
    "gemma4_text-shared": {
        **SHARED_KV,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 100,
        "layer_types": [*MIXED[:2], *MIXED[:2]],
    },
    "ministral3": GROWING,
    "mistral4": GROWING,
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "gpt_oss": {**OSS, "sliding_window": 100, "layer_types": MIXED[:2]},
    "granite": MULTIPLIERS,
    "hunyuan_v1_dense": {},
    "minimax_m2": {"rotary_dim": 8},
    "phi3": LONGROPE,
    "smollm3": {"no_rope_layers": [0, 1]},
}
"""Architectures that differ from the others in what is computed, and options that show it within 320 tokens."""
FAST = {"gemma4_text-shared", "ministral3"}


def few(fast: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in DETERMINED]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """A checkpoint of two layers, by architecture."""
    made: dict[str, str] = {}

    def folder(architecture: str) -> str:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            options = {"num_hidden_layers": 2, **DETERMINED[architecture]}
            name = architecture.split("-")[0]
            made[architecture] = str(save_checkpoint(path, name, dtype=torch.bfloat16, **options))
        return made[architecture]

    return folder


def each_alone(setting: dict[str, Any], indices: list[int]) -> dict[int, Any]:
    engine = Engine(EngineConfig(**setting, prefix_cache="off"))
    outcomes: dict[int, Any] = {}
    for index in indices:
        outcomes |= product.run(engine, [index])
    return outcomes


@pytest.mark.quick("gemma4_text-shared")
@pytest.mark.parametrize("architecture", few(FAST))
def test_nothing_around_a_request_changes_its_tokens(architecture: str, folders: Any) -> None:
    setting = {"model": folders(architecture), "threads": 1}
    alone = each_alone(setting, ORDER)
    assert len({tuple(token for token, _, _ in outcome) for outcome in alone.values()}) == len(alone)
    product.assert_switches_change_nothing(setting, alone, product.PART[: 1 if architecture in FAST else None])
    spec = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    engine = product.engine_of(setting, product.PART[1], speculative_config=spec)
    assert product.run(engine, ORDER) == alone and engine.stats.drafted > 0


@pytest.mark.parametrize("architecture", few({"olmo3"}))
def test_nothing_around_a_request_changes_its_tokens_in_plain_torch(architecture: str, folders: Any) -> None:
    setting = {"model": folders(architecture), "threads": 1, "cpu_kernels": "torch"}
    order = ORDER[:3] + ORDER[5:]
    alone = each_alone(setting, order)
    engine = product.engine_of(setting, product.Switches(16, "radix", 40, True, overlap=True))
    assert product.run(engine, order) == alone
    assert product.run(engine, order[::-1], first_id=100, stagger=2) == alone
    assert engine.stats.cached_tokens > 0


SHARED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"tensor_parallel_size": 2}) for name in DETERMINED),
    ("olmo3", {"tensor_parallel_size": 4}),  # more ranks than key heads
    ("glm4_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("gpt_oss", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("smollm3", {"pipeline_parallel_size": 2}),
    ("granite", {"pipeline_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [pytest.param(*each, marks=() if each == SHARED[1] else pytest.mark.slow) for each in SHARED],
)
def test_ranks_change_nothing(architecture: str, ranks: dict[str, Any], folders: Any) -> None:
    setting = {"model": folders(architecture), "threads": 1}
    alone = each_alone(setting, ORDER)
    with contextlib.closing(product.engine_of(setting, product.PART[0], **ranks)) as engine:
        assert product.run(engine, ORDER) == alone
        assert product.run(engine, ORDER[::-1], first_id=100, stagger=2) == alone
        assert engine.stats.preemptions > 0


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("architecture", few(set()))
def test_nothing_around_a_request_changes_its_tokens_in_triton(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its interpreter, which is slow: requests of few tokens."""
    monkeypatch.setattr(triton.device_forward, "CHUNK", 4)
    options = {"num_hidden_layers": 2, **DETERMINED[architecture]}
    if "sliding_window" in options:
        options["sliding_window"] = 6
    if architecture in ("ministral3", "mistral4"):
        options["rope_parameters"] = {**GROWING["rope_parameters"], "original_max_position_embeddings": 8}
    folder = str(save_checkpoint(tmp_path, architecture.split("-")[0], dtype=torch.float32, **options))
    order = [0, 1, 2]
    config = {"block_size": 32, "prefix_cache": "off", "cuda_graphs": "off", "async_scheduling": False}
    engine = triton.start(folder, {}, **config)
    alone: dict[int, list[Any]] = {}
    for index in order:
        alone |= triton.run(engine, [index])
    together = triton.start(folder, {}, check_invariants=True)
    assert triton.run(together, order) == alone
    assert triton.run(together, order[::-1], stagger=1) == alone
    reference, model = load_reference(Path(folder)), load_model(folder, max_model_len=32)
    for index in (0, 2):
        tokens = [token for token, _ in alone[index]]
        assert tokens == greedy(model, triton.prompts()[index], len(tokens))
        assert tokens == reference_choices(reference, triton.prompts()[index], tokens)
