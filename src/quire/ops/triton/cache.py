"""What goes into the KV cache, and where: a step's inputs, rotation and store, block copies.

One launch each. Sizes of the model are compiled in; what changes from step to step or from layer to layer is not, so
a kernel is compiled once. Offsets into the pool are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.ops.kernels import HeadNorm
from quire.ops.kv_cache import LARGEST, KVCache, on_device
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.triton.rows import inverse_rms, normalized

PLACED = 128
"""Rows that a program of `place` works on: one a thread."""

COPIED = 2048
"""Numbers that a program of `copy_blocks` moves: with 4 warps, 16 a thread."""

HEADS = 8
"""Heads that a program of `rotate_and_store` works on. Its threads hold 8 numbers of each half of a head, so a sum
stays within a warp; with heads of 128 that makes 2 warps, and the 32 programs that an SM can hold fill it."""


def place(
    tokens: torch.Tensor,
    span_of_row: torch.Tensor,
    recent: torch.Tensor,
    spans: DeviceSpans,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Kernels.place`."""
    rows, count, tables = len(tokens), len(spans.starts), spans.block_tables
    ids, positions, slots = (torch.empty(rows, dtype=torch.int64, device=tokens.device) for _ in range(3))
    grid = (-(-max(rows, count) // PLACED),)
    trees = (None, None) if spans.trees is None else (spans.trees.bases, spans.trees.depths)
    _place[grid](
        *(tokens, span_of_row, recent, spans.row_starts, spans.starts, spans.table_rows, tables),
        *(spans.context_lens, ids, positions, slots, *trees, rows, count, tables.stride(0), recent.shape[1]),
        BLOCK_SIZE=block_size,
        PLACED=PLACED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ids, positions, slots


def copy_blocks(kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
    """See `Kernels.copy_blocks`. The list goes to the device: not for a captured graph."""
    if not copies:
        return
    there = on_device(copies, kv.data.device)
    _copy_on_device(kv, there)
    if kv.draft_kv is not None:
        _copy_on_device(kv.draft_kv, there)


def _copy_on_device(kv: KVCache, copies: torch.Tensor) -> None:
    """Copies [copies, 3] int64, of one model."""
    planes, size = kv.layers * kv.kv_heads * kv.sides, kv.block_size * kv.head_dim
    grid = len(copies), planes, -(-size // COPIED)
    _copy_blocks[grid](
        *(kv.data, kv.scales, copies),
        BLOCK_STRIDE=kv.data.stride(0),
        PLANE=kv.data.stride(3),
        DIM=kv.head_dim,
        BLOCK_SIZE=kv.block_size,
        COPIED=COPIED,
        num_warps=4,
        enable_fp_fusion=False,
    )


def rotate_and_store(
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
) -> torch.Tensor:
    """See `Kernels.rotate_and_store`. Queries are rotated where they lie: the result is a view of `qkv`."""
    qkv = qkv.contiguous()
    rows, width = qkv.shape
    heads, half = width // kv.head_dim, 1 << (kv.head_dim // 2 - 1).bit_length()
    weight, eps = (None, 0.0) if norm is None else norm
    normed = 0 if weight is None else len(weight)
    _rotate_and_store[(rows, -(-heads // HEADS))](
        *(qkv, weight, eps, *tables, batch.slots, kv.data, kv.scales, layer),
        NORMED=normed,
        QUERIES=heads - 2 * kv.kv_heads,
        KV_HEADS=kv.kv_heads,
        DIM=kv.head_dim,
        HALF=half,
        BLOCK_STRIDE=kv.data.stride(0),
        BLOCK_SIZE=kv.block_size,
        PLANE=kv.data.stride(3),
        LARGEST=LARGEST.get(kv.stored_dtype),
        HEADS=HEADS,
        num_warps=max(half // 32, 1),
        enable_fp_fusion=False,
    )
    return qkv.view(rows, heads, kv.head_dim)[:, : -2 * kv.kv_heads]


@triton.jit(do_not_specialize=["rows", "count", "table_stride", "size"])
def _place(
    tokens,
    span_of_row,
    recent,
    row_starts,
    starts,
    table_rows,
    block_tables,
    context_lens,
    ids,
    positions,
    slots,
    bases,
    depths,
    rows,
    count,
    table_stride,
    size,
    BLOCK_SIZE: tl.constexpr,
    PLACED: tl.constexpr,
):
    i = tl.program_id(0) * PLACED + tl.arange(0, PLACED)  # a span, then a row

    is_span = i < count
    length = tl.load(row_starts + i + 1, mask=is_span) - tl.load(row_starts + i, mask=is_span)
    tl.store(context_lens + i, tl.load(starts + i, mask=is_span) + length, mask=is_span)

    real = i < tl.load(row_starts + count)
    span = tl.load(span_of_row + i, mask=real, other=0)
    table = tl.load(table_rows + span, mask=real, other=0).to(tl.int64)
    place = tl.load(starts + span, mask=real, other=0) + i - tl.load(row_starts + span, mask=real, other=0)
    block = tl.load(block_tables + table * table_stride + place // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    position = place
    if depths is not None:
        depth = tl.load(depths + i, mask=real, other=-1)
        position = tl.where(depth < 0, place, tl.load(bases + span, mask=real, other=0) + depth)
    token = tl.load(tokens + i, mask=real, other=0).to(tl.int64)
    known = tl.load(recent + table * size + (place - 1 - token) % size, mask=real & (token < 0), other=0)
    tl.store(ids + i, tl.where(token < 0, tl.maximum(known, 0), token), mask=i < rows)
    tl.store(positions + i, tl.where(real, position, 0), mask=i < rows)
    tl.store(slots + i, tl.where(real, block * BLOCK_SIZE + place % BLOCK_SIZE, 0), mask=i < rows)


@triton.jit
def _copy_blocks(
    numbers,
    scales,
    copies,
    BLOCK_STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COPIED: tl.constexpr,
):
    copy = copies + 3 * tl.program_id(0)
    source, destination, tokens = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)  # int64
    source = source * BLOCK_STRIDE + tl.program_id(1) * PLANE
    destination = destination * BLOCK_STRIDE + tl.program_id(1) * PLANE
    i = tl.program_id(2) * COPIED + tl.arange(0, COPIED)
    values = tl.load(numbers + source + i, mask=i < tokens * DIM)
    tl.store(numbers + destination + i, values, mask=i < tokens * DIM)
    if scales is not None:  # few: each part of a plane copies them all
        token = tl.arange(0, BLOCK_SIZE)
        factors = tl.load(scales + source // 4 + token, mask=token < tokens)  # BLOCK_STRIDE and PLANE are in bytes
        tl.store(scales + destination // 4 + token, factors, mask=token < tokens)


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_store(
    qkv,
    weight,
    eps,
    cos,
    sin,
    slots,
    numbers,
    scales,
    layer,
    NORMED: tl.constexpr,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLANE: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of one token. Dimension i turns with dimension i + DIM / 2, so a head is held as two halves."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]: queries, keys, values
    i = tl.arange(0, HALF)[None, :]  # [1, HALF]
    in_half = i < DIM // 2
    is_query, is_value = head < QUERIES, head >= QUERIES + KV_HEADS
    is_stored = (head >= QUERIES) & (head < QUERIES + 2 * KV_HEADS)
    dtype: tl.constexpr = qkv.dtype.element_ty

    lower = qkv + (row * (QUERIES + 2 * KV_HEADS) + head) * DIM + i
    upper = lower + DIM // 2
    first = tl.load(lower, mask=(is_query | is_stored) & in_half, other=0.0).to(tl.float32)
    second = tl.load(upper, mask=(is_query | is_stored) & in_half, other=0.0).to(tl.float32)

    a, b = first, second
    if weight is not None:
        weights, normed = weight + head * DIM + i, (head < NORMED) & in_half
        scale = inverse_rms(tl.sum(a * a + b * b, 1, keep_dims=True), DIM, eps)
        a = normalized(a, scale, tl.load(weights, mask=normed, other=0.0)).to(dtype).to(tl.float32)
        b = normalized(b, scale, tl.load(weights + DIM // 2, mask=normed, other=0.0)).to(dtype).to(tl.float32)
    if NORMED == QUERIES + 2 * KV_HEADS:  # values have a norm, too
        first, second = a, b
    angle = tl.broadcast_to(row * (DIM // 2) + i, (HEADS, HALF))  # loaded for each head, in the heads' layout
    c = tl.load(cos + angle, mask=in_half, other=0.0)
    s = tl.load(sin + angle, mask=in_half, other=0.0)
    first = tl.where(is_value, first, a * c - b * s).to(dtype)
    second = tl.where(is_value, second, b * c + a * s).to(dtype)
    tl.store(lower, first, mask=is_query & in_half)
    tl.store(upper, second, mask=is_query & in_half)

    slot = tl.load(slots + row)
    kv_head = tl.where(is_value, head - KV_HEADS, head) - QUERIES
    plane = slot // BLOCK_SIZE * BLOCK_STRIDE + ((layer * KV_HEADS + kv_head) * 2 + is_value.to(tl.int32)) * PLANE
    if scales is not None:
        first, second, scale = _quantized(first.to(tl.float32), second.to(tl.float32), LARGEST)
        tl.store(scales + plane // 4 + slot % BLOCK_SIZE, scale, mask=is_stored)  # BLOCK_STRIDE and PLANE are in bytes
    into = numbers + plane + slot % BLOCK_SIZE * DIM + i
    tl.store(into, first, mask=is_stored & in_half)
    tl.store(into + DIM // 2, second, mask=is_stored & in_half)


@triton.jit
def _quantized(first, second, LARGEST: tl.constexpr):
    """Codes of both halves [heads, half], as bytes, and scales [heads, 1], as `kv_cache.quantize` defines them."""
    infinity = float("inf")
    top = tl.maximum(tl.abs(first), tl.abs(second))
    finite = (tl.abs(first) < infinity) & (tl.abs(second) < infinity)
    top = tl.max(tl.where(finite, top, infinity), 1, keep_dims=True)  # not a number: infinity, since max may drop it
    scale = tl.div_rn(top, LARGEST)
    usable = (top < infinity) & (scale > 0)
    divisor = tl.where(usable, scale, 1.0)
    first = _code(tl.where(usable, tl.div_rn(first, divisor), 0.0), LARGEST)
    second = _code(tl.where(usable, tl.div_rn(second, divisor), 0.0), LARGEST)
    return first, second, tl.where(top < infinity, scale, float("nan"))


@triton.jit
def _code(x, LARGEST: tl.constexpr):
    """A byte for each number of x, rounded to nearest, ties to even."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return _int8_code(x) if LARGEST == 127.0 else _fp8_code(x)


@triton.jit
def _int8_code(x):
    # Numbers from 2 ** 23 to 2 ** 24 are 1 apart: the sum is rounded to a whole number.
    return (x + 12582912.0 - 12582912.0).to(tl.int32).to(tl.uint8)


@triton.jit
def _fp8_code(x):
    """The bits of x, at most 448 in magnitude, as E4M3 (https://arxiv.org/abs/2209.05433): on any GPU the same.

    The way of PyTorch's c10/util/Float8_e4m3fn.h.
    """
    sign = x.to(tl.uint32, bitcast=True) >> 31 << 7
    bits = tl.abs(x).to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFFF + (bits >> 20 & 1) >> 20  # from 23 digits to 3
    normal = rounded - (127 - 7 << 3)  # from one exponent bias to the other
    # Numbers from 2 ** 14 to 2 ** 15 are 2 ** -9 apart, as E4M3's below 2 ** -6 are.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (sign | tl.where(tl.abs(x) < 0.015625, small, normal)).to(tl.uint8)
