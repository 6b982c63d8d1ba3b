"""Which implementation of the kernels runs here: decided once, at start-up."""

from __future__ import annotations

import torch

from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kernels import Kernels

UNPROVEN = ("amx",)
"""Never run on real hardware yet, so only used where it is asked for by name."""


def choose_kernels(name: str = "auto", device: torch.device | None = None, deterministic: bool = True) -> Kernels:
    """The fastest kernels that this machine can run.

    Args:
        name: of a CPU's: "torch", or an instruction set.
        device: where they run; a CPU unless said.
        deterministic: whether a row's bits are independent of the other rows, and of how its request was cut into
            steps. Each kernel of a CPU promises that anyway; without it, layers may choose among kernels by the step.

    Raises:
        ConfigError: the named ones were not built, or this machine cannot run them.
    """
    if device is not None and device.type == "cuda":
        from quire.ops.triton.kernels import TritonKernels  # Triton is there where there is a GPU

        return TritonKernels(device, deterministic)
    proven = [isa for isa in library.usable() if isa not in UNPROVEN]
    if name == "torch" or (name == "auto" and not proven):
        return Kernels(deterministic)
    return CpuKernels(proven[0] if name == "auto" else name, deterministic)


def choice_note(name: str = "auto") -> str | None:
    """What a user should know of what `choose_kernels` chose: that faster kernels could run here, and how."""
    if name != "auto":
        return None
    lost = library.missed()
    if lost is None and library.usable()[:1] == ["amx"]:
        return "this machine has AMX, which Quire's kernels have only seen emulated; --cpu-kernels amx uses it"
    return f"{lost.what}; {lost.remedy}" if lost else None
