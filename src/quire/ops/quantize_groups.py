"""Brings weights onto grids of groups: codes, with scales and offsets in one of the `Scheme`s below; the definition.

- **8 bits**: code x scale, from -127 to 127. The largest number of a group decides.
- **6 bits** (`six_bits`): code x scale, from -32 to 31, in bytes; scales are whole numbers of their block's scale.
- **4 bits in blocks** (`four_bits`): code x scale - offset; scales and offsets are whole numbers of their block's.
- **4 bits without blocks**: (code - zero) x scale, which compressed-tensors has, too.

Activations have a scale for as many inputs as weights (`Scheme.activations`).

But for 8 bits, scales and offsets are searched for. A grid that spans the group's numbers, a little less or a little
more, gives codes; for these, the scale and the offset of least squared error follow by projection, then codes for
these, and so on; and the grid with the least error wins. A number's error counts by its size and by that of its group,
since errors of large numbers move outputs more, and by the importance of its input where that is known. Scales of
scales are rounded last, and codes taken anew. (The same idea as in llama.cpp's quantizers of its k-quants.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import CheckpointError
from quire.ops.coded import CodedWeight, Scheme

TOP = 15
"""The highest code of 4 bits."""
LOW, HIGH = -32, 31
"""The codes of 6 bits."""
STEPS = tuple(step / 10 for step in range(-10, 11))
"""Steps by which a grid spans more than a group's numbers, if below 0, or less."""
ROUNDS = 2
"""How often codes and scale follow from each other."""
BLOCK = 256
"""Most inputs that share a scale of scales."""
AT_ONCE = 1 << 19
"""Numbers that are quantized at a time."""


def eight_bits(inputs: int) -> Scheme | None:
    """Of a weight with so many inputs; None where groups do not divide them."""
    group = _group(inputs, 32)
    return None if group is None else Scheme("int8", 8, group, activations="group")


def six_bits(inputs: int) -> Scheme | None:
    """See `eight_bits`."""
    group = _group(inputs, 16)
    return None if group is None else Scheme("int6", 8, group, block=_block(inputs, group), activations="group")


def four_bits(inputs: int) -> Scheme | None:
    """See `eight_bits`."""
    group = _group(inputs, 32)
    return None if group is None else Scheme("int4", 4, group, block=_block(inputs, group), activations="group")


SCHEMES = {"int8": eight_bits, "int6": six_bits, "int4": four_bits}
"""By the schemes' names."""


def scheme_of(name: str, inputs: int) -> Scheme:
    """The scheme of this name for a weight with so many inputs; raises CheckpointError where no group divides them."""
    found = SCHEMES[name](inputs)
    if found is None:
        raise CheckpointError(f"{name} has groups of 32 or 16, which do not divide {inputs} inputs")
    return found


def _group(inputs: int, most: int) -> int | None:
    """Inputs that share a scale: a vector at least, whose whole numbers are summed at a time."""
    return next((group for group in (most, 16) if inputs > 0 and inputs % group == 0), None)


def _block(inputs: int, group: int) -> int:
    return next(block for block in range(BLOCK, 0, -group) if inputs % block == 0)


def bits_of(scheme: Scheme, inputs: int) -> float:
    """Bits that a number takes in memory, and in a file that `quire quantize` writes."""
    if scheme.block is None:
        return scheme.held_bits + 16 / scheme.group
    numbers = 1 if scheme.bits == 8 else 2  # a scale, and an offset
    return scheme.held_bits + numbers * (8 / scheme.group + 16 / scheme.block)


