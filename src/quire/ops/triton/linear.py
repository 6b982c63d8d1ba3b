"""Matrix products: which one serves a weight, and how the weight comes to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.ops import quantized
from quire.ops.linear import Product
from quire.ops.quantized import Quantization, QuantizedWeight
from quire.ops.triton.linear_chunks import checked
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_quantized import QuantizedProduct


def pack(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, deterministic: bool
) -> Product:
    """See `Kernels.pack`; cuBLAS's product unless `deterministic`.

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
    bias = None if bias is None else bias.to(device)
    return DenseProduct(weight, bias) if deterministic else VendorProduct(weight, bias)


def quantize(weight: torch.Tensor, how: Quantization, device: torch.device) -> QuantizedWeight:
    """See `Kernels.quantize`: computed on the device, returned in the host's memory, the same as a CPU finds.

    That is so since the reference works number by number there, and sums in a fixed order or exactly.
    """
    return quantized.quantize(weight.to(device), how)


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device) -> Product:
    """See `Kernels.pack_quantized`; the weight is copied."""
    return QuantizedProduct(weight, None if bias is None else bias.to(device), device)


class VendorProduct:
    """The product that torch's library for the device computes, cuBLAS: a row's bits depend on the other rows.

    Attributes:
        weight: [out, in], contiguous, used where it lies; for kernels that multiply with several at once.
        bias: [out]; None: there is none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, (self.weight.dtype,), out_dtype)
        if out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if not x.is_cuda:  # only there has torch a product whose fp32 sums are returned as they are
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        out = torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        return out if self.bias is None else out.add_(self.bias)
