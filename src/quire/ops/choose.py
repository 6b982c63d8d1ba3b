"""Which implementation of the kernels runs here: decided once, at start-up."""

from __future__ import annotations

import functools

import torch

from quire.ops import self_test
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kernels import Kernels

SELF_TESTED = ("amx", "avx_vnni", "neon_bf16", "neon_dot", "neon")
"""Sets that are chosen only where they multiply rightly: AMX's registers a system hands out on request, and virtual
machines not always as they should; AVX-VNNI and ARM's have been run under emulation alone."""


@functools.cache
def failed_checks(isa: str) -> tuple[str, ...]:
    """The checks of the short self-test that these kernels fail on this machine: less than a second, once.

    Raises:
        ConfigError: they were compiled from other sources.
    """
    if isa not in SELF_TESTED:
        return ()
    return tuple(check.name for check in self_test.run_short(CpuKernels(isa)) if not check.passed)


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
    if name == "auto":
        name = next((isa for isa in library.usable() if not failed_checks(isa)), "torch")
    return Kernels(deterministic) if name == "torch" else CpuKernels(name, deterministic)


def lost_kernels() -> library.Lost | None:
    """The fastest kernels for this machine, if they are not those that `choose_kernels` chooses, and what to do."""
    for isa in library.usable()[:1]:
        if failed := failed_checks(isa):
            what = f"the kernels for {isa} fail their self-test on this machine ({', '.join(failed)}): slower ones run"
            return library.Lost(what, f"report it with the output of 'quire doctor --cpu-kernels {isa} --json'")
    return library.missed()


def choice_note(name: str = "auto") -> str | None:
    """What a user should know of what `choose_kernels` chose: that faster kernels could run here, and how."""
    lost = lost_kernels() if name == "auto" else None
    return f"{lost.what}; {lost.remedy}" if lost else None
