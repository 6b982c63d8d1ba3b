"""Attention over the paged cache, in C++: see attention.cpp."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.kv_cache import CODE_DTYPES, KVCache, KVShape
from quire.ops.ragged import RaggedBatch, Trees

PROTOTYPES: dict[str, Prototype] = {
    "attention_scratch_bytes": (I64, (POINTER,)),
    "attend": (None, (POINTER, I64, POINTER, I64, POINTER, POINTER)),
}

KV_FORMATS = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
"""How the C++ side names what the cache holds (`KvFormat` in kv_store.h)."""

ROW_TILES = (384, 128)
"""Most rows (tokens times the query heads that share a KV head) of an item of work. All of them share the packing of a
key tile, so the first is taken where it leaves each thread `TILES_A_THREAD` items. Does not change bits."""

TILES_A_THREAD = 8

TREE_ROWS = 16
"""Most query heads of a KV head with which an item has several tokens of a tree: tokens are also multiplied one by one,
and whole tile registers of a token's rows reach beyond the last, where the next token's sums would be.
"""

ITEMS_A_THREAD = 2
"""At least so many items a thread, as far as there are heads: then the last to end keeps the others waiting briefly."""


class CCache(ctypes.Structure):
    """`KvCache` of kv_store.h."""

    _fields_ = (
        ("data", POINTER),
        ("block_bytes", I64),
        ("kv_heads", I64),
        ("block_size", I64),
        ("head_dim", I64),
        ("format", I32),
        ("sides", I32),
    )


class CTrees(ctypes.Structure):
    """`Trees` of attention_pack.h."""

    _fields_ = (("bases", POINTER), ("positions", POINTER), ("paths", POINTER), ("width", I64))


class CStep(ctypes.Structure):
    """`AttentionStep` of attention.cpp."""

    _fields_ = (
        ("kv", CCache),
        ("dtype", I64),
        ("heads", I64),
        ("window", I64),
        ("ahead", I64),
        ("table_width", I64),
        ("items", I64),
        ("most_rows", I64),
        ("threads", I64),
        ("scratch_bytes", I64),
        ("tables", POINTER),
        ("item", POINTER),
        ("scratch", POINTER),
        ("trees", CTrees),
        ("scale", F32),
    )


class Step:
    """A step's attention as C++ needs it, made once for all layers that agree in its arguments: see `prepare`.

    Attributes:
        pointer: of `AttentionStep`. Valid while this object and the cache live.
    """

    def __init__(
        self,
        lib: Library,
        heads: int,
        dtype: torch.dtype,
        scale: float,
        window: int | None,
        kv: KVCache,
        batch: RaggedBatch,
        causal: bool = True,
    ) -> None:
        if heads % kv.kv_heads or dtype != kv.dtype:
            raise ValueError(f"{heads} heads in {dtype} do not fit a cache of {kv.kv_heads} KV heads and {kv.dtype}")
        threads = lib.threads()
        group = heads // kv.kv_heads
        self.trees = host_trees(batch)
        tile_rows = rows_of_tile(batch.row_starts, group, kv.kv_heads, threads)
        if self.trees and group > TREE_ROWS:
            tile_rows = 1
        ahead = 0 if causal else (window or max(batch.context_lens)) - 1
        spans = batch.row_starts, batch.context_lens
        self.items = plan_items(*spans, tile_rows, kv.kv_heads, threads, self.trees, ahead)
        self.tables = checked_tables(batch, kv)
        self.struct = CStep(
            kv=describe(kv),
            dtype=DTYPES[dtype],
            heads=heads,
            window=window or 0,
            ahead=ahead,
            table_width=self.tables.shape[1],
            items=len(self.items),
            most_rows=tile_rows * group,
            threads=threads,
            tables=self.tables.data_ptr(),
            item=self.items.ctypes.data,
            trees=self.trees.struct if self.trees else CTrees(),
            scale=scale,
        )
        self.pointer = ctypes.addressof(self.struct)
        each = lib.attention_scratch_bytes(self.pointer)
        self.scratch = torch.empty(threads * each + 64, dtype=torch.uint8)
        self.struct.scratch_bytes = each
        self.struct.scratch = -(-self.scratch.data_ptr() // 64) * 64


class HostTrees:
    """A batch's trees as C++ needs them.

    Attributes:
        spans: [spans] bool, which rows follow paths of their own.
        bases: [spans] int64.
        positions: [tokens] int64.
        struct: `Trees`. Valid while this object lives.
    """

    def __init__(self, batch: RaggedBatch, trees: Trees) -> None:
        self.spans = np.array(batch.in_trees())
        self._held = [tensor.contiguous() for tensor in (trees.bases, batch.positions, trees.paths)]
        self.bases, self.positions, _ = (tensor.numpy() for tensor in self._held)
        self.struct = CTrees(*(tensor.data_ptr() for tensor in self._held), trees.paths.shape[1])


def host_trees(batch: RaggedBatch) -> HostTrees | None:
    """None: all rows continue one another."""
    return None if batch.trees is None else HostTrees(batch, batch.trees)


def describe(kv: KVCache) -> CCache:
    """The cache as C++ sees it. The tensor must outlive it."""
    shape = kv.bytes_per_block, kv.kv_heads, kv.block_size, kv.head_dim
    return CCache(kv.data.data_ptr(), *shape, KV_FORMATS[kv.stored_dtype], kv.sides)


def attend(
    lib: Library,
    q: torch.Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """See `Kernels.attend`."""
    tokens, heads, head_dim = q.shape
    if not (0 <= layer < kv.layers and head_dim == kv.head_dim and tokens == batch.row_starts[-1]):
        raise ValueError(
            f"queries [{tokens}, {heads}, {head_dim}] for layer {layer} do not fit a batch of {batch.row_starts[-1]} "
            f"rows and a cache of {kv.layers} layers with head_dim {kv.head_dim}"
        )
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    step = prepare(lib, heads, q.dtype, scale, window, kv, batch, causal)
    out = q.new_empty(tokens, heads * head_dim)
    of_heads = None if sinks is None else sinks.data_ptr()
    lib.attend(step.pointer, layer, q.data_ptr(), q.stride(0), of_heads, out.data_ptr())
    return out


def prepare(
    lib: Library,
    heads: int,
    dtype: torch.dtype,
    scale: float,
    window: int | None,
    kv: KVCache,
    batch: RaggedBatch,
    causal: bool = True,
) -> Step:
    """What all layers of a step share that agree in these arguments.

    Raises:
        ValueError: the batch, or the number or type of the heads, does not fit the cache.
    """
    key = ("attend", heads, dtype, scale, window, id(kv), causal)
    return batch.once(key, lambda: Step(lib, heads, dtype, scale, window, kv, batch, causal))


def rows_of_tile(row_starts: list[int], group: int, kv_heads: int, threads: int) -> int:
    """Most tokens of an item, of which each has `group` rows."""
    lengths = np.diff(row_starts)
    for rows in ROW_TILES:
        tokens = max(1, rows // group)
        if int((-(-lengths // tokens)).sum()) * kv_heads >= TILES_A_THREAD * threads:
            break
    return min(tokens, int(lengths.max()))


def most_scratch(lib: Library, shape: KVShape) -> int:
    """Bytes of all threads' scratch memory where an item has as many rows as any."""
    stored = CODE_DTYPES.get(shape.kv_cache_dtype, shape.dtype)
    kv = CCache(kv_heads=shape.kv_heads, head_dim=shape.head_dim, format=KV_FORMATS[stored], sides=shape.sides)
    step = CStep(kv=kv, dtype=DTYPES[shape.dtype], most_rows=max(ROW_TILES))
    each: int = lib.attention_scratch_bytes(ctypes.addressof(step))
    return each * int(lib.threads())


