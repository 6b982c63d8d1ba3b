"""Latent attention over the paged cache, in Triton: see `quire.ops.latent` for what is computed.

Attention is done as `quire.ops.triton.attention` does it, with its splits and merges. A program has some tokens
of one span with all their heads (or, where these are many, with 64 of them), and loads each row of the cache once for
all of them: as a key it is multiplied in two parts, the compressed vector and the rotated key, and the first part,
where it lies, is multiplied once more as the value.

The absorbed form serves every span here, with `deterministic` or without it: to count whether the expanded one is
cheaper would need the lengths of the spans on the host, which a captured step does not know.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.kv_cache import LARGEST, KVCache
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.triton.attention import (
    LOG2_E,
    LOWEST,
    VALUE_UNIT,
    _blocks,
    _finish,
    _merge,
    _place_of,
    _power_of_two,
    merge_splits,
    short_tiles,
    summed,
)
from quire.ops.triton.cache import _quantized
from quire.ops.triton.fp8 import stored_numbers, widen
from quire.ops.triton.rows import inverse_rms, normalized
from quire.ops.triton.splits import Work, assigned, items_of, list_work, of_trees

ROTATED = 1024
"""Numbers that a program of `rotate_interleaved` turns: with 4 warps, 8 a thread."""


def store_latent(
    compressed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    index_keys: torch.Tensor | None = None,
) -> None:
    """See `quire.ops.latent.store_latent`. One launch, a program a row."""
    compressed = compressed.contiguous()
    behind = None if index_keys is None else index_keys.contiguous()
    rows, size = compressed.shape
    width = len(norm)
    block = _power_of_two(max(width, kv.head_dim - width))
    _store_latent[(rows,)](
        *(compressed, norm, eps, *tables, behind, batch.slots, kv.data, kv.scales, layer),
        WIDTH=width,
        ROPE=size - width,
        BEHIND=kv.head_dim - size,
        BLOCK_STRIDE=kv.data.stride(0),
        BLOCK_SIZE=kv.block_size,
        PLANE=kv.data.stride(3),
        LARGEST=LARGEST.get(kv.stored_dtype),
        BLOCK=block,
        num_warps=max(block // 256, 1),
        enable_fp_fusion=False,
    )


def rotate_interleaved(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """See `quire.ops.latent.rotate_interleaved`; each head of x is contiguous."""
    rows, heads, rope = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_interleaved[(rows, -(-heads * rope // ROTATED))](
        *(x, *tables, out),
        STRIDE=x.stride(0),
        HEAD_STRIDE=x.stride(1),
        HEADS=heads,
        ROPE=rope,
        PART=ROTATED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _turned(x, row, i, cos, sin, there, ROPE: tl.constexpr):
    """Numbers i of the vectors of ROPE numbers that begin at x, rotated with their neighbours; fp32."""
    own = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    other = tl.load(x + (i ^ 1), mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + row * (ROPE // 2) + i // 2, mask=there, other=0.0)
    s = tl.load(sin + row * (ROPE // 2) + i // 2, mask=there, other=0.0)
    return own * c + tl.where(i % 2 == 0, -(other * s), other * s)


@triton.jit
def _rotate_interleaved(
    x,
    cos,
    sin,
    out,
    STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    there = column < HEADS * ROPE
    heads = x + row * STRIDE + column // ROPE * HEAD_STRIDE
    turned = _turned(heads, row, column % ROPE, cos, sin, there, ROPE)
    tl.store(out + row * (HEADS * ROPE) + column, turned, mask=there)


@triton.jit(do_not_specialize=["layer"])
def _store_latent(
    compressed,
    norm,
    eps,
    cos,
    sin,
    behind,
    slots,
    numbers,
    scales,
    layer,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLANE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its compressed vector, and its key with what lies behind that, both held as [1, BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = compressed.dtype.element_ty
    start = compressed + row * (WIDTH + ROPE)

    vector = tl.load(start + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = inverse_rms(tl.sum(vector * vector, 1, keep_dims=True), WIDTH, eps)
    vector = normalized(vector, scale, tl.load(norm + i, mask=i < WIDTH, other=0.0)).to(dtype)
    key = _turned(start + WIDTH, row, i, cos, sin, i < ROPE, ROPE).to(dtype)
    if behind is not None:
        in_rest = (i >= ROPE) & (i < ROPE + BEHIND)
        key = tl.where(in_rest, tl.load(behind + row * BEHIND + i - ROPE, mask=in_rest, other=0.0), key)

    slot = tl.load(slots + row)
    plane = slot // BLOCK_SIZE * BLOCK_STRIDE + layer * PLANE
    if scales is not None:
        vector, key, scale = _quantized(vector.to(tl.float32), key.to(tl.float32), LARGEST)
        tl.store(scales + plane // 4 + slot % BLOCK_SIZE + tl.zeros((1, 1), tl.int32), scale)  # they are in bytes
    into = numbers + plane + slot % BLOCK_SIZE * (WIDTH + ROPE + BEHIND) + i
    tl.store(into, vector, mask=i < WIDTH)
    tl.store(into + WIDTH, key, mask=i < ROPE + BEHIND)


@triton.jit
def _weigh(top, total, scores, seen, row_scales, dtype: tl.constexpr):
    """Maxima with a tile's scores, what sums and outputs so far are multiplied by, the sums, and the tile's weights."""
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - highest)
    weights = tl.exp2(scores - highest[:, None])
    total = total * shrink + summed(weights)
    if row_scales is not None:
        weights *= (row_scales * VALUE_UNIT)[None, :]
    return highest, shrink, total, weights.to(dtype)


@triton.jit
def _take_in(
    top,
    total,
    out,
    queries,
    rope_queries,
    numbers,
    scales,
    plane,
    offset,
    there,
    seen,
    scale,
    always,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Merges a key tile into the rows' maxima [ROWS], sums [ROWS] and outputs [ROWS, DIM].

    Its keys are rows `offset` of the planes `plane`, where they are `there` [KEYS]; `seen` is [ROWS, KEYS]. `always` is
    true, but not known when this is compiled.
    """
    dim, rope_dim = tl.arange(0, DIM), tl.arange(0, ROPE_DIM)
    at = (numbers + plane + offset * ROW)[:, None]
    in_keys = there[:, None] & (dim < WIDTH)[None, :]  # all else is 0, whatever lies in memory
    vectors = widen(tl.load(at + dim[None, :], mask=in_keys, other=0.0), queries.dtype)
    in_keys = there[:, None] & (rope_dim < ROPE)[None, :]
    keys = widen(tl.load(at + WIDTH + rope_dim[None, :], mask=in_keys, other=0.0), queries.dtype)

    row_scales, unit = None, scale
    if QUANTIZED:
        row_scales = tl.load(scales + plane // 4 + offset, mask=there, other=0.0)  # the plane is in bytes
        unit = (row_scales * scale)[None, :]
    scores = tl.dot(queries, tl.trans(vectors), input_precision="ieee")  # [ROWS, KEYS]
    # Each is multiplied before they are added: the compiler would make one product of a sum of two.
    scores = scores * unit + tl.dot(rope_queries, tl.trans(keys), input_precision="ieee") * unit
    if top.shape[0] == 16:
        highest, shrink, total, weights = _weigh(top, total, scores, seen, row_scales, vectors.dtype)
    else:
        # Where the compiler sees that a product follows on another, it gives each warp all keys of its rows. There are
        # more warps than 16 rows each, so that some would multiply the same; but it does not look into branches.
        highest, shrink, weights = top, total, tl.full(scores.shape, scale, vectors.dtype)
        if always:
            highest, shrink, total, weights = _weigh(top, total, scores, seen, row_scales, vectors.dtype)
    out = tl.dot(weights, vectors, out * shrink[:, None], input_precision="ieee")
    return highest, total, out


@triton.jit(do_not_specialize=["table_stride", "tiles", "workers", "short", "layer", "path_width"])
def _attend_latent(
    q,
    numbers,
    scales,
    tables,
    records,
    item_count,
    result,
    split_out,
    split_sums,
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
    BLOCK_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """A row tile of GROUP heads with all its splits, or some of the listed ones; programs (see `items_of`, heads).

    Layouts: split_out [items, short, HEADS, WIDTH]; split_sums, of maxima and sums, [items, short, HEADS, 2].
    `scale` contains the factor log2(e), since weights are powers of 2. ROW: numbers of the cache a token.
    """
    TILES_PER_SPLIT: tl.constexpr = SPLIT // KEYS
    first_item, last_item = items_of(item_count, tiles)
    for item in range(first_item, last_item, workers):
        first_row, start, tokens, table_row, base, low, high, first_split, last_split, listed = assigned(
            *(item, records, tiles, bases, depths, context_lens, path_width, 0, True, SPLIT)
        )
        row, dim, rope_dim = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, ROPE_DIM)
        token, head = row // GROUP, tl.program_id(1) * GROUP + row % GROUP
        is_row = (token < tokens) & (head < HEADS)
        in_tile = is_row[:, None] & (dim < WIDTH)[None, :]
        q_at = q + ((first_row + token).to(tl.int64) * HEADS + head) * (WIDTH + ROPE)
        queries = tl.load(q_at[:, None] + dim[None, :], mask=in_tile, other=0.0)
        in_rope = is_row[:, None] & (rope_dim < ROPE)[None, :]
        rope_queries = tl.load(q_at[:, None] + WIDTH + rope_dim[None, :], mask=in_rope, other=0.0)
        position = (start + token)[:, None]
        if paths is not None:
            turns = tl.where(base < 0, 0, tokens)
            depth = tl.load(depths + first_row + token, mask=is_row, other=0)
            position = tl.where(base < 0, start + token, base + depth)[:, None]
        table = tables + table_row.to(tl.int64) * table_stride

        all_top = tl.full((ROWS,), LOWEST, tl.float32)
        all_total = tl.zeros((ROWS,), tl.float32)
        all_out = tl.zeros((ROWS, DIM), tl.float32)
        for split in range(first_split, last_split):
            top = tl.full((ROWS,), LOWEST, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            out = tl.zeros((ROWS, DIM), tl.float32)
            first = split * TILES_PER_SPLIT
            last = tl.minimum(first + TILES_PER_SPLIT, tl.cdiv(high, KEYS))
            if paths is not None:
                beyond = last
                last = tl.where(base < 0, last, tl.minimum(last, base // KEYS))
            # A tile's blocks are looked up one tile ahead: otherwise its rows could not be on their way by then.
            block = _blocks(table, first * KEYS + tl.arange(0, KEYS), low, high, BLOCK_SIZE)
            for key_tile in range(first, last):
                key = key_tile * KEYS + tl.arange(0, KEYS)
                there = key < high
                plane = block.to(tl.int64) * BLOCK_STRIDE + layer * PLANE
                block = _blocks(table, key + KEYS, low, high, BLOCK_SIZE)
                seen = key[None, :] <= position
                top, total, out = _take_in(
                    *(
                        top,
                        total,
                        out,
                        queries,
                        rope_queries,
                        numbers,
                        scales,
                        plane,
                        key % BLOCK_SIZE,
                        there,
                        seen,
                        scale,
                        key_tile < last,
                    ),
                    *(ROW, WIDTH, ROPE, QUANTIZED, DIM, ROPE_DIM),
                )
            if paths is not None:
                for turn in range(turns):
                    path = paths + (first_row + turn).to(tl.int64) * path_width
                    end = base + tl.load(depths + first_row + turn) + 1
                    mine = (token == turn)[:, None]
                    for key_tile in range(tl.maximum(first, base // KEYS), tl.minimum(beyond, tl.cdiv(end, KEYS))):
                        key = key_tile * KEYS + tl.arange(0, KEYS)
                        there = key < end
                        place = _place_of(path, base, key, there)
                        block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0)
                        plane = block.to(tl.int64) * BLOCK_STRIDE + layer * PLANE
                        seen = mine & (key[None, :] <= position)
                        top, total, taken = _take_in(
                            *(
                                top,
                                total,
                                out,
                                queries,
                                rope_queries,
                                numbers,
                                scales,
                                plane,
                                place % BLOCK_SIZE,
                                there,
                            ),
                            *(seen, scale, turn < turns, ROW, WIDTH, ROPE, QUANTIZED, DIM, ROPE_DIM),
                        )
                        out = tl.where(mine, taken, out)  # a number that is not finite, times 0, is not 0
            if listed:
                slot = (item * short + token) * HEADS + head
                tl.store(split_out + slot[:, None] * WIDTH + dim[None, :], out, mask=in_tile)
                tl.store(split_sums + slot * 2, top, mask=is_row)
                tl.store(split_sums + slot * 2 + 1, total, mask=is_row)
            else:
                all_top, all_total, all_out = _merge(all_top, all_total, all_out, top, total, out)
        if not listed:
            at = ((first_row + token).to(tl.int64) * HEADS + head) * WIDTH
            tl.store(result + at[:, None] + dim[None, :], _finish(all_total, all_out, QUANTIZED), mask=in_tile)


class _Tile(NamedTuple):
    """What a program works on at a time. Keys change bits; rows (tokens times heads), warps and stages do not."""

    rows: int
    keys: int
    warps: int
    stages: int


class _Plan(NamedTuple):
    """How a step's attention is launched. All from shapes, so that a captured launch serves every step of its shape.

    Attributes:
        tile: what a program works on at a time.
        group: heads of a row tile.
        work: which program does what.
    """

    tile: _Tile
    group: int
    work: Work


def _make_plan(q: torch.Tensor, kv: KVCache, spans: DeviceSpans, width: int) -> _Plan:
    tokens, heads, _ = q.shape
    tile = _tile(q, -(-tokens // len(spans.starts)) * heads, short_tiles(q, kv))
    group = min(heads, tile.rows)
    groups = -(-heads // group)
    work = list_work(spans, tokens, tile.rows // group, kv.block_size, None, groups, heads, width)
    return _Plan(tile, group, work)


def _tile(q: torch.Tensor, rows_per_span: int, short: bool) -> _Tile:
    """Of the same keys for all steps, whatever they hold, on one device in one data type.

    Sums of products have one order, whatever the rows and their instruction, where there are `short_tiles`. Two
    programs of 16 rows fit a multiprocessor of a large GPU, and read 16 heads' keys at two thirds of the memory's rate.
    The sums of 64 rows of 512 numbers are 128 registers of each thread of 8 warps, half of what there is; their totals
    lie in local memory, and are read and written once a split. They and three tiles of 32 keys take 200 KiB on a large
    GPU, and 148 on one of compute capability 8.0. Consumer cards have 99, which is enough for 32 rows and two tiles.
    """
    if q.element_size() == 4:  # no matrix instructions: this is for models in fp32, which are tests
        return _Tile(rows=16, keys=16, warps=4, stages=2)
    if short and rows_per_span <= 16:
        return _Tile(rows=16, keys=32, warps=4, stages=3)
    if _shared_memory(q.device) < 160 * 1024:
        return _Tile(rows=32, keys=32, warps=8, stages=2)
    return _Tile(rows=64, keys=32, warps=8, stages=3)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; where there is no GPU, those of a large one."""
    if device.type != "cuda":
        return 227 * 1024
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def attend_latent(
    q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
) -> torch.Tensor:
    """See `quire.ops.latent.latent_attention`; reads `batch.spans`. Rows of padding are not written.

    A row's bits depend on its request alone, with `deterministic` or without it.

    Raises ValueError where the batch's spans are not on the device.
    """
    spans = batch.spans
    if spans is None:
        raise ValueError("this batch's spans are not on the device")
    q = q.contiguous()
    tokens, heads, size = q.shape
    key = ("triton latent attention", q.shape, q.dtype, kv.scales is None, width)
    plan = batch.once(key, lambda: _make_plan(q, kv, spans, width))
    work, groups = plan.work, -(-heads // plan.group)
    result = q.new_empty(tokens, heads, width)
    shape: dict[str, Any] = {
        "QUANTIZED": kv.scales is not None,
        "DIM": max(16, _power_of_two(width)),
        "enable_fp_fusion": False,  # both kernels merge, and must agree
    }
    _attend_latent[(work.tiles + work.workers, groups)](
        q,
        stored_numbers(kv),
        kv.scales,
        spans.block_tables,
        work.records,
        work.item_count,
        result,
        work.out,
        work.sums,
        paths=spans.trees and spans.trees.paths,
        table_stride=spans.block_tables.stride(0),
        tiles=work.tiles,
        workers=work.step,
        short=work.short,
        layer=layer,
        scale=scale * LOG2_E,
        BLOCK_STRIDE=kv.data.stride(0),
        HEADS=heads,
        GROUP=plan.group,
        PLANE=kv.data.stride(3),
        BLOCK_SIZE=kv.block_size,
        ROW=kv.head_dim,
        WIDTH=width,
        ROPE=size - width,
        SPLIT=work.keys,
        ROWS=plan.tile.rows,
        KEYS=plan.tile.keys,
        ROPE_DIM=max(16, _power_of_two(size - width)),
        num_warps=plan.tile.warps,
        num_stages=plan.tile.stages,
        **of_trees(spans),
        **shape,
    )
    merge_splits(work, heads, result, None, HEAD_DIM=width, **shape)
    return result
