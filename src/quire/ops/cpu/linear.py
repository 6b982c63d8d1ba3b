"""Matrix products in C++: see linear.cpp."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from quire.errors import CheckpointError
from quire.ops.blocks import NUMBERS_IN_CPP, SIX_BITS, BlockWeight
from quire.ops.coded import CodedWeight, Scheme, check_parts
from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype
from quire.ops.memory import Scratch, WeightMemory
from quire.ops.mxfp4 import GROUP, Mxfp4Weight

PROTOTYPES: dict[str, Prototype] = {
    "linear": (None, (POINTER, POINTER, I32, I64, POINTER, I32, POINTER)),
    "linear_workspace": (I64, (POINTER, I64)),
    "packed_bytes": (I64, (POINTER,)),
    "pack": (None, (POINTER, POINTER, POINTER)),
    "pack_mxfp4": (None, (POINTER, POINTER, POINTER, POINTER, POINTER)),
    "pack_blocks": (I32, (POINTER, I32, POINTER)),
    "pack_codes": (None, (POINTER, POINTER, POINTER)),
    "pack_numbers": (None, (POINTER, POINTER, I64, I32, POINTER)),
}
INT8, INT4, MXFP4, INT6 = 3, 4, 5, 6
"""Formats beside the dense ones, which have their data type's number."""
NUMBERS = {**DTYPES, torch.uint8: 3, torch.int8: 4}
"""How the C++ side names the types of scales and offsets (`Number` in weight.h)."""
PANEL = 32
"""Outputs that lie together."""
LEAST_SEGMENT = 16
"""Inputs whose whole numbers are summed at a time: a vector's."""


class _Numbers(ctypes.Structure):
    """`Numbers` in weight.h."""

    _fields_ = (("at", POINTER), ("type", I32), ("each", I32), ("count", I64))


class _Weight(ctypes.Structure):
    """`Weight` in weight.h."""

    _fields_ = (
        ("format", I32),
        *(("in_features", I64), ("out_features", I64)),
        *(("data", POINTER), ("bias", POINTER)),
        *((name, _Numbers) for name in ("scales", "offsets", "block_scales", "block_offsets")),
        ("factors", POINTER),
        *((name, I32) for name in ("segment", "shared", "whole_rows", "raised")),
        ("table", ctypes.c_int8 * 16),
        ("width", I64),
        ("next", POINTER),
    )


