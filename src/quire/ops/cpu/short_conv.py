"""The gated short convolution, in C++: see short_conv.cpp."""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cpu.attention import checked_tables
from quire.ops.cpu.library import DTYPES, I64, POINTER, Library, Prototype
from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import RecurrentCache
from quire.ops.short_conv import ConvCache, ShortConvWeights, check_conv

PROTOTYPES: dict[str, Prototype] = {"short_conv": (None, (POINTER,))}


class CInputs(ctypes.Structure):
    """`Inputs` of convolution.h."""

    _fields_ = (
        ("blocks", POINTER),
        *((name, I64) for name in ("block_bytes", "block_size", "channels", "taps", "spans", "table_width")),
        *((name, POINTER) for name in ("row_starts", "context_lens", "tables")),
    )


class CShortConv(ctypes.Structure):
    """`ShortConv` of short_conv.cpp."""

    _fields_ = (
        ("inputs", CInputs),
        *((name, I64) for name in ("dtype", "tokens")),
        *((name, POINTER) for name in ("x", "conv", "bias", "made", "out")),
    )


def inputs_of(
    cache: RecurrentCache, batch: RaggedBatch, layer: int, part: int, conv: torch.Tensor
) -> tuple[CInputs, tuple[torch.Tensor, ...]]:
    """A step's spans and where its convolution's inputs lie, and what must stay in memory meanwhile.

    Args:
        part: which of the cache's parts they are.
        conv: [taps, channels].

    Raises:
        ValueError: the block tables do not fit the cache.
    """
    tables = batch.once(("tables", id(cache)), lambda: checked_tables(batch, cache))
    starts, contexts = batch.once("spans", lambda: (torch.tensor(batch.row_starts), torch.tensor(batch.context_lens)))
    first = cache.memory.data_ptr() + layer * cache.layer_bytes + cache.offsets[part]
    inputs = CInputs(
        blocks=first,
        block_bytes=cache.bytes_per_block,
        block_size=cache.block_size,
        channels=conv.shape[1],
        taps=conv.shape[0],
        spans=len(batch.context_lens),
        table_width=tables.shape[1],
        row_starts=starts.data_ptr(),
        context_lens=contexts.data_ptr(),
        tables=tables.data_ptr(),
    )
    return inputs, (tables, starts, contexts)


def short_conv(
    lib: Library, x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """See `short_conv.short_conv`; raises what it does."""
    check_conv(x, weights, cache, batch, layer)
    inputs, kept = inputs_of(cache, batch, layer, 0, weights.conv)
    x = x.contiguous()
    made = x.new_empty(len(x), cache.conv_shape.channels)
    out = torch.empty_like(made)
    struct = CShortConv(
        inputs=inputs,
        dtype=DTYPES[x.dtype],
        tokens=len(x),
        x=x.data_ptr(),
        conv=weights.conv.data_ptr(),
        bias=weights.bias.data_ptr(),
        made=made.data_ptr(),
        out=out.data_ptr(),
    )
    lib.short_conv(ctypes.addressof(struct))
    del kept
    return out
