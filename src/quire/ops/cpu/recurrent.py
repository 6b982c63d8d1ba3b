"""The gated delta net, in C++: see recurrent.cpp."""

from __future__ import annotations

import ctypes

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
        *((name, I64) for name in ("block_size", "key_heads", "heads", "key_dim", "value_dim", "taps", "channels")),
        *((name, I64) for name in ("dtype", "spans", "tokens", "table_width")),
        *((name, POINTER) for name in ("row_starts", "context_lens", "tables", "x", "ab")),
        *((name, POINTER) for name in ("conv", "decay", "shift", "norm", "mixed", "rates", "results", "scratch")),
        ("scratch_bytes", I64),
        ("out", POINTER),
        ("eps", F32),
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
    shape, tokens, threads = cache.states_shape, len(x), lib.threads()
    tables = batch.once(("tables", id(cache)), lambda: checked_tables(batch, cache))
    starts, contexts = batch.once("spans", lambda: (torch.tensor(batch.row_starts), torch.tensor(batch.context_lens)))
    x, ab = x.contiguous(), ab.contiguous()
    out = x.new_empty(tokens, shape.heads * shape.value_dim)
    each = lib.delta_net_scratch_bytes(shape.key_dim, shape.value_dim)
    sizes = [4 * tokens * count for count in (shape.channels, 2 * shape.heads, shape.heads * shape.value_dim)]
    mixed = workspace.at_least(threads * each + sum(-(-size // 64) * 64 for size in sizes))
    rates = mixed + -(-sizes[0] // 64) * 64
    results = rates + -(-sizes[1] // 64) * 64
    states, keys, updates, decays, inputs = cache.offsets
    struct = CDeltaNet(
        blocks=cache.memory.data_ptr() + layer * shape.layer_bytes,
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
        taps=shape.taps,
        channels=shape.channels,
        dtype=DTYPES[x.dtype],
        spans=len(batch.context_lens),
        tokens=tokens,
        table_width=tables.shape[1],
        row_starts=starts.data_ptr(),
        context_lens=contexts.data_ptr(),
        tables=tables.data_ptr(),
        x=x.data_ptr(),
        ab=ab.data_ptr(),
        conv=weights.conv.data_ptr(),
        decay=weights.decay.data_ptr(),
        shift=weights.shift.data_ptr(),
        norm=weights.norm.data_ptr(),
        mixed=mixed,
        rates=rates,
        results=results,
        scratch=results + -(-sizes[2] // 64) * 64,
        scratch_bytes=each,
        out=out.data_ptr(),
        eps=weights.eps,
    )
    lib.delta_net(ctypes.addressof(struct))
    return out
