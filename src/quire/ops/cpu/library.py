"""The compiled kernels: finding the library for this machine, and calling it.

`setup.py` compiles the sources under `src` once for each instruction set. A library is loaded with ctypes and
shares OpenMP with torch: torch is imported first, so both use the same runtime, and `torch.set_num_threads`
decides for both.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError

I32, I64, F32, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
Prototype = tuple[Any, Sequence[Any]]
"""Result type (or None) and argument types of a function."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the C++ side names data types (`DType` in simd.h)."""

NEEDS = {
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "sse2": {"sse2"},
    "neon_dot": {"asimddp"},
    "neon": {"asimd"},
}
"""Each library's instruction set, the fastest first, and the flags of /proc/cpuinfo that it needs."""


class Library:
    """One compiled library.

    Args:
        isa: its instruction set, a key of `NEEDS`.
        prototypes: by name, without the prefix `quire_`, of every function that is used.

    Raises:
        ConfigError: it was not built, or this machine cannot run it.
    """

    def __init__(self, isa: str, prototypes: Mapping[str, Prototype]) -> None:
        self.isa = isa
        path = built().get(isa)
        if path is None:
            known = ", ".join(built()) or "none: was there a C++ compiler when Quire was installed?"
            raise ConfigError(f"the kernels for {isa!r} were not built; built are: {known}")
        lacking = NEEDS[isa] - cpu_flags()
        if lacking:
            raise ConfigError(
                f"this machine cannot run the kernels for {isa!r}: it lacks {', '.join(sorted(lacking))}; "
                f"it can run: {', '.join(usable())}"
            )
        self._handle = ctypes.CDLL(str(path))
        for name, (result, arguments) in prototypes.items():
            function = getattr(self._handle, f"quire_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the kernels for {self.isa} have no function {name!r}")


@functools.cache
def built() -> dict[str, Path]:
    """The libraries that the installation built, by instruction set, the fastest first."""
    found = {path.name.removeprefix("lib_").split(".")[0]: path for path in Path(__file__).parent.glob("lib_*.so")}
    return {isa: found[isa] for isa in NEEDS if isa in found}


def usable() -> list[str]:
    """The instruction sets that were built and that this machine has, the fastest first."""
    return [isa for isa in built() if NEEDS[isa] <= cpu_flags()]


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What this machine's processor says of itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return frozenset(found[1].split())
    return frozenset({"sse2"} if platform.machine() in ("x86_64", "AMD64") else {"asimd"})
