"""Weights in MXFP4 on the device: how they lie there, and how a kernel makes numbers of their codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.ops.mxfp4 import MOST, Mxfp4Weight, joined
from quire.ops.triton.linear_dense import DenseProduct

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Mxfp4Product:
    """The product with such a weight. By itself it is restored for each product; what is meant is many at once: see
    `experts`.

    Attributes:
        weight: uint8 [out, in / 2], contiguous: two codes a byte, the lower half first.
        scales: uint8 [out, in / 32], exponents, biased as fp32's are.
        bias: [out]; None: there is none.
    """

    def __init__(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None, device: torch.device) -> None:
        whole = joined(parts)
        self.out_features, self.in_features = whole.out_features, whole.in_features
        self.weight = whole.codes.flatten(1).to(device)
        self.scales = whole.scales.clamp(max=MOST).to(device)  # a greater one scales only zeros
        self.bias = None if bias is None else bias.to(device)

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Product`."""
        weight = Mxfp4Weight(self.weight.view(self.out_features, -1, 16), self.scales).restored()
        return DenseProduct(weight.to(x.dtype), self.bias).matmul(x, out_dtype)


@triton.jit
def numbers_of(codes, scales, dtype: tl.constexpr):
    """What codes, in the lower four bits, and the exponents of their scales stand for; both are uint8."""
    codes = codes.to(tl.uint32)
    size = codes & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)  # 0 and 0.5; 1 to 6
    numbers = (bits | (codes & 8) << 28).to(tl.float32, bitcast=True)
    return (numbers * (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)).to(dtype)
