"""The kernels in C++, compiled for this machine's instruction set."""

from __future__ import annotations

import torch

from quire.ops.cpu import rows
from quire.ops.cpu.library import Library
from quire.ops.kernels import Kernels


class CpuKernels(Kernels):
    """What the C++ library does better than plain torch; all of it row by row independent of the other rows.

    Args:
        isa: the instruction set, one of `library.usable()`.

    Raises:
        ConfigError: it was not built, or this machine cannot run it.
    """

    def __init__(self, isa: str) -> None:
        self.name = isa
        self._lib = Library(isa, rows.PROTOTYPES)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return rows.silu_mul(self._lib, x)