def quantize_groups(
    weight: torch.Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.bfloat16,
    importance: torch.Tensor | None = None,
) -> CodedWeight:
    """A weight [out, in] of any floating-point type in a scheme.

    Args:
        scheme: of one of the four kinds above.
        scale_dtype: of scales, and with blocks, of theirs. As codes are taken for scales that are rounded already, 8
            bits of precision are enough, and bf16 has the range of any weight.
        importance: fp32 [in], how much errors at each input count; None: all alike.

    Raises:
        CheckpointError: groups do not divide its inputs, or it has numbers that are not finite or too large.
    """
    outputs, inputs = weight.shape
    check_groups(scheme, inputs)
    rows = max(1, AT_ONCE // max(inputs, 1))
    found = [
        _quantized(weight[first : first + rows].float(), scheme, scale_dtype, importance)
        for first in range(0, max(outputs, 1), rows)
    ]
    return finished(scheme, scale_dtype, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def check_groups(scheme: Scheme, inputs: int) -> None:
    """Raises CheckpointError where a scheme's groups, or blocks, do not divide the inputs."""
    size = scheme.block or scheme.group
    if inputs % size:
        raise CheckpointError(f"groups of {size} do not divide its {inputs} inputs")


def finished(scheme: Scheme, scale_dtype: torch.dtype, codes: torch.Tensor, *numbers: torch.Tensor) -> CodedWeight:
    """The weight with these codes, a byte each [out, in], and scales, offsets, and those of blocks, as there are, in
    fp32.

    Raises:
        CheckpointError: a scale is not finite, as it is where a number is not.
    """
    floats = numbers if scheme.block is None else numbers[len(numbers) // 2 :]
    stored = [each.to(scale_dtype) for each in floats[: 1 if scheme.block is None else None]]
    if not all(each.isfinite().all() for each in stored):
        raise CheckpointError("it has numbers that are not finite, or too large for its scales")
    if scheme.bits == 4:
        codes = codes.view(torch.uint8)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes = codes.view(torch.int8)
    if scheme.block is None:
        offsets = numbers[1].to(torch.uint8) if scheme.bits == 4 else None
        return CodedWeight(scheme, codes, stored[0], offsets)
    if scheme.bits == 8:
        return CodedWeight(scheme, codes, numbers[0].to(torch.int8), None, stored[0])
    scales, offsets = (each.to(torch.uint8) for each in numbers[:2])
    return CodedWeight(scheme, codes, scales, offsets, *stored)


def _quantized(
    rows: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype, importance: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """What `finished` takes, of some rows in fp32.

    Every operation is rounded once, and sums ascend, so that quantize.cpp finds the same bits.
    """
    outputs, inputs = rows.shape
    x = rows.view(-1, scheme.group).T.contiguous()  # [inputs of a group, groups]
    if scheme.bits == 8 and scheme.block is None:
        codes, *numbers = _eight_bits(x, scale_dtype)
    else:
        weights = _weights(x)
        if importance is not None:
            of_groups = importance.float().view(-1, scheme.group).T.repeat(1, outputs)
            weights = weights * of_groups
        if scheme.block is None:
            codes, *numbers = _whole_zeros(x, weights, scale_dtype)
        else:
            blocks = inputs // scheme.block
            numbers = _six_bits(x, weights) if scheme.bits == 8 else _four_bits(x, weights)
            limit = 127 if scheme.bits == 8 else 255
            units = [_units(each.view(outputs * blocks, -1), limit, scale_dtype) for each in numbers]
            numbers = [whole.view(outputs, -1) for _, whole in units] + [unit.view(outputs, -1) for unit, _ in units]
            exact = [(whole * unit.float().unsqueeze(1)).flatten() for unit, whole in units]
            moved = x if len(exact) == 1 else x + exact[1]
            least, most = (LOW, HIGH) if scheme.bits == 8 else (0, TOP)
            codes = (moved * _inverse(exact[0])).nan_to_num_(0.0).round_().clamp_(least, most).to(torch.int8)
    return codes.T.reshape(outputs, inputs), *(each.reshape(outputs, -1) for each in numbers)


def _units(numbers: torch.Tensor, limit: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The unit of each block of numbers [blocks, groups], and the numbers in whole units, up to `limit`, in fp32."""
    units = (numbers.abs().amax(1) / torch.tensor(float(limit))).to(dtype).float()
    whole = (numbers * _inverse(units).unsqueeze(1)).round().clamp(-limit, limit)
    return units, whole.nan_to_num(0.0)


def _eight_bits(x: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of groups [inputs, groups]: codes int8 of this shape, and scales [groups]."""
    scales = (x.abs().amax(0) / torch.tensor(127.0)).to(scale_dtype).float()
    codes = (x * _inverse(scales)).nan_to_num_(0.0).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def _weights(x: torch.Tensor) -> torch.Tensor:
    """How much the error of each number counts."""
    square = torch.zeros_like(x[0])
    for row in x:
        square = square + row * row
    mean = (
        (square / torch.tensor(float(len(x)))).double().sqrt().float()
    )  # torch's root of fp32 may err in its last bit
    return 1 + x.abs() * _inverse(mean)


def _four_bits(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The scales and offsets of least error of groups [inputs, groups]; NaN where a number is not finite."""
    high, low = x.amax(0).clamp_min(0.0), x.amin(0).clamp_max(0.0)
    span, total, sum_x = high - low, torch.zeros_like(high), torch.zeros_like(high)
    for row, weight in zip(x, weights, strict=True):
        total, sum_x = total + weight, sum_x + weight * row
    best = torch.full_like(span, -torch.inf)
    best_scale, best_offset = span / torch.tensor(float(TOP)), -low
    for step in STEPS:
        inverse, offset = torch.where(span == 0, 0.0, torch.tensor(TOP + step) / span), -low
        for _ in range(ROUNDS):
            sum_q, sum_qq, sum_xq = (torch.zeros_like(span) for _ in range(3))
            for row, weight in zip(x, weights, strict=True):
                code = ((row + offset) * inverse).round_().clamp_(0, TOP)
                weighed = weight * code
                sum_q, sum_qq, sum_xq = sum_q + weighed, sum_qq + weighed * code, sum_xq + weighed * row
            apart = total * sum_qq - sum_q * sum_q
            scale = (total * sum_xq - sum_x * sum_q) / apart
            least = (sum_qq * sum_x - sum_q * sum_xq) / apart
            alone = ~((apart > 0) & (least < 0))  # of grids whose lowest number is above 0, the one from 0 on
            scale, least = torch.where(alone, sum_xq / sum_qq, scale), torch.where(alone, 0.0, least)
            gain = scale * sum_xq + least * sum_x  # the squared error is the sum of x^2 less this
            better = (scale > 0) & (gain > best)
            best = torch.where(better, gain, best)
            best_scale, best_offset = torch.where(better, scale, best_scale), torch.where(better, -least, best_offset)
            inverse, offset = torch.where(scale > 0, _inverse(scale), 0.0), -least
    broken = (span - span) + (total - total)
    return [best_scale + broken, best_offset + broken]


def _six_bits(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The scales of least error of groups [inputs, groups], which may be negative; NaN where a number is not finite."""
    high, low = x.amax(0), x.amin(0)
    extreme = torch.where(high > -low, high, low)
    best = torch.full_like(extreme, -torch.inf)
    best_scale = extreme / torch.tensor(float(LOW))
    for step in STEPS:
        inverse = torch.where(extreme == 0, 0.0, torch.tensor(LOW - step) / extreme)
        for _ in range(ROUNDS):
            dot, square = torch.zeros_like(extreme), torch.zeros_like(extreme)
            for row, weight in zip(x, weights, strict=True):
                code = (row * inverse).round_().clamp_(LOW, HIGH)
                weighed = weight * code
                dot, square = dot + weighed * row, square + weighed * code
            scale = dot / square
            gain = dot * scale
            better = (square > 0) & (gain > best)
            best = torch.where(better, gain, best)
            best_scale = torch.where(better, scale, best_scale)
            inverse = torch.where(square > 0, _inverse(scale), 0.0)
    return [best_scale + ((high - high) + (low - low)) + (weights[0] - weights[0])]


def _whole_zeros(x: torch.Tensor, weights: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of groups [inputs, groups]: codes int8 of this shape, scales and zeros [groups]."""
    high, low = x.amax(0).clamp_min(0.0), x.amin(0).clamp_max(0.0)
    span = high - low
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
    return codes.to(torch.int8), best_scale, best_zero


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
