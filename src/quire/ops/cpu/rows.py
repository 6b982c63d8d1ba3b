"""What is done row by row, in C++: see rows.cpp.

Tensors come from layers and products, so types agree and shapes fit by construction; what a step brings, ids and
slots, is checked on the C++ side.
"""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cpu.attention import describe
from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.kernels import HeadNorm
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}
"""Their numbers in gate.h."""

PROTOTYPES: dict[str, Prototype] = {
    "embed": (I32, (I32, I32, POINTER, POINTER, POINTER, I64, I64, I64)),
    "rms_norm": (None, (I32, I32, POINTER, POINTER, POINTER, I64, I64, F32)),
    "add_rms_norm": (None, (I32, I32, POINTER, POINTER, POINTER, I64, I64, F32)),
    "soft_cap": (None, (POINTER, I64, F32)),
    "gate": (None, (I32, I32, POINTER, POINTER, I64, I64)),
    "rotate_and_store": (
        I32,
        (I32, I32, POINTER, POINTER, POINTER, I64, F32, POINTER, POINTER, POINTER, I64, I64, I64, I64, POINTER),
    ),
}


def can_embed(weight: torch.Tensor) -> bool:
    """Whether `embed` takes this table."""
    return weight.dtype in DTYPES and weight.is_contiguous()


def embed(lib: Library, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `Kernels.embed`. Raises IndexError for an id outside the table."""
    vocabulary, size = weight.shape
    ids = ids.contiguous()
    out = torch.empty(len(ids), size, dtype=dtype)
    tensors = ids.data_ptr(), weight.data_ptr(), out.data_ptr()
    if lib.embed(DTYPES[weight.dtype], DTYPES[dtype], *tensors, len(ids), vocabulary, size):
        raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())}; the table has {vocabulary} rows")
    return out


def rms_norm(lib: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, size = x.shape
    lib.rms_norm(
        DTYPES[x.dtype], DTYPES[weight.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps
    )
    return out


def add_rms_norm(
    lib: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.add_rms_norm`. The results take the places of `x` and `residual`."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, size = x.shape
    types = DTYPES[x.dtype], DTYPES[weight.dtype]
    lib.add_rms_norm(*types, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, size, eps)
    return x, residual


def activate(lib: Library, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `Kernels.activate`."""
    x = x.contiguous()
    rows, width = x.shape
    size = width if activation in WITHOUT_GATE else width // 2
    out = x.new_empty(rows, size)
    lib.gate(ACTIVATIONS[activation], DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), rows, size)
    return out


def soft_cap(lib: Library, logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See `Kernels.soft_cap`."""
    logits = logits.contiguous()
    lib.soft_cap(logits.data_ptr(), logits.numel(), cap)
    return logits


def rotate_and_store(
    lib: Library,
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
) -> torch.Tensor:
    """See `Kernels.rotate_and_store`. Raises IndexError for a slot outside the cache."""
    qkv = qkv.contiguous()
    tokens, width = qkv.shape
    heads = width // kv.head_dim - 2 * kv.kv_heads
    queries = qkv.new_empty(tokens, heads, kv.head_dim)
    weight = (None, 0, 0.0) if norm is None else (norm.weight.data_ptr(), len(norm.weight), norm.eps)
    weight_dtype = qkv.dtype if norm is None else norm.weight.dtype
    slots, cache = batch.once(("rotate_and_store", kv), lambda: (batch.slots.contiguous(), describe(kv)))
    outside = lib.rotate_and_store(
        *(DTYPES[qkv.dtype], DTYPES[weight_dtype], qkv.data_ptr(), queries.data_ptr(), *weight),
        *(tables[0].data_ptr(), tables[1].data_ptr(), slots.data_ptr()),
        *(tokens, heads, layer, kv.num_blocks, ctypes.byref(cache)),
    )
    if outside:
        raise IndexError(f"slots from {int(slots.min())} to {int(slots.max())}; the cache has {kv.num_blocks} blocks")
    return queries
