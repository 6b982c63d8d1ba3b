"""Quantizes numbers to GGUF's types Q4_K, Q6_K, Q5_0 and Q8_0: which codes and scales stand for them best.

The idea is that of llama.cpp's quantizers of its k-quants. Of each group of inputs several grids are tried, from one
that spans somewhat less than its numbers to one that spans more. Each gives codes; for these, the scale (and offset) of
least squared error follow by projection; and the grid with the least error wins. Scales and offsets of the groups of a
block are then brought to whole numbers of 6 or 8 bits in the same way, and the codes chosen again for what these stand
for. A number's error counts by its size and that of its group, since errors of large numbers move outputs more; and,
where it is known, by the mean square of the activation that meets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.errors import CheckpointError
from quire.models.gguf.types import joined
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.threads import torch_threads

STEPS = tuple(step / 10 for step in range(-10, 11))
"""By so many codes a grid spans more than a group's numbers, or less."""
WHOLE_STEPS = tuple(step / 4 for step in range(-4, 5))
"""The same of the scales of a block."""
AT_ONCE = 1 << 17
"""Numbers that are quantized at a time, by one thread: so few stay in a processor's caches, and threads would wait for
each other after each operation."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What a type's codes and scales can be.

    Attributes:
        scheme: of the weight.
        low, high: the least and the greatest code.
        offsets: whether groups have offsets.
        most: the greatest scale of a group in a block, a whole number from 0, or if it may be negative from -most - 1;
            0 without blocks, whose scales are fp16.
    """

    scheme: Scheme
    low: int
    high: int
    offsets: bool = False
    most: int = 0


GRIDS = {
    grid.scheme.name: grid
    for grid in (
        Grid(Scheme("Q4_K", 4, 32, block=256), 0, 15, offsets=True, most=63),
        Grid(Scheme("Q6_K", 8, 16, block=256), -32, 31, most=127),
        Grid(Scheme("Q5_0", 8, 32), -16, 15),
        Grid(Scheme("Q8_0", 8, 32), -127, 127),
    )
}
"""By the type's name."""


