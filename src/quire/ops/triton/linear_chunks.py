"""How the inputs of a product are cut into chunks, and how the chunks' sums come together.

A sum of rounded numbers depends on its order, so the order is a property of the weight alone: the inputs are cut into
chunks of one length, each chunk is summed in ascending order from 0, and the sums of the chunks are added in ascending
order to 0. With many rows a program does that for its tile from the first chunk to the last. With few rows there
are few tiles, or a wave of them and a few more, so programs take the chunks side by side, and `add_up` adds what they
leave: the same additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

PROGRAMS = 264
"""Programs that keep the memory busy: two on each of the 132 multiprocessors of an H100 or H200."""
MOST_CHUNKS = 32
"""`add_up` has a load for each of them in flight at once."""
FULL = 0.8
"""Share of the places for programs that should be taken, in whole waves, while one tile of rows is computed."""
MOST_SUMS = 8 * PROGRAMS
"""Sums of tiles, left by programs side by side: 69 MB in tiles of 64 x 128."""
COLUMNS = 256
"""Outputs of a program of `add_up`: two a thread."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a weight's inputs are cut, in blocks: what a program's loop reads at once.

    Attributes:
        blocks: of all inputs.
        length: blocks a chunk; the last may have fewer.
        count: chunks.
        bytes: of the weight that a chunk of a tile reads.
    """

    blocks: int
    length: int
    count: int
    bytes: int

    @classmethod
    def of(cls, out_tiles: int, blocks: int, least: int, block_bytes: int, unit: int = 1) -> Chunks:
        """Of a weight whose outputs are `out_tiles` tiles, each of `blocks` blocks of `block_bytes`.

        The fewest with which one tile of rows keeps the device busy to its last wave of programs; none has fewer than
        `least` blocks, and a chunk's length is a multiple of `unit`.
        """
        most = max(1, min(blocks // least, MOST_CHUNKS))
        taken = {n: out_tiles * n / (waves(out_tiles * n) * PROGRAMS) for n in range(1, most + 1)}
        count = next((n for n, share in taken.items() if share >= FULL), max(taken, key=lambda n: taken[n]))
        length = triton.cdiv(triton.cdiv(blocks, unit), count) * unit
        return cls(blocks, length, triton.cdiv(blocks, length), length * block_bytes)

    def side_by_side(self, tiles: int, sum_bytes: int) -> bool:
        """Whether programs take the chunks of `tiles` tiles side by side: where that takes fewer waves of programs.

        Args:
            sum_bytes: of the sums of a chunk that a program leaves, which are written and read again.
        """
        if self.count == 1 or tiles * self.count > MOST_SUMS:
            return False
        return waves(tiles * self.count) * (1 + 2 * sum_bytes / self.bytes) < waves(tiles) * self.count


def waves(programs: int) -> int:
    """How often programs fill the device."""
    return -(-programs // PROGRAMS)


def checked(
    x: torch.Tensor, in_features: int, dtypes: tuple[torch.dtype, ...], out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.dtype]:
    """x [rows, in_features] as kernels read it, and the data type of what a product returns.

    Raises:
        ValueError: x has other columns or another type, or the type of the result is neither x's nor fp32.
    """
    if x.shape[1] != in_features or x.dtype not in dtypes:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; the product takes {in_features} columns of {dtypes}")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {out_dtype}; allowed are {x.dtype} and torch.float32")
    return x.contiguous(), out_dtype or x.dtype


@triton.jit
def place_of(program, rows, out_tiles, ROWS: tl.constexpr):
    """The row tile and the output tile of a program.

    Eight row tiles go through the outputs together, so that what one program reads of x and of the weight is found
    in the L2 cache by others.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    first = program // (8 * out_tiles) * 8
    height = tl.minimum(row_tiles - first, 8)
    within = program % (8 * out_tiles)
    return first + within % height, within // height


@triton.jit
def finish(total, m, n, rows, out_features, stride, scales, bias, out):
    """Scale sums, add the bias, and store in out [rows, out_features]; m and n broadcast to the shape of `total`.

    Args:
        m: rows, 64-bit; n: outputs. Those that do not exist are left out.
        stride: numbers from a row of `out` to the next.
        scales, bias: [out_features] fp32; None: not there.
    """
    if scales is not None:
        total *= tl.load(scales + n, mask=n < out_features, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < out_features, other=0.0)
    tl.store(out + m * stride + n, total.to(out.dtype.element_ty), mask=(m < rows) & (n < out_features))


@triton.jit(do_not_specialize=["rows"])
def _add_up_kernel(
    sums,
    scales,
    bias,
    out,
    rows,
    out_features,
    stride,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for chunk in tl.static_range(COUNT):
        total += tl.load(sums + (chunk * rows + m) * out_features + n, mask=n < out_features, other=0)
    finish(total, m, n, rows, out_features, stride, scales, bias, out)


class Ending(NamedTuple):
    """What is done to a product's sums before they are stored: see `finish`."""

    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Launch(Protocol):
    """Starts a kernel whose program (t, c) sums the tile t over `span` blocks from c * span on, and stores it with
    `ending` in out[c], if there are several c; else in out."""

    def __call__(self, grid: tuple[int, int], span: int, out: torch.Tensor, ending: Ending) -> None: ...


def sum_chunks(launch: Launch, tiles: int, chunks: Chunks, out: torch.Tensor, ending: Ending) -> None:
    """out [rows, outputs], whose rows may lie apart: the chunks of each of its `tiles` tiles, summed by one program or
    side by side."""
    rows, out_features = out.shape
    if not chunks.side_by_side(tiles, 4 * rows * out_features // tiles):
        launch((tiles, 1), chunks.blocks, out, ending)
        return
    sums = out.new_empty(chunks.count, rows, out_features, dtype=torch.float32)
    launch((tiles, chunks.count), chunks.length, sums, Ending())
    add_up(sums, out, ending)


def add_up(sums: torch.Tensor, out: torch.Tensor, ending: Ending) -> None:
    """out [rows, outputs]: the chunks' sums [chunks, rows, outputs], fp32, added in ascending order."""
    chunks, rows, out_features = sums.shape
    grid = (rows, triton.cdiv(out_features, COLUMNS))
    _add_up_kernel[grid](sums, *ending, out, rows, out_features, out.stride(0), chunks, COLUMNS, enable_fp_fusion=False)
