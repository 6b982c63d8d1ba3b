"""Which implementation of the kernels runs here: decided once, at start-up."""

from __future__ import annotations

from quire.ops.kernels import Kernels


def choose_kernels(name: str = "auto") -> Kernels:
    """The fastest kernels that this machine can run, or those of a name."""
    return Kernels()
