"""Attention over the paged cache for any mixture of spans, in one launch."""

from __future__ import annotations

import torch

from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch


def attend(
    q: torch.Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    layer: int,
    scale: float,
    window: int | None,
    deterministic: bool,
) -> torch.Tensor:
    """See `Kernels.attend`; reads `batch.spans`."""
    raise NotImplementedError
