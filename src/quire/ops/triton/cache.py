"""What goes into the KV cache, and where: a step's inputs, rotation and store, block copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.kernels import HeadNorm
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import DeviceSpans, RaggedBatch


def place(
    tokens: torch.Tensor,
    span_of_row: torch.Tensor,
    last_tokens: torch.Tensor,
    spans: DeviceSpans,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Kernels.place`."""
    raise NotImplementedError


def copy_blocks(kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
    """See `Kernels.copy_blocks`."""
    raise NotImplementedError


def rotate_and_store(
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
) -> torch.Tensor:
    """See `Kernels.rotate_and_store`."""
    raise NotImplementedError
