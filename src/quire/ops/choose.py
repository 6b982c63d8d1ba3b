"""Which implementation of the kernels runs here: decided once, at start-up."""

from __future__ import annotations

from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kernels import Kernels

UNPROVEN = ("amx",)
"""Never run on real hardware yet, so only used where it is asked for by name."""


def choose_kernels(name: str = "auto") -> Kernels:
    """The fastest kernels that this machine can run, or those of a name: "torch", or an instruction set.

    Raises:
        ConfigError: the named ones were not built, or this machine cannot run them.
    """
    proven = [isa for isa in library.usable() if isa not in UNPROVEN]
    if name == "torch" or (name == "auto" and not proven):
        return Kernels()
    return CpuKernels(proven[0] if name == "auto" else name)


def choice_note(name: str = "auto") -> str | None:
    """What a user should know of what `choose_kernels` chose: that faster kernels could run here, and how."""
    if name != "auto":
        return None
    lost = library.missed()
    if lost is None and library.usable()[:1] == ["amx"]:
        return "this machine has AMX, which Quire's kernels have only seen emulated; --cpu-kernels amx uses it"
    return f"{lost.what}; {lost.remedy}" if lost else None
