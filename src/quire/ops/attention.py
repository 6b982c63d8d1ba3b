"""Attention over paged keys and values (plain torch).

The softmax is taken tile by tile with a running maximum and sum (https://arxiv.org/abs/2205.14135), in fp32
throughout; `attention_plan` says which tiles, and why the result of a row never depends on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quire.ops.attention_plan import LOWEST, AttentionPlan, Bucket, Chunk, Layout, make_plan
from quire.ops.kv_cache import KEY, VALUE, KVCache, quantize
from quire.ops.ragged import RaggedBatch, Trees


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int) -> None:
    """Write the step's keys and values [tokens, kv_heads, head_dim] into the cache's slots."""
    if kv.scales is not None:
        _store_quantized(k, v, kv, kv.scales, batch, layer)
        return
    block, offset = batch.once(("slots", kv.block_size), lambda: _parts(batch.slots, kv.block_size))
    kv.numbers[block, layer, :, KEY, offset] = k
    kv.numbers[block, layer, :, VALUE, offset] = v


def _store_quantized(
    k: torch.Tensor, v: torch.Tensor, kv: KVCache, into: torch.Tensor, batch: RaggedBatch, layer: int
) -> None:
    """Codes go into `kv.numbers`, scales into `into`, which is `kv.scales`."""
    block, offset = _parts(batch.slots, kv.block_size)
    for plane, x in ((KEY, k), (VALUE, v)):
        codes, scales = quantize(x, kv.stored_dtype)
        kv.numbers.view(torch.uint8)[block, layer, :, plane, offset] = codes.view(torch.uint8)
        into[block, layer, :, plane, offset] = scales


def paged_attention(
    q: torch.Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Attention of q [tokens, heads, head_dim] over what each span's request has in the cache.

    A row at position p sees the keys up to p; with a `window`, those at p - window + 1 .. p. Where it is not `causal`,
    all keys, or those to p + window - 1, too: spans are whole prompts then. A row of a tree sees those of its
    path there: see `Trees`. With `sinks` [heads] fp32, the softmax of a row has one more score, that of no key
    (https://arxiv.org/abs/2309.17453).
    Returns [tokens, heads, head_dim], contiguous, in q's data type.
    """
    if kv.scales is not None:
        kv, batch, layer = *_dequantized(kv, kv.scales, batch, layer), 0
    if batch.trees is not None:
        kv, batch, layer = *_straightened(kv, batch, batch.trees, layer), 0
    shape = kv.kv_heads, q.shape[1] // kv.kv_heads, kv.head_dim, kv.block_size
    layout = Layout(*shape, kv.numbers.stride(0), window, causal)
    step = batch.once((layout, q.dtype), lambda: _Step(batch, layout, kv, q.dtype))
    cache = _runs(kv, layer, step.plan.run * kv.head_dim)
    for bucket in step.buckets:
        # index_select, then one copy that changes type and order: [tiles, kv_heads, rows, group, head_dim]
        bucket.q_by_row.copy_(q.index_select(0, bucket.tokens).view(bucket.q_by_row.shape))
        bucket.q.mul_(scale)
        for tile in bucket.tiles:
            _attend(tile, cache)
        if sinks is not None:
            bucket.total.add_((_by_row(sinks, bucket, kv.kv_heads) - bucket.top).exp_())
        bucket.out.div_(bucket.total)
        bucket.result.copy_(bucket.out_by_row)
    return step.result.index_select(0, step.plan.order).view(q.shape)


def _by_row(sinks: torch.Tensor, bucket: _Bucket, kv_heads: int) -> torch.Tensor:
    """A bucket's rows' sinks, of the shape of its `top`, contiguous."""
    tiles, rows, _, group, _ = bucket.q_by_row.shape
    by_head = sinks.view(1, kv_heads, 1, group).expand(tiles, kv_heads, rows, group)
    return by_head.reshape(bucket.top.shape)


def _runs(kv: KVCache, layer: int, size: int) -> torch.Tensor:
    """[numbers, size]: of a layer, the `size` numbers from each one on, whatever lies between the blocks."""
    own = kv.numbers[:, layer]
    last = (kv.num_blocks - 1) * own.stride(0) + own[0].numel() - size  # where the last block's last ones begin
    return own.as_strided((last + 1, size), (1, 1))


def _dequantized(kv: KVCache, scales: torch.Tensor, batch: RaggedBatch, layer: int) -> tuple[KVCache, RaggedBatch]:
    """One layer of a quantized cache in fp32, with only the blocks that the batch reads, and the batch renamed to it.

    Its data type is fp32 whatever the queries' is: code times scale would be rounded in theirs.
    """

    def make() -> tuple[KVCache, RaggedBatch, torch.Tensor]:
        blocks, names = torch.unique(batch.block_tables, return_inverse=True)
        wide = KVCache(len(blocks) + 1, 1, kv.kv_heads, kv.head_dim, kv.block_size, torch.float32)
        return wide, replace(batch, block_tables=names), blocks

    wide, renamed, blocks = batch.once(("dequantized", id(kv)), make)
    wide.data[:-1, 0] = kv.numbers[blocks, layer].float() * scales[blocks, layer].unsqueeze(-1)
    return wide, renamed


