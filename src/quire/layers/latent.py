"""Multi-head latent attention, of DeepSeek V2 and V3 (https://arxiv.org/abs/2405.04434).

A token's keys and values of all heads are projections of one compressed vector and one rotated key, and only these are
cached. In the *absorbed* form, a head's query is mapped into the space of the compressed vectors, attention reads those
from the cache, once for all heads, and its result is mapped back. The *expanded* form restores keys and values first,
for fewer operations per key. It differs in the last bits, so results would depend on whether a token was computed in a
long or a short span: only kernels that do not promise equal bits use it, in steps where it is cheaper. It restores some
heads at a time, as many as fit into `RESTORED_BYTES`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from quire.layers.attention import QueryFactors, QueryScaling
from quire.layers.weights import LayerWeights
from quire.ops import Kernels, KVCache, LatentParts, RaggedBatch
from quire.ops.kv_cache import KEY, VALUE
from quire.parallel.group import Split, share

OPERATIONS_A_BYTE = 12
"""Approximate operations of matrix products in the time of moving a byte, measured in bf16 on CPUs."""

RESTORED_BYTES = 128 * 2**20
"""Maximum memory of restored keys and values, which are those of some heads of one layer."""

NORM_EPS = 1e-6
"""Of the norms inside the attention, regardless of `rms_norm_eps`, as in DeepSeek's own code and in transformers."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention, by their names in config.json.

    Attributes:
        q_lora_rank: width of the compressed queries; None: queries are not compressed.
        kv_lora_rank: width of the compressed keys and values.
        qk_nope_head_dim, qk_rope_head_dim: the parts of a head's query and key that are not rotated, and that are.
        v_head_dim: width of a head's value.
        bias: whether the compressing projections, and the output projection, have biases (`attention_bias`).
        scale: factor of the scores.
        index_key: width of the index key after these in a cached row, for sparse attention.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool
    scale: float
    index_key: int = 0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Width of a cached row: numbers per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim + self.index_key

    def tensor_shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """The attention's tensors by name, with their shapes."""
        rank, queries = self.q_lora_rank, heads * self.qk_head_dim
        restored = heads * (self.qk_nope_head_dim + self.v_head_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.kv_a_proj_with_mqa.weight": (self.row - self.index_key, hidden),
            "self_attn.kv_a_layernorm.weight": (self.kv_lora_rank,),
            "self_attn.kv_b_proj.weight": (restored, self.kv_lora_rank),
            "self_attn.o_proj.weight": (hidden, heads * self.v_head_dim),
        }
        if rank is None:
            shapes["self_attn.q_proj.weight"] = (queries, hidden)
        else:
            shapes["self_attn.q_a_proj.weight"] = (rank, hidden)
            shapes["self_attn.q_a_layernorm.weight"] = (rank,)
            shapes["self_attn.q_b_proj.weight"] = (queries, rank)
        if self.bias:
            biased = ["kv_a_proj_with_mqa", "o_proj"] + ([] if rank is None else ["q_a_proj"])
            shapes |= {f"self_attn.{name}.bias": shapes[f"self_attn.{name}.weight"][:1] for name in biased}
        return shapes


