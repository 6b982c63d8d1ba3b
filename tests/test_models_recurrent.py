"""Models with gated delta nets: transformers' logits, and that nothing changes a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError, TensorShapeError
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import load_model
from quire.ops.cpu import library
from tests import test_determinism as product
from tests.oracle import (
    assert_errs_no_more,
    assert_parity,
    assert_same_when_quantized,
    chunked_logits,
    edit_json,
    random_prompt,
    save_checkpoint,
)
from tests.recurrent_engines import (
    ORDER,
    check_drafts,
    check_other_kernels,
    check_ranks,
    check_refusals,
    check_resumption,
    check_switches,
    each_alone,
    greedy_in,
)
from tests.test_models_deepseek import edit_tensors

PROMPT = random_prompt(90)
SECTIONS = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-some-dense": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_next-dense": ("qwen3_next", {"num_experts": 0}),
    "qwen3_5": ("qwen3_5", {"text": "qwen3_5_text", "rope_parameters": SECTIONS}),
    "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": ("qwen3_5_moe", {"text": "qwen3_5_moe_text", "rope_parameters": SECTIONS}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"linear_num_key_heads": 4}),
}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    # What differs is the error of transformers' chunks as much as ours, which grows with a logit.
    assert_parity(folder, PROMPT, rtol=2e-5)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_next"])
def test_a_half_precision_model_errs_no_more_than_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16)
    assert_errs_no_more(folder, PROMPT, 1.1)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_next")
    before = chunked_logits(load_model(folder), PROMPT, 37)
    edit_tensors(folder, **{"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)})
    model = load_model(folder)
    assert torch.equal(chunked_logits(model, PROMPT, 37), before)
    assert "2 tensors" in model.notes[0] and "predict further tokens are not loaded" in model.notes[0]


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    assert_same_when_quantized(folder, tmp_path / "int4", PROMPT)


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_text"])
def test_random_weights_are_those_of_a_model_that_runs(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "saved", architecture)
    made = write_checkpoint(tmp_path / "made", json.loads((folder / "config.json").read_text()))
    assert chunked_logits(load_model(made), PROMPT, 37).isfinite().all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layer_types": ({"layer_types": ["linear_attention"]}, "'layer_types' must be 3 of 'linear_attention' or"),
    "attention": ({"layer_types": ["linear_attention"] * 3}, "at least one is 'full_attention'"),
    "heads": ({"linear_num_value_heads": 3}, r"a multiple of linear_num_key_heads \(2\)"),
    "taps": ({"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim'"),
    "bias": ({"attention_bias": True}, "'attention_bias' is True"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_is_not_supported_is_refused_by_the_fields_name(case: str, tmp_path: Path) -> None:
    edit, words = BAD[case]
    folder = save_checkpoint(tmp_path, "qwen3_next", edit=edit)
    with pytest.raises(ModelConfigError, match=words):
        load_model(folder)


def test_tensors_of_other_sizes_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_next")
    edit_json(folder / "config.json", {"linear_value_head_dim": 32})
    with pytest.raises(TensorShapeError, match=r"in_proj_qkvz.weight.*of 2 heads, which have"):
        load_model(folder)


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5_text", dtype=torch.bfloat16, **TWO))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[int, Any]:
    return each_alone({"model": folder, "threads": 1}, ORDER)


def test_nothing_around_a_request_changes_its_tokens(folder: str, alone: dict[int, Any]) -> None:
    check_switches(folder, alone)


def test_drafts_change_no_token(folder: str, alone: dict[int, Any]) -> None:
    check_drafts(folder, alone)


def test_a_new_engine_goes_on_with_a_reply_in_mid_tile(folder: str) -> None:
    check_resumption(folder)


def test_hits_at_a_prompts_end_at_a_branch_and_at_periodic_marks(folder: str) -> None:
    common = {"model": folder, "threads": 1, "max_model_len": 512, "check_invariants": True}
    with_cache, without = Engine(EngineConfig(**common)), Engine(EngineConfig(**common, prefix_cache="off"))
    interval = 16 * with_cache.scheduler.kv.groups[1].retention.states.interval
    assert interval == 160, "keys of so many tokens are as large as a state"
    head = random_prompt(200, seed=1)
    prompts = [head + random_prompt(40, seed=seed) for seed in range(2, 6)]
    prompts += [prompts[0], head[:175] + random_prompt(30, seed=9)]
    found = []
    for id, prompt in enumerate(prompts):
        tokens, cached = greedy_in(with_cache, id, prompt)
        assert (tokens, 0) == greedy_in(without, id, prompt)
        found.append(cached)
    assert found == [0, 160, 192, 192, 239, 160]


def test_the_plan_says_what_states_take_and_how_many_requests_fit(folder: str) -> None:
    engine = Engine(EngineConfig(model=folder, threads=1, kv_cache_memory="2MiB"))
    assert engine.config.max_num_seqs < 64 and engine.scheduler.config.max_num_seqs == engine.config.max_num_seqs
    [note] = [note for note in engine.notes if "max_num_seqs is" in note]
    assert f"max_num_seqs is {engine.config.max_num_seqs}, not 64" in note
    assert dict(engine.memory_plan.table())["recurrent states"].endswith("the rest is cache")
    assert engine.memory_plan.kv_bytes <= 2 * 2**20
    for index in ORDER:
        engine.add(Request(index, product.prompts()[index], product.params(index), max_tokens=4))
    while not engine.idle:
        assert all(update.error is None for update in engine.step())


def test_what_is_not_there_yet_is_refused(folder: str) -> None:
    check_refusals(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow)]
)
def test_ranks_change_nothing(ranks: dict[str, Any], folder: str, alone: dict[int, Any]) -> None:
    check_ranks(folder, alone, ranks)


@pytest.mark.parametrize("isa", [*library.usable()[1:], "torch"])
@pytest.mark.slow
def test_nothing_around_a_request_changes_its_tokens_on_other_instruction_sets(isa: str, folder: str) -> None:
    check_other_kernels(folder, isa, ORDER[:3] + ORDER[5:])


def test_ranks_that_would_cut_a_head_are_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"and the 2 key heads of its recurrent layers; allowed: 1, 2"):
        Engine(EngineConfig(model=folder, threads=1, tensor_parallel_size=4))
