"""Sparse attention in Triton: see `quire.ops.sparse` for what is computed.

Three kernels choose, of some rows at a time, as many as there is memory for scores: a program scores some keys of one
row, all of its heads at once; one finds a row's best, by a histogram of one byte of their scores after the other, the
highest first; and attention goes along what was chosen as it goes along the path of a row of a tree, whose root is the
cache's first token. All rows choose: one that sees no more than `top` positions has them all, without a score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.kv_cache import KVCache
from quire.ops.ragged import DeviceSpans, DeviceTrees, RaggedBatch
from quire.ops.sparse import SCORE_BYTES, Choice
from quire.ops.triton.fp8 import stored_numbers, widen
from quire.ops.triton.latent import attend_latent

KEYS = 64
"""Keys a tile. Does not change bits: a score is a key's own."""

PART = 512
"""Keys of a program that scores. Does not change bits."""

MOST_HEADS = 64
"""Heads of a product, at most; more are added by the next."""

TAKEN = 1024
"""Scores that a program which chooses looks at, at a time."""


def choose(q: torch.Tensor, weights: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, choice: Choice) -> None:
    """See `quire.ops.sparse.choose`; reads `batch.spans`. Rows of padding get any slots.

    Raises ValueError where the batch's spans are not on the device.
    """
    spans = _spans(batch)
    q, weights = q.contiguous(), weights.contiguous()
    rows, heads, width = q.shape
    table_rows = batch.once("table row of each row", lambda: _table_rows(spans, rows))
    tables, most = spans.block_tables, spans.block_tables.shape[1] * kv.block_size
    at_once = min(rows, max(1, SCORE_BYTES // (4 * most)))
    scores = torch.empty(at_once, most, dtype=torch.float32, device=q.device)
    group = max(16, min(MOST_HEADS, triton.next_power_of_2(heads)))
    where = tables, table_rows, batch.positions
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        _score[(count, -(-most // PART))](
            *(q, weights, stored_numbers(kv), kv.scales, *where, scores, first, tables.stride(0), layer),
            BLOCK_STRIDE=kv.data.stride(0),
            PLANE=kv.data.stride(3),
            BLOCK_SIZE=kv.block_size,
            ROW=kv.head_dim,
            WIDTH=width,
            HEADS=heads,
            TOP=choice.top,
            MOST=most,
            GROUP=group,
            DIM=max(16, triton.next_power_of_2(width)),
            KEYS=KEYS,
            PART=PART,
            num_warps=4,
            enable_fp_fusion=False,
        )
        _choose[(count,)](
            *(scores, *where, choice.slots, first, tables.stride(0)),
            BLOCK_SIZE=kv.block_size,
            TOP=choice.top,
            MOST=most,
            TAKEN=TAKEN,
            num_warps=4,
        )


def attend_chosen(
    q: torch.Tensor, choice: Choice, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
) -> torch.Tensor:
    """See `quire.ops.sparse.attend`. Rows of padding are not written."""
    paths = batch.once(("paths", choice.top, kv.num_blocks), lambda: _as_paths(choice, kv, batch))
    return attend_latent(q, kv, paths, layer, scale, width)


def _spans(batch: RaggedBatch) -> DeviceSpans:
    if batch.spans is None:
        raise ValueError("this batch's spans are not on the device")
    return batch.spans


def _table_rows(spans: DeviceSpans, rows: int) -> torch.Tensor:
    """[rows] int32: the row of the block tables that belongs to each row of the step; of padding, any."""
    row = torch.arange(rows, dtype=torch.int32, device=spans.starts.device)
    span = torch.searchsorted(spans.row_starts[1:], row, right=True)
    return spans.table_rows.index_select(0, span.clamp_(max=len(spans.starts) - 1))


def _as_paths(choice: Choice, kv: KVCache, batch: RaggedBatch) -> RaggedBatch:
    """Each row as a span of its own, of one row of a tree; its table has every block in its place, so that a place in a
    path is a slot."""
    spans, positions = _spans(batch), batch.positions
    row = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    row_starts = torch.minimum(row, spans.row_starts[-1:])
    last = positions.clamp(max=choice.top - 1).to(torch.int32)
    root = torch.zeros_like(last)
    depths = torch.where(row[:-1] < spans.row_starts[-1:], last, -1)
    blocks = torch.arange(kv.num_blocks, dtype=torch.int32, device=positions.device).unsqueeze(0)
    paths = DeviceSpans(row_starts, last, last + 1, root, blocks, DeviceTrees(root, depths, choice.slots))
    return RaggedBatch(batch.token_ids, positions, batch.slots, [], [], blocks[:0], kv.block_size, paths)


@triton.jit(do_not_specialize=["first", "table_stride", "layer"])
def _score(
    q,
    weights,
    numbers,
    scales,
    tables,
    table_rows,
    positions,
    scores,
    first,
    table_stride,
    layer,
    BLOCK_STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
):
    """Scores of PART keys of one row, whose keys' index keys are the last WIDTH numbers of rows of ROW."""
    row = (first + tl.program_id(0)).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    begin = tl.program_id(1) * PART
    if position < TOP:  # it sees all
        return
    if begin > position:
        return
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    head, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    for group in tl.static_range(0, HEADS, GROUP):
        if group > 0:
            tl.debug_barrier()  # what one thread has stored of a score, another adds to
        there = group + head < HEADS
        at = row * HEADS + group + head
        in_queries = there[:, None] & (dim < WIDTH)[None, :]
        queries = tl.load(q + at[:, None] * WIDTH + dim[None, :], mask=in_queries, other=0.0)
        factors = tl.load(weights + at, mask=there, other=0.0)
        for key_tile in range(begin // KEYS, tl.minimum((begin + PART) // KEYS, position // KEYS + 1)):
            key = key_tile * KEYS + tl.arange(0, KEYS)
            seen = key <= position
            block = tl.load(table + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            plane = block * BLOCK_STRIDE + layer * PLANE
            offset = key % BLOCK_SIZE
            index_key = numbers + plane + offset * ROW + (ROW - WIDTH)
            in_keys = seen[:, None] & (dim < WIDTH)[None, :]  # all else is 0, whatever lies in memory
            keys = widen(tl.load(index_key[:, None] + dim[None, :], mask=in_keys, other=0.0), queries.dtype)
            products = tl.dot(queries, tl.trans(keys), input_precision="ieee")  # [GROUP, KEYS]
            products = tl.where(products < 0, 0.0, products)  # a number that is none stays
            score = tl.sum(products * factors[:, None], 0)
            if scales is not None:
                score *= tl.load(scales + plane // 4 + offset, mask=seen, other=0.0)  # the plane is in bytes
            into = scores + tl.program_id(0).to(tl.int64) * MOST + key
            if group > 0:
                score += tl.load(into, mask=seen, other=0.0)
            tl.store(into, score, mask=seen)


@triton.jit
def _ranks(scores, position, seen):
    """Whole numbers without a sign in the order of scores. There is one 0: equal scores are, whatever their sign."""
    bits = (tl.load(scores + position, mask=seen, other=0.0) + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _slots_of(table, position, there, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + position // BLOCK_SIZE, mask=there, other=0) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit(do_not_specialize=["first", "table_stride"])
def _choose(
    scores,
    tables,
    table_rows,
    positions,
    slots,
    first,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    TAKEN: tl.constexpr,
):
    """One row's slots: the TOP best, ascending; of equal ones the lowest position. Where there are no more, all."""
    row = (first + tl.program_id(0)).to(tl.int64)
    count = tl.load(positions + row).to(tl.int32) + 1
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    own = scores + tl.program_id(0).to(tl.int64) * MOST
    into = slots + row * TOP
    i = tl.arange(0, TAKEN)
    if count <= TOP:
        for start in range(0, count, TAKEN):
            position = start + i
            seen = position < count
            tl.store(into + position, _slots_of(table, position, seen, BLOCK_SIZE), mask=seen)
        return
    lowest = tl.zeros((1,), tl.uint32)  # of those that are taken, byte by byte
    wanted = tl.full((1,), TOP, tl.int32)  # of those that have its bytes so far
    digit = tl.arange(0, 256)
    for byte in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, TAKEN):
            position = start + i
            rank = _ranks(own, position, position < count)
            same = position < count
            if byte > 0:
                same = same & (rank >> (32 - 8 * byte) == lowest >> (32 - 8 * byte))
            counts += tl.histogram((rank >> (24 - 8 * byte) & 255).to(tl.int32), 256, mask=same)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # how many have a higher one
        it = (above < wanted) & (above + counts >= wanted)
        lowest += tl.sum(tl.where(it, digit, 0), 0).to(tl.uint32) << (24 - 8 * byte)
        wanted -= tl.sum(tl.where(it, above, 0), 0)
    taken = count * 0
    ties = count * 0
    for start in range(0, count, TAKEN):
        position = start + i
        seen = position < count
        rank = _ranks(own, position, seen)
        equal = seen & (rank == lowest)
        take = seen & ((rank > lowest) | (equal & (ties + tl.cumsum(equal.to(tl.int32), 0) <= wanted)))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(into + place, _slots_of(table, position, take, BLOCK_SIZE), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        ties += tl.sum(equal.to(tl.int32), 0)
