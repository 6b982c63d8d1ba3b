"""Products with weights in 8 or 4 bits: see `quire.ops.quantized` for what they mean.

Activations become int8 in a kernel of their own, with a scale for each `quantized.BLOCK` inputs, and integers are
multiplied, so sums of a group's products (int8: of a line's) are exact and tiles may have any shape. What is rounded is
the same whatever the tile: each such sum is scaled and added to those before it, in the order of `linear_chunks`.

A weight is re-laid once into **blocks** of inputs, each of which holds all outputs one after the other, so that what
a program reads at once is one range of memory: int8 [blocks, padded outputs, bytes]. What is padding is 0.
- int8: a block is 128 inputs; a byte is a code.
- int4: a block is two groups of inputs; byte j has code j of the first group in its low half and code j of the second
  in its high half, both in two's complement, so that either, at the top of a byte, is 16 times the code.
  scales: fp16 [2 * blocks + 2, padded outputs]; the last two rows are read ahead, and not used.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.quantized import BLOCK, PANEL, TINY, QuantizedWeight, codes_of
from quire.ops.triton.early import major
from quire.ops.triton.linear_chunks import Chunks, Ending, checked, finish, place_of, sum_chunks
from quire.ops.triton.rows import activated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of activations."""
OUTPUTS = 128
"""Of a tile. Weights are the left factor, of which a matrix instruction of sm_90 and later takes 64 rows or more;
the right factor's rows, those of x, may be as few as 16."""
INT8_BLOCK = 128
"""Inputs of a block of int8: a line of the cache."""
LARGEST_GROUP = 64
"""int4: larger ones are kept as several of this size, whose products fit the registers."""
PARTS = 16
"""BLOCKs of a row that a program quantizes, at most: 32 numbers a thread."""
PANELS_AT_ONCE = 64
"""Panels that are re-laid at a time, so that little more memory is needed than for the result."""
Activations = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales: see `quantize_activations`."""
COMPILED = isinstance(finish, triton.JITFunction)
"""Whether kernels are compiled; Triton's interpreter does not run assembly."""


class Tile(NamedTuple):
    """Rows of a tile, the warps that compute it, and how many steps' loads are in flight."""

    rows: int
    warps: int
    stages: int


FEW, MANY, MANY_HOPPER, MANY_INT4 = Tile(16, 4, 4), Tile(64, 8, 3), Tile(64, 4, 3), Tile(32, 4, 4)
"""For up to 16 rows, and for more: in int8, there on compute capability 9.0, and in int4. Sums are kept apart for a
group, a chunk and all of the inputs: larger tiles would not fit the registers."""


# -- activations ---------------------------------------------------------------------------------------------


