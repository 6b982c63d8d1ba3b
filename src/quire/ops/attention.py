"""Attention over paged keys and values (plain torch).

The softmax is taken tile by tile with a running maximum and sum (https://arxiv.org/abs/2205.14135), in fp32
throughout; `attention_plan` says which tiles, and why the result of a row never depends on other rows.
"""

from __future__ import annotations

import torch

from quire.ops.attention_plan import LOWEST, AttentionPlan, Bucket, Chunk, Layout, make_plan
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int) -> None:
    """Write the step's keys and values [tokens, kv_heads, head_dim] into the cache's slots."""
    first = batch.once(("slots", kv.layers, kv.kv_heads), lambda: _slot_rows(batch, kv))
    keys, values = (first + layer * kv.kv_heads * 2 * kv.block_size).unbind()
    rows = kv.data.view(-1, kv.head_dim)
    rows.index_copy_(0, keys, k.reshape(-1, kv.head_dim))
    rows.index_copy_(0, values, v.reshape(-1, kv.head_dim))


def _slot_rows(batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
    """[2, tokens * kv_heads]: layer 0's rows of the cache as [rows, head_dim], keys and values."""
    block, offset = batch.slots // kv.block_size, batch.slots % kv.block_size
    planes = torch.arange(kv.kv_heads * 2).view(kv.kv_heads, 2).t().unsqueeze(1)  # [2, 1, kv_heads]
    rows = (block * kv.layers * kv.kv_heads * 2).unsqueeze(1) + planes
    return (rows * kv.block_size + offset.unsqueeze(1)).flatten(1)


def paged_attention(
    q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of q [tokens, heads, head_dim] over what each span's request has in the cache.

    With a `window`, a row at position p sees the keys at p - window + 1 .. p.
    Returns [tokens, heads, head_dim], contiguous, in q's data type.
    """
    tokens, heads, head_dim = q.shape
    layout = Layout(kv.layers, kv.kv_heads, heads // kv.kv_heads, kv.block_size, window)
    plan = batch.once(layout, lambda: make_plan(layout, batch.row_starts, batch.context_lens, batch.block_tables))
    out = [_attend(q, kv, bucket, plan, layout, layer, scale) for bucket in plan.buckets]
    rows = torch.cat(out) if len(out) > 1 else out[0]
    return rows.index_select(0, plan.order).view(tokens, heads, head_dim)


def _attend(
    q: torch.Tensor,
    kv: KVCache,
    bucket: Bucket,
    plan: AttentionPlan,
    layout: Layout,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """A bucket's rows, padding included: [tiles * rows, heads * head_dim] in q's data type."""
    heads, group, dim = layout.kv_heads, layout.group, kv.head_dim
    batch, m = bucket.tiles * heads, bucket.rows * group
    split = (bucket.tiles, bucket.rows, heads, group, dim)
    dtype = q.dtype
    q = q.index_select(0, bucket.tokens).float().mul_(scale)  # index_select copies: q itself stays
    q = q.view(split).transpose(1, 2).reshape(batch, m, dim)
    top, total, out = q.new_empty(batch, m, 1), q.new_empty(batch, m, 1), torch.empty_like(q)
    for chunk in bucket.chunks:
        part = slice(chunk.first * heads, chunk.last * heads)
        _attend_tile(q[part], top[part], total[part], out[part], kv, chunk, plan, layout, layer)
    out = out.div_(total).view(bucket.tiles, heads, bucket.rows, group, dim).transpose(1, 2)
    return out.to(dtype).reshape(bucket.tiles * bucket.rows, heads * group * dim)


def _attend_tile(
    q: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    kv: KVCache,
    chunk: Chunk,
    plan: AttentionPlan,
    layout: Layout,
    layer: int,
) -> None:
    """One key tile for each of a chunk's row tiles, merged into the running `top`, `total` and `out`."""
    k, v = _gather(kv, chunk, plan, layer)
    scores = torch.bmm(q, k.transpose(1, 2))
    if chunk.mask is not None:
        scores.view(-1, layout.kv_heads, *scores.shape[1:]).add_(chunk.mask)
    highest = scores.amax(-1, keepdim=True).clamp_min_(LOWEST)
    if not chunk.opening:
        highest = torch.maximum(highest, top)
    weights = scores.sub_(highest).exp_()
    if chunk.opening:
        torch.sum(weights, -1, keepdim=True, out=total)
        torch.bmm(weights, v, out=out)
    else:
        shrink = top.sub_(highest).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        out.mul_(shrink).add_(torch.bmm(weights, v))
    top.copy_(highest)


def _gather(kv: KVCache, chunk: Chunk, plan: AttentionPlan, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a chunk's tiles: each [tiles * kv_heads, width, head_dim] fp32."""
    rows = kv.data.view(-1, plan.run * kv.head_dim)
    tile = rows.index_select(0, chunk.source + layer * plan.layer_stride)
    if chunk.invalid is not None:
        tile.view(-1, kv.head_dim).index_fill_(0, chunk.invalid, 0)
    k, v = tile.float().view(2, -1, chunk.width, kv.head_dim).unbind()
    return k, v
