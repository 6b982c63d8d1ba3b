"""Gemma 4: layers of unlike shapes, experts beside an MLP, inputs a layer, and layers that share keys and values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError
from quire.models.fields import Fields
from quire.models.layer_groups import LayerGroup
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import check_ranks, load_model, read_config
from tests import test_determinism as product
from tests.oracle import assert_same_when_quantized, chunked_logits, edit_json, random_prompt, save_checkpoint
from tests.test_models_families import DETERMINED, EXPERTS_BESIDE, FAMILIES, GEMMA4, ORDER, SHARED_KV, each_alone

PROMPT = random_prompt(90)
LOCAL, GLOBAL = "sliding_attention", "full_attention"
E2B = {
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "layer_types": [GLOBAL if index % 5 == 4 else LOCAL for index in range(35)],
}
LARGE = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024, "head_dim": 256}
DENSE_31B = {
    **LARGE,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
}
SPARSE_26B = {
    **LARGE,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


def read(**fields: Any) -> Any:
    return read_config(Fields({"architectures": ["Gemma4ForCausalLM"], **fields}, "config.json"), Fields({}, "none"))


def test_published_shapes_have_the_numbers_that_their_names_say() -> None:
    """Without the towers for images and sound."""
    sizes = {
        name: sum(map(math.prod, read(**fields).tensor_shapes().values())) / 1e9
        for name, fields in (("E2B", E2B), ("31B", DENSE_31B), ("26B", SPARSE_26B))
    }
    assert sizes == pytest.approx({"E2B": 4.65, "31B": 30.7, "26B": 25.2}, rel=0.01)


def test_full_layers_have_heads_of_their_own_and_the_last_layers_keep_nothing() -> None:
    dense = read(**DENSE_31B)
    assert [group.window for group in dense.groups] == [None, 1024]
    full = dense.layer_at(5)
    assert (full.num_kv_heads, full.head_dim, full.value_is_key) == (4, 512, True)
    assert (dense.ropes[5].head_dim, dense.ropes[5].still, dense.ropes[5].kind) == (128, 384, "proportional")
    small = read(**E2B)
    assert small.groups == (
        LayerGroup(None, (4, 9, 14)),
        LayerGroup(512, (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13)),
    )
    assert {small.layer_at(i).kv_source for i in range(15, 35)} == {13, 14}
    assert small.layer_at(34).kv_source == 14 and small.layer_at(34).intermediate_size == 2 * 6144


def test_a_layers_section_may_say_what_other_fields_say_for_all() -> None:
    """What transformers writes, and what is published."""
    older = read(**DENSE_31B)
    sections = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    assert read(**{**DENSE_31B, "num_global_key_value_heads": None, "per_layer_config": sections}) == older


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bidirectional": ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
    "sections": ({"per_layer_config": {"0": {"head_dim": 512}}}, "'0' must be an object of head_dim"),
    "unlike sections": (
        {"per_layer_config": {"5": {"head_dim": 512}}, "num_hidden_layers": 12},
        "'per_layer_config' must be the same for all",
    ),
    "all shared": ({"num_kv_shared_layers": 30}, "'num_kv_shared_layers' must be so small"),
    "rope": ({"rope_parameters": {GLOBAL: {"rope_type": "yarn"}}}, "'rope_type' must be 'default' or 'proportional'"),
    "part": ({"rope_parameters": {LOCAL: {"partial_rotary_factor": 0.5}}}, "'partial_rotary_factor' is 0.5"),
    "experts": ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "'top_k_experts' must be"),
    "table": ({"vocab_size_per_layer_input": 1000}, "'vocab_size_per_layer_input' must be a whole number from 262144"),
    "heads": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "'num_global_key_value_heads' must be a div",
    ),
    "cap of scores": ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_is_not_supported_is_refused_by_the_fields_name(case: str) -> None:
    fields, words = BAD[case]
    with pytest.raises(ModelConfigError) as caught:
        read(**fields)
    assert words in str(caught.value)


def test_keys_and_values_that_no_layer_reads_are_passed_over(tmp_path: Path) -> None:
    """Published checkpoints have them, in layers that read those of others."""
    folder = save_checkpoint(tmp_path, "gemma4_text", **SHARED_KV)
    before = chunked_logits(load_model(folder), PROMPT, 37)
    stored = load_file(folder / "model.safetensors")
    extra = {f"model.layers.4.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(stored | extra, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder)
    assert torch.equal(chunked_logits(model, PROMPT, 37), before)
    assert "3 tensors" in model.notes[0] and "self_attn.k_norm" in model.notes[0]


def test_stages_and_such_layers_refuse_one_another(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma4_text", **SHARED_KV)
    check_ranks(folder, 4)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: the model's last layers read what earlier"):
        check_ranks(folder, 1, stages=2)


def test_a_table_of_per_layer_inputs_stays_a_mapped_file(tmp_path: Path) -> None:
    """Of E2B's 4.6 billion numbers, half lie there."""
    options = {**SHARED_KV, "vocab_size_per_layer_input": 100_000}
    model = load_model(save_checkpoint(tmp_path, "gemma4_text", **options))
    table = 100_000 * 5 * 32
    assert model.num_parameters > table and model.weight_bytes == 4 * (model.num_parameters - table)
    assert model.active_parameters == model.num_parameters - table


