"""Quantizing weights in C++: see quantize.cpp."""

from __future__ import annotations

from typing import Literal

import torch

from quire.ops import quantize_groups as groups
from quire.ops import quantized
from quire.ops.coded import CodedWeight
from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype
from quire.ops.quantized import GROUP_SIZES, Quantization, QuantizedWeight, layout

PROTOTYPES: dict[str, Prototype] = {
    "quantize_int8": (None, (I32, POINTER, I64, I64, POINTER, POINTER)),
    "quantize_int4": (None, (I32, POINTER, I64, I64, I32, POINTER, POINTER)),
    "quantize_groups": (None, (I32, POINTER, I64, I64, I32, I32, POINTER, POINTER, POINTER)),
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


def quantize_groups(
    lib: Library, weight: torch.Tensor, bits: Literal[4, 8], group: int, scale_dtype: torch.dtype
) -> CodedWeight:
    """See `Kernels.quantize_groups`: the same codes, scales and zeros, bit for bit."""
    if bits == 8 or weight.dtype not in DTYPES or group not in GROUP_SIZES or weight.shape[1] % group:
        return groups.quantize_groups(weight, bits, group, scale_dtype)
    weight, (outputs, inputs) = weight.contiguous(), weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
    zeros = torch.empty(outputs, inputs // group, dtype=torch.uint8)
    source = DTYPES[weight.dtype], weight.data_ptr(), outputs, inputs, group, DTYPES[scale_dtype]
    lib.quantize_groups(*source, codes.data_ptr(), scales.data_ptr(), zeros.data_ptr())
    return groups.finished(codes, scales.to(scale_dtype), zeros, group)
