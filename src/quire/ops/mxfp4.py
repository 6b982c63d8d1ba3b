"""Weights in MXFP4 (https://arxiv.org/abs/2310.10537), and the product in plain torch: the definition.

A number is one of 16, by its 4-bit code, times a power of 2 that 32 inputs of an output share. Unlike int8 and int4
weights, these meet activations that are not quantized: the product is that of a dense weight of the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.ops.linear import PackedWeight

GROUP = 32
"""Inputs that share a scale."""
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""By their codes."""
BIAS = 127
"""Of the exponents."""
LEAST, MOST = 2, 252
"""Exponents of which all numbers are normal ones of bf16 and fp32."""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A weight [out, in], as checkpoints hold it; its tensors may be views of a mapped file.

    Attributes:
        codes: uint8 [out, in / 32, 16]: two codes a byte, the lower half first.
        scales: uint8 [out, in / 32], exponents of 2.

    Raises:
        CheckpointError: the tensors are not such ones, or a number would be too large or too small.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.codes.shape)
        fits = len(shape) == 3 and shape[2] == GROUP // 2 and tuple(self.scales.shape) == shape[:2]
        if not fits or {self.codes.dtype, self.scales.dtype} != {torch.uint8}:
            raise CheckpointError(
                f"an MXFP4 weight has uint8 codes [out, in / {GROUP}, {GROUP // 2}] and scales [out, in / {GROUP}]; "
                f"found {self.codes.dtype} {list(shape)} and {self.scales.dtype} {list(self.scales.shape)}"
            )
        outside = (self.scales < LEAST) | (self.scales > MOST)
        if outside.any() and (self.codes[outside] & 0x77).any():
            found = sorted({*self.scales[outside].tolist()})
            raise CheckpointError(
                f"scales of numbers that are not 0 must be from {LEAST} to {MOST}, found {found[0]} to {found[-1]}"
            )

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    def outputs(self, wanted: range | torch.Tensor) -> Mxfp4Weight:
        """Of these outputs alone: a view of a range, a copy of what an index picks."""
        if isinstance(wanted, range) and len(wanted) == self.out_features:
            return self
        rows = slice(wanted.start, wanted.stop) if isinstance(wanted, range) else wanted
        return Mxfp4Weight(self.codes[rows], self.scales[rows])

    def restored(self) -> torch.Tensor:
        """The numbers, [out, in] fp32."""
        codes = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)  # [out, in / 32, 32]
        exponents = (self.scales.int() - BIAS).unsqueeze(-1)
        return torch.ldexp(NUMBERS.to(codes.device)[codes.int()], exponents).flatten(1)


def joined(parts: Sequence[Mxfp4Weight]) -> Mxfp4Weight:
    """Their outputs one after another, copied."""
    return Mxfp4Weight(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


class Mxfp4Product:
    """The product in plain torch. The weight stays in its codes, and is restored whenever it is multiplied.

    In bf16 its numbers are exact; in fp16 they may not be, so the product is made in fp32.
    """

    def __init__(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> None:
        self._weight = joined(parts)
        self.in_features, self.out_features = self._weight.in_features, self._weight.out_features
        self._bias = None if bias is None else bias.detach().clone()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Product`."""
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        bias = None if self._bias is None else self._bias.to(dtype)
        product = PackedWeight(self._weight.restored().to(dtype), bias, packed=False)
        return product.matmul(x.to(dtype)).to(out_dtype or x.dtype)
