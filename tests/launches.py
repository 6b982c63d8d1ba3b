"""What was launched on a GPU that computes nothing, for `triton_compile` to compile: see `FakeGpu.launched`."""

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from tests.fake_gpu import Kernel

FILE = "QUIRE_TEST_LAUNCHES"
"""The variable that names the file with the launches."""


def launch_all() -> None:
    launched = pickle.loads(Path(os.environ[FILE]).read_bytes())  # noqa: S301  # the test wrote it
    for module, name, args, by_name in launched:
        kernel = getattr(importlib.import_module(module), name)
        kernel[1, 1, 1](*map(_made, args), **{name: _made(value) for name, value in by_name})


def _made(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.empty(64, dtype=value)
    if isinstance(value, Kernel):
        return getattr(importlib.import_module(value.module), value.name)
    return tuple(map(_made, value)) if isinstance(value, tuple) else value
