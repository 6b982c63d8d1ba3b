"""Attention over the paged cache for any mixture of spans: one launch, and a merge where splits lie side by side.

A program computes one *row tile*: some tokens of one span, each with all query heads that share a KV head. It walks
over the keys in *key tiles* of constant size at constant absolute positions, with a running maximum, sum and output in
fp32 (https://arxiv.org/abs/2205.14135). Every `SPLIT` keys these are merged into the rows' totals and start afresh.

So the splits of a short span can as well be taken by several programs (`splits.py`), which store what they have, and
`_merge_splits` merges it, in the same order and with the same arithmetic (the idea is that of
https://pytorch.org/blog/flash-decoding). Which way a row goes changes none of its bits. Neither does what else is in
its tile: a key tile or a split that it does not see leaves its numbers as they are (but for the sign of a zero, which
the last addition settles), and no product, sum or maximum mixes rows.

Rows of a tree see the same keys up to the tree's base. A program takes the key tiles before it as ever; from there on
it takes them once a token, with the keys of that token's path, which only the token's rows see.

Quantized keys and values are multiplied as codes, which bf16 and fp16 hold exactly. A key's scale then multiplies
its scores, and a value's scale the softmax's weights, before these are rounded to the queries' data type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.kv_cache import KVCache
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.triton.fp8 import stored_numbers, widen
from quire.ops.triton.linear_dense import one_instruction
from quire.ops.triton.splits import RECORD, Work, assigned, items_of, list_work, of_trees

TILE_BYTES = 1 << 14
"""Of a tile's keys, and of its values: with three in flight, they fit the 99 KiB of a consumer card's
multiprocessor."""

LOWEST = tl.constexpr(-1e30)
"""Stands for "nothing seen yet" in a running maximum: finite, so that differences are never NaN."""

VALUE_UNIT = tl.constexpr(64.0)
"""Weights times value scales are kept this much larger, so that fp16 holds them as well as it would hold values.
A value scale of fp16 numbers is at most 65504 / 127, so they stay finite."""

MERGED_AT_ONCE = 8
"""Splits whose loads are under way together when they are merged, and most tokens of a program that does so."""

LOG2_E = 1.4426950408889634
LOG2 = tl.constexpr(LOG2_E)


@triton.jit
def _place_of(path, base, key, there):
    """Positions at which a tree's request has the keys [keys] of a path: those from the base on lie in its slots."""
    slot = tl.load(path + key - base, mask=there & (key >= base), other=0)
    return tl.where(key >= base, base + slot, key)


@triton.jit
def summed(weights):
    """The sums of weights [ROWS, KEYS] from 0 to 1, or a rounding more, added up as multiples of 2^-22, in any order.

    The largest of a split's weights is 1, or was until a larger one made all before it less: what is lost is less than
    2^-23 of it a key, and so less than a thirtieth of what rounding weights to bf16 changes.
    """
    wholes = (weights + 2.0).to(tl.int32, bitcast=True)  # 2^30 more; KEYS of them, a multiple of 4, are 0 modulo 2^32
    return tl.sum(wholes, 1).to(tl.float32) * 2.384185791015625e-07


@triton.jit
def _merge(top, total, out, other_top, other_total, other_out):
    """The softmax over two sets of keys, from each one's maximum [rows], sum [rows] and output [rows, dim]."""
    highest = tl.maximum(top, other_top)
    shrink = tl.exp2(top - highest)
    other_shrink = tl.exp2(other_top - highest)
    total = total * shrink + other_total * other_shrink
    out = out * shrink[:, None] + other_out * other_shrink[:, None]
    return highest, total, out


@triton.jit
def _nothing(like):
    """Maxima [ROWS], sums [ROWS] and outputs of no keys, for outputs like those [ROWS, DIM] that are there."""
    top = tl.full((like.shape[0],), LOWEST, tl.float32)
    return top, tl.zeros_like(top), tl.zeros_like(like)


@triton.jit
def _finish(total, out, QUANTIZED: tl.constexpr):
    """Outputs over sums. Adding 0 makes -0, which splits that a row does not see may turn into 0, always 0."""
    if QUANTIZED:
        total = total * VALUE_UNIT
    return out / total[:, None] + 0.0


