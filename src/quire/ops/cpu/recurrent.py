"""The gated delta net, in C++: see recurrent.cpp."""

from __future__ import annotations

import ctypes
import itertools

import torch

from quire.ops.cpu.attention import checked_tables
from quire.ops.cpu.library import DTYPES, F32, I64, POINTER, Library, Prototype
from quire.ops.memory import Scratch
from quire.ops.ragged import RaggedBatch
from quire.ops.states import DeltaNetWeights, StateCache, check_batch

PROTOTYPES: dict[str, Prototype] = {
    "delta_net_scratch_bytes": (I64, (I64, I64)),
    "delta_net": (None, (POINTER,)),
}


class CDeltaNet(ctypes.Structure):
    """`DeltaNet` of recurrent.cpp."""

    _fields_ = (
        ("blocks", POINTER),
        *((name, I64) for name in ("block_bytes", "states", "keys", "updates", "decays", "inputs")),
        *(
            (name, I64)
            for name in ("block_size", "key_heads", "heads", "key_dim", "value_dim", "decay_dim", "taps", "channels")
        ),
        *((name, I64) for name in ("dtype", "spans", "tokens", "table_width")),
        *((name, POINTER) for name in ("row_starts", "context_lens", "tables", "x", "ab")),
        *((name, POINTER) for name in ("conv", "decay", "shift", "norm", "mixed", "rates", "results", "scratch")),
        ("scratch_bytes", I64),
        ("out", POINTER),
        ("eps", F32),
        ("sigmoid", ctypes.c_int32),
    )


def delta_net(
    lib: Library,
    x: torch.Tensor,
    ab: torch.Tensor,
    weights: DeltaNetWeights,
    cache: StateCache,
    batch: RaggedBatch,
    layer: int,
    workspace: Scratch,
) -> torch.Tensor:
    """See `states.delta_net`.

    Raises:
        ValueError: what is given does not fit the cache, or the batch has trees.
    """
    check_batch(x, ab, cache, batch, layer)
    step = batch.once(("delta_net", id(cache)), lambda: _Step(lib, cache, batch, len(x), x.dtype))
    x, ab = x.contiguous(), ab.contiguous()
    out = x.new_empty(len(x), step.columns)
    struct = step.struct
    struct.blocks = step.blocks + layer * step.layer_bytes
    struct.x, struct.ab, struct.out = x.data_ptr(), ab.data_ptr(), out.data_ptr()
    struct.conv, struct.decay = weights.conv.data_ptr(), weights.decay.data_ptr()
    struct.shift, struct.norm = weights.shift.data_ptr(), weights.norm.data_ptr()
    struct.eps, struct.sigmoid = weights.eps, weights.gate == "sigmoid"
    struct.mixed = mixed = workspace.at_least(step.room)
    struct.rates, struct.results, struct.scratch = (mixed + offset for offset in step.offsets)
    lib.delta_net(step.address)
    return out


class _Step:
    """What is the same for all layers of a step: they are computed one after another, so one structure serves all."""

    __slots__ = ("_kept", "address", "blocks", "columns", "layer_bytes", "offsets", "room", "struct")

    def __init__(self, lib: Library, cache: StateCache, batch: RaggedBatch, tokens: int, dtype: torch.dtype) -> None:
        shape = cache.states_shape
        tables = checked_tables(batch, cache)
        starts, contexts = torch.tensor(batch.row_starts), torch.tensor(batch.context_lens)
        self._kept = tables, starts, contexts
        self.blocks, self.layer_bytes = cache.memory.data_ptr(), shape.layer_bytes
        self.columns = shape.heads * shape.value_dim
        each = lib.delta_net_scratch_bytes(shape.key_dim, shape.value_dim)
        ends = itertools.accumulate(
            -(-4 * tokens * count // 64) * 64 for count in (shape.channels, shape.rates, self.columns)
        )
        self.offsets = tuple(ends)
        self.room = self.offsets[-1] + lib.threads() * each
        states, keys, updates, decays, inputs = cache.offsets
        self.struct = CDeltaNet(
            block_bytes=cache.bytes_per_block,
            states=states,
            keys=keys,
            updates=updates,
            decays=decays,
            inputs=inputs,
            block_size=cache.block_size,
            key_heads=shape.key_heads,
            heads=shape.heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            decay_dim=shape.decay_dim,
            taps=shape.taps,
            channels=shape.channels,
            dtype=DTYPES[dtype],
            spans=len(batch.context_lens),
            tokens=tokens,
            table_width=tables.shape[1],
            row_starts=starts.data_ptr(),
            context_lens=contexts.data_ptr(),
            tables=tables.data_ptr(),
            scratch_bytes=each,
        )
        self.address = ctypes.addressof(self.struct)