def _straightened(kv: KVCache, batch: RaggedBatch, trees: Trees, layer: int) -> tuple[KVCache, RaggedBatch]:
    """One layer of a plain cache in which each row of a tree is a span of its own, and the batch that names it so.

    Such a row shares its request's blocks up to its tree's base; the tokens of its path, and those before them in the
    base's block, are copied to blocks of its own.
    """

    def make() -> tuple[KVCache, RaggedBatch, _Straight]:
        straight = _straight(batch, trees)
        blocks = len(straight.blocks) + straight.added
        wide = KVCache(blocks + 1, 1, kv.kv_heads, kv.head_dim, kv.block_size, kv.dtype)
        return wide, straight.batch, straight

    wide, straightened, straight = batch.once(("straightened", id(kv)), make)
    wide.data[: len(straight.blocks), 0] = kv.data[straight.blocks, layer]
    (block, offset), (into, at) = (_parts(slots, kv.block_size) for slots in (straight.sources, straight.places))
    wide.data[into, 0, :, :, at] = kv.data[block, layer, :, :, offset]
    return wide, straightened


def _parts(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // block_size, slots % block_size


class _Straight(NamedTuple):
    """A batch without trees: `blocks` are copied to the first of a new cache, and `added` come after them.

    In these, tokens from the slots `sources` are copied to the slots `places`.
    """

    batch: RaggedBatch
    blocks: torch.Tensor
    added: int
    sources: torch.Tensor
    places: torch.Tensor


def _straight(batch: RaggedBatch, trees: Trees) -> _Straight:
    size = batch.block_size
    blocks, names = torch.unique(batch.block_tables, return_inverse=True)
    row_starts, context_lens, tables, sources, places = [0], [], [], [], []
    added = 0
    none = torch.empty(0, dtype=torch.int64)
    for span, (branches, last) in enumerate(zip(batch.in_trees(), batch.row_starts[1:], strict=True)):
        if not branches:
            row_starts.append(last)
            context_lens.append(batch.context_lens[span])
            tables.append(names[span])
            continue
        base, table = int(trees.bases[span]), batch.block_tables[span]
        shared = base // size  # blocks
        for row in range(row_starts[-1], last):
            context = int(batch.positions[row]) + 1
            at = torch.cat([torch.arange(shared * size, base), base + trees.paths[row, : context - base]])
            own = len(blocks) + added + torch.arange(-(-len(at) // size))
            added += len(own)
            sources.append(table[at // size] * size + at % size)
            places.append(own[0] * size + torch.arange(len(at)))
            tables.append(torch.cat([names[span, :shared], own]))
            row_starts.append(row + 1)
            context_lens.append(context)
    straight = replace(
        batch,
        row_starts=row_starts,
        context_lens=context_lens,
        block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
        trees=None,
    )
    return _Straight(straight, blocks, added, torch.cat([none, *sources]), torch.cat([none, *places]))


@dataclass(slots=True)
class _Tile:
    """A chunk's views into its bucket's and the step's memory, made once for all layers.

    Attributes (b = row tiles * kv_heads, m = rows * group of each):
        q, top, total, out: the bucket's, [b, m, head_dim or 1].
        stored: gathered from the cache, [runs, run * head_dim] in the cache's data type.
        stored_tokens: the same as [tokens, head_dim].
        wide: the same in fp32; `keys` [b, head_dim, width] and `values` [b, width, head_dim] lie in it.
        scores: [b, m, width]; `scores_by_tile` the same as [row tiles, kv_heads, m, width].
        product: [b, m, head_dim].
    """

    chunk: Chunk
    windowed: bool
    q: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    stored: torch.Tensor
    stored_tokens: torch.Tensor
    wide: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    scores_by_tile: torch.Tensor
    product: torch.Tensor


def _attend(tile: _Tile, cache: torch.Tensor) -> None:
    """One key tile for each of a chunk's row tiles, merged into the running `top`, `total` and `out`.

    `cache` is a layer's: see `_runs`.
    """
    chunk, scores = tile.chunk, tile.scores
    if not chunk.gathered:
        torch.index_select(cache, 0, chunk.source, out=tile.stored)
        if chunk.invalid is not None:
            tile.stored_tokens.index_fill_(0, chunk.invalid, 0)
        if tile.wide is not tile.stored:
            tile.wide.copy_(tile.stored)
    torch.bmm(tile.q, tile.keys, out=scores)
    if chunk.mask is not None:
        tile.scores_by_tile.add_(chunk.mask)
    highest = scores.amax(-1, keepdim=True)
    if tile.windowed:
        highest.clamp_min_(LOWEST)  # a row may see nothing in its tile's first key tiles
    if chunk.opening:
        torch.sum(scores.sub_(highest).exp_(), -1, keepdim=True, out=tile.total)
        torch.bmm(scores, tile.values, out=tile.out)
    else:
        torch.maximum(highest, tile.top, out=highest)
        shrink = tile.top.sub_(highest).exp_()
        tile.total.mul_(shrink).add_(scores.sub_(highest).exp_().sum(-1, keepdim=True))
        tile.out.mul_(shrink).add_(torch.bmm(scores, tile.values, out=tile.product))
    tile.top.copy_(highest)


class _Memory:
    """Memory for a chunk's intermediate results, reused by all chunks and layers of a step.

    Fresh memory for each would cost as much as the work: the system hands large blocks out page by page.
    """

    def __init__(self, plan: AttentionPlan, layout: Layout, kv: KVCache) -> None:
        keys, scores, rows = 0, 0, 0
        for bucket in plan.buckets:
            for chunk in bucket.chunks:
                heads, m = (chunk.last - chunk.first) * layout.kv_heads, bucket.rows * layout.group
                keys = max(keys, heads * chunk.width)
                scores = max(scores, heads * m * chunk.width)
                rows = max(rows, heads * m)
        self.stored = torch.empty(2 * keys * kv.head_dim, dtype=kv.dtype)
        self.wide = torch.empty(0 if kv.dtype == torch.float32 else 2 * keys * kv.head_dim)
        self.scores = torch.empty(scores)
        self.product = torch.empty(rows * kv.head_dim)


class _Bucket:
    """A bucket's queries and running results, and its chunks in the order in which they run.

    Attributes (b = row tiles * kv_heads, m = rows * group of each):
        tokens: rows of the batch to take the queries from.
        q, top, total, out: [b, m, head_dim or 1] fp32.
        q_by_row, out_by_row: q and out as [tiles, rows, kv_heads, group, head_dim].
        result: the same shape, contiguous, in the queries' data type: a part of the step's result.
    """

    def __init__(self, bucket: Bucket, result: torch.Tensor, memory: _Memory, step: _Step, kv: KVCache) -> None:
        heads, group, dim = kv.kv_heads, step.layout.group, kv.head_dim
        by_head = (bucket.tiles, heads, bucket.rows, group, dim)
        shape = (bucket.tiles * heads, bucket.rows * group, dim)
        self.tokens = bucket.tokens
        self.q, self.out = torch.empty(shape), torch.empty(shape)
        self.top, self.total = torch.empty(*shape[:2], 1), torch.empty(*shape[:2], 1)
        self.q_by_row = self.q.view(by_head).transpose(1, 2)
        self.out_by_row = self.out.view(by_head).transpose(1, 2)
        self.result = result.view(self.out_by_row.shape)
        self.tiles = [self._tile(chunk, memory, step, kv) for chunk in bucket.chunks]

    def _tile(self, chunk: Chunk, memory: _Memory, step: _Step, kv: KVCache) -> _Tile:
        part = slice(chunk.first * kv.kv_heads, chunk.last * kv.kv_heads)
        q = self.q[part]
        b, m, dim = q.shape
        stored = memory.stored[: 2 * b * chunk.width * dim].view(-1, step.plan.run * dim)
        if kv.dtype == torch.float32:
            wide = stored
        else:
            wide = memory.wide[: stored.numel()].view(stored.shape)
        keys, values = wide.view(2, b, chunk.width, dim).unbind()
        scores = memory.scores[: b * m * chunk.width].view(b, m, chunk.width)
        return _Tile(
            chunk=chunk,
            windowed=step.layout.window is not None,
            q=q,
            top=self.top[part],
            total=self.total[part],
            out=self.out[part],
            stored=stored,
            stored_tokens=stored.view(-1, dim),
            wide=wide,
            keys=keys.transpose(1, 2),
            values=values,
            scores=scores,
            scores_by_tile=scores.view(-1, kv.kv_heads, m, chunk.width),
            product=memory.product[: b * m * dim].view(b, m, dim),
        )


class _Step:
    """All that the layers of a step share: the plan, and memory laid out for it."""

    def __init__(self, batch: RaggedBatch, layout: Layout, kv: KVCache, dtype: torch.dtype) -> None:
        self.layout = layout
        self.plan = make_plan(layout, batch.row_starts, batch.context_lens, batch.block_tables)
        memory = _Memory(self.plan, layout, kv)
        sizes = [bucket.tiles * bucket.rows for bucket in self.plan.buckets]
        width = layout.kv_heads * layout.group * kv.head_dim
        self.result = torch.empty(sum(sizes), width, dtype=dtype)
        self.buckets = [
            _Bucket(bucket, result, memory, self, kv)
            for bucket, result in zip(self.plan.buckets, torch.split(self.result, sizes), strict=True)
        ]
