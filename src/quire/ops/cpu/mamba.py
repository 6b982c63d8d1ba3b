"""Mamba 2, in C++: see mamba.cpp."""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cpu.library import DTYPES, F32, I64, POINTER, Library, Prototype
from quire.ops.cpu.short_conv import CInputs, inputs_of
from quire.ops.mamba import MambaWeights, check_mamba
from quire.ops.memory import Scratch
from quire.ops.ragged import RaggedBatch
from quire.ops.states import TILE, StateCache

PROTOTYPES: dict[str, Prototype] = {
    "mamba_scratch_bytes": (I64, (I64, I64)),
    "mamba": (None, (POINTER,)),
    "grouped_norm": (None, (POINTER, POINTER, POINTER, I64, I64, I64, I64, F32)),
}


class CMamba(ctypes.Structure):
    """`Mamba` of mamba.cpp."""

    _fields_ = (
        ("inputs", CInputs),
        ("blocks", POINTER),
        *((name, I64) for name in ("states", "keys", "updates", "decays")),
        *((name, I64) for name in ("groups", "heads", "state_dim", "head_dim", "dtype", "tokens")),
        *((name, POINTER) for name in ("x", "dt", "conv", "bias", "decay", "shift", "skip")),
        *((name, POINTER) for name in ("mixed", "rates", "scores", "packed", "scratch")),
        ("scratch_bytes", I64),
        ("out", POINTER),
    )


def mamba(
    lib: Library,
    x: torch.Tensor,
    dt: torch.Tensor,
    weights: MambaWeights,
    cache: StateCache,
    batch: RaggedBatch,
    layer: int,
    workspace: Scratch,
) -> torch.Tensor:
    """See `mamba.mamba`; raises what it does."""
    check_mamba(x, dt, cache, batch, layer)
    shape, tokens = cache.states_shape, len(x)
    inputs, kept = inputs_of(cache, batch, layer, 4, weights.conv)
    tiles = batch.once(("tiles", cache.block_size), lambda: _tiles(batch, cache.block_size))
    x, dt = x.contiguous(), dt.contiguous()
    out = torch.empty(tokens, shape.heads * shape.value_dim)
    each = lib.mamba_scratch_bytes(shape.key_dim, shape.value_dim)
    groups, channels = shape.key_heads, shape.channels
    counts = (
        tokens * channels,
        2 * tokens * shape.heads,
        tokens * groups * TILE,
        tiles * groups * shape.key_dim * TILE,
    )
    sizes = [-(-4 * count // 64) * 64 for count in counts]
    places = [workspace.at_least(sum(sizes) + lib.threads() * each)]
    for size in sizes:
        places.append(places[-1] + size)
    mixed, rates, scores, packed, scratch = places
    states, keys, updates, decays, _ = cache.offsets
    struct = CMamba(
        inputs=inputs,
        blocks=cache.memory.data_ptr() + layer * cache.layer_bytes,
        states=states,
        keys=keys,
        updates=updates,
        decays=decays,
        groups=groups,
        heads=shape.heads,
        state_dim=shape.key_dim,
        head_dim=shape.value_dim,
        dtype=DTYPES[x.dtype],
        tokens=tokens,
        x=x.data_ptr(),
        dt=dt.data_ptr(),
        conv=weights.conv.data_ptr(),
        bias=weights.bias.data_ptr(),
        decay=weights.decay.data_ptr(),
        shift=weights.shift.data_ptr(),
        skip=weights.skip.data_ptr(),
        mixed=mixed,
        rates=rates,
        scores=scores,
        packed=packed,
        scratch=scratch,
        scratch_bytes=each,
        out=out.data_ptr(),
    )
    lib.mamba(ctypes.addressof(struct))
    del kept
    return out


def _tiles(batch: RaggedBatch, block_size: int) -> int:
    """How many tiles a step goes through: each span from the beginning of the block where it begins."""
    spans = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, strict=False)
    firsts = ((context - (end - begin)) // block_size * block_size for begin, end, context in spans)
    return sum(-(-(context - first) // TILE) for first, context in zip(firsts, batch.context_lens, strict=True))


def grouped_norm(
    lib: Library, x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """See `elementwise.grouped_norm`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    parts = len(x), groups, x.shape[1] // groups
    lib.grouped_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), DTYPES[dtype], *parts, eps)
    return out
