"""How a step's attention is cut into batched products: made once a step, used by every layer.

Three rules keep every row's bits independent of what else is in the step:

- **Key tiles lie at constant absolute positions**, `KEY_TILE` keys each, whatever `block_size` or length.
- **Rows are cut anywhere**: a row tile has so many rows of its product (padded by repeating a row) that the product's
  bits do not depend on their number (`row_multiple` finds out of what that must be a multiple).
- **A tile that a row cannot see changes nothing**, so tiles that no row of a row tile can see are left out.

The last key tile of a context may be computed narrower than `KEY_TILE` where this machine's products give
the same bits for it (`narrow_widths` finds out).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

KEY_TILE = 128
"""Keys a tile. Changing it changes bits."""

ROW_TILE = 128
"""Most rows (tokens times the query heads that share a KV head) a row tile. Does not change bits."""

CHUNK_SCORES = 1 << 18
"""About how many scores a chunk may have, so that they stay in the processor's cache. Does not change bits."""

CHUNK_KEYS = 1 << 11
"""About how many keys, counted for each head, a chunk may have, for the same reason. Does not change bits."""

LOWEST = -1e30
"""Stands for "nothing seen yet" in a running maximum: finite, so that differences are never NaN."""


class Layout(NamedTuple):
    """What a plan depends on beside the batch; layers that agree in it share a plan.

    Attributes:
        block_stride: numbers from one block of the cache to the next.
        causal: rows see nothing that follows them; else as far as back.
    """

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    block_stride: int
    window: int | None
    causal: bool = True

    def behind_seen(self, position: int, context: int) -> int:
        """The position behind the last that a row sees, in a context of so many."""
        if self.causal:
            return position + 1
        return context if self.window is None else min(context, position + self.window)


@dataclass(slots=True)
class Chunk:
    """Row tiles `first .. last` of a bucket, each against one key tile of its own.

    Attributes:
        opening: whether it is the first key tile of these row tiles.
        width: keys of each tile that are computed.
        source: where runs of tokens that are to be gathered begin: numbers after the layer's first,
            [2 * (last - first) * kv_heads * runs].
        invalid: rows of the gathered [2 * (last - first) * kv_heads * width, head_dim] to be zeroed, because
            no one has written them or a window has passed them; None: none.
        mask: [last - first, 1, rows * group, width] fp32, 0 or -inf; None: all rows see all keys.
        gathered: the chunk before has just gathered the same keys and values.
    """

    first: int
    last: int
    opening: bool
    width: int
    source: torch.Tensor
    invalid: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    gathered: bool = False


@dataclass(slots=True)
class Bucket:
    """Row tiles of the same number of rows.

    Attributes:
        tiles: how many.
        rows: query rows (tokens) each, with padding.
        tokens: [tiles * rows] rows of the batch; padding repeats a tile's last.
        chunks: in ascending order of key tiles for each row tile.
    """

    tiles: int
    rows: int
    tokens: torch.Tensor
    chunks: list[Chunk]


@dataclass(slots=True)
class AttentionPlan:
    """All buckets of a step, and `order` [tokens]: where each token lies in the buckets laid end to end.

    `run` is how many tokens are gathered as one.
    """

    buckets: list[Bucket]
    order: torch.Tensor
    run: int


class _RowTile(NamedTuple):
    """Rows `row .. row + length` of the batch, a part of one span; key tiles `tile .. tile + tiles`."""

    span: int
    row: int
    length: int
    position: int
    tile: int
    tiles: int
    last_width: int


def make_plan(
    layout: Layout,
    row_starts: list[int],
    context_lens: list[int],
    block_tables: torch.Tensor,
) -> AttentionPlan:
    """Cut the spans into row tiles, bucket them by size, and lay out each bucket's products."""
    exact = row_multiple(layout.head_dim)
    multiple = exact // math.gcd(exact, layout.group)
    buckets: dict[int, list[_RowTile]] = {}
    for span, context in enumerate(context_lens):
        for tile in _row_tiles(layout, span, row_starts[span], row_starts[span + 1], context):
            buckets.setdefault(_padded(tile.length, multiple), []).append(tile)
    run = min(layout.block_size, min(narrow_widths()))
    tables = _run_tables(block_tables, layout.block_size, run)
    made, order, offset = [], torch.empty(row_starts[-1], dtype=torch.int64), 0
    for rows, tiles in sorted(buckets.items()):
        tiles.sort(key=lambda tile: (-tile.tiles, -tile.last_width))
        bucket = _bucket(layout, rows, tiles, tables, context_lens, run)
        places = torch.arange(offset, offset + bucket.tokens.numel())
        order[bucket.tokens] = places  # padding repeats a row: any of its copies will do
        made.append(bucket)
        offset += bucket.tokens.numel()
    return AttentionPlan(made, order, run)


