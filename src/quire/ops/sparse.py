"""Sparse attention (DSA, https://arxiv.org/abs/2512.02556): a row attends to the `top` positions alone that an indexer
finds best among those before it and its own. In plain torch; the definition.

The cache holds an index key a token behind what attention reads of it, in the same row. What is chosen is exact: the
highest scores, and of equal ones the lowest position. It is kept as slots of the cache, in ascending order of
positions: so layers may share it, and a row that chose is to attention like a row of a tree, whose path they are.

Where the host knows the spans, a row at a position below `top` is computed as any other: it sees all. Where the device
alone knows them, such a row's path is all that it sees.

Scores are sums of fp32 products of tiles at constant positions, which depend on nothing but the row and the key; heads
are added up one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire.ops.attention_plan import KEY_TILE, ROW_TILE, row_multiple
from quire.ops.kv_cache import KEY, KVCache
from quire.ops.ragged import RaggedBatch

LatentAttention = Callable[[torch.Tensor, KVCache, RaggedBatch, int, float, int], torch.Tensor]

PRODUCT_BYTES = 4 * 2**20
"""About how much memory the products have that are made at once. Does not change bits."""

SCORE_BYTES = 64 * 2**20
"""Most memory of the scores that are kept at once, unless one row needs more. Does not change bits."""

GATHERED_BYTES = 64 * 2**20
"""Most memory of the rows that are copied at once, unless one row needs more. Does not change bits."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """Rows of one span at positions from `top` on.

    Attributes:
        span: its number. first, last: of the rows that choose, first .. last - 1.
        position: of the first.
    """

    span: int
    first: int
    last: int
    position: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What the rows of a step attend to; made once a step, and written by each layer that chooses.

    Attributes:
        top: most positions of a row.
        rows: those that choose, in order, [rows] int64; None: all do, as the host does not know their positions.
        slots: [rows, top] int64, on a device int32: where the tokens lie that they attend to, in ascending order of
            positions.
        beyond: the rows that choose, by span; empty where all do.
        whole: the others, [rows] int64; `batch`: they alone; None: there are none.
    """

    top: int
    rows: torch.Tensor | None
    slots: torch.Tensor
    beyond: list[Beyond]
    whole: torch.Tensor
    batch: RaggedBatch | None

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x of the rows that choose, of x [tokens, ...]."""
        return x if self.rows is None else x[self.rows]


NONE = torch.empty(0, dtype=torch.int64)


def choice(batch: RaggedBatch, top: int) -> Choice:
    """Which rows choose, with room for what they will.

    Raises:
        ValueError: rows are in trees.
    """
    if batch.trees is not None or (batch.spans is not None and batch.spans.trees is not None):
        raise ValueError("rows of trees have no sparse attention")
    if batch.spans is not None:
        positions = batch.positions
        slots = torch.empty(len(positions), top, dtype=torch.int32, device=positions.device)
        return Choice(top, None, slots, [], NONE, None)
    spans, beyond, whole, rows, starts, count = [], [], [NONE], [NONE], [0], 0
    for span, context in enumerate(batch.context_lens):
        first, last = batch.row_starts[span : span + 2]
        position = context - (last - first)
        middle = min(last, max(first, first + top - position))
        if middle > first:
            spans.append((span, position + middle - first))
            whole.append(torch.arange(first, middle))
            starts.append(starts[-1] + middle - first)
        if last > middle:
            beyond.append(Beyond(span, count, count + last - middle, position + middle - first))
            rows.append(torch.arange(middle, last))
            count += last - middle
    slots, seen = torch.empty(count, top, dtype=torch.int64), torch.cat(whole)
    part = None
    if spans:
        part = RaggedBatch(
            token_ids=batch.token_ids[seen],
            positions=batch.positions[seen],
            slots=batch.slots[seen],
            row_starts=starts,
            context_lens=[context for _, context in spans],
            block_tables=batch.block_tables[[span for span, _ in spans]].contiguous(),
            block_size=batch.block_size,
        )
    return Choice(top, torch.cat(rows), slots, beyond, seen, part)


def choose(q: torch.Tensor, weights: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, choice: Choice) -> None:
    """Write what rows attend to into `choice.slots`.

    The score of a key is the sum over heads of weight * relu(query . key).

    Args:
        q: [rows, heads, index_head_dim], index queries of the rows that choose.
        weights: [rows, heads] fp32.
    """
    for each in choice.beyond:
        rows = slice(each.first, each.last)
        positions = _best(q[rows], weights[rows], each, kv, batch, layer, choice.top)
        table, size = batch.block_tables[each.span], batch.block_size
        choice.slots[rows] = table[positions // size] * size + positions % size


def _best(
    q: torch.Tensor,
    weights: torch.Tensor,
    beyond: Beyond,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    top: int,
) -> torch.Tensor:
    """Positions of one span's rows, ascending: [rows, top] int64."""
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
    best = torch.empty(len(q), top, dtype=torch.int64)
    at_once = max(1, SCORE_BYTES // (16 * tiles * KEY_TILE))  # of a score also its copy and its position, sorted
    for first in range(0, len(q), at_once):
        rows = slice(first, first + at_once)
        scores = _scores(q[rows].float(), weights[rows], by_tile)
        positions = beyond.position + first + torch.arange(len(scores))
        scores.masked_fill_(torch.arange(tiles * KEY_TILE) > positions.unsqueeze(1), float("-inf"))
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        best[rows] = order[:, :top].sort(dim=1).values
    return best


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
    latent: LatentAttention,
    q: torch.Tensor,
    choice: Choice,
    kv: KVCache,
    layer: int,
    scale: float,
    width: int,
) -> torch.Tensor:
    """Latent attention of each row to what it sees: all, or what it chose.

    What was chosen is copied side by side, so that attention sees a context of `top` tokens.

    Args:
        latent: `Kernels.attend_latent`.
        q: [tokens, heads, latent + rope], in rows of the cache that have an index key behind these.
        width: see `latent_attention`.

    Returns [tokens, heads, latent], contiguous.
    """
    out = q.new_empty(*q.shape[:2], width)
    if choice.batch is not None:
        out[choice.whole] = latent(q[choice.whole], kv, choice.batch, layer, scale, width)
    for part, gathered, spans in _gathered(q.shape[2], choice, kv, layer):
        out[part] = latent(q[part], gathered, spans, 0, scale, width)
    return out


def _gathered(
    attended: int, choice: Choice, kv: KVCache, layer: int
) -> Iterator[tuple[torch.Tensor, KVCache, RaggedBatch]]:
    """Of some rows that choose at a time: which they are, a cache with what each attends to, and the batch of them."""
    if choice.rows is None:
        raise ValueError("this batch's spans are not on the host")
    top = choice.top
    at_once = max(1, GATHERED_BYTES // (kv.shape.row_bytes * top))
    rooms: dict[int, tuple[KVCache, RaggedBatch]] = {}
    for first in range(0, len(choice.slots), at_once):
        rows, slots = choice.rows[first : first + at_once], choice.slots[first : first + at_once]
        if len(rows) not in rooms:
            rooms[len(rows)] = _room(len(rows), top, attended, kv)
        gathered, batch = rooms[len(rows)]
        _gather(slots, layer, kv, gathered)
        yield rows, gathered, batch


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
