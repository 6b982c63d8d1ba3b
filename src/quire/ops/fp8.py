"""Weights in 8-bit floating point (E4M3, https://arxiv.org/abs/2209.05433) as checkpoints hold them: the definition.

A number is its code times a scale that a group of inputs shares, rounded once to the data type of the computation. So
a product is that of a dense weight of these numbers, bit by bit, whether they are restored when a model is loaded or
by the kernel that multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [out, in]; its codes may be a view of a mapped file.

    Attributes:
        codes: uint8 [out, in], the bytes of float8_e4m3fn.
        scales: fp32 [out, groups of inputs].
        group: inputs that share a scale; the last group may have fewer.

    Raises:
        CheckpointError: the tensors are not such ones.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int

    def __post_init__(self) -> None:
        codes, scales = self.codes, self.scales
        fits = codes.dim() == 2 and self.group > 0
        if not fits or tuple(scales.shape) != (len(codes), -(-codes.shape[1] // self.group)):
            raise CheckpointError(
                f"an fp8 weight has codes [out, in] and scales [out, in / {self.group}]; found {list(codes.shape)} and "
                f"{list(scales.shape)}"
            )
        if (codes.dtype, scales.dtype) != (torch.uint8, torch.float32):
            raise CheckpointError(
                f"an fp8 weight has uint8 codes and float32 scales; found {codes.dtype} and {scales.dtype}"
            )

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def outputs(self, wanted: range | torch.Tensor) -> Fp8Weight:
        """Of these outputs alone: a view of a range, a copy of what an index picks."""
        if isinstance(wanted, torch.Tensor):
            return Fp8Weight(self.codes[wanted], self.scales[wanted], self.group)
        rows = slice(wanted.start, wanted.stop)
        return Fp8Weight(self.codes[rows], self.scales[rows], self.group)

    def restored(self) -> torch.Tensor:
        """The numbers, [out, in] fp32."""
        scales = self.scales.repeat_interleave(self.group, dim=1)[:, : self.in_features]
        return self.codes.view(torch.float8_e4m3fn).float() * scales


def joined(parts: Sequence[Fp8Weight], device: torch.device) -> Fp8Weight:
    """Their outputs one after another, copied to a device, each to its place at once.

    Raises:
        CheckpointError: they have other inputs or groups.
    """
    first = parts[0]
    if {(part.in_features, part.group) for part in parts} != {(first.in_features, first.group)}:
        found = [(list(part.codes.shape), part.group) for part in parts]
        raise CheckpointError(f"the parts of an fp8 weight differ in inputs or groups: {found}")
    codes = torch.empty(sum(part.out_features for part in parts), first.in_features, dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        codes[start : start + part.out_features].copy_(part.codes)
        start += part.out_features
    return Fp8Weight(codes, torch.cat([part.scales for part in parts]).to(device), first.group)
