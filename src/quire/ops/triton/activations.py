"""Rows of activations as int8: what products with weights in codes multiply (`ops.coded`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.activations import BLOCK, TINY
from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.triton.rows import activate, activated

NUMBERS = 4096
"""That a program quantizes, at most: 32 a thread."""


class Shares(NamedTuple):
    """What of a row has a scale, and what has a sum of codes.

    Attributes:
        scaled: inputs that share a scale; 0: those of a row.
        summed: inputs whose codes are summed; None: no sums are wanted.
    """

    scaled: int
    summed: int | None


class Activations(NamedTuple):
    """Rows in int8.

    Attributes:
        codes: int8 [rows, padded], zeros after the inputs.
        scales: fp32 [padded / `Shares.scaled` and more, rows]; of whole rows [1, rows]. What is more is read ahead, and
            not used.
        sums: of the codes, fp32 [padded / `Shares.summed` and more, rows], times their scales where these are of fewer
            inputs than a block; None: not wanted.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None


@triton.jit
def _quantize_kernel(
    x,
    largest_of_rows,
    codes,
    scales,
    sums,
    size,
    padded,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    TINY: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of x [rows, size]; with an ACTIVATION, of what it makes of x, whose gate and up are UP numbers apart.

    PARTS times EACH inputs, of which each part has a scale, unless the rows' largest numbers are given.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * EACH + tl.arange(0, EACH)[None, :]
    infinity = float("inf")
    x += row * (size + UP) + column
    numbers = tl.load(x, mask=column < size, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x + UP, mask=column < size, other=0.0).to(tl.float32)
        active, up = activated(numbers, up, x.dtype.element_ty, ACTIVATION)
        numbers = (active * up).to(x.dtype.element_ty).to(tl.float32)
    if largest_of_rows is None:
        # The maximum of a GPU passes over NaN.
        largest = tl.max(tl.where(tl.abs(numbers) < infinity, tl.abs(numbers), infinity), 1)
    else:
        largest = tl.load(largest_of_rows + row + part * 0)
    largest = tl.where(largest < TINY, 0.0, largest)
    finite = largest < infinity
    some = finite & (largest > 0)
    inverse = tl.where(some, tl.div_rn(127.0, tl.where(some, largest, 1.0)), 0.0)
    code = tl.where(finite[:, None], numbers, 0.0) * inverse[:, None]
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added rounds to a whole number, halves to even
    tl.store(codes + row * padded + column, code.to(tl.int8), mask=column < padded)
    scale = tl.where(finite, tl.div_rn(largest, 127.0), float("nan"))
    there = part * EACH < padded
    if largest_of_rows is None:
        tl.store(scales + part * rows + row, scale, mask=there)
    else:
        tl.store(scales + row + part * 0, scale, mask=part == 0)
    if SUMMED is not None:
        COUNT: tl.constexpr = PARTS * EACH // SUMMED
        total = tl.sum(tl.reshape(code, (COUNT, SUMMED)), 1)  # whole numbers, in any order
        if SUMMED == EACH and EACH < BLOCK:
            total *= scale
        segment = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
        tl.store(sums + segment * rows + row, total, mask=segment * SUMMED < padded)


def quantize_activations(
    x: torch.Tensor, padded: int, shares: Shares, activation: Activation | None = None
) -> Activations:
    """`activations.quantize_activations` or `quantize_rows`, bit by bit, but for where they lie. With an activation, of
    `activate`'s result, which is left out.

    Args:
        padded: inputs of the codes, a multiple of `BLOCK`.
    """
    largest = None
    if not shares.scaled:
        if activation is not None:
            x, activation = activate(x, activation), None
        largest = x.float().abs().amax(1)
        largest = torch.where(largest.isfinite(), largest, torch.inf)
    rows, width = x.shape
    size = width // 2 if activation is not None and activation not in WITHOUT_GATE else width
    each, summed = shares.scaled or BLOCK, shares.summed
    codes = x.new_empty(rows, padded, dtype=torch.int8)
    ahead = padded + BLOCK
    scales = x.new_empty(ahead // shares.scaled if shares.scaled else 1, rows, dtype=torch.float32)
    sums = None if summed is None else x.new_empty(ahead // summed, rows, dtype=torch.float32)
    parts = min(triton.next_power_of_2(padded // each), NUMBERS // each)
    grid, warps = (rows, triton.cdiv(padded, parts * each)), max(1, parts * each // 1024)
    shape = {"ACTIVATION": activation, "UP": width - size, "TINY": TINY, "PARTS": parts}
    shape |= {"EACH": each, "SUMMED": summed, "BLOCK": BLOCK}
    where = x, largest, codes, scales, sums
    _quantize_kernel[grid](*where, size, padded, **shape, num_warps=warps, enable_fp_fusion=False)
    return Activations(codes, scales, sums)