def quantized(kind: str, weight: torch.Tensor, importance: torch.Tensor | None = None) -> CodedWeight:
    """A weight [out, in] of any floating-point type, whose inputs the type's blocks divide.

    Args:
        kind: the type's name.
        importance: mean squares of the activations that meet the inputs, fp32 [in]; None: all alike.

    Raises:
        CheckpointError: it has numbers that are not finite, or too large for its scales.
    """
    grid, rows = GRIDS[kind], max(1, AT_ONCE // max(weight.shape[1], 1))
    with torch_threads(1):
        parts = [_quantized(grid, part.float(), importance) for part in torch.split(weight, rows)]
    whole = joined(parts)
    whole.check_finite()
    return whole


def packed(grid: Grid, codes: torch.Tensor) -> torch.Tensor:
    """Codes, whole numbers of any type [out, in], as `CodedWeight` has them."""
    if grid.scheme.bits == 8:
        return codes.to(torch.int8)
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _quantized(grid: Grid, weight: torch.Tensor, importance: torch.Tensor | None) -> CodedWeight:
    rows, group = len(weight), grid.scheme.group
    if not weight.isfinite().all():
        raise CheckpointError("it has numbers that are not finite")
    x = weight.view(-1, group).T.contiguous()
    sizes = _sizes(x, None if importance is None else importance.view(-1, group).T.repeat(1, rows))
    offsets = None
    if grid.scheme.name == "Q8_0":
        scales = x.abs().amax(0) / grid.high
    elif grid.offsets:
        scales, offsets = _with_offsets(grid, x, sizes)
    else:
        scales = _around_zero(grid, x, sizes)
    total, empty = sizes.sum(0).view(rows, -1), torch.zeros_like(weight, dtype=torch.int8)
    parts = _stored(grid, scales.view(rows, -1), total)
    moved = (None, None) if offsets is None else _stored(grid, offsets.view(rows, -1), total)
    found = CodedWeight(grid.scheme, packed(grid, empty), parts[0], moved[0], parts[1], moved[1])
    return coded(found, grid, weight)


def coded(found: CodedWeight, grid: Grid, weight: torch.Tensor) -> CodedWeight:
    """A weight with the scales and offsets that `found` has, and the codes nearest to these numbers, fp32 [out, in]."""
    scales, offsets = found.group_scales(), found.group_offsets()
    x = weight.view(len(weight), -1, grid.scheme.group)
    moved = x if offsets is None else x + offsets.unsqueeze(-1)
    codes = moved if scales is None else moved * _inverse(scales).unsqueeze(-1)
    codes = codes.nan_to_num_(0.0).round_().clamp_(grid.low, grid.high)
    return replace(found, codes=packed(grid, codes.flatten(1)))


def _sizes(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """How much the errors of groups' numbers [group, groups] count."""
    square = x.square().mean(0)
    return square.sqrt() + x.abs() if importance is None else importance * (square + x.square()).sqrt()


def _inverse(numbers: torch.Tensor) -> torch.Tensor:
    return torch.where(numbers == 0, 0.0, 1 / numbers)


def _with_offsets(grid: Grid, x: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and what is subtracted, both from 0 on, of groups [group, groups]."""
    low = x.amin(0).clamp_max(0.0)
    span = x.amax(0) - low
    total, middle = sizes.sum(0), (sizes * x).sum(0)
    best = torch.full_like(span, torch.inf)
    scales, offsets = span / grid.high, -low
    for step in STEPS:
        codes = ((x - low) * ((grid.high + step) * _inverse(span))).round_().clamp_(grid.low, grid.high)
        weighed = sizes * codes
        first, second, both = weighed.sum(0), (weighed * codes).sum(0), (weighed * x).sum(0)
        spread = total * second - first * first
        scale = (total * both - middle * first) / spread
        offset = (first * both - second * middle) / spread
        below = offset < 0
        scale, offset = torch.where(below, both / second, scale), torch.where(below, 0.0, offset)
        error = (sizes * (scale * codes - offset - x).square()).sum(0)
        better = (spread > 0) & (scale > 0) & (error < best)
        best = torch.where(better, error, best)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    return scales, offsets


def _around_zero(grid: Grid, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Scales, of either sign, of groups [group, groups]: the largest number has the least code, of which there is one
    more than of the greatest."""
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    best, scales = torch.full_like(largest, -torch.inf), largest / grid.low
    for step in STEPS:
        codes = (x * ((grid.low + step) * _inverse(largest))).round_().clamp_(grid.low, grid.high)
        weighed = sizes * codes
        square, both = (weighed * codes).sum(0), (weighed * x).sum(0)
        gain = both.square() / square  # by so much the error is less than that of zeros
        better = (square > 0) & (gain > best)
        best, scales = torch.where(better, gain, best), torch.where(better, both / square, scales)
    return scales


def _stored(grid: Grid, numbers: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales or offsets [rows, groups] as they are stored: fp16; or whole numbers and their units, those of least
    error. `sizes`: how much each counts."""
    if not grid.most:
        return numbers.half(), None
    signed = not grid.offsets
    dtype, low = (torch.int8, -grid.most - 1) if signed else (torch.uint8, 0)
    x = numbers.view(-1, (grid.scheme.block or 0) // grid.scheme.group).T
    sizes = sizes.view(-1, len(x)).T
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    top = low if signed else grid.most
    best, units = torch.full_like(largest, torch.inf), largest / top
    for step in WHOLE_STEPS:
        codes = (x * ((top + step) * _inverse(largest))).round_().clamp_(low, grid.most)
        square, both = (sizes * codes * codes).sum(0), (sizes * codes * x).sum(0)
        unit = torch.where(square > 0, both / square, largest / top).half().float()
        codes = (x * _inverse(unit)).nan_to_num_(0.0).round_().clamp_(low, grid.most)
        error = (sizes * (unit * codes - x).square()).sum(0)
        units, best = torch.where(error < best, unit, units), torch.minimum(error, best)
    units = units.half().float()
    codes = (x * _inverse(units)).nan_to_num_(0.0).round_().clamp_(low, grid.most)
    return codes.T.reshape(numbers.shape).to(dtype), units.view(len(numbers), -1).half()