@triton.jit
def _quantize_kernel(
    x,
    codes,
    scales,
    size,
    padded,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    TINY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of x [rows, size]; with an ACTIVATION, of what it makes of x, whose gate and up are UP numbers apart."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    infinity = float("inf")
    x += row * (size + UP) + column
    numbers = tl.load(x, mask=column < size, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x + UP, mask=column < size, other=0.0).to(tl.float32)
        active, up = activated(numbers, up, x.dtype.element_ty, ACTIVATION)
        numbers = (active * up).to(x.dtype.element_ty).to(tl.float32)
    # The maximum of a GPU passes over NaN.
    largest = tl.max(tl.where(tl.abs(numbers) < infinity, tl.abs(numbers), infinity), 1)
    largest = tl.where(largest < TINY, 0.0, largest)
    finite = largest < infinity
    some = finite & (largest > 0)
    inverse = tl.where(some, tl.div_rn(127.0, tl.where(some, largest, 1.0)), 0.0)
    code = tl.where(finite[:, None], numbers, 0.0) * inverse[:, None]
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added rounds to a whole number, halves to even
    tl.store(codes + row * padded + column, code.to(tl.int8), mask=column < padded)
    scale = tl.where(finite, tl.div_rn(largest, 127.0), float("nan"))
    tl.store(scales + part * rows + row, scale, mask=part * BLOCK < size)


def quantize_activations(
    x: torch.Tensor, padded: int, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantized.quantize_activations`, bit by bit, but for where they lie: codes int8 [rows, padded], zeros after x's;
    scales fp32 [BLOCKs + 1, rows], of which the last are read ahead, and not used. With an activation, of `activate`'s
    result, which is left out."""
    rows, width = x.shape
    size = width // 2 if activation is not None and activation not in WITHOUT_GATE else width
    blocks = triton.cdiv(size, BLOCK)
    codes, scales = x.new_empty(rows, padded, dtype=torch.int8), x.new_empty(blocks + 1, rows, dtype=torch.float32)
    parts = min(triton.next_power_of_2(blocks), PARTS)
    grid, warps = (rows, triton.cdiv(padded, parts * BLOCK)), max(1, parts // 4)
    shape = {"ACTIVATION": activation, "UP": width - size, "TINY": TINY, "PARTS": parts, "BLOCK": BLOCK}
    _quantize_kernel[grid](x, codes, scales, size, padded, **shape, num_warps=warps, enable_fp_fusion=False)
    return codes, scales


@triton.jit
def row_scales_at(row_scales, rows, m, there, block, BLOCK_INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of rows m in a block of inputs."""
    return tl.load(row_scales + block * BLOCK_INPUTS // BLOCK * rows + m, mask=there, other=0.0)


# -- products ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "length", "span"])
def _int8_kernel(
    codes,
    weight,
    row_scales,
    scales,
    bias,
    out,
    rows,
    out_features,
    out_padded,
    blocks,
    length,
    span,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of W x^T, over `span` blocks of inputs from program_id(1) * span on; out is [.., rows, out_features].

    The sums of the blocks, scaled, come together in chunks of `length` blocks, if there are several.
    """
    row_tile, out_tile = place_of(tl.program_id(0), rows, out_padded // OUTPUTS, ROWS)
    m = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    n = (out_tile * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    k = tl.arange(0, INPUTS)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, blocks)
    x_tile = codes + (m * blocks + first) * INPUTS + k[:, None]
    weight_tile = weight + (first.to(tl.int64) * out_padded + n) * INPUTS + k[None, :]

    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
    row_scale = row_scales_at(row_scales, rows, m, m < rows, first, INPUTS, BLOCK)
    for block in range(first, last):
        # The next block's scales are on their way while this one is computed.
        next_scale = row_scales_at(row_scales, rows, m, m < rows, block + 1, INPUTS, BLOCK)
        sums = tl.dot(tl.load(weight_tile), tl.load(x_tile, mask=m < rows, other=0), out_dtype=tl.int32)
        chunk = tl.fma(sums.to(tl.float32), tl.broadcast_to(row_scale, chunk.shape), chunk)
        if CHUNKED and ((block + 1) % length == 0 or block + 1 == last):
            total += chunk
            chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
        row_scale = next_scale
        x_tile += INPUTS
        weight_tile += out_padded * INPUTS
    out += tl.program_id(1).to(tl.int64) * rows * out_features
    finish(total if CHUNKED else chunk, m, n, rows, out_features, scales, bias, out)


@triton.jit(do_not_specialize=["rows", "length", "span"])
def _int4_kernel(
    codes,
    weight,
    scales,
    row_scales,
    bias,
    out,
    rows,
    out_features,
    out_padded,
    blocks,
    length,
    span,
    CHUNKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """As `_int8_kernel`, with the sums of the groups."""
    row_tile, out_tile = place_of(tl.program_id(0), rows, out_padded // OUTPUTS, ROWS)
    m = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    outputs = out_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    n = outputs[:, None]
    k = tl.arange(0, GROUP)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, blocks)
    x_tile = codes + (m * blocks + first) * 2 * GROUP + k[:, None]
    weight_tile = weight + (first.to(tl.int64) * out_padded + n) * GROUP + k[None, :]
    scale = scales + first * 2 * out_padded + outputs

    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
    scale_1 = tl.load(scale)
    scale_2 = tl.load(scale + out_padded)
    row_scale = row_scales_at(row_scales, rows, m, m < rows, first, 2 * GROUP, BLOCK)
    for block in range(first, last):
        # The next block's scales are on their way while this one is computed.
        scale += 2 * out_padded
        next_1 = tl.load(scale)
        next_2 = tl.load(scale + out_padded)
        next_scale = row_scales_at(row_scales, rows, m, m < rows, block + 1, 2 * GROUP, BLOCK)
        both = tl.load(weight_tile)
        sums = tl.dot(low_halves(both, COMPILED), tl.load(x_tile, mask=m < rows, other=0), out_dtype=tl.int32)
        chunk = add_group(chunk, sums, scale_1, row_scale)
        sums = tl.dot(high_halves(both, COMPILED), tl.load(x_tile + GROUP, mask=m < rows, other=0), out_dtype=tl.int32)
        chunk = add_group(chunk, sums, scale_2, row_scale)
        if CHUNKED and ((block + 1) % length == 0 or block + 1 == last):
            total += chunk
            chunk = tl.zeros((OUTPUTS, ROWS), tl.float32)
        scale_1, scale_2, row_scale = next_1, next_2, next_scale
        x_tile += 2 * GROUP
        weight_tile += out_padded * GROUP
    out += tl.program_id(1).to(tl.int64) * rows * out_features
    finish(total if CHUNKED else chunk, m, n, rows, out_features, None, bias, out)


@triton.jit
def add_group(chunk, sums, scale, row_scale):
    """chunk + sums * scale / 16 * row_scale, rounded once after the product of the scales."""
    scale = (scale.to(tl.float32) * 0.0625)[:, None] * row_scale
    return tl.fma(sums.to(tl.float32), scale, chunk)


# The compiler takes bytes one by one; the assembly takes four at once, which halves the loop's instructions.


@triton.jit
def low_halves(both, COMPILED: tl.constexpr):
    """16 times the signed low half of each byte."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [both], tl.int8, True, 4
        )
    return both << 4


@triton.jit
def high_halves(both, COMPILED: tl.constexpr):
    """16 times the signed high half of each byte."""
    if COMPILED:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [both], tl.int8, True, 4)
    return both & -16


# -- the product ---------------------------------------------------------------------------------------------


class QuantizedProduct:
    """The product with a quantized weight, each row's bits independent of the other rows: a `Product`.

    Args:
        weight: copied to the device.
        bias: [out], on the device.

    Attributes: for kernels that multiply with several such weights at once, with the same bits.
        group: inputs that share a scale, as kernels read them; None: int8, which has a scale an output.
        block_inputs: inputs of a block.
        blocks: [blocks, padded outputs, bytes] int8, the codes, in the layout that this file begins with.
        scales: [outputs] fp32 of int8; of int4 see `relay_scales`.
        chunks: how the blocks' sums come together; each has whole `quantized.BLOCK`s.
        bias: [out] fp32; None: there is none.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, outputs: int | None = None
    ) -> None:
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.group = None if weight.group is None else min(weight.group, LARGEST_GROUP)
        self.block_inputs = INT8_BLOCK if self.group is None else 2 * self.group
        self.blocks = relay(weight, self.block_inputs, device)
        self._out_tiles = self.blocks.shape[1] // OUTPUTS
        whole = BLOCK // self.block_inputs
        of_all = self._out_tiles if outputs is None else triton.cdiv(outputs, OUTPUTS)
        block_bytes = OUTPUTS * self.blocks.shape[2]
        self.chunks = Chunks.of(of_all, len(self.blocks), whole, block_bytes, unit=whole)
        self.scales = weight.scales.to(device) if self.group is None else relay_scales(weight, self.blocks)
        self.bias = None if bias is None else bias.float()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, DTYPES, out_dtype)
        rows = len(x)
        out = x.new_empty(rows, self.out_features, dtype=out_dtype)
        if rows == 0:
            return out
        activations = quantize_activations(x, len(self.blocks) * self.block_inputs)
        tile = FEW if rows <= FEW.rows else self._many()  # either gives the same bits
        tiles = triton.cdiv(rows, tile.rows) * self._out_tiles
        launch = self._launch_int8 if self.group is None else self._launch_int4
        ending = Ending(self.scales if self.group is None else None, self.bias)
        sum_chunks(functools.partial(launch, activations, tile), tiles, self.chunks, out, ending)
        return out

    def _many(self) -> Tile:
        if self.group is not None:
            return MANY_INT4
        return MANY_HOPPER if major(self.blocks.device) == 9 else MANY

    def _launch_int8(
        self, activations: Activations, tile: Tile, grid: tuple[int, int], span: int, out: torch.Tensor, ending: Ending
    ) -> None:
        blocks, padded, _ = self.blocks.shape
        codes, row_scales = activations
        _int8_kernel[grid](
            codes,
            self.blocks,
            row_scales,
            *ending,
            out,
            len(codes),
            self.out_features,
            padded,
            blocks,
            self.chunks.length,
            span,
            CHUNKED=self.chunks.count > 1,
            ROWS=tile.rows,
            OUTPUTS=OUTPUTS,
            INPUTS=INT8_BLOCK,
            BLOCK=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

    def _launch_int4(
        self, activations: Activations, tile: Tile, grid: tuple[int, int], span: int, out: torch.Tensor, ending: Ending
    ) -> None:
        blocks, padded, group = self.blocks.shape
        codes, row_scales = activations
        _int4_kernel[grid](
            codes,
            self.blocks,
            self.scales,
            row_scales,
            ending.bias,
            out,
            len(codes),
            self.out_features,
            padded,
            blocks,
            self.chunks.length,
            span,
            CHUNKED=self.chunks.count > 1,
            ROWS=tile.rows,
            OUTPUTS=OUTPUTS,
            GROUP=group,
            BLOCK=BLOCK,
            COMPILED=COMPILED,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )


def relay(weight: QuantizedWeight, inputs: int, device: torch.device) -> torch.Tensor:
    """The codes in blocks of `inputs`, as the head of this file says, re-laid on the device."""
    count = triton.cdiv(weight.in_features, inputs)
    padded = triton.cdiv(weight.out_features, OUTPUTS) * OUTPUTS
    width = inputs if weight.group is None else inputs // 2
    blocks = torch.zeros(count, padded, width, dtype=torch.int8, device=device)
    on_device = replace(weight, packed=weight.packed.to(device))
    for first in range(0, len(weight.packed), PANELS_AT_ONCE):
        codes = codes_of(on_device, slice(first, first + PANELS_AT_ONCE))
        codes = F.pad(codes, (0, count * inputs - weight.in_features)).view(len(codes), count, -1, width)
        both = codes[:, :, 0] if weight.group is None else codes[:, :, 0] & 15 | codes[:, :, 1] << 4
        blocks[:, first * PANEL : first * PANEL + len(both)] = both.transpose(0, 1)
    return blocks


def relay_scales(weight: QuantizedWeight, blocks: torch.Tensor) -> torch.Tensor:
    """Those of int4, [2 * blocks + 2, padded outputs]."""
    count, padded, group = blocks.shape
    scales = weight.scales.to(blocks.device).transpose(0, 1).flatten(1)  # [groups, outputs]
    scales = scales.repeat_interleave((weight.group or group) // group, 0)
    return F.pad(scales, (0, padded - scales.shape[1], 0, 2 * count + 2 - len(scales)))