class LatentAttention:
    """Latent attention of one layer over the paged cache, including the output projection.

    The two halves of `kv_b_proj`, which map queries into the latent space and results out of it, are projections per
    head, and keep the model's data type in a quantized model.

    Args:
        config: sizes.
        heads: query heads.
        weights: gives the layer's parts by name.
        layer: which layer of the cache this is.
        query_scaling: by position; None if there is none.
    """

    def __init__(
        self,
        config: LatentConfig,
        heads: int,
        weights: LayerWeights,
        layer: int,
        query_scaling: QueryScaling | None = None,
    ) -> None:
        mine = share(heads, weights.group, heads)
        self.config, self.heads, self.layer = config, len(mine), layer
        self._kernels = kernels = weights.kernels
        self.query_factors = QueryFactors(query_scaling, kernels) if query_scaling else None
        if config.q_lora_rank is None:
            self.queries = weights.linear("self_attn.q_proj", split=Split.OUTPUTS, heads=(heads,))
        else:
            self.compressed_queries = weights.linear("self_attn.q_a_proj", bias=config.bias)
            self.query_norm = weights.norm("self_attn.q_a_layernorm", NORM_EPS)
            self.queries = weights.linear("self_attn.q_b_proj", split=Split.OUTPUTS, heads=(heads,))
        self.compressed = weights.linear("self_attn.kv_a_proj_with_mqa", bias=config.bias)
        self.norm = weights.norm("self_attn.kv_a_layernorm", NORM_EPS)
        both = weights.tensor("self_attn.kv_b_proj.weight").view(heads, -1, config.kv_lora_rank)[mine.start : mine.stop]
        to_keys, to_values = both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]
        self.into_latent = kernels.heads([kernels.pack([weight.t().contiguous()]) for weight in to_keys])
        # Copies: a view would keep all heads of all ranks where weights are used as they lie.
        values = [kernels.pack([weight.clone()]) for weight in to_values]
        self.out_of_latent = kernels.heads(values)
        self.output = weights.linear("self_attn.o_proj", bias=config.bias, split=Split.INPUTS, heads=(heads,))
        # Projections per head, for keys and for values; the latter also map results out of the latent space.
        self._restoring = (
            [(kernels.pack([weight.contiguous()]), value) for weight, value in zip(to_keys, values, strict=True)]
            if may_expand(kernels) and not config.index_key
            else []
        )

    @property
    def parts(self) -> LatentParts | None:
        """Arguments of a kernel for the whole layer; None if steps may need the expanded form."""
        if self._restoring or self.config.index_key:
            return None
        compresses = self.config.q_lora_rank is not None
        return LatentParts(
            compressed_queries=self.compressed_queries.product if compresses else None,
            query_norm=self.query_norm.weight if compresses else None,
            queries=self.queries.product,
            compressed=self.compressed.product,
            norm=self.norm.weight,
            into_latent=self.into_latent,
            out_of_latent=self.out_of_latent,
            eps=self.norm.eps,
            heads=self.heads,
            turned=self.config.qk_rope_head_dim,
            scale=self.config.scale,
        )

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """x: [tokens, hidden]; tables: cos and sin, [tokens, rope / 2] each. Returns [tokens, hidden]."""
        config, kernels = self.config, self._kernels
        q = self.queries(x if config.q_lora_rank is None else self.query_norm(self.compressed_queries(x)))
        still, turned = self._halves(q, tables, batch)
        norm = self.norm
        kernels.store_latent(self.compressed(x), norm.weight, norm.eps, tables, kv, batch, self.layer)
        restored = None
        if self._restoring and batch.trees is None:
            key = ("expanded", config, self.heads, id(kv))
            restored = batch.once(key, lambda: restored_of(config, self.heads, kv, batch))
        if restored is None:
            q = torch.cat([self.into_latent(still), turned], dim=-1)  # [tokens, heads, latent + rope]
            out = kernels.attend_latent(q, kv, batch, self.layer, config.scale, config.kv_lora_rank)
            out = self.out_of_latent(out)
        else:
            out = self.expanded(still, turned, kv, restored)
        return self.output(out.flatten(1))

    def expanded(
        self, still: torch.Tensor, turned: torch.Tensor, kv: KVCache, restored: RestoredContexts
    ) -> torch.Tensor:
        """Attention in the expanded form, a few heads at a time: [tokens, heads, v]."""
        config, wide = self.config, restored.wide
        tokens, at_once = len(still), wide.kv_heads
        rows = self._rows(kv, restored.blocks)  # [blocks, block_size, latent + rope]
        latent, key = rows[..., : config.kv_lora_rank].contiguous(), rows[..., config.kv_lora_rank :].unsqueeze(1)
        q = still.new_zeros(tokens, self.heads, wide.head_dim)
        q[..., : config.qk_nope_head_dim] = still
        q[..., config.qk_nope_head_dim : config.qk_head_dim] = turned
        out = still.new_empty(tokens, self.heads, config.v_head_dim)
        for first in range(0, self.heads, at_once):
            heads = slice(first, first + at_once)
            self._restore(latent, key, heads, wide)
            part = self._kernels.attend(q[:, heads], wide, restored.batch, 0, config.scale, None)
            out[:, heads] = part.view(tokens, at_once, wide.head_dim)[..., : config.v_head_dim]
        return out

    def _rows(self, kv: KVCache, blocks: torch.Tensor) -> torch.Tensor:
        """This layer's rows of some blocks of the cache, [blocks, block_size, latent + rope]."""
        rows = kv.numbers[blocks, self.layer, 0, KEY]
        if kv.scales is not None:
            rows = (rows.float() * kv.scales[blocks, self.layer, 0, KEY].unsqueeze(-1)).to(kv.dtype)
        return rows

    def _restore(self, latent: torch.Tensor, key: torch.Tensor, heads: slice, wide: KVCache) -> None:
        """Write some heads' keys and values into `wide`, with zeros in the rest.

        Args:
            latent: [blocks, block_size, latent]. key: [blocks, 1, block_size, rope], the part shared by all heads.
        """
        still, whole, value = self.config.qk_nope_head_dim, self.config.qk_head_dim, self.config.v_head_dim
        keys, values = wide.numbers[:-1, 0, :, KEY], wide.numbers[:-1, 0, :, VALUE]  # [blocks, heads, block_size, ..]
        keys[..., still:whole] = key
        flat = latent.flatten(0, 1)
        for place, (to_key, to_value) in enumerate(self._restoring[heads]):
            keys[:, place, :, :still] = to_key.matmul(flat).view(*latent.shape[:2], still)
            values[:, place, :, :value] = to_value.matmul(flat).view(*latent.shape[:2], value)

    def _halves(
        self, q: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], batch: RaggedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries' unrotated and rotated parts, [tokens, heads, nope] and [.., rope], of q [tokens, heads * both]."""
        q = q.view(len(q), self.heads, self.config.qk_head_dim)
        nope = self.config.qk_nope_head_dim
        still, turned = q[..., :nope], self._kernels.rotate_interleaved(q[..., nope:], tables)
        factors = self.query_factors.of(batch) if self.query_factors else None
        if factors is None:
            return still, turned
        return (still * factors).to(q.dtype), (turned * factors).to(q.dtype)


