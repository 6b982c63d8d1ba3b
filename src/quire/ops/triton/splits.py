"""Splits of short spans that lie side by side: a list of them, made on the device, which programs share out.

A span that decodes has few rows and may have a long context. Its splits (see `quire.ops.triton.attention`) are items of
a list over all spans of the step, and a fixed number of programs, the *workers*, take every so many-th item, whatever
span it is of: a long context among short ones keeps all of them busy, and the launch needs no number of the step's.
Each item has its place in scratch memory, which therefore follows what contexts are and not what they may become. Spans
that find no more room there walk through their splits one after the other, with the same bits.
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

PROGRAMS = 1024
"""About how many programs decoding should have: some rounds of the two that fit each multiprocessor of a large GPU,
which has 130 to 150, so that no long context is left to one program. Does not change bits."""

SHORT = 8
"""Most tokens of a span whose splits lie side by side: one to decode, and its drafts. Does not change bits."""

SCRATCH_BYTES = 1 << 27
"""Most memory for splits that lie side by side: of two million keys in all, with 32 heads of 128 and a row a span. Does
not change bits."""

SPANS_AT_ONCE = tl.constexpr(256)


@triton.jit
def _reach(start, rows, row, span, bases, depths, context_lens, path_width, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """What `rows` rows of a span from position `start` on see: first key and the one after the last; so for splits.

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
    return base, low, high, low // SPLIT, tl.cdiv(high, SPLIT)


