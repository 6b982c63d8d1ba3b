"""Which implementation of the kernels runs here: decided once, at start-up."""

from __future__ import annotations

from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kernels import Kernels


def choose_kernels(name: str = "auto") -> Kernels:
    """The fastest kernels that this machine can run, or those of a name: "torch", or an instruction set.

    Raises:
        ConfigError: the named ones were not built, or this machine cannot run them.
    """
    usable = library.usable()
    if name == "torch" or (name == "auto" and not usable):
        return Kernels()
    return CpuKernels(usable[0] if name == "auto" else name)


def choice_note(name: str = "auto") -> str | None:
    """What a user should know of what `choose_kernels` chose: that faster kernels could run here, and how."""
    lost = library.missed() if name == "auto" else None
    return f"{lost.what}; {lost.remedy}" if lost else None
