"""Products with a dense weight whose rows do not know of one another.

An output element's sum has one order, whatever the number of rows: that of `linear_chunks`, and within a chunk that of
the matrix instruction. Tiles have the same outputs and inputs for any rows, so the instruction is one too (64 x 128
of a warp group on sm_90, 16 x 8 of a warp on sm_80), and a tile of twice the rows only has twice the warps. Whether a
program sums one chunk or all is a bound of its loop, an argument like the number of rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.triton.fp8 import restored
from quire.ops.triton.linear_chunks import Chunks, Ending, checked, finish, place_of, sum_chunks, waves

LEAST_INPUTS = 256
"""Of a chunk: below that, starting a program costs more than it reads."""


class Tile(NamedTuple):
    """What a program computes, and how.

    Attributes:
        rows, outputs, inputs: inputs are those of one step of its loop.
        warps: on sm_90 a group of four is needed for each 64 rows.
        stages: steps whose loads are in flight.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


SHORT = Tile(64, 128, 64, 4, 4)
"""64 rows are the fewest of sm_90's fast instruction; even with one row, reading the weight takes longer than it."""
TALL = Tile(128, 128, 64, 8, 3)
"""With many rows: a third less is read for each multiplication."""
TALLER = 4 / 3
"""How much longer a row takes in a short tile, where many rows are computed: so much more is read for it."""
TALL_INSTRUCTION = (10, 11)
"""Major compute capabilities (B200, Thor) of whose instruction, tcgen05, a tall tile takes a form of 128 rows. Consumer
cards of 12 have that of sm_80."""
EXACT = Tile(64, 64, 16, 8, 3)
"""fp32, which goes without matrix instructions."""


@triton.jit(do_not_specialize=["rows", "span"])
def _dense_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    rows,
    in_features,
    out_features,
    blocks,
    length,
    span,
    EVEN: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A tile of x W^T, over `span` blocks of inputs from program_id(1) * span on; out is [.., rows, out_features].

    With `scales` [out_features, groups of GROUP inputs], the weight is of codes in fp8.
    """
    row_tile, out_tile = place_of(tl.program_id(0), rows, tl.cdiv(out_features, OUTPUTS), ROWS)
    m = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = (out_tile * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[None, :]
    k = tl.arange(0, INPUTS)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, blocks)
    x_tile = x + m * in_features + first * INPUTS + k[None, :]
    weight_tile = weight + n * in_features + first * INPUTS + k[:, None]

    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    chunk = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for block in range(first, last):
        if EVEN:
            a = tl.load(x_tile, mask=m < rows, other=0.0)
            b = tl.load(weight_tile, mask=n < out_features, other=0.0)
        else:
            inside = k < in_features - block * INPUTS
            a = tl.load(x_tile, mask=(m < rows) & inside[None, :], other=0.0)
            b = tl.load(weight_tile, mask=(n < out_features) & inside[:, None], other=0.0)
        if scales is not None:
            scale = scales + n * tl.cdiv(in_features, GROUP) + block * INPUTS // GROUP
            b = restored(b, tl.load(scale, mask=n < out_features, other=0.0), a.dtype)
        chunk = tl.dot(a, b, chunk, input_precision="ieee")
        x_tile += INPUTS
        weight_tile += INPUTS
        if CHUNKED and ((block + 1) % length == 0 or block + 1 == last):
            total += chunk
            chunk = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if not CHUNKED:
        total = chunk
    out += tl.program_id(1).to(tl.int64) * rows * out_features
    finish(total, m, n, rows, out_features, out_features, None, bias, out)


class Scales(NamedTuple):
    """What codes in fp8 are multiplied with: see `quire.ops.fp8`.

    Attributes:
        numbers: fp32 [out, groups of inputs].
        group: inputs that share one, in whole steps of a tile's loop.
        dtype: to which the products are rounded; that of x.
    """

    numbers: torch.Tensor
    group: int
    dtype: torch.dtype


class DenseProduct:
    """The product with a dense weight, each row's bits independent of the other rows: a `Product`.

    Args:
        tiles: for few rows and for many, of the same outputs and inputs; None: those for the weight's data type.
        outputs: see `Kernels.pack`.
        scales: of a weight of codes, as `fp8.as_read` gives them; None: it is one of numbers.

    Attributes:
        weight: [out, in], contiguous, used where it lies; for kernels that multiply with several at once.
        bias: [out], in fp32; None: there is none.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tiles: tuple[Tile, Tile] | None = None,
        outputs: int | None = None,
        scales: Scales | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self._scales = weight, scales
        self._dtype = scales.dtype if scales else weight.dtype
        self.bias = None if bias is None else bias.float()
        usual = (EXACT, EXACT) if self._dtype == torch.float32 else (SHORT, TALL)
        self._short, self._tall = tiles or usual
        if not one_instruction(weight.device):
            self._tall = self._short
        self._out_tiles = triton.cdiv(self.out_features, self._short.outputs)
        blocks = triton.cdiv(self.in_features, self._short.inputs)
        of_all = triton.cdiv(outputs or self.out_features, self._short.outputs)
        block_bytes = self._short.outputs * self._short.inputs * self._dtype.itemsize
        self._chunks = Chunks.of(of_all, blocks, LEAST_INPUTS // self._short.inputs, block_bytes)

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x W^T + b` for x [rows, in]; any number of rows. Returns [rows, out] in `out_dtype`, x's unless said."""
        x, out_dtype = checked(x, self.in_features, (self._dtype,), out_dtype)
        rows = len(x)
        out = x.new_empty(rows, self.out_features, dtype=out_dtype)
        if rows == 0:
            return out
        tile = quicker(self._short, self._tall, rows, self._out_tiles)
        tiles = triton.cdiv(rows, tile.rows) * self._out_tiles
        launch = functools.partial(self._launch, x, tile)
        sum_chunks(launch, tiles, self._chunks, out, Ending(bias=self.bias))
        return out

    def _launch(
        self, x: torch.Tensor, tile: Tile, grid: tuple[int, int], span: int, out: torch.Tensor, ending: Ending
    ) -> None:
        _dense_kernel[grid](
            x,
            self.weight,
            self._scales and self._scales.numbers,
            ending.bias,
            out,
            len(x),
            self.in_features,
            self.out_features,
            self._chunks.blocks,
            self._chunks.length,
            span,
            EVEN=self.in_features % tile.inputs == 0,
            CHUNKED=self._chunks.count > 1,
            GROUP=self._scales.group if self._scales else 1,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )


def quicker(short: Tile, tall: Tile, rows: int, columns: int) -> Tile:
    """The tile whose waves of programs take less time; either gives the same bits.

    Args:
        columns: tiles side by side: those of the outputs, for each weight.
    """

    def cost(tile: Tile) -> float:
        row_cost = 1.0 if tile.rows > short.rows else TALLER
        return waves(triton.cdiv(rows, tile.rows) * columns) * tile.rows * row_cost

    return tall if rows > short.rows and cost(tall) <= cost(short) else short


def one_instruction(device: torch.device) -> bool:
    """Whether tiles of any height sum alike: the tall one by the short one's instruction, and those of 16 and 32 rows
    by that of sm_80, which gave the bits of sm_90's on an H200 (of 16-bit numbers from memory: see `Weights.low`)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in TALL_INSTRUCTION
