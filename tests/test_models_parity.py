"""Every architecture and option gives transformers' logits and greedy tokens, from the same checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelConfigError
from quire.models.checkpoint import resolve
from quire.models.registry import load_model
from tests.oracle import (
    assert_parity,
    chunked_logits,
    greedy,
    load_reference,
    random_prompt,
    reference_greedy,
    reference_logits,
    save_checkpoint,
)

PROMPT = random_prompt(90)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
YARN_IN_FULL = {
    "factor": 4.0,
    "original_max_position_embeddings": 256,  # long enough for both ends of the ramp to lie inside a head
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "truncate": False,
}


def older(kind: str, key: str, **settings: Any) -> dict[str, Any]:
    """Rotary settings as config.json spelled them before `rope_parameters`."""
    return {"edit": {"rope_parameters": ..., "rope_theta": 5000.0, "rope_scaling": {key: kind, **settings}}}


def newer(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **settings}}


ROTARY: dict[str, dict[str, Any]] = {
    "theta": newer("default"),
    "theta-older": {"edit": {"rope_parameters": ..., "rope_theta": 5000.0, "rope_scaling": None}},
    "theta-beside-rope_parameters": {
        "edit": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5000.0},
    },
    "linear": newer("linear", factor=2.5),
    "linear-older": older("linear", "type", factor=2.5),
    "llama3": newer("llama3", **LLAMA3),
    "llama3-older": older("llama3", "rope_type", **LLAMA3),
    "yarn": newer("yarn", **YARN),
    "yarn-older": older("yarn", "type", **YARN),
    "yarn-in-full": newer("yarn", **YARN_IN_FULL),
    "yarn-attention-factor": newer("yarn", **YARN, attention_factor=1.4),
    "yarn-without-original-length": older("yarn", "rope_type", factor=2.0),
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-head_dim-apart": ("qwen3", {"head_dim": 24}),
    "qwen3-head_dim-absent": ("qwen3", {"head_dim": 128, "edit": {"head_dim": ...}}),
    "qwen3-attention_bias": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", older("yarn", "rope_type", **YARN)),
    "qwen3-max_window_layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "edit": {"layer_types": ...}},
    ),
    "qwen3-layer_types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-window-not-used": ("qwen3", {"edit": {"sliding_window": 20, "layer_types": ...}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-all-layers-windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 0, "edit": {"layer_types": ...}},
    ),
    "qwen2-max_window_layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2, "edit": {"layer_types": ...}},
    ),
    "qwen2-yarn": ("qwen2", newer("yarn", **YARN)),
    "llama-as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-kv-heads-absent": ("llama", {"num_key_value_heads": 4, "edit": {"num_key_value_heads": ...}}),
    "llama-head_dim-absent": ("llama", {"edit": {"head_dim": ...}}),
    "llama-head_dim-apart": ("llama", {"head_dim": 40}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention_bias": ("llama", {"attention_bias": True}),
    "llama-mlp_bias": ("llama", {"mlp_bias": True}),
    "llama-rms_norm_eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-in-shards": ("llama", {"shard_size": "60KB"}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-head_dim-apart": ("mistral", {"sliding_window": 24, "head_dim": 8}),
    "mistral-tied": ("mistral", {"sliding_window": 24, "tie_word_embeddings": True}),
    "mistral-yarn": ("mistral", {"sliding_window": None, **newer("yarn", **YARN)}),
} | {f"llama-rope-{name}": ("llama", options) for name, options in ROTARY.items()}


@pytest.mark.parametrize("case", OPTIONS)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = OPTIONS[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


def test_the_shards_case_has_several_files_and_an_index(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama", shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("*.safetensors"))) > 3


@pytest.mark.parametrize("case", ["theta", "linear", "llama3", "yarn", "yarn-in-full", "yarn-attention-factor"])
def test_each_rotary_setting_shows_in_the_logits(case: str, tmp_path: Path) -> None:
    plain = load_model(save_checkpoint(tmp_path / "plain", "llama"))
    other = load_model(save_checkpoint(tmp_path / "other", "llama", **ROTARY[case]))
    difference = chunked_logits(plain, PROMPT, 90) - chunked_logits(other, PROMPT, 90)
    assert difference.abs().max() > 0.05


def test_windows_show_in_the_logits_where_they_end(tmp_path: Path) -> None:
    wide = load_model(save_checkpoint(tmp_path / "wide", "mistral", sliding_window=24, num_hidden_layers=1))
    narrow = load_model(save_checkpoint(tmp_path / "narrow", "mistral", sliding_window=23, num_hidden_layers=1))
    difference = (chunked_logits(wide, PROMPT, 90) - chunked_logits(narrow, PROMPT, 90)).abs().amax(1)
    assert difference[:23].max() == 0
    assert difference[23:].median() > 1e-3


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
def test_tokens_of_a_model_that_is_not_causal_see_those_that_follow_them(architecture: str, tmp_path: Path) -> None:
    window = {"sliding_window": None} if architecture == "mistral" else {}
    folder = save_checkpoint(tmp_path, architecture, edit={"is_causal": False}, **window)
    model, expected = load_model(folder), reference_logits(load_reference(folder), PROMPT)
    torch.testing.assert_close(chunked_logits(model, PROMPT, len(PROMPT)), expected, rtol=0, atol=1e-4)
    assert not model.causal


@pytest.mark.parametrize(
    ("architecture", "options"), [("qwen3_moe", {}), ("deepseek_v3", {}), ("mistral", {"sliding_window": 24})]
)
def test_where_attention_cannot_see_ahead_a_model_that_does_is_refused(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture, edit={"is_causal": False}, **options)
    with pytest.raises(ModelConfigError, match="'is_causal' is False"):
        load_model(folder)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_half_precision_model_errs_no_more_than_transformers(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture, dtype=dtype)
    exact = reference_logits(load_reference(folder), PROMPT)
    theirs = reference_logits(load_reference(folder, dtype), PROMPT)
    model = load_model(folder, str(dtype).removeprefix("torch."))
    ours = chunked_logits(model, PROMPT, 37)
    assert model.dtype == dtype
    assert (ours - exact).square().mean().sqrt() < 1.1 * (theirs - exact).square().mean().sqrt()
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_weights_computed_in_fp32_give_transformers_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3", dtype=dtype, tie_word_embeddings=True)
    expected = reference_logits(load_reference(folder), PROMPT)
    torch.testing.assert_close(chunked_logits(load_model(folder, "float32"), PROMPT, 37), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_any_length_give_the_same_bits(architecture: str, dtype: str, tmp_path: Path) -> None:
    window = {"sliding_window": 24} if architecture == "mistral" else {}
    model = load_model(save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **window), dtype)
    whole = chunked_logits(model, PROMPT, len(PROMPT))
    for chunk in (1, 2, 3, 7, 16, 37):
        assert torch.equal(chunked_logits(model, PROMPT, chunk), whole), f"chunks of {chunk}"


def test_the_embedded_model_gives_transformers_logits_and_greedy_tokens() -> None:
    folder = resolve("demo")
    reference, model = load_reference(folder), load_model(folder, "float32")
    prompt = random_prompt(90, vocab=model.vocab_size)
    expected = reference_logits(reference, prompt)
    torch.testing.assert_close(chunked_logits(model, prompt, 37), expected, rtol=0, atol=1e-4)
    assert greedy(model, prompt, 64) == reference_greedy(reference, prompt, 64)