class CpuProduct:
    """The product with a weight [out, in], dense or in codes, whose panels of 32 outputs C++ reads as one stream.

    Args:
        weight: dense parts [out, in], or such in MXFP4, of any schemes (`ops.coded`) or in blocks, whose outputs come
            side by side; they are copied into panels.
        scratch: what all products share for the length of a call.
        memory: where panels go.

    Attributes:
        address: of `Weight`, for kernels that work on several products.
        dtypes: that activations may have.
        parts: what a product reads as a stream.

    Raises:
        CheckpointError: see `CodedProduct`.
    """

    def __init__(
        self,
        lib: Library,
        weight: Sequence[torch.Tensor] | Sequence[Mxfp4Weight] | Sequence[CodedWeight] | Sequence[BlockWeight],
        bias: torch.Tensor | None,
        scratch: Scratch,
        memory: WeightMemory,
    ) -> None:
        self._lib, self._memory, self.parts = lib, memory, list[torch.Tensor]()
        self.dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
        dense = [part for part in weight if isinstance(part, torch.Tensor)]
        coded = [part for part in weight if isinstance(part, CodedWeight)]
        blocks = [part for part in weight if isinstance(part, BlockWeight)]
        if dense:
            self.dtypes = (dense[0].dtype,)
            self._weights = [self._dense(dense)]
        elif coded:
            check_parts(coded)
            self._weights = [self._coded(list(alike)) for _, alike in itertools.groupby(coded, _layout)]
        elif blocks:
            self._weights = [self._blocks(list(alike)) for _, alike in itertools.groupby(blocks, _kind)]
        else:
            self._weights = [self._mxfp4([part for part in weight if isinstance(part, Mxfp4Weight)])]
        self.in_features: int = self._weights[0].in_features
        self.out_features: int = sum(part.out_features for part in self._weights)
        self.address = ctypes.addressof(self._weights[0])
        for part, after in itertools.pairwise(self._weights):
            part.next = ctypes.addressof(after)
        self._bias = None if bias is None else bias.detach().float().contiguous().clone()
        at = None if self._bias is None else self._bias.data_ptr()
        for part in self._weights:
            part.width, part.bias = self.out_features, at
            at = None if at is None else at + 4 * part.out_features
        self._linear, self._workspace, self._scratch = lib.linear, lib.linear_workspace, scratch

    def _hold(self, tensor: torch.Tensor) -> int:
        self.parts.append(tensor)
        return tensor.data_ptr()

    def _taken(self, size: int) -> int:
        """The address of memory for panels."""
        return self._hold(self._memory.take(size, self))

    def _dense(self, parts: Sequence[torch.Tensor]) -> _Weight:
        parts, inputs = [part.contiguous() for part in parts], parts[0].shape[1]
        if {(part.dtype, part.shape[1]) for part in parts} != {(parts[0].dtype, inputs)}:
            raise ValueError(f"the parts of a weight differ: {[(part.dtype, list(part.shape)) for part in parts]}")
        outputs = sum(map(len, parts))
        weight = _Weight(format=DTYPES[parts[0].dtype], in_features=inputs, out_features=outputs)
        weight.data = self._taken(self._lib.packed_bytes(ctypes.addressof(weight)))
        rows = _rows(parts)
        self._lib.pack(ctypes.addressof(weight), rows.ctypes.data, weight.data)
        return weight

    def _mxfp4(self, parts: Sequence[Mxfp4Weight]) -> _Weight:
        inputs, outputs = parts[0].in_features, sum(part.out_features for part in parts)
        if {part.in_features for part in parts} != {inputs}:
            raise ValueError(f"the parts of a weight differ: {[list(part.codes.shape) for part in parts]}")
        weight = _Weight(format=MXFP4, in_features=inputs, out_features=outputs)
        weight.data = self._taken(self._lib.packed_bytes(ctypes.addressof(weight)))
        size = -(-outputs // PANEL) * PANEL * inputs // GROUP
        weight.scales = _Numbers(self._taken(size), NUMBERS[torch.uint8], GROUP, inputs // GROUP)
        codes, scales = [_with_rows(part.codes) for part in parts], [_with_rows(part.scales) for part in parts]
        of_codes, of_scales = _rows(codes), _rows(scales)
        pointers = of_codes.ctypes.data, of_scales.ctypes.data
        self._lib.pack_mxfp4(ctypes.addressof(weight), *pointers, weight.data, weight.scales.at)
        return weight

    def _coded(self, parts: Sequence[CodedWeight]) -> _Weight:
        """Parts of one layout."""
        first, scheme = parts[0], parts[0].scheme
        weight = self._in_codes(scheme, first.in_features, sum(part.out_features for part in parts), _raised(parts))
        codes = [_with_rows(part.codes) for part in parts]
        rows = _rows(codes)
        self._lib.pack_codes(ctypes.addressof(weight), rows.ctypes.data, weight.data)
        for name, each in _scaled(scheme):
            numbers = [getattr(part, name) for part in parts]
            if numbers[0] is not None:
                setattr(weight, name, _Numbers(0, NUMBERS[numbers[0].dtype], each, numbers[0].shape[1]))
                getattr(weight, name).at = self._numbers(weight, numbers)
        if first.factors is not None:
            weight.factors = self._numbers(
                weight, [part.factors.unsqueeze(1) for part in parts if part.factors is not None]
            )
        return weight

    def _in_codes(self, scheme: Scheme, inputs: int, outputs: int, raised: int | None) -> _Weight:
        """A weight with room for its codes; `raised`: see `_raised`."""
        weight = _Weight(
            format=INT4 if scheme.bits == 4 else INT8 if raised is None else INT6,
            in_features=inputs,
            out_features=outputs,
            segment=scheme.segment,
            shared=scheme.shared,
            whole_rows=scheme.activations == "row",
            raised=raised or 0,
            table=(ctypes.c_int8 * 16)(*(scheme.table or range(16))),
        )
        weight.data = self._taken(self._lib.packed_bytes(ctypes.addressof(weight)))
        return weight

    def _room(self, weight: _Weight, count: int, size: int) -> int:
        """The address of memory for so many numbers an output, in panels."""
        return self._taken(-(-weight.out_features // PANEL) * PANEL * count * size)

    def _numbers(self, weight: _Weight, parts: Sequence[torch.Tensor]) -> int:
        """The address of scales or offsets, [out, n] in parts, in panels."""
        parts, count, size = [_with_rows(part) for part in parts], parts[0].shape[1], parts[0].element_size()
        at, rows = self._room(weight, count, size), _rows(parts)
        self._lib.pack_numbers(ctypes.addressof(weight), rows.ctypes.data, count, size, at)
        return at

    def _blocks(self, parts: Sequence[BlockWeight]) -> _Weight:
        """Parts of one kind."""
        form, inputs, outputs = parts[0].form, parts[0].in_features, sum(part.out_features for part in parts)
        if {part.in_features for part in parts} != {inputs}:
            raise CheckpointError(f"the parts of a product differ in inputs: {[part.in_features for part in parts]}")
        example, room = form.example, self._room
        if isinstance(example, Mxfp4Weight):
            weight = _Weight(format=MXFP4, in_features=inputs, out_features=outputs)
            weight.data = self._taken(self._lib.packed_bytes(ctypes.addressof(weight)))
            count = inputs // GROUP
            weight.scales = _Numbers(room(weight, count, 1), NUMBERS[torch.uint8], GROUP, count)
        else:
            weight = self._in_codes(example.scheme, inputs, outputs, SIX_BITS.get(form.name))
            for name, each in _scaled(example.scheme):
                numbers, count = getattr(example, name), inputs // each
                if numbers is not None:
                    at = room(weight, count, numbers.element_size())
                    setattr(weight, name, _Numbers(at, NUMBERS[numbers.dtype], each, count))
            factors = [torch.full((part.out_features, 1), part.factor) for part in parts if part.factor is not None]
            if factors:
                weight.factors = self._numbers(weight, factors)
        rows = np.concatenate([_block_rows(part) for part in parts])
        if not self._lib.pack_blocks(ctypes.addressof(weight), NUMBERS_IN_CPP.index(form.name), rows.ctypes.data):
            for part in parts:
                decoded = part.decoded()
                if isinstance(decoded, CodedWeight):
                    decoded.check_finite()
            raise CheckpointError(f"{form.name}: scales are not numbers to compute with. Download the file again.")
        return weight

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


def can_multiply(weight: CodedWeight) -> bool:
    """Whether such weights are multiplied as they are: a vector of codes at a time shares a scale."""
    return weight.scheme.segment >= LEAST_SEGMENT and (
        weight.scheme.bits == 8 or weight.in_features % LEAST_SEGMENT == 0
    )


def _layout(weight: CodedWeight) -> tuple[object, ...]:
    """Parts for which this is the same are one weight."""
    tensors = weight.scales, weight.offsets, weight.block_scales, weight.block_offsets, weight.factors
    return weight.scheme, *(None if tensor is None else tensor.dtype for tensor in tensors)


def _kind(weight: BlockWeight) -> tuple[object, ...]:
    """The same of those in blocks."""
    return weight.form.name, weight.factor is not None


def _scaled(scheme: Scheme) -> list[tuple[str, int]]:
    """What scales there may be, and how many inputs have one."""
    each = {
        "scales": scheme.group,
        "offsets": scheme.group,
        "block_scales": scheme.block,
        "block_offsets": scheme.block,
    }
    return [(name, inputs) for name, inputs in each.items() if inputs]


def _block_rows(part: BlockWeight) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The addresses of its rows."""
    index = np.arange(part.out_features) if part.index is None else part.index.numpy()
    return part.blocks.data_ptr() + _row_bytes(part.blocks) * index


def _raised(parts: Sequence[CodedWeight]) -> int | None:
    """What makes numbers of 8 bits such of 6, from 0 to 63, as those of Q5_K and Q6_K; None where nothing does."""
    if parts[0].scheme.bits == 4 or not parts[0].scheme.group or not all(part.codes.numel() for part in parts):
        return None
    least = min(0, *(int(part.codes.min()) for part in parts))
    most = max(int(part.codes.max()) for part in parts)
    return -least if most - least < 64 else None


def _rows(parts: Sequence[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The addresses of the rows of all parts."""
    return np.concatenate([part.data_ptr() + _row_bytes(part) * np.arange(len(part)) for part in parts])


def _row_bytes(part: torch.Tensor) -> int:
    return part.stride(0) * part.element_size()


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers whose rows are each contiguous, which may lie apart."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()
