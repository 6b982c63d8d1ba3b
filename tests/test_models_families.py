"""The families beside Llama's, Qwen's and DeepSeek's: transformers' logits and greedy tokens, and what is special."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.models.registry import load_model
from tests import test_determinism as product
from tests import test_triton_engine as triton
from tests.oracle import (
    chunked_logits,
    greedy,
    load_reference,
    random_prompt,
    reference_choices,
    reference_logits,
    save_checkpoint,
)

PROMPT = random_prompt(90)
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
ALPHA = {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral3", {"text": "mistral", "sliding_window": None}),
    "mistral3-ministral3": ("mistral3", {"text": "ministral3", "tie_word_embeddings": True, **GROWING}),
    "mistral3-mistral4": ("mistral3", {"text": "mistral4", **GROWING}),
    "kimi_k25": ("kimi_k25", {"text": "deepseek_v3"}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite-layer-types": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "ministral3": ("ministral3", GROWING),
    "mistral4": ("mistral4", GROWING),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-qk-norm": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1}),
    "glm4": ("glm4", {}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 8}),
    "phi3": ("phi3", {}),
    "phi3-partly-turned": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 24}),
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
    "granite": ("granite", MULTIPLIERS),
    "granite-tied": ("granite", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "hunyuan_v1_dense-alpha": ("hunyuan_v1_dense", ALPHA),
    "hy_v3": ("hy_v3", {}),
}
"""Name of a case: the architecture, and options of its configuration."""


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    reference, model = load_reference(folder), load_model(folder)
    expected = reference_logits(reference, PROMPT)
    assert expected.abs().max() > 0.5, "the logits tell models apart"
    torch.testing.assert_close(chunked_logits(model, PROMPT, 37), expected, rtol=0, atol=1e-4)
    output = greedy(model, PROMPT, 64)
    assert output == reference_choices(reference, PROMPT, output)


# -- the promise ---------------------------------------------------------------------------------------------------

DETERMINED = {
    "exaone4": {"sliding_window": 100, "layer_types": MIXED[:2]},
    "olmo3": {"sliding_window": 100, "layer_types": MIXED[:2]},
    "ministral3": GROWING,
    "mistral4": GROWING,
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "granite": MULTIPLIERS,
    "hunyuan_v1_dense": {},
    "minimax_m2": {"rotary_dim": 8},
    "phi3": LONGROPE,
    "smollm3": {"no_rope_layers": [0, 1]},
}
"""Architectures that differ from the others in what is computed, and options that show it within 320 tokens."""
FAST = {"exaone4", "ministral3"}


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
            made[architecture] = str(save_checkpoint(path, architecture, dtype=torch.bfloat16, **options))
        return made[architecture]

    return folder


def each_alone(setting: dict[str, Any], indices: list[int]) -> dict[int, Any]:
    engine = Engine(EngineConfig(**setting, prefix_cache="off"))
    outcomes: dict[int, Any] = {}
    for index in indices:
        outcomes |= product.run(engine, [index])
    return outcomes


ORDER = list(range(len(product.prompts())))


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


@pytest.mark.parametrize("architecture", few({"olmo3"}))
def test_ranks_change_nothing(architecture: str, folders: Any) -> None:
    setting = {"model": folders(architecture), "threads": 1}
    alone = each_alone(setting, ORDER)
    with contextlib.closing(product.engine_of(setting, product.PART[0], tensor_parallel_size=2)) as engine:
        assert product.run(engine, ORDER) == alone
        assert product.run(engine, ORDER[::-1], first_id=100, stagger=2) == alone
        assert engine.stats.preemptions > 0


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("architecture", few({"ministral3"}))
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
    folder = str(save_checkpoint(tmp_path, architecture, dtype=torch.float32, **options))
    order = [0, 1, 2]
    config = {"block_size": 32, "prefix_cache": "off", "cuda_graphs": "off", "async_scheduling": False}
    engine = triton.start(folder, {}, **config)
    alone: dict[int, list[Any]] = {}
    for index in order:
        alone |= triton.run(engine, [index])
    together = triton.start(folder, {}, check_invariants=True)
    assert triton.run(together, order) == alone
    assert triton.run(together, order[::-1], stagger=1) == alone
    reference, model = load_reference(Path(folder)), load_model(folder)
    for index in (0, 2):
        tokens = [token for token, _ in alone[index]]
        assert tokens == greedy(model, triton.prompts()[index], len(tokens))
        assert tokens == reference_choices(reference, triton.prompts()[index], tokens)
