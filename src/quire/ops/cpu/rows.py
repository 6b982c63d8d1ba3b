"""What is done row by row, in C++: see rows.cpp."""

from __future__ import annotations

import torch

from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype

PROTOTYPES: dict[str, Prototype] = {
    "silu_mul": (None, (I32, POINTER, POINTER, I64, I64)),
}


def silu_mul(lib: Library, x: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_mul`. x: [rows, 2 * size], contiguous."""
    rows, width = x.shape
    out = x.new_empty(rows, width // 2)
    lib.silu_mul(DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), rows, width // 2)
    return out
