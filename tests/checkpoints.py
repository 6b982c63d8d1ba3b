"""Folders with a few tensors, for readers of formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.models.checkpoint import Checkpoint

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Tensors, section: dict[str, Any]) -> Checkpoint:
    """A checkpoint with these tensors and this `quantization_config`, and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def under(name: str, tensors: Tensors) -> Tensors:
    """A module's tensors by their full names."""
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}
