"""The attention layer: projections, rotary embedding, storing of keys and values, attention, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from quire.layers.linear import Linear
from quire.layers.weights import LayerWeights
from quire.ops import AttentionParts, HeadNorm, Kernels, KVCache, RaggedBatch
from quire.ops.elementwise import rotate, sigmoid_gated
from quire.parallel.group import Gather, Split, own_heads, query_pieces, share

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions, [tokens, head_dim / 2] fp32 each."""

QKNorm = Literal["head", "whole", "turned"]
"""Norms of queries and keys: of each head before rotation, of all heads together before rotation, or of each head after
rotation."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Scales queries by 1 + beta * log(1 + position // original), as in Llama 4 and Ministral 3.

    Attributes:
        beta: `llama_4_scaling_beta`.
        original: number of positions whose queries are not scaled (`original_max_position_embeddings`).
        longest: largest number of positions.
    """

    beta: float
    original: int
    longest: int


class QueryFactors:
    """The factors of a step's queries, from a table, so that a position's factor always has the same bits."""

    def __init__(self, scaling: QueryScaling, kernels: Kernels) -> None:
        self._scaling, self._seen = scaling, not kernels.reads_spans
        steps = range(scaling.longest // scaling.original + 1)
        self._table = torch.tensor([1 + scaling.beta * math.log(1 + step) for step in steps], device=kernels.device)

    def of(self, batch: RaggedBatch) -> torch.Tensor | None:
        """[tokens, 1, 1] fp32; None if all are known to be 1, which is only checked if positions are on the host."""
        return batch.once(self._scaling, lambda: self._of(batch.positions))

    def _of(self, positions: torch.Tensor) -> torch.Tensor | None:
        if self._seen and int(positions.max()) < self._scaling.original:
            return None
        return self._table[positions // self._scaling.original].view(-1, 1, 1)


class Attention:
    """Grouped-query attention of one layer over the paged cache.

    Args:
        num_heads, num_kv_heads, head_dim: its shape.
        weights: makes the layer's parts by name.
        layer: its index in its cache.
        window: number of positions that a token sees, including itself; None for all.
        qkv_bias, output_bias: whether the products have biases.
        qk_norm: the kind of norm of queries and keys; None if they have none.
        eps: of these norms.
        scale: of the scores; None: head_dim ** -0.5.
        query_scaling: scales queries by position; None if they are not scaled.
        sinks: each query head has an additional score: see `ops.attention.paged_attention`.
        value_norm: each value head has a norm without weights; only with `qk_norm="head"`.
        value_is_key: values are the keys before norm and rotation.
        gated: the output is multiplied by the sigmoid of a projection of the input.
        causal: tokens do not see those that follow them; if false, spans are whole prompts.

    Attributes:
        prepares: processes queries and keys before rotation, other than by norms of each head.
        query_factors: see `query_scaling`.
        gate: the projection for the gate; None if there is none.
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
        qk_norm: QKNorm | None = None,
        eps: float = 0.0,
        scale: float | None = None,
        query_scaling: QueryScaling | None = None,
        sinks: bool = False,
        value_norm: bool = False,
        value_is_key: bool = False,
        gated: bool = False,
        causal: bool = True,
    ) -> None:
        pieces = query_pieces(num_heads, num_kv_heads, weights.group.size)
        heads, own = (pieces, num_kv_heads, num_kv_heads), share(num_heads, weights.group, pieces)
        self.heads, kv_heads = len(own), own_heads(num_kv_heads, weights.group)
        self.prepares: WholeNorm | TurnedNorm | None = None
        self.qkv: Linear | ApartQKV
        if qk_norm == "whole":
            self.prepares = WholeNorm(weights, (num_heads, num_kv_heads), pieces, head_dim, eps)
        if qk_norm == "whole" and weights.group.size > 1:
            self.qkv = ApartQKV(weights, heads, qkv_bias)
        else:
            names = (*QKV[:2], QKV[1]) if value_is_key else QKV
            self.qkv = weights.linear(*names, bias=qkv_bias, split=Split.OUTPUTS, heads=heads)
        if qk_norm == "turned":
            self.prepares = TurnedNorm(weights, self.heads, kv_heads, head_dim, eps)
        self.output = weights.linear("self_attn.o_proj", bias=output_bias, split=Split.INPUTS, heads=(pieces,))
        self.norm = _head_norm(weights, self.heads, kv_heads, eps, value_norm) if qk_norm == "head" else None
        self.scale, self.window, self.layer = scale or head_dim**-0.5, window, layer
        self.causal = causal
        self.query_factors = QueryFactors(query_scaling, weights.kernels) if query_scaling else None
        self.sinks: torch.Tensor | None = None
        if sinks:
            self.sinks = weights.tensor("self_attn.sinks")[own.start : own.stop].float().clone()
        self.gate: Linear | None = None
        if gated:
            self.gate = weights.linear("self_attn.gate_proj", split=Split.OUTPUTS, heads=(pieces,))
        self._kernels = weights.kernels

    @property
    def parts(self) -> AttentionParts | None:
        """The arguments of a kernel that computes the whole layer; None if there is none for this kind of attention."""
        if not isinstance(self.qkv, Linear) or self.prepares or self.sinks is not None or self.gate is not None:
            return None
        return AttentionParts(self.qkv.product, self.norm, self.heads, self.scale, self.window, self.causal)

    def __call__(self, x: torch.Tensor, tables: Tables, kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
        """x: [tokens, hidden]; tables: cos and sin, [tokens, head_dim / 2] each. Returns [tokens, hidden]."""
        qkv = self.qkv(x)
        if self.prepares is not None:
            qkv, tables = self.prepares(qkv, tables, batch)
        q = self._kernels.rotate_and_store(qkv, self.norm, tables, kv, batch, self.layer)
        factors = self.query_factors.of(batch) if self.query_factors else None
        if factors is not None:
            q = q.mul_(factors)
        out = self._kernels.attend(q, kv, batch, self.layer, self.scale, self.window, self.sinks, self.causal)
        return self.output(out if self.gate is None else sigmoid_gated(out, self.gate(x)))


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _head_norm(weights: LayerWeights, num_heads: int, num_kv_heads: int, eps: float, of_values: bool) -> HeadNorm:
    """One norm for the concatenated heads of queries, keys, and optionally values, with a row of weights for each."""
    q, k = (weights.norm(name, eps).weight for name in ("self_attn.q_norm", "self_attn.k_norm"))  # [head_dim] each
    parts = [q.expand(num_heads, -1), k.expand(num_kv_heads, -1)]
    return HeadNorm(torch.cat([*parts, torch.ones_like(parts[1])] if of_values else parts), eps)


class ApartQKV:
    """Separate projections of queries, keys and values, for a norm over all heads with several ranks.

    Every rank computes all keys, since there may be fewer key heads than ranks.
    """

    def __init__(self, weights: LayerWeights, heads: tuple[int, int, int], bias: bool) -> None:
        q, k, v = QKV
        self.q = weights.linear(q, bias=bias, split=Split.OUTPUTS, heads=heads[:1])
        self.k = weights.linear(k, bias=bias)
        self.v = weights.linear(v, bias=bias, split=Split.OUTPUTS, heads=heads[2:])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's queries, all keys, and this rank's values, concatenated."""
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=1)


class WholeNorm:
    """A norm over all query heads together, and one over all key heads.

    Args:
        weights: has both, [heads * head_dim] and [kv_heads * head_dim].
        heads: number of query and key heads of all ranks.
        pieces: see `query_pieces`.
    """

    def __init__(self, weights: LayerWeights, heads: tuple[int, int], pieces: int, head_dim: int, eps: float) -> None:
        group, widths = weights.group, [count * head_dim for count in heads]
        self._q, self._k = weights.norm("self_attn.q_norm", eps), weights.norm("self_attn.k_norm", eps)
        self._own_q, self._own_k = (
            share(width, group, count) for width, count in zip(widths, (pieces, heads[1]), strict=True)
        )
        self._gather = Gather(group, widths[0], pieces) if group.size > 1 else None
        self._widths = [len(self._own_q), widths[1], len(self._own_k)]

    def __call__(self, qkv: torch.Tensor, tables: Tables, batch: RaggedBatch) -> tuple[torch.Tensor, Tables]:
        """qkv: [tokens, own queries, all keys, own values]. Returns [tokens, own queries, keys and values]."""
        q, k, v = torch.split(qkv, self._widths, dim=1)
        if self._gather is None:
            return torch.cat([self._q(q.contiguous()), self._k(k.contiguous()), v], dim=1), tables
        q = self._q(self._gather(q.contiguous()))[:, self._own_q.start : self._own_q.stop]
        k = self._k(k.contiguous())[:, self._own_k.start : self._own_k.stop]
        return torch.cat([q, k, v], dim=1), tables


class TurnedNorm:
    """A norm of each query and key head after rotation; later rotations become the identity."""

    def __init__(self, weights: LayerWeights, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._q, self._k = weights.norm("self_attn.q_norm", eps), weights.norm("self_attn.k_norm", eps)
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim

    def __call__(self, qkv: torch.Tensor, tables: Tables, batch: RaggedBatch) -> tuple[torch.Tensor, Tables]:
        """qkv: [tokens, (heads + 2 * kv_heads) * head_dim]. Returns the same shape, and tables for the identity."""
        tokens, size = len(qkv), self._head_dim
        heads = qkv.view(tokens, -1, size)
        turned = rotate(heads[:, : -self._kv_heads], *tables)  # [tokens, heads + kv_heads, head_dim]
        q = self._q(turned[:, : self._heads].reshape(-1, size)).view(tokens, -1)
        k = self._k(turned[:, self._heads :].reshape(-1, size)).view(tokens, -1)
        v = heads[:, -self._kv_heads :].reshape(tokens, -1)
        still = batch.once(("still", size), lambda: (torch.ones_like(tables[0]), torch.zeros_like(tables[1])))
        return torch.cat([q, k, v], dim=1), still
