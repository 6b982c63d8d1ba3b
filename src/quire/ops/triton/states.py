"""Layers that keep a matrix a head, in Triton: the gated delta rule of `quire.ops.states`, and Mamba 2 of `ops.mamba`.

Three launches, which both are: rows are convolved, and a delta net's queries and keys normalized, a head of a row each;
each program of the scan has some columns of one head of one span, and goes through its tiles with the state in
registers; heads of rows are normed, where the layer does so, and gated. Mamba adds what a token says; the delta rule
corrects it first by what the state and the tile know. A tile's corrections depend on one another, so they are made one
row after the other, each a sum over all rows of the tile in which those that are not before it count as 0: no bit
depends on where a span begins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.mamba import MambaWeights, check_mamba
from quire.ops.ragged import RaggedBatch
from quire.ops.states import L2_EPS, TILE, DeltaNetWeights, StateCache, check_batch
from quire.ops.triton.rows import inverse_rms
from quire.ops.triton.short_conv import convolved, place_of, places, spans_of

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
    step = _Step(x, cache, batch, layer)
    mixed = step.mixed(weights.conv, None, unit=True)
    results = step.scanned(mixed, ab, weights.decay, weights.shift, None)
    return step.finished(results, weights.norm, weights.eps, weights.gate == "sigmoid", x.dtype)


def mamba(
    x: torch.Tensor, dt: torch.Tensor, weights: MambaWeights, cache: StateCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """See `quire.ops.mamba.mamba`; the same otherwise."""
    check_mamba(x, dt, cache, batch, layer)
    step = _Step(x, cache, batch, layer)
    mixed = step.mixed(weights.conv, weights.bias, unit=False)
    results = step.scanned(mixed, dt, weights.decay, weights.shift, weights.skip)
    return step.finished(results, None, 0.0, False, torch.float32)


class _Step:
    """The launches of one layer of a step."""

    def __init__(self, x: torch.Tensor, cache: StateCache, batch: RaggedBatch, layer: int) -> None:
        """Raises ValueError where the batch has trees, or is not on the device."""
        self._x, self._slots, self._spans = x.contiguous(), batch.slots, spans_of(batch)
        self._shape = shape = cache.states_shape
        self._columns = shape.heads * shape.value_dim
        self._views = [view[:, layer] for view in cache.views]
        self._sizes: dict[str, Any] = {
            "KEY_HEADS": shape.key_heads,
            "HEADS": shape.heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "BLOCK_SIZE": cache.block_size,
            "enable_fp_fusion": False,
        }

    def mixed(self, conv: torch.Tensor, bias: torch.Tensor | None, *, unit: bool) -> torch.Tensor:
        """[tokens, channels] fp32: convolved; `unit`: queries and keys are brought to length 1. Keys are stored."""
        shape, tokens, (_, keys, _, _, inputs) = self._shape, len(self._x), self._views
        out = torch.empty(tokens, shape.channels, dtype=torch.float32, device=self._x.device)
        _mix[(tokens, 2 * shape.key_heads + shape.heads)](
            *(self._x, conv, bias, self._slots, *places(self._spans), inputs, keys, out),
            UNIT=unit,
            TAPS=shape.taps,
            SPANS=triton.next_power_of_2(len(self._spans.starts)),
            DIM=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
            INPUTS_STRIDE=inputs.stride(0),
            KEYS_STRIDE=keys.stride(0),
            num_warps=4,
            **self._sizes,
        )
        return out

    def scanned(
        self,
        mixed: torch.Tensor,
        rates: torch.Tensor,
        decay: torch.Tensor,
        shift: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """[tokens, heads * value_dim] fp32: through the states; with `skip` as in Mamba, else by the delta rule."""
        shape, spans, (states, keys, updates, decays, _) = self._shape, self._spans, self._views
        out = torch.empty(len(mixed), self._columns, dtype=torch.float32, device=mixed.device)
        columns = min(COLUMNS, triton.next_power_of_2(shape.value_dim))
        where = spans.row_starts, spans.starts, spans.table_rows, spans.block_tables, spans.block_tables.stride(0)
        _scan[(len(spans.starts), shape.heads, triton.cdiv(shape.value_dim, columns))](
            *(mixed, rates.contiguous(), decay, shift, skip, *where, states, keys, updates, decays, out),
            RATES=rates.shape[1],
            KEY_BLOCK=triton.next_power_of_2(shape.key_dim),
            DECAY_DIM=shape.decay_dim,
            DECAY_BLOCK=triton.next_power_of_2(shape.decay_dim),
            COLUMNS=columns,
            STATES_STRIDE=states.stride(0),
            KEYS_STRIDE=keys.stride(0),
            UPDATES_STRIDE=updates.stride(0),
            DECAYS_STRIDE=decays.stride(0),
            num_warps=8,
            **self._sizes,
        )
        return out

    def finished(
        self, results: torch.Tensor, norm: torch.Tensor | None, eps: float, sigmoid: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        """[tokens, heads * value_dim]: normed by heads, if so, and gated by a sigmoid or SiLU."""
        shape, tokens = self._shape, len(results)
        out = torch.empty(tokens, self._columns, dtype=dtype, device=results.device)
        _finish[(tokens, shape.heads)](
            *(results, self._x, norm, eps, self._spans.row_starts, len(self._spans.starts), out),
            CHANNELS=shape.channels,
            HEADS=shape.heads,
            VALUE_DIM=shape.value_dim,
            DIM=triton.next_power_of_2(shape.value_dim),
            SIGMOID=sigmoid,
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
    bias,
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
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    TAPS: tl.constexpr,
    SPANS: tl.constexpr,
    DIM: tl.constexpr,
    INPUTS_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr,
):
    """One head of one row: convolved; UNIT: queries and keys are brought to length 1. Inputs and keys are stored."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    width: tl.constexpr = channels + HEADS * VALUE_DIM
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(row_starts + count):
        return
    begin, position, table = place_of(row, row_starts, starts, table_rows, block_tables, count, table_stride, SPANS)
    is_key = unit < 2 * KEY_HEADS
    dim = tl.where(is_key, KEY_DIM, VALUE_DIM)
    first = tl.where(is_key, unit * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (unit - 2 * KEY_HEADS) * VALUE_DIM)
    d, slot = tl.arange(0, DIM), tl.load(slots + row)
    total = convolved(
        x,
        conv,
        bias,
        inputs,
        row,
        slot,
        begin,
        position,
        table,
        first,
        d,
        dim,
        channels,
        width,
        0,
        TAPS,
        BLOCK_SIZE,
        INPUTS_STRIDE,
    )
    total = total * _sigmoid(total)
    if UNIT:
        scale = tl.rsqrt(tl.sum(total * total, 0) + EPS)
        total *= tl.where(is_key, tl.where(unit < KEY_HEADS, scale * (KEY_DIM**-0.5), scale), 1.0)
    tl.store(mixed + row * channels + first + d, total, mask=d < dim)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
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
def _scan(
    mixed,
    rates,
    decay,
    shift,
    skip,
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
    BLOCK_SIZE: tl.constexpr,
    RATES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    DECAY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr,
    UPDATES_STRIDE: tl.constexpr,
    DECAYS_STRIDE: tl.constexpr,
):
    """Some columns of one head of one span, tile by tile: with a `skip` as in Mamba, else by the delta rule."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
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
        g = tl.load(rates + row * RATES + head * DECAY_DIM + e, mask=new & in_decay, other=0.0) + moved
        step = tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g)))
        g = rate * step
        for i in tl.static_range(ROWS):
            sums = tl.where((rows == i) & new, g + _row(sums, rows, i - 1), sums)

        since = tl.exp(sums)
        if skip is None:  # in an order in which the compiler keeps most in registers
            b = tl.load(rates + row * RATES + HEADS * DECAY_DIM + head, mask=new, other=0.0)
            update = v - tl.dot(k * since, state, input_precision="ieee")
            out = tl.dot(q * since, state, input_precision="ieee")
            seen = tl.where(tl.trans(rows) < rows, _pairs(k, k, sums, rows, DECAY_DIM), 0.0)
            read = tl.where(tl.trans(rows) <= rows, _pairs(q, k, sums, rows, DECAY_DIM), 0.0)
            beta = _sigmoid(b)
            for i in tl.static_range(ROWS):
                known = tl.sum(tl.trans(_row(seen, rows, i)) * u, 0, keep_dims=True)  # rows from i on are not there yet
                u = tl.where((rows == i) & new, beta * (update - known), u)
        else:
            out = tl.dot(q * since, state, tl.load(skip + head) * v, input_precision="ieee")
            read = tl.where(tl.trans(rows) <= rows, _pairs(q, k, sums, rows, DECAY_DIM), 0.0)
            u = tl.where(new, v * step, u)
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
    """The norm of one head of one row, if there is one, and its gate."""
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM)[None, :]
    there = d < VALUE_DIM
    at = row * (HEADS * VALUE_DIM) + head * VALUE_DIM + d
    real = row < tl.load(row_starts + count)
    result = tl.load(results + at, mask=d < tl.where(real, VALUE_DIM, 0), other=0.0)
    if norm is not None:
        scale = inverse_rms(tl.sum(result * result, 1, keep_dims=True), VALUE_DIM, eps)
        result = result * scale * tl.load(norm + d, mask=there, other=0.0)
    gate = tl.load(x + row * (CHANNELS + HEADS * VALUE_DIM) + CHANNELS + head * VALUE_DIM + d, mask=there, other=0.0)
    gate = gate.to(tl.float32)
    through = _sigmoid(gate) if SIGMOID else gate * _sigmoid(gate)
    tl.store(out + at, tl.where(real, result * through, 0.0), mask=there)
