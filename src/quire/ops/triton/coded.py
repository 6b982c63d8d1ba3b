"""Weights in codes on the device: how they lie there, and the loop over their inputs that all products share.

What codes mean is in `quire.ops.coded`. Activations become int8 in a kernel of their own (`activations`), and integers
are multiplied, so sums of a segment's products are exact and tiles may have any shape. What is rounded is the same
whatever the tile: segments are scaled and added in the order of `ops.coded`, those of a chunk from 0 on, and the sums
of chunks in that of `linear_chunks`. With one chunk, the bits are the reference's.

A weight is re-laid once into **steps** of 2 * DEPTH inputs, each of which holds all outputs one after the other, so
that what a program reads at once is one range of memory. What is padding is 0.
- 4 bits: int8 [steps, padded outputs, DEPTH]; byte j has code j of the step in its low half and code DEPTH + j in its
  high half.
- 8 bits: int8 [2 * steps, padded outputs, DEPTH].
- Scales and offsets keep their types: [groups, padded outputs], and a step more, which is read ahead, and not used.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire.ops.activations import BLOCK
from quire.ops.coded import WHOLE, CodedWeight
from quire.ops.triton.activations import Shares
from quire.ops.triton.linear_chunks import finish

OUTPUTS = 128
"""Of a tile. Weights are the left factor, of which a matrix instruction of sm_90 and later takes 64 rows or more;
the right factor's rows, those of x, may be as few as 16."""
LEAST_SEGMENT = 16
"""Inputs that share a scale, at least: half of what a matrix instruction takes, which then computes with the other half
of x zeros."""
LEAST_DEPTH, MOST_DEPTH = 32, 64
"""Inputs of a matrix instruction, and those of which the codes in registers leave room for the sums."""
AT_ONCE = 2048
"""Outputs that are re-laid at a time, so that little more memory is needed than for the result."""
COMPILED = isinstance(finish, triton.JITFunction)
"""Whether kernels are compiled; Triton's interpreter does not run assembly."""
TYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}
"""Triton's names of what scales and offsets may be stored in."""


class Tile(NamedTuple):
    """Rows of a tile, the warps that compute it, and how many steps' loads are in flight."""

    rows: int
    warps: int
    stages: int


FEW, MANY, MANY_SHORT, MANY_WHOLE = Tile(16, 4, 4), Tile(32, 4, 4), Tile(32, 8, 4), Tile(64, 8, 3)
"""For up to 16 rows, and for more: so in general, with segments of fewer than 64 inputs, of which a step has several,
and with those of a whole block. Sums are kept apart for a segment, a block, a chunk and all of the inputs: larger tiles
would not fit the registers."""


