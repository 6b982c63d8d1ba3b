"""The compiled kernels: finding the library for this machine, and calling it.

The sources under `src` are compiled once for each of `instruction_sets.py`. A library is loaded with ctypes. It has
a team of threads of its own (team.cpp), of which as many compute as `set_threads` was told by the thread that calls.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.errors import ConfigError
from quire.ops.cpu.instruction_sets import INSTRUCTION_SETS, cpu_flags

I32, I64, F32, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
Prototype = tuple[Any, Sequence[Any]]
"""Result type (or None) and argument types of a function."""

VERSION = 20
"""Of the kernels: raised here and in library.cpp whenever their bits, or a function's arguments, change. Part of
the fingerprint; and a library that an older or newer source was compiled to is refused."""

PROTOTYPES: dict[str, Prototype] = {
    "version": (I32, ()),
    "threads": (I32, ()),
    "set_threads": (I32, (I32,)),
    "give_way": (I32, (I32,)),
    "disorder": (None, (I64,)),
}

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the C++ side names data types (`DType` in simd.h)."""

NEEDS = {name: isa.needs for name, isa in INSTRUCTION_SETS.items()}
"""The flags of /proc/cpuinfo that each library needs, the fastest first."""

MACHINES = (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"))
"""For these systems and machines an installation with a C++ compiler builds kernels."""


class Lost(NamedTuple):
    """Something that this machine could do, and does not: `what`, and the `remedy`."""

    what: str
    remedy: str


class Library:
    """One compiled library.

    Args:
        isa: its instruction set, a key of `NEEDS`.
        prototypes: by name, without the prefix `quire_`, of every function that is used.

    Raises:
        ConfigError: it was not built, this machine cannot run it, or it was compiled from other sources.
    """

    def __init__(self, isa: str, prototypes: Mapping[str, Prototype]) -> None:
        self.isa = isa
        handle = _load(isa)
        for name, (result, arguments) in {**PROTOTYPES, **prototypes}.items():
            function = getattr(handle, f"quire_{name}", None)
            if function is None:
                raise ConfigError(f"the kernels for {isa!r} have no function quire_{name}: {STALE}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if self.version() != VERSION:
            raise ConfigError(f"the kernels for {isa!r} are version {self.version()}, not {VERSION}: {STALE}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the kernels for {self.isa} have no function {name!r}")


STALE = "they were compiled from another version of the sources; install Quire again ('make kernels' in a checkout)"


def _load(isa: str) -> ctypes.CDLL:
    path = built().get(isa)
    if path is None:
        raise ConfigError(f"the kernels for {isa!r} were not built; {_choices()}")
    lacking = NEEDS[isa] - cpu_flags()
    if lacking:
        raise ConfigError(
            f"this machine cannot run the kernels for {isa!r}: it lacks {', '.join(sorted(lacking))}; {_choices()}"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the kernels for {isa!r} cannot be loaded: {error}; install Quire again") from error


def _choices() -> str:
    """What may be asked for here, in words."""
    names = usable()
    if names:
        return f"this machine has kernels for {', '.join(names)}, and plain torch: 'torch'"
    remedy = f"; to have others, {lost.remedy}" if (lost := missed()) else ""
    return f"there is only plain torch: 'torch'{remedy}"


@functools.cache
def built() -> dict[str, Path]:
    """The libraries that the installation built for this Python, by instruction set, the fastest first."""
    suffixes = str(sysconfig.get_config_var("EXT_SUFFIX")), ".so"  # built here, or in a wheel for every Python
    paths = [(isa, Path(__file__).with_name(f"lib_{isa}{suffix}")) for isa in NEEDS for suffix in reversed(suffixes)]
    return {isa: path for isa, path in paths if path.is_file()}


def usable() -> list[str]:
    """The instruction sets that were built and that this machine has, the fastest first."""
    return [isa for isa in built() if NEEDS[isa] <= cpu_flags()]


def missed() -> Lost | None:
    """The fastest kernels that this machine could run, if they were not built; None where nothing is lost."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in MACHINES:
        what = f"there are no compiled kernels for {machine} on {system}: the slower torch path runs"
        return Lost(what, "run Quire on Linux on x86_64 or aarch64")
    best = next((isa for isa, needs in NEEDS.items() if needs <= cpu_flags()), None)
    if best is None or best in built():
        return None
    again = "then install Quire again ('make kernels' in a checkout, else pip install --force-reinstall --no-deps)"
    if not built():
        return Lost("the compiled kernels were not built: the slower torch path runs", f"install g++, {again}")
    what = f"the kernels for {best}, which this machine could run, were not built: slower ones run"
    return Lost(what, f"install a newer g++ (12 knows them all), {again}")
