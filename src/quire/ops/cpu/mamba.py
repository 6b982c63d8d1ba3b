"""Mamba 2, in C++: see mamba.cpp."""

from __future__ import annotations

import ctypes
import itertools

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
    step = batch.once(("mamba", id(cache)), lambda: _Step(lib, weights, cache, batch, len(x), x.dtype))
    x, dt = x.contiguous(), dt.contiguous()
    out = torch.empty(len(x), step.columns)
    struct = step.struct
    struct.blocks = step.blocks + layer * cache.layer_bytes
    struct.inputs.blocks = step.inputs + layer * cache.layer_bytes
    struct.x, struct.dt, struct.out = x.data_ptr(), dt.data_ptr(), out.data_ptr()
    struct.conv, struct.bias = weights.conv.data_ptr(), weights.bias.data_ptr()
    struct.decay, struct.shift = weights.decay.data_ptr(), weights.shift.data_ptr()
    struct.skip = weights.skip.data_ptr()
    struct.mixed = mixed = workspace.at_least(step.room)
    struct.rates, struct.scores, struct.packed, struct.scratch = (mixed + offset for offset in step.offsets)
    lib.mamba(step.address)
    return out


class _Step:
    """What is the same for all layers of a step: they are computed one after another, so one structure serves all."""

    __slots__ = ("_kept", "address", "blocks", "columns", "inputs", "offsets", "room", "struct")

    def __init__(
        self,
        lib: Library,
        weights: MambaWeights,
        cache: StateCache,
        batch: RaggedBatch,
        tokens: int,
        dtype: torch.dtype,
    ) -> None:
        shape, groups = cache.states_shape, cache.states_shape.key_heads
        inputs, self._kept = inputs_of(cache, batch, 0, 4, weights.conv)
        self.inputs, self.blocks, self.columns = inputs.blocks, cache.memory.data_ptr(), shape.heads * shape.value_dim
        each = lib.mamba_scratch_bytes(shape.key_dim, shape.value_dim)
        counts = (
            tokens * shape.channels,
            2 * tokens * shape.heads,
            tokens * groups * TILE,
            _tiles(batch, cache.block_size) * groups * shape.key_dim * TILE,
        )
        self.offsets = tuple(itertools.accumulate(-(-4 * count // 64) * 64 for count in counts))
        self.room = self.offsets[-1] + lib.threads() * each
        states, keys, updates, decays, _ = cache.offsets
        self.struct = CMamba(
            inputs=inputs,
            states=states,
            keys=keys,
            updates=updates,
            decays=decays,
            groups=groups,
            heads=shape.heads,
            state_dim=shape.key_dim,
            head_dim=shape.value_dim,
            dtype=DTYPES[dtype],
            tokens=tokens,
            scratch_bytes=each,
        )
        self.address = ctypes.addressof(self.struct)


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
