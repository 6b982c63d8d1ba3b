"""Coded weights as the bytes of GGUF's blocks: the reverse of `types`, which describes them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.models.gguf.search import GRIDS, quantized
from quire.models.gguf.types import PLAIN
from quire.models.met import Met, fitted
from quire.ops.coded import CodedWeight


def encoded(kind: str, weight: torch.Tensor, met: Met | None = None) -> torch.Tensor:
    """A weight [out, in] as a type's bytes, uint8, or, in a type that is not quantized, as its numbers.

    Args:
        met: the activations that it has met.

    Raises:
        CheckpointError: see `search.quantized`.
    """
    if kind in PLAIN:
        return weight.to(PLAIN[kind]).contiguous()
    return blocks_of(fitted(weight, GRIDS[kind].scheme, met, lambda x, importance: quantized(kind, x, importance)))


def blocks_of(weight: CodedWeight) -> torch.Tensor:
    """uint8 [out, blocks, bytes of a block]."""
    return ENCODERS[weight.scheme.name](weight)


def _joined(codes: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Codes [rows, blocks, inputs] of this many bits, several a byte: of each 8 / bits runs, the first one's are in the
    lower bits. uint8 [rows, blocks, inputs * bits / 8]."""
    count = 8 // bits
    runs = codes.reshape(*codes.shape[:2], -1, count, run)
    together = torch.zeros_like(runs[..., 0, :])
    for index in range(count):
        together |= runs[..., index, :] << (bits * index)
    return together.flatten(2)


def _halves(weight: CodedWeight, name: str) -> torch.Tensor:
    """A field of fp16 [rows, blocks] as two bytes each."""
    numbers: torch.Tensor = getattr(weight, name)
    return numbers.half().contiguous().view(torch.uint8).view(*numbers.shape, 2)


def _codes(weight: CodedWeight, block: int, least: int = 0) -> torch.Tensor:
    """Codes from 0 on, given the least one: uint8 [rows, blocks, inputs]."""
    return (weight.numbers() - least).to(torch.uint8).view(weight.out_features, -1, block)


def _small(weight: CodedWeight, name: str, count: int) -> torch.Tensor:
    """A field of each block's groups: uint8 [rows, blocks, count]."""
    numbers: torch.Tensor = getattr(weight, name)
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1, count)


def _q8_0(weight: CodedWeight) -> torch.Tensor:
    codes = weight.codes.contiguous().view(torch.uint8).view(weight.out_features, -1, 32)
    return torch.cat([_halves(weight, "scales"), codes], -1)


def _q5_0(weight: CodedWeight) -> torch.Tensor:
    codes = _codes(weight, 32, -16)
    fifth = (codes >> 4).view(*codes.shape[:2], 4, 8)
    bits = torch.zeros_like(fifth[..., 0])
    for bit in range(8):
        bits |= fifth[..., bit] << bit
    return torch.cat([_halves(weight, "scales"), bits, _joined(codes & 15, 4, 16)], -1)


def _q4_k(weight: CodedWeight) -> torch.Tensor:
    """Of the last four scales and offsets, the upper bits are beside the first four."""
    scales, offsets = _small(weight, "scales", 8), _small(weight, "offsets", 8)
    last, under = scales[..., 4:], offsets[..., 4:]
    small = [scales[..., :4] | (last >> 4) << 6, offsets[..., :4] | (under >> 4) << 6, (last & 15) | (under & 15) << 4]
    units = _halves(weight, "block_scales"), _halves(weight, "block_offsets")
    return torch.cat([*units, *small, _joined(_codes(weight, 256), 4, 32)], -1)


def _q6_k(weight: CodedWeight) -> torch.Tensor:
    codes = _codes(weight, 256, -32)
    parts = _joined(codes & 15, 4, 64), _joined(codes >> 4, 2, 32), _small(weight, "scales", 16)
    return torch.cat([*parts, _halves(weight, "block_scales")], -1)


ENCODERS: dict[str, Callable[[CodedWeight], torch.Tensor]] = {
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
"""By the type's name."""
