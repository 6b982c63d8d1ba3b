"""Quantizing weights in C++: see quantize.cpp."""

from __future__ import annotations

import ctypes

import torch

from quire.ops import quantize_groups as groups
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype

PROTOTYPES: dict[str, Prototype] = {"quantize_groups": (None, (POINTER, I32, POINTER))}
LANES, MOST = 16, 128
"""What divides the groups that it knows, and the largest."""


class _Job(ctypes.Structure):
    """`Job` in quantize.cpp."""

    _fields_ = (
        *((name, I32) for name in ("kind", "group", "block", "stored")),
        *((name, I64) for name in ("outputs", "inputs")),
        *((name, POINTER) for name in ("importance", "codes", "scales", "offsets", "block_scales", "block_offsets")),
    )


def quantize_groups(
    lib: Library,
    weight: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.bfloat16,
    importance: torch.Tensor | None = None,
) -> CodedWeight:
    """See `quantize_groups.quantize_groups`: the same bits. Raises ValueError for a weight that a CPU cannot read."""
    if weight.dtype not in DTYPES or scheme.group % LANES or scheme.group > MOST or not weight.numel():
        return groups.quantize_groups(weight, scheme, scale_dtype, importance)
    if weight.device.type != "cpu" or not weight.data_ptr():
        raise ValueError(
            f"a weight {list(weight.shape)} on {weight.device}, a {type(weight).__name__}, has no numbers that a CPU "
            "can read; move it to the CPU, or quantize it with the kernels of its device"
        )
    weight, (outputs, inputs) = weight.contiguous(), weight.shape
    groups.check_groups(scheme, inputs)
    kind = (1 if scheme.block else 0) if scheme.bits == 8 else (2 if scheme.block else 3)
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    per_block = [inputs // scheme.block] * (1 if scheme.bits == 8 else 2) if scheme.block else []
    counts = [inputs // scheme.group] * (1 if scheme.bits == 8 else 2) + per_block
    numbers = [torch.empty(outputs, count) for count in counts]
    job = _Job(kind, scheme.group, scheme.block or 0, DTYPES[scale_dtype], outputs, inputs)
    if importance is not None:
        importance = importance.float().contiguous()
        job.importance = importance.data_ptr()
    job.codes = codes.data_ptr()
    names = ("scales", "block_scales") if scheme.bits == 8 else ("scales", "offsets", "block_scales", "block_offsets")
    for name, tensor in zip(names, numbers, strict=False):
        setattr(job, name, tensor.data_ptr())
    lib.quantize_groups(ctypes.addressof(job), DTYPES[weight.dtype], weight.data_ptr())
    return groups.finished(scheme, scale_dtype, codes, *numbers)
