"""Which program of attention does what: lists of row tiles and of their splits, made on the device once a step.

A *row tile* is some tokens of one span, and a *split* some of the keys that it sees (see `quire.ops.triton.attention`).
A tile is walked by one program, split after split, unless that would take long beside what each program of the device
has to do: a decode with a long context, a few rows behind a long prefix. Then its splits are *items* of a list, and a
fixed number of programs, the *workers*, take every so many-th item, whatever span it is of. What they find is merged
in the order in which one program would have walked. So a launch needs no number of the step's, and neither a long
context among short ones nor a short step leaves most of the device idle.

Each item has its place in scratch memory, which therefore follows what contexts are and not what they may become.
Spans that find no more room there are walked. None of this changes bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.ragged import DeviceSpans

SPLIT = 512
"""Keys a split. Changing it changes bits. Few, since a lone request decodes with one program a split and KV head; not
fewer, since each split costs a merge, and a row of scratch memory where splits lie side by side."""

RESIDENT = 264
"""Programs that run at once: two on each of the 132 multiprocessors of an H100 or H200. A tile of one token is walked
if it has at most half of the splits that each of them would have if all were shared evenly; one of more tokens, which
would leave more in scratch memory, if it has at most as many."""

WORKERS = 1024
"""Programs that share the items: some rounds of those that run at once, so that the last round is short."""

SCRATCH_BYTES = 1 << 28
"""Most memory for splits that lie side by side: of four million keys in all, with 32 heads of 128 and a row a span, or
of 512 rows behind 16,384 tokens, with 16 heads."""

WRITERS = 8
"""Programs that write the lists."""

SPANS_AT_ONCE = tl.constexpr(256)

RECORD = tl.constexpr(8)
"""Numbers of a tile or an item: see `Work`."""


@triton.jit
def _reach(start, rows, row, span, bases, depths, context_lens, path_width, WINDOW: tl.constexpr):
    """What `rows` rows of a span from position `start` on see: first key and the one after the last.

    `row` is the first. Before that, the base of the tree that they belong to, or -1. Of a tree, it is what all of its
    rows see.
    """
    base = -1
    if depths is not None:
        root = tl.load(bases + span)
        in_tree = tl.load(depths + row, mask=rows > 0, other=-1) >= 0
        base = tl.where(in_tree, root, -1)
        start = tl.where(in_tree, root, start)
        rows = tl.where(in_tree, tl.minimum(tl.load(context_lens + span) - root, path_width), rows)
    low, high = start * 0, start + rows
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0)
    return base, low, high


@triton.jit
def _measured(
    first,
    spans,
    row_starts,
    starts,
    bases,
    depths,
    context_lens,
    path_width,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Of the spans from `first` on: which they are, their first rows, rows, positions, row tiles, and splits a tile, or
    more."""
    span = first + tl.arange(0, SPANS_AT_ONCE)
    there = span < spans
    span = tl.where(there, span, 0)
    first_row = tl.load(row_starts + span)
    rows = tl.where(there, tl.load(row_starts + span + 1) - first_row, 0)
    start = tl.load(starts + span)
    _, low, high = _reach(start, rows, first_row, span, bases, depths, context_lens, path_width, WINDOW)
    splits = tl.cdiv(high, SPLIT) - low // SPLIT
    if WINDOW and depths is None:
        splits = tl.minimum(splits, (WINDOW + TOKENS - 3) // SPLIT + 2)
    return span, first_row, rows, start, tl.cdiv(rows, TOKENS), splits


@triton.jit
def _write(record, there, first_row, start, tokens, beyond, table_row, span, first, splits):
    """Records of tiles or items [SPANS_AT_ONCE], those that are `there`: see `Work`."""
    tl.store(record, first_row, mask=there)
    tl.store(record + 1, start, mask=there)
    tl.store(record + 2, tokens, mask=there)
    tl.store(record + 3, beyond, mask=there)
    tl.store(record + 4, table_row, mask=there)
    tl.store(record + 5, span, mask=there)
    tl.store(record + 6, first, mask=there)
    tl.store(record + 7, splits, mask=there)


@triton.jit(do_not_specialize=["spans", "tiles", "short", "room", "groups", "path_width"])
def _list_work(
    row_starts,
    starts,
    table_rows,
    bases,
    depths,
    context_lens,
    path_width,
    records,
    item_count,
    spans,
    tiles,
    short,
    room,
    groups,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """Writes what `Work` describes; each program every so many-th record of a span."""
    writer, writers = tl.program_id(0), tl.num_programs(0)
    work, all_tiles = 0, 0
    for first in range(0, spans, SPANS_AT_ONCE):
        _, _, _, _, own_tiles, splits = _measured(
            *(first, spans, row_starts, starts, bases, depths, context_lens, path_width, WINDOW, SPLIT, TOKENS)
        )
        work += tl.sum(own_tiles * splits, 0)
        all_tiles += tl.sum(own_tiles, 0)
    share = (work * groups + RESIDENT // 2) // RESIDENT

    tiles_before, items_before, listed_items = 0, 0, 0
    for first in range(0, spans, SPANS_AT_ONCE):
        span, first_row, rows, start, own_tiles, splits = _measured(
            *(first, spans, row_starts, starts, bases, depths, context_lens, path_width, WINDOW, SPLIT, TOKENS)
        )
        table_row = tl.load(table_rows + span)
        long = tl.where(rows == 1, 2 * splits, splits) > share
        listed = (splits > 1) & long & (tl.minimum(rows, TOKENS) <= short)
        items = tl.where(listed, own_tiles * splits, 0)
        item_ends = items_before + tl.cumsum(items, 0)
        listed &= item_ends <= room
        items = tl.where(listed, items, 0)
        listed_items = tl.maximum(listed_items, tl.max(tl.where(listed, item_ends, 0), 0))
        first_item = item_ends - items
        tile_ends = tiles_before + tl.cumsum(own_tiles, 0)
        for turn in range(writer, tl.max(own_tiles, 0), writers):
            # The rows of a long span that see most come first, those of short spans before it last.
            place = all_tiles - 1 - (tile_ends - own_tiles + turn)
            skipped = turn * TOKENS
            _write(
                *(records + place * RECORD, turn < own_tiles, first_row + skipped, start + skipped),
                *(tl.minimum(rows - skipped, TOKENS), rows - skipped, table_row, span),
                *(tl.where(listed, first_item + turn * splits, -1), splits),
            )
        for turn in range(writer, tl.max(items, 0), writers):
            skipped = turn // tl.maximum(splits, 1) * TOKENS
            _write(
                *(records + (tiles + first_item + turn) * RECORD, turn < items, first_row + skipped, start + skipped),
                *(tl.minimum(rows - skipped, TOKENS), rows - skipped, table_row, span),
                *(turn % tl.maximum(splits, 1), splits),
            )
        tiles_before = tl.max(tile_ends, 0)
        items_before = tl.max(item_ends, 0)
    tl.store(item_count, listed_items)
    for first in range(all_tiles + writer * SPANS_AT_ONCE, tiles, writers * SPANS_AT_ONCE):
        place = first + tl.arange(0, SPANS_AT_ONCE)
        nothing = place * 0
        _write(
            *(records + place * RECORD, place < tiles, nothing, nothing, nothing, nothing, nothing, nothing),
            *(nothing - 1, nothing),
        )


@triton.jit
def items_of(item_count, tiles):
    """Items of this program: first, and the one after the last. The first `tiles` programs have a row tile each, as
    item 0; after them are the workers."""
    program = tl.program_id(0)
    first, last = program * 0, program * 0 + 1
    if program >= tiles:
        first, last = program - tiles, tl.load(item_count)
    return first, last


@triton.jit
def assigned(
    item,
    records,
    tiles,
    bases,
    depths,
    context_lens,
    path_width,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What a program works on: the tile's first row, its position, how many tokens, the request's row of the tables,
    the base of their tree or -1, the first key and the one after the last, the same of splits, and whether these are
    of the list, whose place is `item`."""
    program = tl.program_id(0)
    listed = program >= tiles
    record = records + tl.where(listed, tiles + item, program) * RECORD
    first_row, start, tokens = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    beyond, table_row, span = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    first = tl.load(record + 6)
    if not listed:  # a tile whose splits are listed is not walked
        tokens = tl.where(first >= 0, 0, tokens)
    base, low, high = _reach(start, tokens, first_row, span, bases, depths, context_lens, path_width, WINDOW)
    first_split, last_split = low // SPLIT, tl.cdiv(high, SPLIT)
    if not CAUSAL:  # rows see up to their span's end, or as far ahead as back
        high = start + beyond
        if WINDOW:
            high = tl.minimum(high, start + tokens + WINDOW - 1)
        last_split = tl.cdiv(high, SPLIT)
    last_split = tl.where(tokens > 0, last_split, first_split)
    if listed:
        first_split += first
        last_split = first_split + 1  # one that the tile does not see changes nothing
    return first_row, start, tokens, table_row, base, low, high, first_split, last_split, listed


class Work(NamedTuple):
    """The lists, and where items leave what they have. All from shapes, so that a captured launch serves every step.

    A record is of eight numbers: first row, its position, tokens of the tile, rows of the span from the first on, the
    request's row of the tables, the span; then of a tile its first item, or -1 if it is walked, and its splits (a tile
    of no tokens is padding); of an item, which of its tile's splits it is.

    Attributes:
        tiles: how many there may be.
        records: [tiles + items, 8] int32, on the device.
        item_count: [1] int32.
        short: most tokens of a tile that has items.
        workers: programs that share the items.
        keys: of a split.
        out: [items, short, heads, head_dim] fp32.
        sums: [items, short, heads, 2] fp32, maxima and sums.
    """

    tiles: int
    records: torch.Tensor
    item_count: torch.Tensor
    short: int
    workers: int
    keys: int
    out: torch.Tensor
    sums: torch.Tensor

    @property
    def step(self) -> int:
        """From one item of a program to its next."""
        return max(1, self.workers)


def most_splits(spans: DeviceSpans, block_size: int, window: int | None, tokens: int) -> int:
    """Of a tile of `tokens` tokens, by the width of the tables."""
    slots = -(-spans.block_tables.shape[1] * block_size // SPLIT)
    if window is not None:
        deepest = 1 if spans.trees is None else spans.trees.paths.shape[1]
        slots = min(slots, (window + max(tokens, deepest) - 3) // SPLIT + 2)
    return slots


def list_work(
    spans: DeviceSpans,
    rows: int,
    tokens: int,
    block_size: int,
    window: int | None,
    groups: int,
    heads: int,
    head_dim: int,
    side_by_side: bool = True,
) -> Work:
    """The tiles of all spans, and the splits of those that are listed.

    Args:
        rows: of the step, padding included.
        tokens: of a tile.
        groups: programs that each tile is for: one a group of heads.
        side_by_side: whether any splits may be listed.
    """
    spans_there = len(spans.starts)
    tiles = rows // tokens + spans_there
    short = 1 if rows == spans_there else tokens
    slots = most_splits(spans, block_size, window, tokens)
    room = (
        min(tiles * slots, SCRATCH_BYTES // (4 * short * heads * (head_dim + 2))) if side_by_side and slots > 1 else 0
    )
    workers = min(room, -(-WORKERS // groups))
    device = spans.starts.device
    records = torch.empty(tiles + room, RECORD.value, dtype=torch.int32, device=device)
    item_count = torch.empty(1, dtype=torch.int32, device=device)
    _list_work[(WRITERS,)](
        spans.row_starts,
        spans.starts,
        spans.table_rows,
        records=records,
        item_count=item_count,
        spans=spans_there,
        tiles=tiles,
        short=short,
        room=room,
        groups=groups,
        WINDOW=window or 0,
        SPLIT=SPLIT,
        TOKENS=tokens,
        RESIDENT=RESIDENT,
        num_warps=4,
        enable_fp_fusion=False,
        **of_trees(spans),
    )
    numbers = room * short * heads
    out, sums = (torch.empty(numbers * width, dtype=torch.float32, device=device) for width in (head_dim, 2))
    return Work(tiles, records, item_count, short, workers, SPLIT, out, sums)


def of_trees(spans: DeviceSpans) -> dict[str, Any]:
    """The arguments of kernels that say how rows of trees follow their paths; None where there are no trees."""
    if spans.trees is None:
        return {"bases": None, "depths": None, "context_lens": None, "path_width": 0}
    trees = spans.trees
    return {
        "bases": trees.bases,
        "depths": trees.depths,
        "context_lens": spans.context_lens,
        "path_width": trees.paths.shape[1],
    }
