"""No option of a model is read and then forgotten: without it, logits are others, or the checkpoint does not fit."""

from __future__ import annotations

import functools
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.layers.decoder import LayerConfig
from quire.layers.experts import ExpertsConfig
from quire.models import registry
from quire.models.checkpoint import Checkpoint
from quire.models.config import DecoderConfig
from quire.models.registry import load_model
from quire.ops.experts import Routing
from tests.oracle import chunked_logits, random_prompt, save_checkpoint
from tests.test_models_families import FAMILIES as OTHERS

BOTH_WAYS = ("gemma3_text", {**OTHERS["gemma3_text"][1], "use_bidirectional_attention": True})
NEMOTRON = ("nemotron_h", {"moe_latent_size": 32})
FAMILIES = {**OTHERS, "qwen3_next": ("qwen3_next", {}), "gemma3_text-both-ways": BOTH_WAYS, "nemotron_h": NEMOTRON}

PROMPT = random_prompt(60)
ELSEWHERE = {
    "num_mtp_layers": "layers that are not loaded: test_models_deepseek.py",
    "passed_over": "tensors that nothing here uses: test_models_families.py",
    "mtp": "of a model that drafts: test_models_deepseek.py",
    "one_kv_group": "of a draft model: test_kv_groups.py",
    "groups": "of experts: test_models_deepseek.py",
    "top_groups": "of experts: test_models_deepseek.py",
    "group_score": "of experts: test_models_deepseek.py",
    "normalize": "of experts: test_models_moe.py",
    "embedding_scale_rounded": "shows in narrower types alone: test_models_families.py",
    "latent": "attention of another kind: test_latent.py",
    "index": "which positions that sees: test_models_sparse.py",
    "experts": "there are others in their place: test_models_moe.py",
    "dense_layers": "which layers have experts: test_models_moe.py",
}
"""Options that are tested in other files, and where."""
CASES = [
    "gemma4_text-shared",
    "gemma4",
    "gemma3_text-untied",
    "gpt_oss",
    "granite",
    "hy_v3",
    "ministral3",
    "olmo3",
    "glm4",
]
CASES += ["seed_oss", "mistral3-mistral4", "ernie4_5", "qwen3_next", "gemma3_text-both-ways", "nemotron_h"]
"""Families that have all options together."""


OPTIONS = [
    (kind, field)
    for kind in (DecoderConfig, LayerConfig, ExpertsConfig, Routing)
    for field in fields(kind)
    if field.default is not MISSING and field.name not in ELSEWHERE
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By case: the folder of its checkpoint, what config.json says, and logits."""

    @functools.cache
    def of(case: str) -> tuple[Path, DecoderConfig, torch.Tensor]:
        architecture, given = FAMILIES[case]
        folder = save_checkpoint(tmp_path_factory.mktemp(case), architecture, **given)
        checkpoint = Checkpoint(folder)
        config = registry.read_config(checkpoint.config, checkpoint.generation)
        return folder, config, chunked_logits(load_model(folder), PROMPT, 60)

    return of


def without(part: Any, kind: type, field: Field[Any]) -> Any:
    """A configuration in which the option of every part of that kind has its default."""
    if isinstance(part, kind):
        part = replace(part, **{field.name: field.default})
    for inner in ("layer", "experts", "routing"):
        if inner in {each.name for each in fields(part)} and getattr(part, inner) is not None and inner != field.name:
            part = replace(part, **{inner: without(getattr(part, inner), kind, field)})
    if isinstance(part, DecoderConfig) and part.layers is not None:
        part = replace(part, layers=tuple(without(layer, kind, field) for layer in part.layers))
    return part


@pytest.mark.parametrize(("kind", "field"), OPTIONS, ids=[f"{kind.__name__}.{field.name}" for kind, field in OPTIONS])
def test_without_an_option_a_model_that_has_it_is_another(
    kind: type, field: Field[Any], saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    having = [(case, config) for case in CASES if (config := without(saved(case)[1], kind, field)) != saved(case)[1]]
    assert having, f"no family in CASES has {kind.__name__}.{field.name}"
    assert any(shows(config, *saved(case)[::2], monkeypatch) for case, config in having)


def shows(config: DecoderConfig, folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a checkpoint that is read by another configuration than its own has other logits, or none."""
    monkeypatch.setattr(registry, "read_config", lambda *_: config)
    try:
        logits = chunked_logits(load_model(folder), PROMPT, 60)
    except (CheckpointError, RuntimeError):
        return True  # tensors are missing or left over, or of another shape
    return bool((logits - expected).abs().max() > 1e-3)
