"""The families beside Llama's, Qwen's and DeepSeek's: transformers' logits and greedy tokens, and what is special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.registry import load_model
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
