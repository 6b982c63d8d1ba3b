"""The gated delta rule over rows and states in blocks, in Triton: see `quire.ops.states` for what is computed.

Three launches: rows are convolved and normalized, a head of a row each; each program of the rule has some columns of
one head of one span, and goes through its tiles with the state in registers; heads of rows are normed and gated. A
tile's corrections depend on one another, so they are made one row after the other, each a sum over all rows of the
tile in which those that are not before it count as 0: no bit depends on where a span begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.ragged import RaggedBatch
from quire.ops.states import L2_EPS, TILE, DeltaNetWeights, StateCache, check_batch
from quire.ops.triton.rows import inverse_rms

ROWS, EPS = tl.constexpr(TILE), tl.constexpr(L2_EPS)

COLUMNS = 16
"""Columns of a state that a program has: with a key_dim of 128 and 8 warps, 8 numbers a thread; more are spilled."""


def delta_net(
    x: torch.Tensor, ab: torch.Tensor, weights: DeltaNetWeights, cache: StateCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """See `quire.ops.states.delta_net`. Rows of padding are 0.

    Raises:
        ValueError: what is given does not fit the cache, or the batch has trees.
    """
    check_batch(x, ab, cache, batch, layer)
    spans = batch.spans
    if spans is None or spans.trees is not None:
        raise ValueError("kernels of a GPU need a step's spans on the device, and recurrent layers none in trees")
    shape, tokens, count = cache.states_shape, len(x), len(spans.starts)
    columns = shape.heads * shape.value_dim
    x, ab = x.contiguous(), ab.contiguous()
    mixed = torch.empty(tokens, shape.channels, dtype=torch.float32, device=x.device)
    results = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    states, keys, updates, decays, inputs = (view[:, layer] for view in cache.views)
    where = spans.row_starts, spans.starts, spans.table_rows, spans.block_tables, count, spans.block_tables.stride(0)
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "HEADS": shape.heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_BLOCK": triton.next_power_of_2(shape.key_dim),
        "BLOCK_SIZE": cache.block_size,
        "enable_fp_fusion": False,
    }
    _mix[(tokens, 2 * shape.key_heads + shape.heads)](
        *(x, weights.conv, batch.slots, *where, inputs, keys, mixed),
        TAPS=shape.taps,
        SPANS=triton.next_power_of_2(count),
        DIM=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        INPUTS_STRIDE=inputs.stride(0),
        KEYS_STRIDE=keys.stride(0),
        num_warps=4,
        **sizes,
    )
    part = min(COLUMNS, triton.next_power_of_2(shape.value_dim))
    _rule[(count, shape.heads, -(-shape.value_dim // part))](
        *(mixed, ab, weights.decay, weights.shift, *where[:4], where[5], states, keys, updates, decays, results),
        DECAY_DIM=shape.decay_dim,
        DECAY_BLOCK=triton.next_power_of_2(shape.decay_dim),
        COLUMNS=part,
        STATES_STRIDE=states.stride(0),
        KEYS_STRIDE=keys.stride(0),
        UPDATES_STRIDE=updates.stride(0),
        DECAYS_STRIDE=decays.stride(0),
        num_warps=8,
        **sizes,
    )
    _finish[(tokens, shape.heads)](
        *(results, x, weights.norm, weights.eps, spans.row_starts, count, out),
        CHANNELS=shape.channels,
        HEADS=shape.heads,
        VALUE_DIM=shape.value_dim,
        DIM=triton.next_power_of_2(shape.value_dim),
        SIGMOID=weights.gate == "sigmoid",
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _log1p(x):
    """log(1 + x) of numbers from 0 to 1: 2 atanh(x / (2 + x)), as a series."""
    z = x / (2.0 + x)
    square = z * z
    series = square * (1.0 / 15.0) + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return 2.0 * z * (series * square + 1.0)


@triton.jit(do_not_specialize=["count", "table_stride"])
def _mix(
    x,
    conv,
    slots,
    row_starts,
    starts,
    table_rows,
    block_tables,
    count,
    table_stride,
    inputs,
    keys,
    mixed,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    SPANS: tl.constexpr,
    DIM: tl.constexpr,
    INPUTS_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr,
):
    """One head of one row: convolved, queries and keys brought to length 1. Inputs and keys are stored."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    width: tl.constexpr = channels + HEADS * VALUE_DIM
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(row_starts + count):
        return
    i = tl.arange(0, SPANS)
    span = tl.sum((tl.load(row_starts + 1 + i, mask=i < count, other=2147483647) <= row).to(tl.int32), 0)
    begin = tl.load(row_starts + span).to(tl.int64)
    position = tl.load(starts + span).to(tl.int64) + (row - begin)
    table = block_tables + tl.load(table_rows + span).to(tl.int64) * table_stride
    is_key = unit < 2 * KEY_HEADS
    dim = tl.where(is_key, KEY_DIM, VALUE_DIM)
    first = tl.where(is_key, unit * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (unit - 2 * KEY_HEADS) * VALUE_DIM)
    d = tl.arange(0, DIM)
    there = d < dim
    total = tl.zeros((DIM,), tl.float32)
    own = tl.load(x + row * width + first + d, mask=there, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        at, in_step = position - back, row - back >= begin
        in_block = (at >= 0) & (row - back < begin)
        place = tl.maximum(at, 0)
        block = tl.load(table + place // BLOCK_SIZE, mask=in_block, other=0).to(tl.int64)
        stored = inputs + block * INPUTS_STRIDE + place % BLOCK_SIZE * channels + first + d
        before = tl.load(stored, mask=d < tl.where(in_block, dim, 0), other=0.0)
        now = tl.load(x + (row - back) * width + first + d, mask=d < tl.where(in_step, dim, 0), other=0.0)
        taken = tl.where(in_step, now, before).to(tl.float32)
        total += taken * tl.load(conv + tap * channels + first + d, mask=there, other=0.0)
    total = total * _sigmoid(total)
    if is_key:
        scale = tl.rsqrt(tl.sum(total * total, 0) + EPS)
        total = total * tl.where(unit < KEY_HEADS, scale * (KEY_DIM**-0.5), scale)
    tl.store(mixed + row * channels + first + d, total, mask=there)
    slot = tl.load(slots + row)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    tl.store(inputs + block * INPUTS_STRIDE + offset * channels + first + d, own, mask=d < tl.where(block > 0, dim, 0))
    into = keys + block * KEYS_STRIDE + ((unit - KEY_HEADS) * BLOCK_SIZE + offset) * KEY_DIM + d
    is_new_key = (block > 0) & is_key & (unit >= KEY_HEADS)
    tl.store(into, total, mask=d < tl.where(is_new_key, dim, 0))


@triton.jit
def _row(tile, rows, i):
    """Row i of a tile [ROWS, columns]: [1, columns]."""
    return tl.sum(tl.where(rows == i, tile, 0.0), 0, keep_dims=True)


@triton.jit
def _pairs(queries, keys, sums, rows, DECAY_DIM: tl.constexpr):
    """What each row's query (or key) is to each row's key, with their decays: [ROWS, ROWS]; of meaning up to itself."""
    columns = tl.trans(rows)
    if DECAY_DIM == 1:
        pairs = tl.dot(queries, tl.trans(keys), input_precision="ieee") * tl.exp(sums - tl.trans(sums))
    else:
        pairs = tl.zeros((ROWS, ROWS), tl.float32)
        for j in tl.static_range(ROWS):
            near = _row(keys, rows, j) * tl.exp(sums - _row(sums, rows, j))
            pairs = tl.where(columns == j, tl.sum(queries * near, 1, keep_dims=True), pairs)
    return pairs


@triton.jit(do_not_specialize=["table_stride"])
def _rule(
    mixed,
    ab,
    decay,
    shift,
    row_starts,
    starts,
    table_rows,
    block_tables,
    table_stride,
    states,
    keys,
    updates,
    decays,
    results,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    DECAY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr,
    UPDATES_STRIDE: tl.constexpr,
    DECAYS_STRIDE: tl.constexpr,
):
    """Some columns of one head of one span, tile by tile."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    rates: tl.constexpr = HEADS * (DECAY_DIM + 1)
    span, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    begin = tl.load(row_starts + span).to(tl.int64)
    count = tl.load(row_starts + span + 1).to(tl.int64) - begin
    if count == 0:
        return
    start = tl.load(starts + span).to(tl.int64)
    end = start + count
    table = block_tables + tl.load(table_rows + span).to(tl.int64) * table_stride

    a, c = tl.arange(0, KEY_BLOCK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    rows, e = tl.arange(0, ROWS)[:, None], tl.arange(0, DECAY_BLOCK)[None, :]
    in_key, in_value, in_decay = (a < KEY_DIM)[None, :], (c < VALUE_DIM)[None, :], e < DECAY_DIM
    in_state, there_before = (a < KEY_DIM)[:, None] & in_value, tl.where(start >= BLOCK_SIZE, KEY_DIM, 0)
    cell = head * (KEY_DIM * VALUE_DIM) + a[:, None] * VALUE_DIM + c[None, :]
    tile = start // BLOCK_SIZE * BLOCK_SIZE
    block = tl.load(table + tl.maximum(tile // BLOCK_SIZE - 1, 0)).to(tl.int64)
    state = tl.load(states + block * STATES_STRIDE + cell, mask=in_state & (a < there_before)[:, None], other=0.0)
    rate = tl.load(decay + head * DECAY_DIM + e, mask=in_decay, other=0.0)
    moved = tl.load(shift + head * DECAY_DIM + e, mask=in_decay, other=0.0)

    while tile < end:
        block, offset = tl.load(table + tile // BLOCK_SIZE).to(tl.int64), tile % BLOCK_SIZE
        old, there = tile + rows < start, tile + rows < end  # [ROWS, 1]
        new = there & (old == 0)
        row = begin + tile - start + rows
        stored = offset + rows
        at_key = keys + block * KEYS_STRIDE + (key_head * BLOCK_SIZE + stored) * KEY_DIM + a[None, :]
        at_update = updates + block * UPDATES_STRIDE + (head * BLOCK_SIZE + stored) * VALUE_DIM + c[None, :]
        at_decay = decays + block * DECAYS_STRIDE + (head * BLOCK_SIZE + stored) * DECAY_DIM + e
        own = mixed + row * channels + a[None, :]
        k = tl.load(at_key, mask=old & in_key, other=0.0)
        k += tl.load(own + (KEY_HEADS + key_head) * KEY_DIM, mask=new & in_key, other=0.0)
        q = tl.load(own + key_head * KEY_DIM, mask=new & in_key, other=0.0)
        values = mixed + row * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c[None, :]
        v = tl.load(values, mask=new & in_value, other=0.0)
        u = tl.load(at_update, mask=old & in_value, other=0.0)
        sums = tl.load(at_decay, mask=old & in_decay, other=0.0)
        b = tl.load(ab + row * rates + HEADS * DECAY_DIM + head, mask=new, other=0.0)
        g = tl.load(ab + row * rates + head * DECAY_DIM + e, mask=new & in_decay, other=0.0) + moved
        g = rate * (tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g))))
        for i in tl.static_range(ROWS):
            sums = tl.where((rows == i) & new, g + _row(sums, rows, i - 1), sums)

        since = tl.exp(sums)
        update = v - tl.dot(k * since, state, input_precision="ieee")
        out = tl.dot(q * since, state, input_precision="ieee")
        seen = tl.where(tl.trans(rows) < rows, _pairs(k, k, sums, rows, DECAY_DIM), 0.0)
        read = tl.where(tl.trans(rows) <= rows, _pairs(q, k, sums, rows, DECAY_DIM), 0.0)
        beta = _sigmoid(b)
        for i in tl.static_range(ROWS):
            known = tl.sum(tl.trans(_row(seen, rows, i)) * u, 0, keep_dims=True)  # rows from i on are not there yet
            u = tl.where((rows == i) & new, beta * (update - known), u)
        for j in tl.static_range(ROWS):
            weight = tl.sum(tl.where(tl.trans(rows) == j, read, 0.0), 1, keep_dims=True)
            said = weight * _row(u, rows, j)
            out += tl.where(rows >= j, said, 0.0)  # a row after this one may be no number
        tl.store(results + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + c[None, :], out, mask=new & in_value)
        kept = tl.where(block > 0, ROWS, 0)  # a block that is there keeps its rows
        tl.store(at_update, u, mask=new & in_value & (rows < kept))
        tl.store(at_decay, sums, mask=new & in_decay & (rows < tl.where(tl.program_id(2) == 0, kept, 0)))

        if tile + ROWS <= end:
            last = _row(sums, rows, ROWS - 1)  # [1, DECAY_BLOCK]
            left = k * tl.exp(last - sums)
            state = tl.dot(tl.trans(left), u, state * tl.trans(tl.exp(last)), input_precision="ieee")
            if (block > 0) & (tile + ROWS > start) & ((tile + ROWS) % BLOCK_SIZE == 0):
                tl.store(states + block * STATES_STRIDE + cell, state, mask=in_state)
        tile += ROWS


@triton.jit(do_not_specialize=["count"])
def _finish(
    results,
    x,
    norm,
    eps,
    row_starts,
    count,
    out,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """The norm of one head of one row, and its gate."""
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM)[None, :]
    there = d < VALUE_DIM
    at = row * (HEADS * VALUE_DIM) + head * VALUE_DIM + d
    real = row < tl.load(row_starts + count)
    result = tl.load(results + at, mask=d < tl.where(real, VALUE_DIM, 0), other=0.0)
    scale = inverse_rms(tl.sum(result * result, 1, keep_dims=True), VALUE_DIM, eps)
    gate = tl.load(x + row * (CHANNELS + HEADS * VALUE_DIM) + CHANNELS + head * VALUE_DIM + d, mask=there, other=0.0)
    gate = gate.to(tl.float32)
    through = _sigmoid(gate) if SIGMOID else gate * _sigmoid(gate)
    normed = result * scale * tl.load(norm + d, mask=there, other=0.0)
    tl.store(out + at, tl.where(real, normed * through, 0.0), mask=there)
