"""Sparse latent attention, to positions chosen by an indexer (DeepSeek V3.2, https://arxiv.org/abs/2512.02556).

The indexer has its own queries, projected from the compressed ones, and one key per token, stored in the token's row of
the cache after the part that attention reads. The reference multiplies both by a Hadamard matrix, and rounds to fp8 to
save time. Scores are invariant under that matrix, so it is omitted here, and values are rounded to the model's data
type only. A layer may reuse the positions chosen by the one before it (GLM-5.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.attention import QueryScaling
from quire.layers.latent import LatentAttention, LatentConfig
from quire.layers.weights import LayerWeights
from quire.ops import KVCache, RaggedBatch, elementwise, sparse

INDEX_EPS = 1e-6
"""Of the norm of index keys, regardless of `rms_norm_eps`, as in DeepSeek's own code and in transformers."""

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Sizes of an indexer, which chooses the positions that a row attends to.

    Attributes:
        heads, head_dim: of its queries (`index_n_heads`, `index_head_dim`); there is one key.
        top: number of positions (`index_topk`).
        interleaved: whether adjacent dimensions are rotated in pairs, or those half of the rotated part apart.
        shared: this layer reuses the choice of the one before it.
    """

    heads: int
    head_dim: int
    top: int
    interleaved: bool = False
    shared: bool = False

    def tensor_shapes(self, hidden: int, queries: int) -> dict[str, tuple[int, ...]]:
        """Its tensors, for compressed queries of this width."""
        if self.shared:
            return {}
        return {
            "self_attn.indexer.wq_b.weight": (self.heads * self.head_dim, queries),
            "self_attn.indexer.wk.weight": (self.head_dim, hidden),
            "self_attn.indexer.k_norm.weight": (self.head_dim,),
            "self_attn.indexer.k_norm.bias": (self.head_dim,),
            "self_attn.indexer.weights_proj.weight": (self.heads, hidden),
        }


class Indexer:
    """Computes index keys, and the positions that rows attend to. Like a router's, its projections are never quantized.

    Args:
        config: sizes.
        rope: number of rotated dimensions of a query and key, the first ones.
    """

    def __init__(self, config: IndexConfig, rope: int, weights: LayerWeights) -> None:
        name, pack = "self_attn.indexer.", weights.kernels.pack
        self._config, self._rope, self._kernels = config, rope, weights.kernels
        self._queries = pack([weights.tensor(f"{name}wq_b.weight")])
        self._keys = pack([weights.tensor(f"{name}wk.weight")])
        self._weights = pack([weights.tensor(f"{name}weights_proj.weight", torch.float32)])
        self._norm = weights.tensor(f"{name}k_norm.weight", torch.float32).clone()
        self._bias = weights.tensor(f"{name}k_norm.bias", torch.float32).clone()

    def keys(self, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        """x: [tokens, hidden], normed. Returns [tokens, head_dim]."""
        keys = self._keys.matmul(x)
        like = keys.shape[1:], self._norm, self._bias, INDEX_EPS
        normed = torch.nn.functional.layer_norm(keys.float(), *like).to(x.dtype)
        return self._turned(normed.unsqueeze(1), tables).squeeze(1)

    def choose(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor,
        tables: Tables,
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        choice: sparse.Choice,
    ) -> None:
        """See `sparse.choose`.

        Args:
            x: [tokens, hidden]. compressed: [tokens, q_lora_rank], the normed compressed queries.
        """
        if len(choice.slots) == 0:
            return
        config, of_rows = self._config, choice.of_rows
        q = self._queries.matmul(of_rows(compressed)).view(-1, config.heads, config.head_dim)
        q = self._turned(q, (of_rows(tables[0]), of_rows(tables[1])))
        scale = config.heads**-0.5 * config.head_dim**-0.5  # above 0, so it commutes with the relu
        weights = self._weights.matmul(of_rows(x).float()) * scale
        self._kernels.choose(q, weights, kv, batch, layer, choice)

    def _turned(self, x: torch.Tensor, tables: Tables) -> torch.Tensor:
        """x: [tokens, heads, head_dim], of which the first dimensions are rotated."""
        first, rest = x[..., : self._rope], x[..., self._rope :]
        if self._config.interleaved:
            turned = self._kernels.rotate_interleaved(first, tables)
        else:
            turned = elementwise.rotate(first, *tables)
        return torch.cat([turned, rest], dim=-1)


class SparseLatentAttention(LatentAttention):
    """Latent attention of one layer to the positions chosen by its indexer. See `LatentAttention`."""

    def __init__(
        self,
        config: LatentConfig,
        index: IndexConfig,
        heads: int,
        weights: LayerWeights,
        layer: int,
        query_scaling: QueryScaling | None = None,
    ) -> None:
        super().__init__(config, heads, weights, layer, query_scaling)
        self._index = index
        self._indexer = None if index.shared else Indexer(index, config.qk_rope_head_dim, weights)

    def __call__(self, x: torch.Tensor, tables: Tables, kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
        """x: [tokens, hidden]; tables: cos and sin, [tokens, rope / 2] each. Returns [tokens, hidden]."""
        config, kernels = self.config, self._kernels
        compressed = self.query_norm(self.compressed_queries(x))
        still, turned = self._halves(self.queries(compressed), tables, batch)
        keys = self._indexer.keys(x, tables) if self._indexer else x.new_zeros(len(x), self._index.head_dim)
        norm = self.norm
        kernels.store_latent(self.compressed(x), norm.weight, norm.eps, tables, kv, batch, self.layer, keys)
        choice = batch.once(("choice", self._index.top), lambda: sparse.choice(batch, self._index.top))
        if self._indexer is not None:  # else the last layer with an indexer chose
            self._indexer.choose(x, compressed, tables, kv, batch, self.layer, choice)
        q = torch.cat([self.into_latent(still), turned], dim=-1)  # [tokens, heads, latent + rope]
        out = kernels.attend_chosen(q, choice, kv, batch, self.layer, config.scale, config.kv_lora_rank)
        out = self.out_of_latent(out)
        return self.output(out.flatten(1))
