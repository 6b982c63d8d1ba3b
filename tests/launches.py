"""What was launched on a GPU that computes nothing, for `triton_compile` to compile: see `FakeGpu.launched`."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import triton

FILE = "QUIRE_TEST_LAUNCHES"
"""The variable that names the file with the launches, in JSON."""


def launch_all() -> None:
    for module, name, args, by_name in json.loads(Path(os.environ[FILE]).read_text("utf-8")):
        kernel = getattr(importlib.import_module(module), name)
        kernel[1, 1, 1](*(_made(*arg) for arg in args), **{name: _made(*arg) for name, arg in by_name})


def _made(kind: str, value: Any) -> Any:
    """An argument that `described` describes."""
    if kind == "tensor":
        return torch.empty(64, dtype=getattr(torch, value))
    return triton.language.dtype(value) if kind == "dtype" else value