@dataclass(frozen=True, slots=True)
class RestoredContexts:
    """Buffers for a step's contexts in the expanded form, reused by all layers.

    Attributes:
        blocks: [blocks] int64, the cache's blocks that the step reads.
        wide: their keys and values of some heads of one layer; its block i is `blocks[i]`.
        batch: the step, with its blocks renamed to those of `wide`.
    """

    blocks: torch.Tensor
    wide: KVCache
    batch: RaggedBatch


def may_expand(kernels: Kernels) -> bool:
    """Whether steps use the expanded form if it is cheaper; on a device, the layer does not know the spans."""
    return not kernels.deterministic and not kernels.reads_spans


def restored_of(config: LatentConfig, heads: int, kv: KVCache, batch: RaggedBatch) -> RestoredContexts | None:
    """Buffers for a step's contexts, of as many heads as fit; None if the absorbed form is cheaper, or no head fits."""
    if not expanded_is_cheaper(config, heads, batch):
        return None
    blocks, names = torch.unique(batch.block_tables, return_inverse=True)
    at_once = heads_at_once(config, heads, (len(blocks) + 1) * kv.block_size, kv)
    if at_once == 0:
        return None
    width = max(config.qk_head_dim, config.v_head_dim)
    wide = KVCache(len(blocks) + 1, 1, at_once, width, kv.block_size, kv.dtype)
    return RestoredContexts(blocks, wide, replace(batch, block_tables=names))


def heads_at_once(config: LatentConfig, heads: int, tokens: int, kv: KVCache) -> int:
    """A divisor of `heads`: how many heads' keys and values of `tokens` tokens fit into `RESTORED_BYTES`; 0 if none.

    The memory includes the rows they are computed from, twice (and as fp32, if the cache is quantized), and one head's
    projections.
    """
    itemsize = kv.dtype.itemsize
    rows = config.row * (2 * itemsize + (0 if kv.scales is None else 2 * 4))
    products = (config.qk_nope_head_dim + config.v_head_dim) * itemsize
    each = 2 * max(config.qk_head_dim, config.v_head_dim) * itemsize
    fitting = (RESTORED_BYTES // tokens - rows - products) // each
    return max((count for count in range(1, heads + 1) if heads % count == 0 and count <= fitting), default=0)


def expanded_is_cheaper(config: LatentConfig, heads: int, batch: RaggedBatch) -> bool:
    """Whether a step's attention is faster in the expanded form, estimated from operations and bytes moved."""
    absorbed = expanded = 0
    full = heads * (config.qk_head_dim + config.v_head_dim)  # width of a token's keys and values
    mapped = heads * config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    for (first, last), context in zip(itertools.pairwise(batch.row_starts), batch.context_lens, strict=True):
        rows = last - first
        pairs = rows * (context - rows) + rows * (rows + 1) // 2  # pairs of a query and a visible key
        absorbed += 2 * pairs * heads * (config.row + config.kv_lora_rank) + 2 * rows * mapped
        absorbed += OPERATIONS_A_BYTE * 2 * context * config.row
        expanded += 2 * pairs * full + 2 * context * mapped
        expanded += OPERATIONS_A_BYTE * 2 * context * (config.row + 2 * full)  # restored ones are written and read
    return expanded < absorbed