def _row_tiles(layout: Layout, span: int, first: int, last: int, context: int) -> list[_RowTile]:
    tiles, window = [], layout.window
    largest = max(16, ROW_TILE // layout.group)
    for row in range(first, last, largest):
        length = min(largest, last - row)
        position = context - (last - row)
        end = layout.behind_seen(position + length - 1, context)  # keys that the last row sees
        tile = 0 if window is None else max(0, position - window + 1) // KEY_TILE
        last_tile = (end - 1) // KEY_TILE
        width = next(w for w in narrow_widths() if w >= end - last_tile * KEY_TILE)
        tiles.append(_RowTile(span, row, length, position, tile, last_tile + 1 - tile, width))
    return tiles


def _padded(rows: int, multiple: int) -> int:
    """Few different sizes, so that row tiles of about the same size are computed together."""
    step = max(multiple, 1 if rows <= 8 else 8 if rows <= 32 else 32)
    return -(-rows // step) * step


def _run_tables(table: torch.Tensor, block_size: int, run: int) -> torch.Tensor:
    """[spans, runs]: each request's runs of `run` tokens within one block, padded with block 0's."""
    parts = block_size // run
    if parts > 1:
        table = (table.unsqueeze(-1) * parts + torch.arange(parts)).flatten(1)
    padding = -table.shape[1] % (KEY_TILE // run)
    return torch.nn.functional.pad(table, (0, padding))


def _bucket(
    layout: Layout,
    rows: int,
    tiles: list[_RowTile],
    tables: torch.Tensor,
    context_lens: list[int],
    run: int,
) -> Bucket:
    numbers = [(t.span, t.row, t.length, t.position, t.tile, context_lens[t.span]) for t in tiles]
    columns = (column.unsqueeze(1) for column in torch.tensor(numbers).unbind(1))
    span, row, length, position, first_tile, context = columns
    within = torch.minimum(torch.arange(rows), length - 1)  # [tiles, rows]
    chunks: list[Chunk] = []
    for rank in range(tiles[0].tiles):
        for first, last, width in _ranges(layout, rows, tiles, rank):
            part = slice(first, last)
            start = (first_tile[part] + rank) * KEY_TILE
            runs = tables[span[part], (start + torch.arange(0, width, run)) // run]
            chunk = Chunk(first, last, rank == 0, width, _sources(layout, runs, run))
            if not all(_sees_all(tile, rank, width, layout, context_lens[tile.span]) for tile in tiles[part]):
                keys = start + torch.arange(width)  # [tiles of this chunk, width]
                positions = position[part] + within[part]  # [tiles of this chunk, rows]
                _hide(chunk, keys, positions, context[part], layout)
            chunk.gathered = bool(chunks) and _same_keys(chunks[-1], chunk)
            chunks.append(chunk)
    return Bucket(len(tiles), rows, (row + within).flatten(), chunks)


def _ranges(layout: Layout, rows: int, tiles: list[_RowTile], rank: int) -> list[tuple[int, int, int]]:
    """(first, last, width): row tiles that have a key tile of this rank, in runs of similar width."""
    keys = layout.kv_heads * KEY_TILE
    limit = max(1, min(CHUNK_KEYS // keys, CHUNK_SCORES // (keys * rows * layout.group)))
    ranges: list[tuple[int, int, int]] = []
    for index, tile in enumerate(tiles):
        if tile.tiles <= rank:
            break  # they are sorted: the longest come first
        width = KEY_TILE if tile.tiles > rank + 1 else tile.last_width
        if ranges and index - ranges[-1][0] < limit and width * 4 >= ranges[-1][2] * 3:
            first, _, wider = ranges[-1]
            ranges[-1] = (first, index + 1, wider)
        else:
            ranges.append((index, index + 1, width))
    return ranges


def _same_keys(one: Chunk, other: Chunk) -> bool:
    """Whether two chunks read the same: as those of a long span do, which differ in their rows only."""
    if one.invalid is not None and other.invalid is not None:
        return torch.equal(one.source, other.source) and torch.equal(one.invalid, other.invalid)
    return one.invalid is other.invalid and torch.equal(one.source, other.source)


def _sources(layout: Layout, runs: torch.Tensor, run: int) -> torch.Tensor:
    """See `Chunk.source`; of runs [tiles, runs], keys first."""
    parts = layout.block_size // run
    heads = torch.arange(layout.kv_heads * 2).view(layout.kv_heads, 2).t() * (layout.block_size * layout.head_dim)
    within = runs // parts * layout.block_stride + runs % parts * (run * layout.head_dim)
    return (within[:, None] + heads[:, None, :, None]).flatten()


def _sees_all(tile: _RowTile, rank: int, width: int, layout: Layout, context: int) -> bool:
    """Whether all rows of a row tile see all keys of its key tile of this rank."""
    seen = layout.behind_seen(tile.position, context)
    return layout.window is None and (tile.tile + rank) * KEY_TILE + width <= seen


def _hide(chunk: Chunk, keys: torch.Tensor, positions: torch.Tensor, context: torch.Tensor, layout: Layout) -> None:
    """Set a chunk's `invalid` and `mask`.

    Args:
        keys: [tiles, width] positions of the keys.
        positions: [tiles, rows] positions of the rows.
        context: [tiles, 1] number of keys that exist.
    """
    invalid = keys >= context
    if layout.causal:
        hidden = keys.unsqueeze(1) > positions.unsqueeze(2)
    else:
        hidden = invalid.unsqueeze(1).expand(-1, positions.shape[1], -1)
        if layout.window is not None:
            hidden = hidden | (keys.unsqueeze(1) >= positions.unsqueeze(2) + layout.window)
    if layout.window is not None:
        invalid |= keys <= positions[:, :1] - layout.window
        hidden = hidden | (keys.unsqueeze(1) <= positions.unsqueeze(2) - layout.window)
    if invalid.any():
        rows = invalid[None, :, None].expand(2, -1, layout.kv_heads, -1)
        chunk.invalid = rows.flatten().nonzero().flatten()
    if hidden.any():
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        chunk.mask = mask.repeat_interleave(layout.group, 1).unsqueeze(1)


@functools.cache
def row_multiple(dim: int) -> int:
    """Products of so many rows, or a multiple of it, give each row the same bits, for heads of `dim` numbers.

    Found by trying, since matrix libraries do not promise it: some have kernels of their own for a few rows.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, KEY_TILE, dim, generator=generator)
    queries = torch.randn(3, ROW_TILE, dim, generator=generator)
    weights = torch.rand(3, ROW_TILE, KEY_TILE, generator=generator)
    factors = ((queries, keys.transpose(1, 2)), (weights, keys))
    whole = [torch.bmm(rows, other) for rows, other in factors]

    def equal(count: int, tiles: int) -> bool:
        return all(
            torch.equal(torch.bmm(rows[:tiles, :count].contiguous(), other[:tiles]), product[:tiles, :count])
            for (rows, other), product in zip(factors, whole, strict=True)
        )

    for multiple in (4, 8, 16):
        if all(equal(count, tiles) for count in range(multiple, ROW_TILE, multiple) for tiles in (1, 3)):
            return multiple
    return 32


@functools.cache
def narrow_widths() -> tuple[int, ...]:
    """Widths, `KEY_TILE` the last, at which a key tile with nothing after that width gives the same bits.

    Found by trying: matrix libraries do not promise it, but where it holds, a short context costs less. Tried are heads
    of 128 numbers, and latent attention's rows of 576.
    """
    of_heads, of_latent = _exact_widths(128), _exact_widths(576)
    return (*(width for width in of_heads if width in of_latent), KEY_TILE)


def _exact_widths(dim: int) -> list[int]:
    """Those narrower than `KEY_TILE`, for heads of so many numbers."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, KEY_TILE, dim, generator=generator)
    weights = torch.rand(3, 64, KEY_TILE, generator=generator)
    queries = torch.randn(3, 64, dim, generator=generator)
    widths = []
    for width in (32, 64, 96):
        cut, zeroed = weights[..., :width].contiguous(), weights.clone()
        zeroed[..., width:] = 0
        near = keys[:, :width].contiguous()
        exact = all(
            torch.equal(torch.bmm(cut[:, :rows].contiguous(), near), torch.bmm(zeroed, keys)[:, :rows])
            and torch.equal(
                torch.bmm(queries[:, :rows].contiguous(), near.transpose(1, 2)),
                torch.bmm(queries, keys.transpose(1, 2))[:, :rows, :width],
            )
            and torch.equal(cut[:, :rows].contiguous().sum(-1), zeroed.sum(-1)[:, :rows])
            for rows in (row_multiple(dim), 2 * row_multiple(dim), 64)
        )
        if exact:
            widths.append(width)
    return widths
