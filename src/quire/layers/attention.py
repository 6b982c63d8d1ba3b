"""The attention layer: projects, rotates queries and keys, stores the step's keys and values, attends, projects."""

from __future__ import annotations

import torch

from quire.layers.weights import LayerWeights
from quire.ops import HeadNorm, KVCache, RaggedBatch
from quire.parallel.group import Split, own_heads


class Attention:
    """Causal grouped-query attention of one layer over the paged cache.

    Args:
        num_heads, num_kv_heads, head_dim: its shape.
        weights: gives the layer's parts by name.
        layer: which layer of its cache this is.
        window: a row sees this many positions, itself included; None: all.
        qkv_bias, output_bias: whether the products have biases.
        norm_eps: of a norm of each query and key head, before it is rotated; None: there is none.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        weights: LayerWeights,
        layer: int,
        window: int | None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        heads = (num_heads, num_kv_heads, num_kv_heads)
        self.qkv = weights.linear(*qkv, bias=qkv_bias, split=Split.OUTPUTS, heads=heads)
        self.output = weights.linear("self_attn.o_proj", bias=output_bias, split=Split.INPUTS, heads=(num_heads,))
        self.heads, kv_heads = own_heads(num_heads, weights.group), own_heads(num_kv_heads, weights.group)
        self.norm = None if norm_eps is None else _head_norm(weights, self.heads, kv_heads, norm_eps)
        self.scale, self.window, self.layer = head_dim**-0.5, window, layer
        self._kernels = weights.kernels

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """x: [tokens, hidden]; tables: cos and sin, [tokens, head_dim / 2] each. Returns [tokens, hidden]."""
        q = self._kernels.rotate_and_store(self.qkv(x), self.norm, tables, kv, batch, self.layer)
        out = self._kernels.attend(q, kv, batch, self.layer, self.scale, self.window)  # [tokens, heads * head_dim]
        kv.pulse[0] += 1
        return self.output(out)


def _head_norm(weights: LayerWeights, num_heads: int, num_kv_heads: int, eps: float) -> HeadNorm:
    """One norm for the query and key heads, which lie side by side: a row of weights for each head."""
    q, k = weights.tensor("self_attn.q_norm.weight"), weights.tensor("self_attn.k_norm.weight")  # [head_dim] each
    return HeadNorm(torch.cat([q.expand(num_heads, -1), k.expand(num_kv_heads, -1)]), eps)
