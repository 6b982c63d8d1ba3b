"""Quantizing weights in C++: see quantize.cpp."""

from __future__ import annotations

import torch

from quire.ops import quantized
from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype
from quire.ops.quantized import Quantization, QuantizedWeight, layout

PROTOTYPES: dict[str, Prototype] = {
    "quantize_int8": (None, (I32, POINTER, I64, I64, POINTER, POINTER)),
    "quantize_int4": (None, (I32, POINTER, I64, I64, I32, POINTER, POINTER)),
}


def quantize(lib: Library, weight: torch.Tensor, how: Quantization) -> QuantizedWeight:
    """See `Kernels.quantize`: the same codes and scales, bit for bit."""
    if weight.dtype not in DTYPES:
        return quantized.quantize(weight, how)
    weight = weight.contiguous()
    wanted = layout(how, *weight.shape)
    packed = torch.empty(wanted.packed, dtype=wanted.packed_dtype)
    scales = torch.empty(wanted.scales, dtype=wanted.scales_dtype)
    source, target = (DTYPES[weight.dtype], weight.data_ptr(), *weight.shape), (packed.data_ptr(), scales.data_ptr())
    if how.group is None:
        lib.quantize_int8(*source, *target)
    else:
        lib.quantize_int4(*source, how.group, *target)
    return quantized.finished(weight, how, packed, scales)