@triton.jit
def _blocks(table, key, low, high, BLOCK_SIZE: tl.constexpr):
    """The blocks of keys [keys]; the null block for those that no row sees."""
    return tl.load(table + key // BLOCK_SIZE, mask=(key >= low) & (key < high), other=0)


@triton.jit
def _look_at(
    queries,
    numbers,
    scales,
    plane,
    offset,
    there,
    HEAD_DIM: tl.constexpr,
    PLANE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DIM: tl.constexpr,
):
    """Scores [ROWS, KEYS] of a key tile, its values [KEYS, DIM], and the scales [KEYS] of these where QUANTIZED.

    Its keys are rows `offset` of the planes `plane`, where they are `there` [KEYS].
    """
    dim = tl.arange(0, DIM)
    at = numbers + (plane + offset * HEAD_DIM)[:, None] + dim[None, :]
    in_keys = there[:, None] & (dim < HEAD_DIM)[None, :]  # all else is 0, whatever lies in memory
    k = widen(tl.load(at, mask=in_keys, other=0.0), queries.dtype)
    v = widen(tl.load(at + PLANE, mask=in_keys, other=0.0), queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
    value_scales = 1.0
    if QUANTIZED:
        scale_at = scales + plane // 4 + offset  # BLOCK_STRIDE and PLANE are in bytes
        scores *= tl.load(scale_at, mask=there, other=0.0)[None, :]
        value_scales = tl.load(scale_at + PLANE // 4, mask=there, other=0.0) * VALUE_UNIT
    return scores, v, value_scales


@triton.jit
def _take_in(top, total, out, scores, v, value_scales, scale, QUANTIZED: tl.constexpr):
    """Merges a key tile into the rows' maxima [ROWS], sums [ROWS] and outputs [ROWS, DIM]; -inf is not seen."""
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -highest[:, None]))
    shrink = tl.exp2(top - highest)
    total = total * shrink + summed(weights)
    if QUANTIZED:
        weights *= value_scales[None, :]
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return highest, total, out


@triton.jit
def _within(key, position, high, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether rows at positions [ROWS, 1] see keys [1, KEYS], of which there are `high`."""
    if CAUSAL:
        seen = key <= position
        if WINDOW:
            seen &= key > position - WINDOW
    else:
        seen = (key < high) & (position >= 0)
        if WINDOW:
            seen &= (key > position - WINDOW) & (key < position + WINDOW)
    return seen


@triton.jit
def _begin(sinks, head):
    """Maximum and sum of rows of the query heads `head` before their first split: those of the sinks, if any."""
    top = tl.full(head.shape, LOWEST, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if sinks is not None:
        top, total = tl.load(sinks + head) * LOG2, total + 1.0
    return top, total


@triton.jit
def _attend_tile(
    q,
    numbers,
    scales,
    tables,
    result,
    split_out,
    split_sums,
    sinks,
    depths,
    paths,
    path_width,
    table_stride,
    short,
    layer,
    scale,
    item,
    kv_head,
    assignment,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """A row tile, or one of its splits, as `assigned` says; of at most ROWS tokens times heads."""
    first_row, start, tokens, table_row, base, low, high, first_split, last_split, listed = assignment
    TILES_PER_SPLIT: tl.constexpr = SPLIT // KEYS
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_row = token < tokens
    in_tile = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = (first_row + token).to(tl.int64) * Q_STRIDE + head * Q_HEAD_STRIDE
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=in_tile, other=0.0)
    position = (start + token)[:, None]
    if paths is not None:
        depth = tl.load(depths + first_row + token, mask=is_row, other=0)
        position = tl.where(base < 0, start + token, base + depth)[:, None]
    table = tables + table_row.to(tl.int64) * table_stride

    all_top, all_total = _begin(sinks, head)
    all_out = tl.zeros((ROWS, DIM), tl.float32)
    top, total, out = _nothing(all_out)
    first = tl.maximum(first_split * TILES_PER_SPLIT, low // KEYS)
    last = tl.minimum(last_split * TILES_PER_SPLIT, tl.cdiv(high, KEYS))
    if paths is not None:
        last = tl.where(base < 0, last, tl.minimum(last, base // KEYS))
    whole = 0 if WINDOW else (start + 1 if CAUSAL else high) // KEYS  # up to which all rows see all keys
    if paths is not None and not WINDOW:
        whole = tl.where(base < 0, whole, last)
    # A tile's blocks are looked up one tile ahead: otherwise its keys could not be on their way by then.
    block = _blocks(table, first * KEYS + tl.arange(0, KEYS), low, high, BLOCK_SIZE)
    for key_tile in range(first, last):
        key = key_tile * KEYS + tl.arange(0, KEYS)
        there = (key >= low) & (key < high)
        plane = block.to(tl.int64) * BLOCK_STRIDE + (layer * KV_HEADS + kv_head) * 2 * PLANE
        block = _blocks(table, key + KEYS, low, high, BLOCK_SIZE)
        scores, v, value_scales = _look_at(
            *(queries, numbers, scales, plane, key % BLOCK_SIZE, there, HEAD_DIM, PLANE, QUANTIZED, DIM)
        )
        # In one loop, since a split's first keys are on their way during the one before. And here, since the last
        # product is awaited with this one: used before that, it would be awaited at once, by itself.
        if key_tile % TILES_PER_SPLIT == 0 and not listed:
            all_top, all_total, all_out = _merge(all_top, all_total, all_out, top, total, out)
            top, total, out = _nothing(all_out)
        if key_tile >= whole:
            seen = _within(key[None, :], position, high, WINDOW, CAUSAL)
            scores = tl.where(seen, scores, float("-inf"))
        top, total, out = _take_in(top, total, out, scores, v, value_scales, scale, QUANTIZED)
    if paths is not None:
        first_tree = tl.where(base < 0, last_split, tl.maximum(first_split, base // SPLIT))
        if last % TILES_PER_SPLIT == 0 and not listed:  # the tree begins a split
            all_top, all_total, all_out = _merge(all_top, all_total, all_out, top, total, out)
            top, total, out = _nothing(all_out)
        for split in range(first_tree, last_split):
            for turn in range(tokens):
                path = paths + (first_row + turn).to(tl.int64) * path_width
                end = base + tl.load(depths + first_row + turn) + 1
                mine = (token == turn)[:, None]
                begin = tl.maximum(split * TILES_PER_SPLIT, tl.maximum(low, base) // KEYS)
                for key_tile in range(begin, tl.minimum((split + 1) * TILES_PER_SPLIT, tl.cdiv(end, KEYS))):
                    key = key_tile * KEYS + tl.arange(0, KEYS)
                    there = (key >= low) & (key < end)
                    place = _place_of(path, base, key, there)
                    block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0)
                    plane = block.to(tl.int64) * BLOCK_STRIDE + (layer * KV_HEADS + kv_head) * 2 * PLANE
                    seen = mine & (key[None, :] <= position)
                    if WINDOW:
                        seen &= key[None, :] > position - WINDOW
                    scores, v, value_scales = _look_at(
                        *(queries, numbers, scales, plane, place % BLOCK_SIZE, there),
                        *(HEAD_DIM, PLANE, QUANTIZED, DIM),
                    )
                    scores = tl.where(seen, scores, float("-inf"))
                    top, total, taken = _take_in(top, total, out, scores, v, value_scales, scale, QUANTIZED)
                    out = tl.where(mine, taken, out)  # a number that is not finite, times 0, is not 0
            if not listed:
                all_top, all_total, all_out = _merge(all_top, all_total, all_out, top, total, out)
                top, total, out = _nothing(all_out)
    if listed:
        slot = (item * short + token) * (KV_HEADS * GROUP) + head
        tl.store(split_out + slot[:, None] * HEAD_DIM + dim[None, :], out, mask=in_tile)
        tl.store(split_sums + slot * 2, top, mask=is_row)
        tl.store(split_sums + slot * 2 + 1, total, mask=is_row)
    else:
        all_top, all_total, all_out = _merge(all_top, all_total, all_out, top, total, out)
        at = (first_row + token).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
        tl.store(result + at[:, None] + dim[None, :], _finish(all_total, all_out, QUANTIZED), mask=in_tile)


@triton.jit(do_not_specialize=["table_stride", "tiles", "workers", "short", "layer", "path_width"])
def _attend(
    q,
    numbers,
    scales,
    tables,
    records,
    item_count,
    result,
    split_out,
    split_sums,
    sinks,
    bases,
    depths,
    paths,
    context_lens,
    path_width,
    table_stride,
    tiles,
    workers,
    short,
    layer,
    scale,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    LEAST: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """A row tile of one KV head with all its splits, or some of the listed splits; programs (see `items_of`, KV head).

    A tile that has no more rows (tokens times heads) than LEAST is computed as one of so many. Layouts: split_out
    [items, short, heads, HEAD_DIM]; split_sums, of maxima and sums, [items, short, heads, 2]. `scale` contains the
    factor log2(e), since weights are powers of 2.
    """
    kv_head = tl.program_id(1)
    first_item, last_item = items_of(item_count, tiles)
    for item in range(first_item, last_item, workers):
        assignment = assigned(*(item, records, tiles, bases, depths, context_lens, path_width, WINDOW, CAUSAL, SPLIT))
        if LEAST < ROWS and assignment[2] * GROUP <= LEAST:
            _attend_tile(
                *(q, numbers, scales, tables, result, split_out, split_sums, sinks, depths, paths, path_width),
                *(table_stride, short, layer, scale, item, kv_head, assignment, Q_STRIDE, Q_HEAD_STRIDE, BLOCK_STRIDE),
                *(KV_HEADS, GROUP, PLANE, BLOCK_SIZE, HEAD_DIM, WINDOW, CAUSAL, QUANTIZED, SPLIT, LEAST, KEYS, DIM),
            )
        else:
            _attend_tile(
                *(q, numbers, scales, tables, result, split_out, split_sums, sinks, depths, paths, path_width),
                *(table_stride, short, layer, scale, item, kv_head, assignment, Q_STRIDE, Q_HEAD_STRIDE, BLOCK_STRIDE),
                *(KV_HEADS, GROUP, PLANE, BLOCK_SIZE, HEAD_DIM, WINDOW, CAUSAL, QUANTIZED, SPLIT, ROWS, KEYS, DIM),
            )


@triton.jit(do_not_specialize=["short"])
def _merge_splits(
    split_out,
    split_sums,
    records,
    result,
    sinks,
    short,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """TOKENS tokens of a tile whose splits are listed, one head; programs (tile, head, tokens of the tile)."""
    head = tl.program_id(1)
    record = records + tl.program_id(0) * RECORD
    first_row, tokens, first_item, items = (
        tl.load(record),
        tl.load(record + 2),
        tl.load(record + 6),
        tl.load(record + 7),
    )
    if (first_item < 0) | (tl.program_id(2) * TOKENS >= tokens):
        return

    token, dim = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    is_row = token < tokens
    in_tile = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    top, total = _begin(sinks, head + token * 0)
    out = tl.zeros((TOKENS, DIM), tl.float32)
    for first in range(0, items, AT_ONCE):
        # Written out, so that all their loads are under way together; a split beyond the last changes nothing.
        for split in tl.static_range(AT_ONCE):
            there = is_row & (first + split + token * 0 < items)
            slot = ((first_item + first + split) * short + token) * HEADS + head
            at = split_out + slot[:, None] * HEAD_DIM + dim[None, :]
            other_out = tl.load(at, mask=there[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            other_top = tl.load(split_sums + slot * 2, mask=there, other=LOWEST)
            other_total = tl.load(split_sums + slot * 2 + 1, mask=there, other=0.0)
            top, total, out = _merge(top, total, out, other_top, other_total, other_out)
    at = ((first_row + token).to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(result + at[:, None] + dim[None, :], _finish(total, out, QUANTIZED), mask=in_tile)


class _Plan(NamedTuple):
    """How a step's attention is launched. All from shapes, so that a captured launch serves every step of its shape.

    Attributes:
        rows, keys, dim: of a row tile (tokens times group), of a key tile, and of a head, padded: powers of two.
        least: rows of a tile that has no more.
        warps, stages: of a program, and how many key tiles it has in flight.
        work: which program does what.
    """

    rows: int
    least: int
    keys: int
    dim: int
    warps: int
    stages: int
    work: Work


def _make_plan(q: torch.Tensor, kv: KVCache, spans: DeviceSpans, window: int | None, causal: bool = True) -> _Plan:
    tokens, heads, head_dim = q.shape
    group = heads // kv.kv_heads
    dim = max(16, _power_of_two(head_dim))
    head_bytes = dim * q.element_size()
    most, least = _row_tiles(group, short_tiles(q, kv))
    rows = least if tokens == len(spans.starts) else most
    return _Plan(
        rows=rows,
        least=least,
        keys=min(64, max(16, TILE_BYTES // head_bytes)),
        dim=dim,
        warps=8 if rows * max(head_bytes, 256) > 64 * 256 else 4,  # the sums of 16 rows of 128 numbers fill a warp
        stages=max(1, min(3 if rows < 64 else 2, 1024 // head_bytes)),
        work=list_work(
            *(spans, tokens, rows // group, kv.block_size, window, kv.kv_heads, heads, head_dim),
            side_by_side=causal,
        ),
    )


def _row_tiles(group: int, short: bool) -> tuple[int, int]:
    """Most and fewest rows (tokens times group) of a tile; `short`: see `short_tiles`.

    64 are the fewest of the fast instruction of compute capability 9.0, and what prompts take. 16 do for decodes, which
    memory bounds: fewer of them are padding.
    """
    fewest = _power_of_two(group)
    return max(64, fewest), max(16 if short else 64, fewest)


def short_tiles(q: torch.Tensor, kv: KVCache) -> bool:
    """Whether few rows may have tiles of 16, whose instruction must give the bits of the one for many rows.

    It does where both sum alike (see `linear_dense`), and get their inputs in one order. Of numbers that are widened
    from 8 bits in registers `mma.sync` gets them in another one: Triton then chooses a larger K width.
    """
    return kv.scales is None and one_instruction(q.device)


def _power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


def attend(
    q: torch.Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """See `Kernels.attend`; reads `batch.spans`. Rows of padding are not written.

    A row's bits depend on its request alone.

    Args:
        q: [tokens, heads, head_dim], each head contiguous.

    Returns:
        [tokens, heads * head_dim] in q's data type.
    """
    spans = batch.spans
    if spans is None:
        raise ValueError("this batch's spans are not on the device")
    tokens, heads, head_dim = q.shape
    key = ("triton attention", q.shape, q.dtype, kv.kv_heads, kv.scales is None, window, causal)
    plan = batch.once(key, lambda: _make_plan(q, kv, spans, window, causal))
    work = plan.work
    result = q.new_empty(tokens, heads * head_dim)
    shape: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "QUANTIZED": kv.scales is not None,
        "DIM": plan.dim,
        "enable_fp_fusion": False,  # both kernels merge, and must agree
    }
    _attend[(work.tiles + work.workers, kv.kv_heads)](
        q,
        stored_numbers(kv),
        kv.scales,
        spans.block_tables,
        work.records,
        work.item_count,
        result,
        work.out,
        work.sums,
        sinks,
        paths=spans.trees and spans.trees.paths,
        table_stride=spans.block_tables.stride(0),
        tiles=work.tiles,
        workers=work.step,
        short=work.short,
        layer=layer,
        scale=scale * LOG2_E,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        BLOCK_STRIDE=kv.numbers.stride(0),
        KV_HEADS=kv.kv_heads,
        GROUP=heads // kv.kv_heads,
        PLANE=kv.numbers.stride(3),
        BLOCK_SIZE=kv.block_size,
        WINDOW=window or 0,
        CAUSAL=causal,
        SPLIT=work.keys,
        ROWS=plan.rows,
        LEAST=plan.least,
        KEYS=plan.keys,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **of_trees(spans),
        **shape,
    )
    merge_splits(work, heads, result, sinks, **shape)
    return result


def merge_splits(work: Work, heads: int, result: torch.Tensor, sinks: torch.Tensor | None, **shape: Any) -> None:
    """Writes the rows of `result` whose splits are listed; `shape`: the other arguments of `_merge_splits`."""
    if work.workers:
        tokens = min(MERGED_AT_ONCE, _power_of_two(work.short))
        _merge_splits[(work.tiles, heads, -(-work.short // tokens))](
            *(work.out, work.sums, work.records, result, sinks, work.short),
            HEADS=heads,
            TOKENS=tokens,
            AT_ONCE=MERGED_AT_ONCE,
            num_warps=1 if tokens * shape["DIM"] <= 256 else 4,
            **shape,
        )
