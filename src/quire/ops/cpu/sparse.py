"""Sparse attention in C++: the choice of positions (see sparse.cpp), and attention to what was chosen (latent.cpp)."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.cpu import latent
from quire.ops.cpu.attention import CCache, checked_tables, describe
from quire.ops.cpu.library import DTYPES, I64, POINTER, Library, Prototype
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch, Trees
from quire.ops.sparse import SCORE_BYTES, Choice

PROTOTYPES: dict[str, Prototype] = {
    "choice_scratch_bytes": (I64, (POINTER,)),
    "choose": (None, (POINTER, I64, POINTER, POINTER, POINTER, I64, I64, I64, I64)),
}

KEY_TILE = 128
"""Of attention_pack.h."""

ITEM_TOKENS, ITEM_TILES = 8, 16
"""Most rows and key tiles of an item of work. Do not change bits."""


class CStep(ctypes.Structure):
    """`ChoiceStep` of sparse.cpp."""

    _fields_ = (
        ("kv", CCache),
        *((name, I64) for name in ("dtype", "heads", "width", "top", "table_width", "most_tokens", "stride")),
        *((name, I64) for name in ("threads", "scratch_bytes")),
        *((name, POINTER) for name in ("tables", "item", "spans", "positions", "scratch", "ranks")),
    )


class Step:
    """A step's choice of positions as C++ needs it, made once for all layers.

    Attributes:
        pointer: of `ChoiceStep`. Valid while this object and the cache live.
        rounds: first item, the one after the last, first row, and the one after the last, of each.
    """

    def __init__(
        self, lib: Library, heads: int, width: int, dtype: torch.dtype, kv: KVCache, batch: RaggedBatch, choice: Choice
    ) -> None:
        if dtype != kv.dtype or kv.kv_heads != 1 or kv.sides != 1:
            raise ValueError(f"index queries in {dtype} need a cache of one plane a layer in {dtype}, not {kv.dtype}")
        threads = lib.threads()
        self.tables = checked_tables(batch, kv)
        lengths = [each.last - each.first for each in choice.beyond]
        self.spans = np.repeat([each.span for each in choice.beyond], lengths)
        self.positions = np.concatenate([each.position + np.arange(each.last - each.first) for each in choice.beyond])
        stride = -(-(int(self.positions.max()) + 1) // KEY_TILE) * KEY_TILE
        self.items, self.rounds = plan(choice, max(1, SCORE_BYTES // (4 * stride)))
        rows = max(last - first for _, _, first, last in self.rounds)
        self.ranks = torch.empty(rows * stride, dtype=torch.int32)
        self.struct = CStep(
            kv=describe(kv),
            dtype=DTYPES[dtype],
            heads=heads,
            width=width,
            top=choice.top,
            table_width=self.tables.shape[1],
            most_tokens=int(self.items[:, 2].max()),
            stride=stride,
            threads=threads,
            tables=self.tables.data_ptr(),
            item=self.items.ctypes.data,
            spans=self.spans.ctypes.data,
            positions=self.positions.ctypes.data,
            ranks=self.ranks.data_ptr(),
        )
        self.pointer = ctypes.addressof(self.struct)
        each = lib.choice_scratch_bytes(self.pointer)
        self.scratch = torch.empty(threads * each + 64, dtype=torch.uint8)
        self.struct.scratch_bytes = each
        self.struct.scratch = -(-self.scratch.data_ptr() // 64) * 64


def plan(choice: Choice, at_once: int) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int, int]]]:
    """Items of work [items, 6], with the fields of `ChoiceItem` in sparse.cpp, and the rounds that they are done in, as
    `Step` has them. The longest of a round come first, so that the threads end together.

    Args:
        at_once: most rows of a round.
    """
    items: list[tuple[int, ...]] = []
    rounds = []
    rows = choice.beyond[-1].last
    for first in range(0, rows, at_once):
        last, begin = min(rows, first + at_once), len(items)
        for each in choice.beyond:
            for row in range(max(first, each.first), min(last, each.last), ITEM_TOKENS):
                tokens, position = min(ITEM_TOKENS, last - row, each.last - row), each.position + row - each.first
                tiles = -(-(position + tokens) // KEY_TILE)
                for tile in range(0, tiles, ITEM_TILES):
                    items.append((each.span, row, tokens, position, tile, min(ITEM_TILES, tiles - tile)))
        items[begin:] = sorted(items[begin:], key=lambda item: -item[2] * item[5])
        rounds.append((begin, len(items), first, last))
    return np.array(items, dtype=np.int64), rounds


def choose(
    lib: Library,
    q: torch.Tensor,
    weights: torch.Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    choice: Choice,
) -> None:
    """See `sparse.choose`.

    Raises:
        ValueError: the queries or the batch do not fit the cache.
    """
    rows, heads, width = q.shape
    if not (0 <= layer < kv.layers and width <= kv.head_dim and rows == len(choice.slots)):
        raise ValueError(
            f"index queries [{rows}, {heads}, {width}] for layer {layer} do not fit {len(choice.slots)} rows that "
            f"choose and a cache of {kv.layers} layers with {kv.head_dim} numbers a token"
        )
    if rows == 0:
        return
    q, weights = q.contiguous(), weights.contiguous()
    key = ("choose", heads, width, q.dtype, choice.top, id(kv))
    step = batch.once(key, lambda: Step(lib, heads, width, q.dtype, kv, batch, choice))
    for one in step.rounds:
        lib.choose(step.pointer, layer, q.data_ptr(), weights.data_ptr(), choice.slots.data_ptr(), *one)


def as_paths(choice: Choice, kv: KVCache) -> RaggedBatch:
    """The rows that choose, as rows of a tree whose root is the cache's first token: a row's path is what it chose.

    One span that has every block in its place, so that a place in a path is a slot.
    """
    rows, top = choice.slots.shape
    positions = torch.full((rows,), top - 1)
    return RaggedBatch(
        token_ids=positions,
        positions=positions,
        slots=positions,
        row_starts=[0, rows],
        context_lens=[kv.num_blocks * kv.block_size],
        block_tables=torch.arange(kv.num_blocks).unsqueeze(0),
        block_size=kv.block_size,
        trees=Trees(torch.zeros(1, dtype=torch.int64), choice.slots),
    )


def attend(
    lib: Library,
    q: torch.Tensor,
    choice: Choice,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    width: int,
) -> torch.Tensor:
    """See `sparse.attend`; what was chosen is read where it lies."""

    def chosen(q: torch.Tensor) -> torch.Tensor:
        paths = batch.once(("paths", choice.top, id(kv)), lambda: as_paths(choice, kv))
        return latent.attend(lib, q, kv, paths, layer, scale, width)

    if choice.batch is None:
        return chosen(q)
    whole = latent.attend(lib, q[choice.whole], kv, choice.batch, layer, scale, width)
    if not choice.beyond:
        return whole
    out = q.new_empty(*q.shape[:2], width)
    out[choice.whole] = whole
    out[choice.rows] = chosen(q[choice.rows])
    return out
