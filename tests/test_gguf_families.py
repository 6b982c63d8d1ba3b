"""Families in GGUF: what llama.cpp's converter makes of a tiny checkpoint gives that checkpoint again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.checkpoint import Checkpoint, resolve
from quire.models.layout import LaidOutCheckpoint, Layout
from quire.models.registry import read_config
from tests.llama_cpp import convert
from tests.oracle import VOCAB, save_checkpoint
from tests.test_models_families import FAMILIES, GEMMA, GEMMA4, GROWING, MIXED, MULTIPLIERS, SHARED_KV, YARN

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"max_position_embeddings": 1 << 20}  # as the converter writes for what rotates nothing
NEMOTRON = ["linear_attention", "moe", "full_attention"]
NEMOTRON_DENSE = ["linear_attention", "mlp", "full_attention", "mlp"]
KINDS = ["mamba", "attention", "mamba"]
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "edit": {"layer_types": KINDS},
    **LONG,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn-tied": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma3_text": ("gemma3_text", {**GEMMA, "num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16}),
    "gemma4_text": ("gemma4_text", {**GEMMA4, "layer_types": [*MIXED[:2], *MIXED[:2]]}),
    "gemma4_text-shared": ("gemma4_text", SHARED_KV),
    "gemma4-experts": FAMILIES["gemma4"],
    "gpt_oss": ("gpt_oss", {"sliding_window": 20, "rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v2": ("deepseek_v2", {"topk_method": "group_limited_greedy", "norm_topk_prob": False}),
    "deepseek_v2-yarn": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": ("deepseek_v3", {"num_nextn_predict_layers": 0}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {"num_nextn_predict_layers": 0, "norm_topk_prob": True}),
    "glm4_moe-qk-norm": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0, "norm_topk_prob": True},
    ),
    "granite": ("granite", MULTIPLIERS),
    "granitemoehybrid": ("granitemoehybrid", {**MULTIPLIERS, **HYBRID}),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        {
            **MULTIPLIERS,
            **HYBRID,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "nemotron_h": (
        "nemotron_h",
        {"mamba_head_dim": 16, "layers_block_type": NEMOTRON, "intermediate_size": 32, **LONG},
    ),
    "nemotron_h-dense": ("nemotron_h", {"mamba_head_dim": 16, "layers_block_type": NEMOTRON_DENSE, **LONG}),
    "phi3": ("phi3", {}),
    "phi3-longrope": FAMILIES["phi3-longrope"],
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "ministral3": ("ministral3", GROWING),
    "mistral3": FAMILIES["mistral3"],
    "olmo2": ("olmo2", {}),
    "olmo3": FAMILIES["olmo3"],
    "exaone4": FAMILIES["exaone4-all"],
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 8}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
}
FUSED = ("llama", "qwen3", "gemma3_text")


def assert_same(gguf: Path, folder: Path) -> None:
    """The configuration and every tensor are those of the checkpoint."""
    own, theirs = Checkpoint(resolve(str(gguf))), Checkpoint(folder)
    config, expected = (read_config(each.config, each.generation) for each in (own, theirs))
    elsewhere = {"eos_token_ids": config.eos_token_ids, "num_mtp_layers": 0}  # the tokenizer's; not converted
    assert replace(config, layout=None) == replace(expected, layout=None, **elsewhere)
    laid = LaidOutCheckpoint(own, config.layout or Layout()), LaidOutCheckpoint(theirs, expected.layout or Layout())
    assert [note for note in own.notes if "tokenizer" not in note] == []  # which was not converted
    for name, shape in config.tensor_shapes().items():
        found, wanted = (each.tensor(name).float() for each in laid)
        assert found.shape == wanted.shape == shape, name
        loose = {"rtol": 1e-6, "atol": 1e-6} if name.endswith(("A_log", "norm.weight")) else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found, wanted, **loose, msg=lambda text, name=name: f"{name}: {text}")
    assert {*laid[0].entries} <= {*config.tensor_shapes()} | {"lm_head.weight"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each case's checkpoint, CASE, and file, CASE.gguf, and CASE-fused.gguf of some."""
    folder = tmp_path_factory.mktemp("converted")
    jobs: list[tuple[Path, Path, Sequence[str]]] = []
    for case, (architecture, options) in CASES.items():
        model = save_checkpoint(folder / case, architecture, **options)
        vocabulary = {"model": {"vocab": {str(token): token for token in range(VOCAB)}}, "added_tokens": []}
        (model / "tokenizer.json").write_text(json.dumps(vocabulary))  # Gemma's table is cut to its length
        jobs.append((model, folder / f"{case}.gguf", ()))
        if case in FUSED:
            jobs.append((model, folder / f"{case}-fused.gguf", ("fused",)))
    convert(jobs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *(f"{case}-fused" for case in FUSED)])
def test_what_llama_cpp_has_converted_is_the_checkpoint_again(case: str, converted: Path) -> None:
    failed = converted / f"{case}.error"
    assert not failed.exists(), failed.read_text()
    assert_same(converted / f"{case}.gguf", converted / case.removesuffix("-fused"))
