"""Matrix products in C++: see linear.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype
from quire.ops.memory import SMALL, Scratch, WeightMemory, collapse
from quire.ops.mxfp4 import GROUP, Mxfp4Weight
from quire.ops.quantized import PANEL, QuantizedWeight

PROTOTYPES: dict[str, Prototype] = {
    "linear": (None, (POINTER, POINTER, I32, I64, POINTER, I32, POINTER)),
    "linear_workspace": (I64, (POINTER, I64)),
    "packed_bytes": (I64, (POINTER,)),
    "pack": (None, (POINTER, POINTER, POINTER)),
    "pack_mxfp4": (None, (POINTER, POINTER, POINTER, POINTER, POINTER)),
}
INT8, INT4, MXFP4 = 3, 4, 5
"""Formats beside the dense ones, which have their data type's number."""


class _Weight(ctypes.Structure):
    """`Weight` in linear.cpp."""

    _fields_ = (
        ("format", I32),
        ("group", I32),
        ("in_features", I64),
        ("out_features", I64),
        ("data", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
    )


class CpuProduct:
    """The product with a weight [out, in], dense or quantized, whose panels of 32 outputs C++ reads as one stream.

    Args:
        weight: dense parts [out, in], or such in MXFP4, whose outputs come side by side, are copied into panels; a
            quantized one of `SMALL` bytes or more is used where it lies.
        scratch: what all products share for the length of a call.
        memory: where panels go.

    Attributes:
        address: of `Weight`, for kernels that work on several products.
        dtypes: that activations may have.
    """

    def __init__(
        self,
        lib: Library,
        weight: Sequence[torch.Tensor] | Sequence[Mxfp4Weight] | QuantizedWeight,
        bias: torch.Tensor | None,
        scratch: Scratch,
        memory: WeightMemory,
    ) -> None:
        codes = [] if isinstance(weight, QuantizedWeight) else [w for w in weight if isinstance(w, Mxfp4Weight)]
        dense = [] if isinstance(weight, QuantizedWeight) else [w for w in weight if isinstance(w, torch.Tensor)]
        shapes = [(len(part), part.shape[1]) for part in dense] + [(w.out_features, w.in_features) for w in codes]
        if isinstance(weight, QuantizedWeight):
            shapes = [(weight.out_features, weight.in_features)]
        self.out_features, self.in_features = sum(out for out, _ in shapes), shapes[0][1]
        self._weight = _Weight(in_features=self.in_features, out_features=self.out_features)
        self.address = ctypes.addressof(self._weight)
        self._held: dict[str, torch.Tensor] = {}  # what the addresses in the structure point to
        self._memory = memory
        self.dtypes: tuple[torch.dtype, ...] = (dense[0].dtype,) if dense else tuple(DTYPES)
        if isinstance(weight, QuantizedWeight):
            self._use_quantized(lib, weight)
        elif codes:
            self._pack_codes(lib, codes)
        else:
            self._pack(lib, dense)
        if bias is not None:
            self._hold("bias", bias.detach().float().contiguous().clone())
        self._linear, self._workspace, self._scratch = lib.linear, lib.linear_workspace, scratch

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor
        setattr(self._weight, name, tensor.data_ptr())

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """What a product reads as a stream."""
        return {name: self._held[name] for name in ("data", "scales") if name in self._held}

    def _pack(self, lib: Library, parts: Sequence[torch.Tensor]) -> None:
        parts = [part.contiguous() for part in parts]
        if {(part.dtype, part.shape[1]) for part in parts} != {(parts[0].dtype, self.in_features)}:
            raise ValueError(f"the parts of a weight differ: {[(part.dtype, list(part.shape)) for part in parts]}")
        self._weight.format = DTYPES[parts[0].dtype]
        self._hold("data", self._memory.take(lib.packed_bytes(self.address), self))
        row = self.in_features * parts[0].element_size()
        rows = np.concatenate([part.data_ptr() + row * np.arange(len(part)) for part in parts])
        lib.pack(self.address, rows.ctypes.data, self._weight.data)

    def _pack_codes(self, lib: Library, parts: Sequence[Mxfp4Weight]) -> None:
        if {part.in_features for part in parts} != {self.in_features}:
            raise ValueError(f"the parts of a weight differ: {[list(part.codes.shape) for part in parts]}")
        self._weight.format, self._weight.group = MXFP4, GROUP
        self._hold("data", self._memory.take(lib.packed_bytes(self.address), self))
        size = -(-self.out_features // PANEL) * PANEL * self.in_features // GROUP
        self._hold("scales", self._memory.take(size, self))
        held = [(_with_rows(part.codes), _with_rows(part.scales)) for part in parts]
        codes, scales = (
            np.concatenate([each[side].data_ptr() + each[side].stride(0) * np.arange(len(each[side])) for each in held])
            for side in (0, 1)
        )
        lib.pack_mxfp4(self.address, codes.ctypes.data, scales.ctypes.data, self._weight.data, self._weight.scales)

    def _use_quantized(self, lib: Library, weight: QuantizedWeight) -> None:
        self._hold("data", self._in_huge_pages(weight.packed))
        self._hold("scales", self._in_huge_pages(weight.scales))
        if weight.group is None:
            self._weight.format = INT8
        else:
            self._weight.format, self._weight.group = INT4, weight.group

    def _in_huge_pages(self, part: torch.Tensor) -> torch.Tensor:
        """A part of a weight; one so small that its begin and end would be much of it is moved beside others."""
        if not 0 < part.nbytes < SMALL:
            collapse(part)
            return part
        part = part.flatten().view(torch.uint8)
        return self._memory.take(part.nbytes, self).copy_(part)

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in x's type or fp32."""
        if x.shape[1] != self.in_features or x.dtype not in self.dtypes:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; the product takes {self.in_features} columns of {self.dtypes}"
            )
        if out_dtype is None:
            out_dtype = x.dtype
        elif out_dtype not in (x.dtype, torch.float32):
            raise ValueError(f"out_dtype is {out_dtype}; allowed are {x.dtype} and torch.float32")
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=out_dtype)
        if rows:
            room = self._scratch.at_least(self._workspace(self.address, rows))
            self._linear(self.address, x.data_ptr(), DTYPES[x.dtype], rows, out.data_ptr(), DTYPES[out_dtype], room)
        return out


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes whose rows are each contiguous, which may lie apart."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()
