"""Attention of a layer without its own KV: it reads another layer's, as in Gemma 3n and 4."""

from __future__ import annotations

import torch

from quire.layers.attention import Tables
from quire.layers.weights import LayerWeights
from quire.ops import KVCache, RaggedBatch
from quire.ops.elementwise import rotate
from quire.parallel.group import Split, query_pieces, share


class SharedKVAttention:
    """Causal attention of one layer over another one's KV: norms of the query heads, and their rotation.

    Args:
        num_heads, head_dim: of the queries.
        num_kv_heads: of the layer whose KV it reads.
        weights: gives the layer's parts by name.
        layer: which layer of the cache it reads.
        window: number of positions that a row sees, including itself; None for all.
        eps: of the norms.
        scale: of the scores.
    """

    query_factors = None
    """See `Attention`."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        weights: LayerWeights,
        layer: int,
        window: int | None,
        *,
        bias: bool,
        eps: float,
        scale: float,
    ) -> None:
        pieces = query_pieces(num_heads, num_kv_heads, weights.group.size)
        self.heads, self._head_dim = len(share(num_heads, weights.group, pieces)), head_dim
        self.queries = weights.linear("self_attn.q_proj", bias=bias, split=Split.OUTPUTS, heads=(pieces,))
        self.norm = weights.norm("self_attn.q_norm", eps)
        self.output = weights.linear("self_attn.o_proj", bias=bias, split=Split.INPUTS, heads=(pieces,))
        self.scale, self.window, self.layer = scale, window, layer
        self._kernels = weights.kernels

    def __call__(self, x: torch.Tensor, tables: Tables, kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
        """See `Attention`."""
        q = self.norm(self.queries(x).view(-1, self._head_dim)).view(len(x), self.heads, self._head_dim)
        out = self._kernels.attend(rotate(q, *tables), kv, batch, self.layer, self.scale, self.window)
        return self.output(out)
