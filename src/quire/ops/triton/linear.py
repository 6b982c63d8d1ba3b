"""Matrix products: which one serves a weight, and how the weight comes to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.ops import quantized
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.linear import Product
from quire.ops.quantized import BLOCK, Quantization, QuantizedWeight, codes_of
from quire.ops.triton.linear_coded import CodedProduct

Make = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""A product from a weight [out, in] that lies on the device, and its bias [out]."""


def pack(parts: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, make: Make) -> Product:
    """See `Kernels.pack`; `make`: what multiplies.

    A lone part that lies on the device is not copied: a head may share the embedding's memory.

    Raises:
        ValueError: the parts have different inputs or data types.
    """
    first = parts[0]
    if {(part.dtype, part.shape[1]) for part in parts} != {(first.dtype, first.shape[1])}:
        raise ValueError(f"the parts of a weight differ: {[(part.dtype, list(part.shape)) for part in parts]}")
    if len(parts) == 1:
        weight = first.to(device).contiguous()
    else:  # each goes to its place at once, so that no second copy of the whole is made
        weight = torch.empty(sum(map(len, parts)), first.shape[1], dtype=first.dtype, device=device)
        for part, place in zip(parts, weight.split([len(part) for part in parts]), strict=True):
            place.copy_(part)
    return make(weight, None if bias is None else bias.to(device))


def quantize(weight: torch.Tensor, how: Quantization, device: torch.device) -> QuantizedWeight:
    """See `Kernels.quantize`: computed on the device, returned in the host's memory, the same as a CPU finds.

    That is so since the reference works number by number there, and sums in a fixed order or exactly.
    """
    return quantized.quantize(weight.to(device), how)


def pack_quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, outputs: int | None = None
) -> Product:
    """See `Kernels.pack_quantized`; the weight is copied."""
    return CodedProduct([coded(weight)], None if bias is None else bias.to(device), device, outputs, scaled=BLOCK)


def coded(weight: QuantizedWeight) -> CodedWeight:
    """The same numbers, row by row."""
    outputs, group = weight.out_features, weight.group
    codes = codes_of(weight)[:outputs]
    if group is None:
        return CodedWeight(Scheme("int8", 8, 0), codes, factors=weight.scales[:outputs])
    halves = (codes + 8).view(torch.uint8).view(outputs, -1, 2)
    scales = weight.scales.transpose(1, 2).flatten(0, 1)[:outputs]
    scheme = Scheme("int4", 4, group, table=tuple(range(-8, 8)))
    return CodedWeight(scheme, halves[:, :, 0] | halves[:, :, 1] << 4, scales)
