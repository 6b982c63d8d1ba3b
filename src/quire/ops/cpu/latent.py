"""Latent attention over the paged cache, in C++: see latent.cpp; the store and the rotation: see rows.cpp."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.cpu.attention import CCache, CTrees, HostTrees, checked_tables, describe, host_trees
from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch

PROTOTYPES: dict[str, Prototype] = {
    "latent_scratch_bytes": (I64, (POINTER,)),
    "attend_latent": (None, (POINTER, I64, POINTER, I64, POINTER)),
    "store_latent": (
        I32,
        (I32, POINTER, I64, POINTER, F32, *[POINTER] * 5, *[I64] * 5, POINTER),
    ),
    "rotate_interleaved": (None, (I32, POINTER, I64, I64, POINTER, POINTER, POINTER, I64, I64, I64)),
}

ROW_TILE = 64
"""Most rows (tokens times heads) of an item of work. Does not change bits."""

ITEMS_A_THREAD = 2
"""At least so many items a thread, as far as the context has splits. Does not change bits."""

SPLIT = 512
"""Keys of a split, a multiple of `KEY_TILE` of attention_pack.h. Changing it changes bits."""


class CStep(ctypes.Structure):
    """`LatentStep` of latent.cpp."""

    _fields_ = (
        ("kv", CCache),
        *((name, I64) for name in ("dtype", "heads", "key", "latent", "split", "table_width", "items", "merges")),
        *((name, I64) for name in ("most_rows", "threads", "scratch_bytes")),
        *((name, POINTER) for name in ("tables", "item", "merge", "scratch", "left")),
        ("trees", CTrees),
        ("scale", F32),
    )


class Step:
    """A step's latent attention as C++ needs it, made once for all layers.

    Attributes:
        pointer: of `LatentStep`. Valid while this object and the cache live.
    """

    def __init__(
        self,
        lib: Library,
        heads: int,
        key: int,
        latent: int,
        dtype: torch.dtype,
        scale: float,
        kv: KVCache,
        batch: RaggedBatch,
    ) -> None:
        if dtype != kv.dtype or kv.kv_heads != 1 or kv.sides != 1:
            raise ValueError(f"latent queries in {dtype} need a cache of one plane a layer in {dtype}, not {kv.dtype}")
        threads = lib.threads()
        self.trees = host_trees(batch)
        self.items, self.merges, left = plan(batch.row_starts, batch.context_lens, heads, threads, self.trees)
        self.tables = checked_tables(batch, kv)
        self.struct = CStep(
            kv=describe(kv),
            dtype=DTYPES[dtype],
            heads=heads,
            key=key,
            latent=latent,
            split=SPLIT,
            table_width=self.tables.shape[1],
            items=len(self.items),
            merges=len(self.merges),
            most_rows=int((self.items[:, 2] * self.items[:, 5]).max()),
            threads=threads,
            tables=self.tables.data_ptr(),
            item=self.items.ctypes.data,
            merge=self.merges.ctypes.data,
            trees=self.trees.struct if self.trees else CTrees(),
            scale=scale,
        )
        self.pointer = ctypes.addressof(self.struct)
        each = lib.latent_scratch_bytes(self.pointer)
        state = 4 * (-(-latent // 32) * 32 + 16)  # bytes of `States` a row, at most
        self.scratch = torch.empty(threads * each + left * state + 64, dtype=torch.uint8)
        self.struct.scratch_bytes = each
        self.struct.scratch = -(-self.scratch.data_ptr() // 64) * 64
        self.struct.left = self.struct.scratch + threads * each


def attend(
    lib: Library, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
) -> torch.Tensor:
    """See `latent.latent_attention`.

    Raises:
        ValueError: the queries or the batch do not fit the cache.
    """
    tokens, heads, size = q.shape
    if not (0 <= layer < kv.layers and size <= kv.head_dim and tokens == batch.row_starts[-1]):
        raise ValueError(
            f"queries [{tokens}, {heads}, {size}] for layer {layer} do not fit a batch of {batch.row_starts[-1]} "
            f"rows and a cache of {kv.layers} layers with {kv.head_dim} numbers a token"
        )
    if not 1 <= width <= size:
        raise ValueError(f"values of {width} numbers do not lie in a row of {size}")
    if q.stride(2) != 1 or q.stride(1) != size:
        q = q.contiguous()
    step = prepare(lib, heads, size, width, q.dtype, scale, kv, batch)
    out = q.new_empty(tokens, heads, width)
    lib.attend_latent(step.pointer, layer, q.data_ptr(), q.stride(0), out.data_ptr())
    return out


def prepare(
    lib: Library,
    heads: int,
    key: int,
    latent: int,
    dtype: torch.dtype,
    scale: float,
    kv: KVCache,
    batch: RaggedBatch,
) -> Step:
    """What all layers of a step share that agree in these arguments: see `Step`."""
    which = ("attend_latent", heads, key, latent, dtype, scale, id(kv))
    return batch.once(which, lambda: Step(lib, heads, key, latent, dtype, scale, kv, batch))


def plan(
    row_starts: list[int], context_lens: list[int], heads: int, threads: int, trees: HostTrees | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Items of work [items, 9] and merges [merges, 6], with the fields of `LatentItem` and `LatentMerge` in latent.cpp,
    and how many states of rows the items leave in memory.

    A row tile is one item, unless it alone would keep the other threads waiting: then several items share its splits.
    A token of a tree, whose keys are its own, shares a tile with no other. The longest come first, so that the threads
    end together.
    """
    groups = -(-heads // ROW_TILE)
    group = -(-heads // groups)  # heads of a row tile; the last may have fewer
    tiles: list[tuple[int, ...]] = []  # numpy would take longer, but for hundreds of spans
    for span, (start, end, context) in enumerate(zip(row_starts, row_starts[1:], context_lens, strict=False)):
        alone = trees is not None and bool(trees.spans[span])
        at_once = 1 if alone else max(1, ROW_TILE // group)
        for row in range(start, end, at_once):
            tokens = min(at_once, end - row)
            position = int(trees.positions[row]) if trees is not None and alone else context - (end - row)
            splits = -(-(position + tokens) // SPLIT)
            for head in range(0, heads, group):
                tiles.append((span, row, tokens, position, head, min(group, heads - head), splits))
    fair = sum(tokens * count * splits for _, _, tokens, _, _, count, splits in tiles) // (ITEMS_A_THREAD * threads)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    left = 0  # states of rows that lie in memory
    for span, row, tokens, position, head, count, splits in tiles:
        rows = tokens * count
        share = max(1, fair // rows)  # splits of an item
        for first in range(0, splits, share):
            at = left + first * rows if splits > share else -1
            items.append((span, row, tokens, position, head, count, first, min(share, splits - first), at))
        if splits > share:
            merges.append((row, tokens, head, count, splits, left))
            left += rows * splits
    items.sort(key=lambda item: -item[2] * item[5] * item[7])
    return np.array(items, np.int64), np.array(merges, np.int64).reshape(-1, 6), left


def store_latent(
    lib: Library,
    compressed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    index_keys: torch.Tensor | None = None,
) -> None:
    """See `latent.store_latent`.

    Raises:
        ValueError: the rows do not fit the cache.
        IndexError: a slot outside the cache.
    """
    tokens, size = compressed.shape
    behind = compressed[:, :0] if index_keys is None else index_keys.contiguous()
    rope, whole = size - len(norm), size + behind.shape[1]
    cos, sin = (table.contiguous() for table in tables)
    if whole != kv.head_dim or rope != 2 * cos.shape[1] or not 0 <= layer < kv.layers:
        raise ValueError(
            f"rows of {whole} numbers, {len(norm)} of them normalized and {2 * cos.shape[1]} rotated, for layer "
            f"{layer} do not fit a cache of {kv.layers} layers with {kv.head_dim} numbers a token"
        )
    if compressed.stride(1) != 1:
        compressed = compressed.contiguous()
    rows = compressed.new_empty(tokens, whole)
    slots, cache = batch.once(("store_latent", id(kv)), lambda: (batch.slots.contiguous(), describe(kv)))
    outside = lib.store_latent(
        *(DTYPES[compressed.dtype], compressed.data_ptr(), compressed.stride(0), norm.data_ptr(), eps),
        *(cos.data_ptr(), sin.data_ptr(), behind.data_ptr(), rows.data_ptr(), slots.data_ptr()),
        *(tokens, len(norm), rope, layer, kv.num_blocks, ctypes.byref(cache)),
    )
    if outside:
        raise IndexError(f"slots from {int(slots.min())} to {int(slots.max())}; the cache has {kv.num_blocks} blocks")


def rotate_interleaved(lib: Library, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """See `latent.rotate_interleaved`."""
    if x.stride(2) != 1:
        x = x.contiguous()
    tokens, heads, rope = x.shape
    cos, sin = (table.contiguous() for table in tables)
    out = x.new_empty(tokens, heads, rope)
    lib.rotate_interleaved(
        *(DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr()),
        *(out.data_ptr(), tokens, heads, rope),
    )
    return out
