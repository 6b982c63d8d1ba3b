"""A model and what drafts for it, as an engine's options ask for them: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.config import EngineConfig
from quire.models.checkpoint import Checkpoint
from quire.models.model import Model
from quire.models.registry import load_model
from quire.ops import choose_kernels
from quire.parallel.group import Group
from quire.runner.device import Device
from quire.runner.proposer import Proposer, Speculation
from quire.runner.start import OnLoad
from quire.speculate.methods import make_speculation


def load(
    config: EngineConfig,
    path: Path,
    device: Device,
    group: Group,
    report: OnLoad,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
    proposer: Proposer | None = None,
) -> tuple[Model, Speculation | None]:
    """The model, or this rank's part of it, and what drafts.

    Raises:
        ConfigError, CheckpointError: and what derives from them.
    """
    loading = f"quantizing weights to {config.quantization}" if config.quantization else "loading weights"
    spec = config.speculation
    model = load_model(
        path,
        config.dtype,
        lambda done, total: report(loading, done / total),
        choose_kernels(config.cpu_kernels, device.torch, config.deterministic),
        config.quantization,
        config.quantization_group_size,
        open_checkpoint,
        mtp=spec is not None and spec.method == "mtp",
        ranks=group,
    )
    if proposer is not None:
        return model, Speculation(proposer, rejection=config.speculative_acceptance == "rejection")
    return model, None if spec is None else make_speculation(spec, model, path, config)
