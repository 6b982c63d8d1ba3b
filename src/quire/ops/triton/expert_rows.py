"""Which rows an expert computes: pairs of a token and one of its experts, ordered by expert and cut into tiles.

Pair `t * top_k + p` is token t's expert at place p. A **row tile** has rows of one expert alone, so an expert that no
token chose costs nothing. How many row tiles there are is known on the device alone: launches have as many programs as
any choice could need, and those after the last tile end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_PAIRS, MANY_PAIRS = 1024, 4096
"""That a program which orders them reads at once, 8 a thread: the first if there are no more, else the second."""


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _order_kernel(
    ids, order, tile_table, pairs, tiles, experts, BINS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):
    """One expert: its pairs in ascending order, after those of the experts before it, and its row tiles.

    tile_table: [tiles, 3], expert, first row and the row after the expert's last; zeros where there is no tile.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        found = tl.load(ids + start + at, mask=at < pairs - start, other=-1).to(tl.int32)
        counts += tl.histogram(found, BINS, mask=found >= 0)
    bins = tl.arange(0, BINS)
    tiles_of = (counts + ROWS - 1) // ROWS
    row = tl.sum(tl.where(bins < expert, counts, 0))
    end = row + tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles_of, 0))
    last = tl.where(expert == experts - 1, tiles, tile + (end - row + ROWS - 1) // ROWS)
    for start in range(tile, last, PAIRS):
        first = row + (start - tile + at) * ROWS
        there, real = start + at < last, first < end
        entry = tile_table + (start + at) * 3
        tl.store(entry, tl.where(real, expert, 0), mask=there)
        tl.store(entry + 1, tl.where(real, first, 0), mask=there)
        tl.store(entry + 2, tl.where(real, end, 0), mask=there)
    if row < end:
        for start in range(0, pairs, PAIRS):
            mine = tl.load(ids + start + at, mask=at < pairs - start, other=-1) == expert
            tl.store(order + row + tl.cumsum(mine.to(tl.int32), 0) - 1, start + at, mask=mine)
            row += tl.sum(mine.to(tl.int32))


@triton.jit
def tile_at(tile_table, tile, ORDERED: tl.constexpr):
    """A tile's expert, its first row, and the row after its expert's last; zeros where there is no tile.

    Not ordered: the table is one token's ids, each a tile of a row.
    """
    if ORDERED:
        entry = tile_table + tile * 3
        expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    else:
        expert, first = tl.load(tile_table + tile).to(tl.int32), tile
        end = tl.where(expert < 0, tile, tile + 1)
    return expert, first, end


@triton.jit
def pairs_of(order, m, end):
    """The pairs in rows m; without an order each is in the row of its number."""
    pairs = m
    if order is not None:
        pairs = tl.load(order + m, mask=m < end, other=0)
    return pairs


def ordered(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The pairs of ids [tokens, top_k] ordered by expert, and the tiles of `rows` rows into which they are cut.

    Pairs whose id is none of the experts (-1: another rank has it) are in no tile.

    Returns:
        (pairs [tokens * top_k] int32, table [tiles, 3] int32: see `_order_kernel`). Of one token, whose experts all
        differ, (None, ids): see `tile_at`.
    """
    ids, pairs = ids.contiguous(), ids.numel()
    if len(ids) == 1:
        return None, ids.view(-1)
    chosen = min(experts, pairs)  # at most
    tiles = (pairs + chosen * (rows - 1)) // rows
    order = ids.new_empty(pairs, dtype=torch.int32)
    tile_table = ids.new_empty(tiles, 3, dtype=torch.int32)
    bins = max(32, triton.next_power_of_2(experts))  # one a thread of a warp, at least
    at_once = FEW_PAIRS if pairs <= FEW_PAIRS else MANY_PAIRS
    sizes = {"BINS": bins, "ROWS": rows, "PAIRS": at_once, "num_warps": max(4, at_once // 256)}
    _order_kernel[(experts,)](ids, order, tile_table, pairs, tiles, experts, **sizes, enable_fp_fusion=False)
    return order, tile_table
