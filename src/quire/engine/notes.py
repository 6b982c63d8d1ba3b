"""What users should know about options that behave differently than their names suggest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.config import EngineConfig
from quire.core.sampling_params import NEUTRAL
from quire.devices import find_device
from quire.models.model import Model
from quire.observe.timeline import Timeline
from quire.ops import choice_note

OF_GPUS = ("gpu_memory_utilization", "cuda_graphs", "enforce_eager")
"""Options without effect on a CPU."""

TWO_FORMS = (
    "deterministic=False: each step computes latent attention in its cheaper form, so "
    "a request's tokens may depend on other requests"
)

ADDED = (
    "deterministic=False: ranks add partial sums of products that are not quantized, so tokens may depend on the "
    "number of ranks"
)

REJECTION_NOTE = (
    "speculative_acceptance=rejection: the distribution of sampled tokens is kept, but the tokens themselves "
    "depend on the number of drafts"
)


def notes_of(
    config: EngineConfig, model: Model, sampling_defaults: Mapping[str, Any], timeline: Timeline | None
) -> list[str]:
    """Notes about an engine with these options, one line each.

    Args:
        sampling_defaults: the checkpoint's defaults of sampling parameters.
    """
    notes = _of_cpu(config, model) if config.device == "cpu" else []
    changed = [f"{name}={value}" for name, value in sampling_defaults.items() if value != NEUTRAL[name]]
    if changed:
        notes.append(f"sampling defaults of the checkpoint: {', '.join(changed)}")
    if config.pipeline_parallel_size > 1:
        notes.append(f"{config.pipeline_parallel_size} pipeline stages (processes), each with some of the layers")
    if config.tensor_parallel_size > 1:
        notes.append(f"{config.tensor_parallel_size} ranks (processes) share each layer")
    if config.data_parallel_size > 1:
        notes.append(
            f"{config.data_parallel_size} data-parallel attention replicas with their own requests and KV; "
            "limits on requests and tokens apply to each"
        )
    if config.nnodes > 1:
        from quire.engine import external_launcher

        notes += external_launcher.notes_of(config)
    if config.redundant_experts is not None:
        each = "never" if not config.eplb_interval else f"at most every {config.eplb_interval:,} steps"
        notes.append(f"each rank holds its own experts; they are rebalanced {each}")
    if not model.causal:
        notes.append("an embedding model: prompts are computed whole, without chunked prefill or prefix caching")
    if config.speculation is not None:
        notes.append(config.speculation.describe())
        if config.speculative_acceptance == "rejection":
            notes.append(REJECTION_NOTE)
    if timeline is not None:
        notes.append(f"a timeline of the steps is written to {timeline.path}")
    return notes


def _of_cpu(config: EngineConfig, model: Model) -> list[str]:
    """Why it is slower than it could be, and which options have no effect on a CPU."""
    notes = [note for note in (find_device()[1], choice_note(config.cpu_kernels)) if note]
    if not config.deterministic:
        if model.config.layer.expands:
            notes.append(TWO_FORMS)
        elif config.tensor_parallel_size == 1:
            notes.append("deterministic=False has no effect on a CPU for this model")
        if config.tensor_parallel_size > 1:
            notes.append(ADDED)
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in OF_GPUS and value != each.default:
            notes.append(f"{each.name}={value} has no effect on a CPU")
    return notes
