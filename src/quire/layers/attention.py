"""The attention layer: turns queries and keys, stores the step's keys and values, then attends."""

from __future__ import annotations

import torch

from quire.ops import HeadNorm, Kernels, KVCache, RaggedBatch


class Attention:
    """Causal grouped-query attention of one layer over the paged cache.

    Args:
        scale: factor of the scores, as a rule head_dim ** -0.5.
        window: a row sees this many positions, itself included; None: all.
        layer: which layer of the cache this is.
        norm: of each query and key head, before it is turned; None: none.
    """

    def __init__(self, scale: float, window: int | None, layer: int, norm: HeadNorm | None, kernels: Kernels) -> None:
        self.scale, self.window, self.layer, self.norm = scale, window, layer, norm
        self._kernels = kernels

    def __call__(
        self, qkv: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; tables: cos and sin. Returns [tokens, heads * head_dim]."""
        q = self._kernels.rotate_and_store(qkv, self.norm, tables, kv, batch, self.layer)
        out = self._kernels.attend(q, kv, batch, self.layer, self.scale, self.window)
        kv.pulse[0] += 1
        return out