@pytest.mark.parametrize("case", ["gemma4", "gemma4_text-shared"])
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    assert_same_when_quantized(folder, tmp_path / "int4", PROMPT)


@pytest.mark.parametrize("case", ["gemma4", "gemma4_text-shared"])
def test_random_weights_are_those_of_a_model_that_runs(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    config = json.loads((save_checkpoint(tmp_path / "saved", architecture, **options) / "config.json").read_text())
    made = write_checkpoint(tmp_path / "made", config)
    engine = Engine(EngineConfig(model=str(made), threads=1, max_model_len=128))
    greedily = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).resolved()
    engine.add(Request(0, PROMPT, greedily, max_tokens=4))
    tokens = [token for _ in range(20) for update in engine.step() for token in update.tokens]
    assert len(tokens) == 4


INT4 = {"quantization": "int4"}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text-shared", {**INT4, "kv_cache_dtype": "fp8"}),
    ("gemma4_text-shared", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("gemma4_text-experts", {**INT4, "kv_cache_dtype": "int8"}),
    ("gemma4_text-experts", {"quantization": "int8", "kv_cache_dtype": "fp8"}),
    ("gemma4_text", {**INT4, "kv_cache_dtype": "int8", "cpu_kernels": "torch"}),
]


@pytest.mark.parametrize(
    ("case", "options"),
    [pytest.param(*each, marks=() if each == SETTINGS[0] else pytest.mark.slow) for each in SETTINGS],
)
def test_nothing_around_a_request_changes_its_tokens_with_quantized_weights_and_caches(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, case.split("-")[0], dtype=torch.bfloat16, **DETERMINED[case])
    setting = {"model": str(folder), "threads": 1, **options}
    alone = each_alone(setting, ORDER)
    product.assert_switches_change_nothing(setting, alone, product.PART[:1])


def test_an_error_in_a_configuration_that_nests_another_names_the_section(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma4", text="gemma4_text", **EXPERTS_BESIDE)
    fields = json.loads((folder / "config.json").read_text())["text_config"]
    edit_json(folder / "config.json", {"text_config": fields | {"top_k_experts": 9}})
    with pytest.raises(ModelConfigError, match="text_config: field 'top_k_experts'"):
        load_model(folder)
    assert (
        GEMMA4["final_logit_softcapping"]
        == load_model(save_checkpoint(tmp_path, "gemma4_text", **GEMMA4)).config.logits_cap
    )