@triton.jit(do_not_specialize=["spans", "short", "room", "path_width"])
def _list_splits(
    row_starts,
    starts,
    bases,
    depths,
    context_lens,
    path_width,
    before,
    spans,
    short,
    room,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """before[span + 1] = items of all spans up to this one; one program. A span that finds no room has none."""
    total = 0
    fitting = 0
    tl.store(before, 0)
    for first in range(0, spans, SPANS_AT_ONCE):
        span = first + tl.arange(0, SPANS_AT_ONCE)
        there = span < spans
        own = tl.where(there, span, 0)
        first_row = tl.load(row_starts + own)
        rows = tl.where(there, tl.load(row_starts + own + 1) - first_row, 0)
        start = tl.load(starts + own)
        _, _, _, first_split, last_split = _reach(
            start, rows, first_row, own, bases, depths, context_lens, path_width, WINDOW, SPLIT
        )
        splits = last_split - first_split
        listed = (rows > 0) & (rows <= short) & (splits > 1)
        ends = total + tl.cumsum(tl.where(listed, splits, 0), 0)
        fits = ends <= room
        fitting = tl.maximum(fitting, tl.max(tl.where(fits, ends, 0), 0))
        total = tl.max(ends, 0)
        tl.store(before + span + 1, tl.where(fits, ends, fitting), mask=there)


@triton.jit
def _last_of(numbers, spans, most, TOKENS: tl.constexpr):
    """The last span whose number, of an ascending list, is not above `most`; with TOKENS, whose first row tile is not:
    those of span s begin with tile numbers[s] // TOKENS + s, which leaves it enough."""
    count = 0
    for first in range(0, spans, SPANS_AT_ONCE):
        span = first + tl.arange(0, SPANS_AT_ONCE)
        number = tl.load(numbers + span, mask=span < spans, other=0)
        if TOKENS:
            number = number // TOKENS + span
        count += tl.sum(((span < spans) & (number <= most)).to(tl.int32), 0)
    return count - 1


@triton.jit
def items_of(before, spans, tiles):
    """Items of this program: first, and the one after the last. The first `tiles` programs have a row tile each, as
    item 0; after them are the workers."""
    program = tl.program_id(0)
    first, last = program * 0, program * 0 + 1
    if program >= tiles:
        first, last = program - tiles, tl.load(before + spans)
    return first, last


@triton.jit
def _locate(row_starts, before, spans, tiles, item, TOKENS: tl.constexpr):
    """Span, its first row and the one after its last, the first row of the tile (where there is nothing to do, the
    last), and which of the span's splits, or -1: all of them."""
    program = tl.program_id(0)
    if program < tiles:
        tile = tiles - 1 - program  # the rows of a long span that see most come first
        span = _last_of(row_starts, spans, tile, TOKENS)
        span_first, span_last = tl.load(row_starts + span), tl.load(row_starts + span + 1)
        first_row = span_first + (tile - span_first // TOKENS - span) * TOKENS
        if tl.load(before + span + 1) > tl.load(before + span):
            first_row = span_last
        split = item * 0 - 1
    else:
        span = _last_of(before, spans, item, 0)
        span_first, span_last = tl.load(row_starts + span), tl.load(row_starts + span + 1)
        first_row = span_first
        split = item - tl.load(before + span)
    return span, span_first, span_last, first_row, split


@triton.jit
def assigned(
    item,
    row_starts,
    starts,
    before,
    spans,
    tiles,
    bases,
    depths,
    context_lens,
    path_width,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """What a program works on: span, first row, its position, how many tokens, the base of their tree or -1, the first
    key and the one after the last, the same of splits, and whether these are of the list, whose place is `item`."""
    span, span_first, span_last, first_row, listed = _locate(row_starts, before, spans, tiles, item, TOKENS)
    start = tl.load(starts + span) + first_row - span_first
    tokens = tl.minimum(span_last - first_row, TOKENS)
    base, low, high, first_split, last_split = _reach(
        start, tokens, first_row, span, bases, depths, context_lens, path_width, WINDOW, SPLIT
    )
    if not CAUSAL:  # rows see up to their span's end, or as far ahead as back
        high = start + span_last - first_row
        if WINDOW:
            high = tl.minimum(high, start + tokens + WINDOW - 1)
        last_split = tl.cdiv(high, SPLIT)
    last_split = tl.where(tokens > 0, last_split, first_split)
    if listed >= 0:
        first_split += listed
        last_split = first_split + 1
    return span, first_row, start, tokens, base, low, high, first_split, last_split, listed >= 0


class Splits(NamedTuple):
    """The list, and where its items leave what they have. All from shapes, so that a captured launch serves every step.

    Attributes:
        before: [spans + 1] int32, on the device: how many items are of spans before each.
        short: most rows of a span that has any.
        workers: programs that share the items.
        keys: of a split.
        out: [items, short, heads, head_dim] fp32.
        sums: [items, short, heads, 2] fp32, maxima and sums.
    """

    before: torch.Tensor
    short: int
    workers: int
    keys: int
    out: torch.Tensor
    sums: torch.Tensor

    @property
    def step(self) -> int:
        """From one item of a program to its next."""
        return max(1, self.workers)


def most_splits(spans: DeviceSpans, block_size: int, window: int | None, short: int) -> int:
    """Of a short span, by the width of the tables."""
    slots = -(-spans.block_tables.shape[1] * block_size // SPLIT)
    if window is not None:
        deepest = 1 if spans.trees is None else spans.trees.paths.shape[1]
        slots = min(slots, (window + max(short, deepest) - 3) // SPLIT + 2)
    return slots


def list_splits(
    spans: DeviceSpans, block_size: int, window: int | None, short: int, programs: int, heads: int, head_dim: int
) -> Splits:
    """The splits of all spans of at most `short` rows.

    Args:
        programs: that each item is for: one a group of heads.
        short: 0: no span is listed.
    """
    count = len(spans.starts)
    slots = most_splits(spans, block_size, window, short)
    room = min(count * slots, SCRATCH_BYTES // (4 * short * heads * (head_dim + 2))) if slots > 1 and short else 0
    workers = min(room, -(-PROGRAMS // programs))
    before = spans.row_starts.new_zeros(count + 1)
    if workers:
        _list_splits[(1,)](
            spans.row_starts,
            spans.starts,
            before=before,
            spans=count,
            short=short,
            room=room,
            WINDOW=window or 0,
            SPLIT=SPLIT,
            num_warps=4,
            enable_fp_fusion=False,
            **of_trees(spans),
        )
    numbers = room * short * heads
    out, sums = (torch.empty(numbers * width, dtype=torch.float32, device=before.device) for width in (head_dim, 2))
    return Splits(before, short, workers, SPLIT, out, sums)


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
