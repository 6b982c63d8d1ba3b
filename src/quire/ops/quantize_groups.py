"""Brings weights onto grids of groups, (code - zero) x scale, that other engines read, too; the definition.

With 4 bits, the scale and zero of a group are searched for. A grid that spans the group's numbers, a little less or a
little more, gives codes; for these, the scale of least squared error follows by projection; and the grid with the
least error wins. A number's error counts by its size, and by that of its group: errors of large numbers move outputs
more. (The same idea as in llama.cpp's quantizers of its k-quants, whose offsets are not whole.) With 8 bits the largest
number decides.
"""

from __future__ import annotations

from typing import Literal

import torch

from quire.errors import CheckpointError
from quire.ops.coded import CodedWeight, Scheme

TOP = 15
"""The highest code of 4 bits."""
STEPS = tuple(step / 10 for step in range(-10, 11))
"""Steps by which a grid spans more than a group's numbers, if below 0, or less."""
ROUNDS = 2
"""How often codes and scale follow from each other."""
AT_ONCE = 1 << 19
"""Numbers that are quantized at a time."""


def quantize_groups(
    weight: torch.Tensor, bits: Literal[4, 8], group: int, scale_dtype: torch.dtype = torch.float16
) -> CodedWeight:
    """A weight [out, in] of any floating-point type, in groups of `group` inputs.

    Raises:
        CheckpointError: groups do not divide its inputs, or it has numbers that are not finite or too large.
    """
    outputs, inputs = weight.shape
    if inputs % group:
        raise CheckpointError(f"groups of {group} do not divide its {inputs} inputs")
    rows = max(1, AT_ONCE // max(inputs, 1))
    one = _four_bits if bits == 4 else _eight_bits
    parts = [
        one(weight[first : first + rows].float().view(-1, group).T.contiguous(), scale_dtype)
        for first in range(0, outputs, rows)
    ]
    codes, scales, *zeros = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    codes = codes.T.reshape(outputs, inputs)
    return finished(codes, scales.view(outputs, -1), zeros[0].view(outputs, -1) if zeros else None, group)


def finished(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> CodedWeight:
    """The weight with these codes, uint8 from 0 to 15, or int8 [out, in], unless a scale is not finite.

    Raises:
        CheckpointError: it is not, as it is where a number is not.
    """
    if not scales.isfinite().all():
        raise CheckpointError("it has numbers that are not finite, or too large for its scales")
    if zeros is None:
        return CodedWeight(Scheme("int8", 8, group), codes, scales)
    return CodedWeight(Scheme("int4", 4, group), codes[:, 0::2] | codes[:, 1::2] << 4, scales, zeros)


def _eight_bits(x: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of groups [inputs, groups]: codes int8 of this shape, and scales [groups]."""
    scales = (x.abs().amax(0) / 127.0).to(scale_dtype)
    codes = (x * _inverse(scales.float())).nan_to_num_(0.0).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def _four_bits(x: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of groups [inputs, groups]: codes uint8 of this shape, scales and zeros uint8 [groups].

    Every operation is rounded once, and sums ascend, so that quantize.cpp finds the same bits.
    """
    high, low = x.amax(0).clamp_min(0.0), x.amin(0).clamp_max(0.0)
    span = high - low
    square = torch.zeros_like(span)
    for row in x:
        square = square + row * row
    weights = (square / len(x)).sqrt() + x.abs()
    best_error = torch.full_like(span, torch.inf)
    best_scale, best_zero = torch.zeros_like(span), torch.zeros_like(span)
    for step in STEPS:
        scale = span / torch.tensor(TOP + step)
        zero = (-low * _inverse(scale)).round().clamp(0, TOP)
        for _ in range(ROUNDS):
            scale = _projected(x, weights, scale, zero)
        scale = scale.to(scale_dtype).float()
        error = torch.zeros_like(span)
        inverse = _inverse(scale)
        for row, weight in zip(x, weights, strict=True):
            off = scale * _code(row, inverse, zero) - row
            error = error + weight * (off * off)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    best_scale = torch.where(best_error.isfinite(), best_scale, torch.nan)
    codes = (x * _inverse(best_scale) + best_zero).nan_to_num_(0.0).round_().clamp_(0, TOP)
    return codes.to(torch.uint8), best_scale.to(scale_dtype), best_zero.to(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, torch.ones_like(scale) / scale)


def _code(row: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The codes of one input of each group, less the zeros."""
    return (row * inverse + zero).round_().clamp_(0, TOP).sub_(zero)


def _projected(x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The scale of least error for the codes that a scale gives; that scale itself where all codes are 0."""
    dot, square, inverse = torch.zeros_like(scale), torch.zeros_like(scale), _inverse(scale)
    for row, weight in zip(x, weights, strict=True):
        code = _code(row, inverse, zero)
        weighed = weight * code
        dot, square = dot + weighed * row, square + weighed * code
    return torch.where((dot > 0) & (square > 0), dot / square, scale)