def plan_items(
    row_starts: list[int],
    context_lens: list[int],
    tile_rows: int,
    kv_heads: int,
    threads: int,
    trees: HostTrees | None = None,
    ahead: int = 0,
) -> npt.NDArray[np.int64]:
    """Items of work [items, 7]: span, first row, rows (at most `tile_rows`), the first row's position (of a tree: one
    from its base on), the position behind the last that they see, first KV head, KV heads.

    The longest come first, so that the threads end together. An item has as many heads as leave each thread some
    items: from one head to the next, memory is read ahead.
    """
    tiles: list[tuple[int, int, int, int, int]] = []  # numpy would take longer, but for hundreds of spans
    for span, (start, end, context) in enumerate(zip(row_starts, row_starts[1:], context_lens, strict=False)):
        first = context - (end - start) if trees is None or not trees.spans[span] else int(trees.bases[span])
        for row in range(start, end, tile_rows):
            rows, position = min(tile_rows, end - row), first + row - start
            tiles.append((span, row, rows, position, position + rows + min(ahead, end - row - rows)))
    tiles.sort(key=lambda tile: -tile[2] * tile[4])
    parts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    heads = kv_heads // next((n for n in parts if n * len(tiles) >= ITEMS_A_THREAD * threads), kv_heads)
    return np.array([(*tile, head, heads) for tile in tiles for head in range(0, kv_heads, heads)])


def checked_tables(batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
    """The block tables, of which every entry that is read lies in the cache."""
    tables = batch.block_tables.contiguous()
    longest = max(batch.context_lens)
    if kv.block_size != batch.block_size or tables.shape[1] * kv.block_size < longest:
        raise ValueError(
            f"a context of {longest} tokens does not fit {tables.shape[1]} blocks of {batch.block_size} tokens "
            f"(of a cache with blocks of {kv.block_size})"
        )
    low, high = (int(x) for x in torch.aminmax(tables))
    if low < 0 or high >= kv.num_blocks:
        raise ValueError(f"block tables name blocks {low} to {high}; the cache has 0 to {kv.num_blocks - 1}")
    return tables
