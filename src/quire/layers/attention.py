"""The attention layer: stores the step's keys and values, then attends."""

from __future__ import annotations

import torch

from quire.ops import KVCache, RaggedBatch, paged_attention, store_kv


class Attention:
    """Causal grouped-query attention of one layer over the paged cache.

    Args:
        num_heads: query heads; a multiple of num_kv_heads.
        num_kv_heads: heads of the cache.
        head_dim: dimensions a head.
        scale: factor of the scores, as a rule head_dim ** -0.5.
        window: a row sees this many positions, itself included; None: all.
        layer: which layer of the cache this is.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None, layer: int
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.layer = scale, window, layer

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """q: [tokens, heads, d]; k, v: [tokens, kv_heads, d], any strides. Returns [tokens, heads * d]."""
        store_kv(k, v, kv, batch, self.layer)
        out = paged_attention(q, kv, batch, self.layer, self.scale, self.window)
        kv.pulse[0] += 1
        return out.flatten(1)