class Form(NamedTuple):
    """What kernels must know of weights that they multiply in one launch.

    Attributes:
        bits: of a code.
        segment, group, block: inputs; see `Scheme`. No group or no block: 0.
        shares: of activations.
        table: of 4 bits; None: codes of 8 bits.
        scales, offsets, block_scales, block_offsets: their types; None: there are none.
        has_factors: whether outputs have factors.
    """

    bits: int
    segment: int
    group: int
    block: int
    shares: Shares
    table: tuple[int, ...] | None
    scales: torch.dtype | None
    offsets: torch.dtype | None
    block_scales: torch.dtype | None
    block_offsets: torch.dtype | None
    has_factors: bool

    @classmethod
    def of(cls, weight: CodedWeight, scaled: int | None = None) -> Form:
        """That of a weight; `scaled`: see `Shares`, None: as its scheme says."""
        scheme = weight.scheme
        if scaled is None:
            scaled = 0 if scheme.activations == "row" else scheme.shared
        return cls(
            bits=scheme.bits,
            segment=scheme.segment,
            group=scheme.group,
            block=scheme.block or 0,
            shares=Shares(scaled, None if weight.offsets is None else scheme.segment),
            table=(scheme.table or tuple(range(16))) if scheme.bits == 4 else None,
            scales=_type(weight.scales),
            offsets=_type(weight.offsets),
            block_scales=_type(weight.block_scales),
            block_offsets=_type(weight.block_offsets),
            has_factors=weight.factors is not None,
        )

    @property
    def depth(self) -> int:
        """Inputs of half a step."""
        return min(max(self.segment, LEAST_DEPTH), MOST_DEPTH)

    @property
    def alone(self) -> bool:
        """Whether each segment of activations has a scale of its own."""
        return 0 < self.shares.scaled < BLOCK

    def steps(self, inputs: int) -> int:
        return -(-inputs // (2 * self.depth))

    def constants(self) -> dict[str, Any]:
        """The arguments of `multiply` that are the same for all weights of this form."""
        low, high = (None, None) if self.table is None else assembly(self.table)
        return {
            "SEGMENT": self.segment,
            "GROUP": self.group,
            "UNIT": self.block,
            "ALONE": self.alone,
            "WHOLE_ROWS": not self.shares.scaled,
            "OFFSET_UNITS": None if self.offsets is None else self._offset_units(),
            "LOW": low,
            "HIGH": high,
            "DEPTH": self.depth,
            "BLOCK": BLOCK,
            "COMPILED": COMPILED,
        }

    def _offset_units(self) -> str | None:
        if self.block_offsets is not None:
            return "blocks"
        return "steps" if self.offsets in WHOLE else None

    def tile(self, many: bool) -> Tile:
        """For few rows, or for many: they give the same bits."""
        if not many:
            return FEW
        if self.segment == BLOCK:
            return MANY_WHOLE
        return MANY_SHORT if self.segment < MOST_DEPTH else MANY


def _type(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def can_multiply(weight: CodedWeight) -> bool:
    """Whether such weights are multiplied as they are."""
    return weight.scheme.segment >= LEAST_SEGMENT


# -- how weights lie -----------------------------------------------------------------------------------------


class Lain(NamedTuple):
    """A weight as kernels read it: see the head of this file."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    offsets: torch.Tensor | None
    block_scales: torch.Tensor | None
    block_offsets: torch.Tensor | None
    factors: torch.Tensor | None


def relay(form: Form, parts: list[CodedWeight], device: torch.device) -> Lain:
    """Weights of one form side by side, re-laid on the device."""
    inputs, depth = parts[0].in_features, form.depth
    steps = form.steps(inputs)
    padded = triton.cdiv(sum(part.out_features for part in parts), OUTPUTS) * OUTPUTS
    halves = steps if form.bits == 4 else 2 * steps
    codes = torch.zeros(halves, padded, depth, dtype=torch.int8, device=device)
    column = 0
    for part in parts:
        for some in part.codes.split(AT_ONCE):
            codes[:, column : column + len(some)] = _steps(some.to(device), inputs, depth, halves).transpose(0, 1)
            column += len(some)

    def numbers(name: str, each: int) -> torch.Tensor | None:
        found: list[torch.Tensor] = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
        if not found:
            return None
        joined = torch.cat([tensor.to(device).t() for tensor in found], 1)  # [groups, outputs]
        count = triton.cdiv(2 * depth * (steps + 1), each)
        return F.pad(joined, (0, padded - joined.shape[1], 0, count - len(joined))).contiguous()

    factors: list[torch.Tensor] = [part.factors.to(device) for part in parts if part.factors is not None]
    return Lain(
        codes,
        *(numbers("scales", form.group), numbers("offsets", form.group)),
        *(numbers("block_scales", form.block), numbers("block_offsets", form.block)),
        torch.cat(factors) if factors else None,
    )


def _steps(codes: torch.Tensor, inputs: int, depth: int, halves: int) -> torch.Tensor:
    """Codes of some outputs, int8 [outputs, halves, depth]: with 4 bits, of whole steps."""
    if codes.dtype == torch.int8:
        return F.pad(codes, (0, halves * depth - inputs)).view(len(codes), halves, depth)
    apart = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    steps = F.pad(apart, (0, 2 * halves * depth - inputs)).view(len(codes), halves, 2, depth)
    return (steps[:, :, 0] | steps[:, :, 1] << 4).view(torch.int8)


# -- what codes stand for ------------------------------------------------------------------------------------
# The compiler takes bytes one by one; assembly takes four at once.


@functools.cache
def assembly(table: tuple[int, ...]) -> tuple[str, str]:
    """What makes of four bytes in $1 the numbers that their low, or high, halves stand for, in $0.

    Codes for themselves, and those that count from -8 on, take 1 to 4 instructions; others are looked up, which takes
    10: the halves are put side by side, since `prmt` chooses four of eight bytes by such.
    """
    if table == tuple(range(16)):
        rest = "mov.b32 $0, a;"
    elif table == tuple(range(-8, 8)):  # a half with its sign turned around, whose sign is copied four times
        rest = "xor.b32 a, a, 0x08080808; and.b32 b, a, 0x08080808; mad.lo.u32 $0, b, 30, a;"
    else:
        words = [int.from_bytes(bytes(number & 255 for number in table[i : i + 4]), "little") for i in range(0, 16, 4)]
        rest = (
            "shr.b32 b, a, 4; or.b32 a, a, b; prmt.b32 a, a, 0, 0x4420; and.b32 b, a, 0x7777;"
            f" mov.b32 c, {words[0]:#x}; mov.b32 d, {words[1]:#x}; prmt.b32 c, c, d, b;"
            f" mov.b32 d, {words[2]:#x}; mov.b32 e, {words[3]:#x}; prmt.b32 d, d, e, b;"
            " and.b32 a, a, 0x8888; shr.b32 a, a, 1; or.b32 a, a, 0x3210; prmt.b32 $0, c, d, a;"
        )
    low, high = "and.b32 a, $1, 0x0f0f0f0f;", "shr.b32 a, $1, 4; and.b32 a, a, 0x0f0f0f0f;"
    return f"{{ .reg .b32 a, b, c, d, e; {low} {rest} }}", f"{{ .reg .b32 a, b, c, d, e; {high} {rest} }}"


def looked_up(form: Form, device: torch.device) -> torch.Tensor | None:
    """The table, int8 [16], for the interpreter, which does not run assembly."""
    return None if COMPILED or form.table is None else torch.tensor(form.table, dtype=torch.int8, device=device)


@triton.jit
def _numbers_of(both, table, HALF: tl.constexpr, ASSEMBLY: tl.constexpr, COMPILED: tl.constexpr):
    """What the low (HALF 0) or the high halves of bytes stand for, int8."""
    if COMPILED:
        numbers = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [both], tl.int8, True, 4)
    else:
        numbers = tl.load(table + ((both >> (4 * HALF)) & 15))
    return numbers


# -- the loop ------------------------------------------------------------------------------------------------


@triton.jit
def _numbers_at(
    step,
    n,
    padded,
    scales,
    offsets,
    block_scales,
    block_offsets,
    row_scales,
    row_sums,
    rows,
    there,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ALONE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Six tensors for each segment of a step, as they are stored: scale, its unit, offset, its unit, and of the rows
    the scale and the sum. In the place of those that are not there is another."""
    found = ()
    of_block = step * STEP // (SEGMENT if ALONE else BLOCK) * rows
    if WHOLE_ROWS:
        of_block = 0
    row_scale = tl.load(row_scales + of_block, mask=there, other=0.0)
    scale, unit, offset, offset_unit, row_sum = row_scale, row_scale, row_scale, row_scale, row_scale
    for part in tl.static_range(max(STEP // SEGMENT, 1)):
        segment = step * STEP // SEGMENT + part
        if ALONE and part:
            row_scale = tl.load(row_scales + segment * rows, mask=there, other=0.0)
        if scales is not None:
            group = (segment * SEGMENT // GROUP).to(tl.int64) * padded + n
            scale = tl.load(scales + group)
            if offsets is not None:
                offset = tl.load(offsets + group)
                row_sum = tl.load(row_sums + segment * rows, mask=there, other=0.0)
            if block_scales is not None and (part == 0 or UNIT % STEP):
                in_block = (segment * SEGMENT // UNIT).to(tl.int64) * padded + n
                unit = tl.load(block_scales + in_block)
                if block_offsets is not None:
                    offset_unit = tl.load(block_offsets + in_block)
        found += (scale, unit, offset, offset_unit, row_scale, row_sum)  # type: ignore[assignment]
    return found


@triton.jit
def _add_segment(
    sums,
    dots,
    numbers,
    at: tl.constexpr,
    ALONE: tl.constexpr,
    SCALED: tl.constexpr,
    UNITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    OFFSET_UNITS: tl.constexpr,
):
    """sums + what a segment brings, in the order of `ops.coded`.

    dots: its whole numbers; numbers: those of a step, in which its place is `at`.
    """
    dots = dots.to(tl.float32)
    if ALONE:
        dots *= numbers[6 * at + 4][None, :]
    if SCALED:
        scale = numbers[6 * at].to(tl.float32)
        if UNITS:
            scale *= numbers[6 * at + 1].to(tl.float32)
        sums = tl.fma(dots, tl.broadcast_to(scale[:, None], dots.shape), sums)
        if OFFSETS:
            offset = numbers[6 * at + 2].to(tl.float32)
            if OFFSET_UNITS == "steps":
                offset *= scale
            elif OFFSET_UNITS == "blocks":
                offset *= numbers[6 * at + 3].to(tl.float32)
            of_rows = tl.broadcast_to(-numbers[6 * at + 5][None, :], dots.shape)
            sums = tl.fma(of_rows, tl.broadcast_to(offset[:, None], dots.shape), sums)
    else:
        sums += dots
    return sums


@triton.jit
def multiply(
    x_rows,
    there,
    row_scales,
    row_sums,
    rows,
    weight,
    scales,
    offsets,
    block_scales,
    block_offsets,
    table,
    n,
    padded,
    first,
    last,
    length,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ALONE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    OFFSET_UNITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The sums of a tile of W x^T over the steps first to last - 1, fp32 [OUTPUTS, ROWS]; factors are left out.

    Args:
        x_rows: pointers [ROWS] to rows of codes, of which those exist that are `there`.
        row_scales, row_sums: pointers [ROWS] to the first of the rows' numbers; `rows` numbers further are the next.
        weight: where codes begin, and so of the others: see the head of this file. None: there are none.
        n: the outputs [OUTPUTS].
        length: steps a chunk; CHUNKED: there are several.
        UNIT: inputs that share a scale of scales.
        OFFSET_UNITS: what offsets are multiplied by: the scales ("steps"), those of "blocks", or None.
        LOW, HIGH: see `assembly`; None: codes of 8 bits.
    """
    STEP: tl.constexpr = 2 * DEPTH
    PARTS: tl.constexpr = 2 if SEGMENT < DEPTH else 1
    LOADS: tl.constexpr = 2 if LOW is None else 1
    SCALED: tl.constexpr = scales is not None
    UNITS: tl.constexpr = block_scales is not None
    OFFSETS: tl.constexpr = offsets is not None
    k = tl.arange(0, DEPTH)
    x_tile = x_rows[None, :] + first * STEP + k[:, None]
    weight_tile = weight + (first.to(tl.int64) * LOADS * padded + n[:, None]) * DEPTH + k[None, :]
    nothing, empty = tl.zeros((OUTPUTS, ROWS), tl.int32), tl.zeros((OUTPUTS, ROWS), tl.float32)
    total, chunk, dots = empty, empty, nothing
    block = empty  # of a block of activations; where segments stand alone, of a chunk
    after = _numbers_at(
        *(first, n, padded, scales, offsets, block_scales, block_offsets, row_scales, row_sums, rows, there),
        *(SEGMENT, GROUP, UNIT, ALONE, WHOLE_ROWS, STEP, BLOCK),
    )
    for step in range(first, last):
        numbers = after
        # The next step's are on their way while this one is computed.
        after = _numbers_at(
            *(step + 1, n, padded, scales, offsets, block_scales, block_offsets, row_scales, row_sums, rows, there),
            *(SEGMENT, GROUP, UNIT, ALONE, WHOLE_ROWS, STEP, BLOCK),
        )
        if SEGMENT <= STEP:
            dots = nothing
        for half in tl.static_range(2):
            x = tl.load(x_tile + half * DEPTH, mask=there[None, :], other=0)
            if LOW is None:
                codes = tl.load(weight_tile + half * DEPTH * padded)
            else:
                if half == 0:
                    both = tl.load(weight_tile)
                codes = _numbers_of(both, table, half, HIGH if half else LOW, COMPILED)
            for part in tl.static_range(PARTS):
                x_part = x
                if PARTS > 1:
                    x_part = tl.where((k // SEGMENT == part)[:, None], x, 0)
                dots = tl.dot(codes, x_part, acc=dots if SEGMENT > DEPTH else nothing, out_dtype=tl.int32)
                if SEGMENT <= DEPTH:
                    block = _add_segment(
                        block, dots, numbers, half * PARTS + part, ALONE, SCALED, UNITS, OFFSETS, OFFSET_UNITS
                    )
        if SEGMENT == STEP:
            block = _add_segment(block, dots, numbers, 0, ALONE, SCALED, UNITS, OFFSETS, OFFSET_UNITS)
        if not ALONE and ((step + 1) % (BLOCK // STEP) == 0 or step + 1 == last):
            if SEGMENT > STEP:
                block = _add_segment(block, dots, numbers, 0, ALONE, SCALED, UNITS, OFFSETS, OFFSET_UNITS)
                dots = nothing
            chunk = tl.fma(block, tl.broadcast_to(numbers[4][None, :], block.shape), chunk)
            block = empty
        if CHUNKED and ((step + 1) % length == 0 or step + 1 == last):
            if ALONE:
                total += block
                block = empty
            else:
                total += chunk
                chunk = empty
        x_tile += STEP
        weight_tile += LOADS * padded * DEPTH
    if not CHUNKED:
        total = block if ALONE else chunk
    return total
