"""Sparse attention in plain torch (DSA, https://arxiv.org/abs/2512.02556): a row attends to the `top` positions alone
that an indexer finds best among those before it and its own.

The cache holds an index key a token behind what attention reads of it, in the same row. A row at a position below `top`
sees all, and is computed as any other. For those behind, what was chosen is copied side by side, in ascending order of
positions, and attention sees a context of `top` tokens: its kernels, and what they promise of bits, are the same.

Scores are sums of fp32 products of tiles at constant positions, which depend on nothing but the row and the key; heads
are added up one after the other. What is chosen is exact: the highest scores, and of equal ones the lowest position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from quire.ops.attention_plan import KEY_TILE, ROW_TILE, row_multiple
from quire.ops.kernels import Kernels
from quire.ops.kv_cache import KEY, KVCache
from quire.ops.ragged import RaggedBatch

PRODUCT_BYTES = 4 * 2**20
"""About how much memory the products have that are made at once. Does not change bits."""

SCORE_BYTES = 64 * 2**20
"""Most memory of the scores that are sorted at once, with their order. Does not change bits."""

GATHERED_BYTES = 64 * 2**20
"""Most memory of the rows that are copied at once, unless one row needs more. Does not change bits."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """Rows of one span at positions from `top` on.

    Attributes:
        span: its number. first, last: rows of the batch, first .. last - 1.
        position: of the first.
    """

    span: int
    first: int
    last: int
    position: int


@dataclass(frozen=True, slots=True)
class Split:
    """A step's rows by whether they see all before them.

    Attributes:
        whole: rows that do, [rows] int64; `batch`: they alone; None: there are none.
        beyond: of each span that has others.
        rows: those, in order.
    """

    whole: torch.Tensor
    batch: RaggedBatch | None
    beyond: list[Beyond]
    rows: torch.Tensor


def split(batch: RaggedBatch, top: int) -> Split:
    """Rows that see at most `top` positions, and the others.

    Raises:
        ValueError: rows are in trees.
    """
    if batch.trees is not None:
        raise ValueError("rows of trees have no sparse attention")
    spans, beyond, whole, rows, starts = [], [], [], [], [0]
    for span, context in enumerate(batch.context_lens):
        first, last = batch.row_starts[span : span + 2]
        position = context - (last - first)
        middle = min(last, max(first, first + top - position))
        if middle > first:
            spans.append((span, position + middle - first))
            whole.append(torch.arange(first, middle))
            starts.append(starts[-1] + middle - first)
        if last > middle:
            beyond.append(Beyond(span, middle, last, position + middle - first))
            rows.append(torch.arange(middle, last))
    none = torch.empty(0, dtype=torch.int64)
    seen = torch.cat([none, *whole])
    if not spans:
        return Split(seen, None, beyond, torch.cat([none, *rows]))
    part = RaggedBatch(
        token_ids=batch.token_ids[seen],
        positions=batch.positions[seen],
        slots=batch.slots[seen],
        row_starts=starts,
        context_lens=[context for _, context in spans],
        block_tables=batch.block_tables[[span for span, _ in spans]].contiguous(),
        block_size=batch.block_size,
    )
    return Split(seen, part, beyond, torch.cat([none, *rows]))


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    beyond: Beyond,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    top: int,
) -> torch.Tensor:
    """The positions that rows of one span attend to, ascending: [rows, top] int64.

    The score of a key is the sum over heads of weight * relu(query . key).

    Args:
        q: [rows, heads, index_head_dim], those rows' index queries.
        weights: [rows, heads] fp32.
    """
    size, width = batch.block_size, q.shape[2]
    context = beyond.position + len(q)
    blocks = batch.block_tables[beyond.span, : -(-context // size)]
    keys = kv.numbers[blocks, layer, 0, KEY, :, -width:].float()
    if kv.scales is not None:
        keys = keys * kv.scales[blocks, layer, 0, KEY].unsqueeze(-1)
    tiles = -(-context // KEY_TILE)
    wide = keys.new_zeros(tiles * KEY_TILE, width)
    wide[:context] = keys.flatten(0, 1)[:context]
    by_tile = wide.view(tiles, KEY_TILE, width).transpose(1, 2)  # [tiles, width, KEY_TILE]
    chosen = torch.empty(len(q), top, dtype=torch.int64)
    at_once = max(1, SCORE_BYTES // (16 * tiles * KEY_TILE))
    for first in range(0, len(q), at_once):
        rows = slice(first, first + at_once)
        scores = _scores(q[rows].float(), weights[rows], by_tile)
        positions = beyond.position + first + torch.arange(len(scores))
        scores.masked_fill_(torch.arange(tiles * KEY_TILE) > positions.unsqueeze(1), float("-inf"))
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        chosen[rows] = order[:, :top].sort(dim=1).values
    return chosen


def _scores(q: torch.Tensor, weights: torch.Tensor, by_tile: torch.Tensor) -> torch.Tensor:
    """[rows, tiles * KEY_TILE] fp32, for q [rows, heads, width] and keys [tiles, width, KEY_TILE], both fp32."""
    rows, heads, width = q.shape
    multiple = row_multiple(width)
    at_once = max(1, ROW_TILE // heads)  # products of few rows: what their bits depend on was tried for those
    scores = torch.zeros(rows, len(by_tile) * KEY_TILE)
    for first in range(0, rows, at_once):
        part = q[first : first + at_once].reshape(-1, width)
        padded = part.new_zeros(-(-len(part) // multiple) * multiple, width)
        padded[: len(part)] = part
        tiles = max(1, PRODUCT_BYTES // (4 * KEY_TILE * len(padded)))
        for tile in range(0, len(by_tile), tiles):
            keys = by_tile[tile : tile + tiles]
            products = torch.bmm(padded.expand(len(keys), -1, -1), keys)[:, : len(part)].relu_()
            products = products.view(len(keys), -1, heads, KEY_TILE)
            into = scores[first : first + at_once].view(-1, len(by_tile), KEY_TILE)[:, tile : tile + tiles]
            for head in range(heads):  # element by element, so in one order
                weighted = products[:, :, head] * weights[first : first + at_once, head].view(1, -1, 1)
                into += weighted.transpose(0, 1)
    return scores


def attend(
    kernels: Kernels,
    q: torch.Tensor,
    chosen: list[torch.Tensor],
    parts: Split,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    width: int,
) -> torch.Tensor:
    """Latent attention of q [tokens, heads, latent + rope] to what each row sees.

    Args:
        chosen: for each of `parts.beyond`, positions [rows, top].
        width: see `latent_attention`.

    Returns [tokens, heads, latent], contiguous.
    """
    tokens, heads, attended = q.shape
    out = q.new_empty(tokens, heads, width)
    if parts.batch is not None:
        whole = torch.nn.functional.pad(q[parts.whole], (0, kv.head_dim - attended))  # index keys times zero
        out[parts.whole] = kernels.attend_latent(whole, kv, parts.batch, layer, scale, width)
    if not parts.beyond:
        return out
    size, top = batch.block_size, chosen[0].shape[1]
    slots = torch.cat(
        [
            batch.block_tables[each.span][positions // size] * size + positions % size
            for each, positions in zip(parts.beyond, chosen, strict=True)
        ]
    )
    at_once = max(1, GATHERED_BYTES // (kv.shape.row_bytes * top))
    for first in range(0, len(slots), at_once):
        rows, sources = parts.rows[first : first + at_once], slots[first : first + at_once]
        key = ("gathered", id(kv), len(sources), top)
        gathered, spans = batch.once(key, partial(_room, len(sources), top, attended, kv))
        _gather(sources, layer, kv, gathered)
        out[rows] = kernels.attend_latent(q[rows], gathered, spans, 0, scale, width)
    return out


def _room(rows: int, top: int, attended: int, kv: KVCache) -> tuple[KVCache, RaggedBatch]:
    """A cache in which each of so many rows has a context of its own, of `top` tokens, and the batch that reads it."""
    blocks = -(-top // kv.block_size)
    kept = kv.shape.kv_cache_dtype
    cache = KVCache(rows * blocks + 1, 1, 1, attended, kv.block_size, kv.dtype, kept, sides=kv.sides)
    none = torch.zeros(rows, dtype=torch.int64)
    return cache, RaggedBatch(
        token_ids=none,
        positions=none,
        slots=none,
        row_starts=list(range(rows + 1)),
        context_lens=[top] * rows,
        block_tables=torch.arange(rows * blocks).view(rows, blocks),
        block_size=kv.block_size,
    )


def _gather(sources: torch.Tensor, layer: int, kv: KVCache, into: KVCache) -> None:
    """Copy tokens from slots [rows, top] of one layer, as they are stored, to each row's blocks."""
    rows, top = sources.shape
    places = torch.arange(top)
    blocks = torch.arange(rows).unsqueeze(1) * -(-top // into.block_size) + places // into.block_size  # [rows, top]
    read = sources // kv.block_size, layer, 0, KEY, sources % kv.block_size
    write = blocks, 0, 0, KEY, (places % into.block_size).expand(rows, -1)
    given, numbers = (
        (cache.numbers if cache.scales is None else cache.numbers.view(torch.uint8)) for cache in (kv, into)
    )
    numbers[write] = given[read][..., : into.head_dim]
    if kv.scales is not None and into.scales is not None:
        into.scales[write] = kv.scales[read]
