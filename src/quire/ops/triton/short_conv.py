"""Causal convolutions over inputs in blocks, in Triton, and the gated one of LFM2: see `quire.ops.short_conv`.

A program has some channels of one row. Each channel's sum runs over the taps in their order, so no bit depends on where
a span begins: an input of this step is read where it is, one of an earlier step in its block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.short_conv import ConvCache, ShortConvWeights, check_conv

PART = 1024
"""Channels that a program has."""


def short_conv(
    x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """See `quire.ops.short_conv.short_conv`. Rows of padding are 0.

    Raises:
        ValueError: what is given does not fit the cache, or the batch has trees.
    """
    check_conv(x, weights, cache, batch, layer)
    spans = spans_of(batch)
    x, channels, inputs = x.contiguous(), cache.conv_shape.channels, cache.inputs[:, layer]
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    _short_conv[(len(x), triton.cdiv(channels, PART))](
        *(x, weights.conv, weights.bias, batch.slots, *places(spans), inputs, out),
        CHANNELS=channels,
        TAPS=len(weights.conv),
        SPANS=triton.next_power_of_2(len(spans.starts)),
        PART=PART,
        BLOCK_SIZE=cache.block_size,
        INPUTS_STRIDE=inputs.stride(0),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def spans_of(batch: RaggedBatch) -> DeviceSpans:
    """The step's spans on the device.

    Raises:
        ValueError: they are not there, or have trees.
    """
    if batch.spans is None or batch.spans.trees is not None:
        raise ValueError("kernels of a GPU need a step's spans on the device, and recurrent layers none in trees")
    return batch.spans


def places(spans: DeviceSpans) -> tuple[torch.Tensor | int, ...]:
    """What `place_of` takes of a step's spans."""
    tables = spans.block_tables
    return spans.row_starts, spans.starts, spans.table_rows, tables, len(spans.starts), tables.stride(0)


@triton.jit
def place_of(row, row_starts, starts, table_rows, block_tables, count, table_stride, SPANS: tl.constexpr):
    """Of a row: the first row of its span, its position, and its request's blocks."""
    i = tl.arange(0, SPANS)
    span = tl.sum((tl.load(row_starts + 1 + i, mask=i < count, other=2147483647) <= row).to(tl.int32), 0)
    begin = tl.load(row_starts + span).to(tl.int64)
    position = tl.load(starts + span).to(tl.int64) + (row - begin)
    return begin, position, block_tables + tl.load(table_rows + span).to(tl.int64) * table_stride


@triton.jit
def input_of(x, row, channel, there, WIDTH: tl.constexpr, PARTNER: tl.constexpr):
    """What is convolved of a row of x [rows, WIDTH]: numbers, or their products with those PARTNER behind them."""
    at = x + row * WIDTH + channel
    value = tl.load(at, mask=there, other=0.0)
    if PARTNER:
        value = (value.to(tl.float32) * tl.load(at + PARTNER, mask=there, other=0.0).to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def convolved(
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
    count,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTNER: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INPUTS_STRIDE: tl.constexpr,
):
    """fp32: `count` channels of a row from `first` on, as d counts them. Its own inputs are stored at its slot."""
    there, channel = d < count, first + d
    total = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=there, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        at, in_step = position - back, row - back >= begin
        in_block = (at >= 0) & (row - back < begin)
        place = tl.maximum(at, 0)
        block = tl.load(table + place // BLOCK_SIZE, mask=in_block, other=0).to(tl.int64)
        stored = inputs + block * INPUTS_STRIDE + place % BLOCK_SIZE * CHANNELS + channel
        before = tl.load(stored, mask=d < tl.where(in_block, count, 0), other=0.0)
        now = input_of(x, row - back, channel, d < tl.where(in_step, count, 0), WIDTH, PARTNER)
        taken = tl.where(in_step, now, before).to(tl.float32)
        total += taken * tl.load(conv + tap * CHANNELS + channel, mask=there, other=0.0)
    block, own = slot // BLOCK_SIZE, input_of(x, row, channel, there, WIDTH, PARTNER)
    into = inputs + block * INPUTS_STRIDE + slot % BLOCK_SIZE * CHANNELS + channel
    tl.store(into, own, mask=d < tl.where(block > 0, count, 0))
    return total


@triton.jit(do_not_specialize=["count", "table_stride"])
def _short_conv(
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
    out,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SPANS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INPUTS_STRIDE: tl.constexpr,
):
    """Of some channels of a row, b | c | x: the convolution of b * x, times c."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART
    d = tl.arange(0, PART)
    channels = tl.minimum(CHANNELS - first, PART)
    to = out + row * CHANNELS + first + d
    if row >= tl.load(row_starts + count):
        tl.store(to, tl.zeros((PART,), out.dtype.element_ty), mask=d < channels)
        return
    begin, position, table = place_of(row, row_starts, starts, table_rows, block_tables, count, table_stride, SPANS)
    total = convolved(
        x,
        conv,
        bias,
        inputs,
        row,
        tl.load(slots + row),
        begin,
        position,
        table,
        first,
        d,
        channels,
        CHANNELS,
        3 * CHANNELS,
        2 * CHANNELS,
        TAPS,
        BLOCK_SIZE,
        INPUTS_STRIDE,
    )
    gate = tl.load(x + row * (3 * CHANNELS) + CHANNELS + first + d, mask=d < channels, other=0.0)
    tl.store(to, total * gate.to(tl.float32), mask=d < channels)
