"""Which device steps will run on, found without importing torch. A leaf: anyone may import it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


def find_device() -> tuple[DeviceKind, str | None]:
    """The fastest device that Quire can use here, and what a user should know of the choice, if anything."""
    if not count_gpus():
        return "cpu", None
    if not torch_has_cuda():
        return "cpu", (
            "this machine has a GPU, but the installed torch is built for CPUs only: running on the CPU; "
            "pip install torch from PyPI brings CUDA"
        )
    return "cuda", None


def count_gpus() -> int:
    """How many NVIDIA GPUs the driver shows to this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, by what lies in its folder."""
    found = importlib.util.find_spec("torch")
    return bool(found and found.origin and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists())
