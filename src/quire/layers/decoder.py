"""The decoder layer: attention, then an MLP or experts, each with norms and a residual connection; or only one of both.

All architectures share it; they differ in the options of `LayerConfig`, in windows, and in rotary embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.attention import Attention, QKNorm, QueryScaling
from quire.layers.beside_experts import MLPBesideExperts, beside_shapes
from quire.layers.experts import ExpertsConfig, ExpertsLayer
from quire.layers.latent import LatentAttention, LatentConfig
from quire.layers.mlp import MLP, mlp_shapes
from quire.layers.norm import RMSNorm
from quire.layers.per_layer_input import PerLayerGate, gate_shapes
from quire.layers.recurrent import RecurrentConfig, RecurrentLayer
from quire.layers.shared_kv import SharedKVAttention
from quire.layers.sparse_latent import IndexConfig, SparseLatentAttention
from quire.layers.weights import LayerWeights
from quire.ops import KVCache, LayerParts, RaggedBatch
from quire.ops.elementwise import Activation
from quire.ops.kernels import SharedLayer, WholeLayer


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer by their names in a checkpoint; None if it has no norm there.

    Attributes:
        before_attention, before_mlp: of the input (pre-norm).
        after_attention, after_mlp: of the output, before it is added to the residual (post-norm).
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def present(self) -> list[str]:
        names = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return [name for name in names if name is not None]


PRE_NORMS = NormNames()
"""Llama's, and most others'."""
SANDWICH_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
"""Of Gemma 2 and later."""
POST_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Of OLMo 2 and 3, and EXAONE 4."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes and options of a decoder layer.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: inner width of the MLP; unused in a layer with experts.
        num_heads, num_kv_heads: number of query heads, and of key and value heads.
        head_dim: width of a head; num_heads * head_dim need not be hidden_size. Latent attention has one key head with
            the width of a row of the cache.
        rms_norm_eps: added to the mean square.
        qkv_bias, output_bias, mlp_bias: whether q/k/v, the attention's output, and the MLP have biases.
        qk_norm: the kind of norm of queries and keys; None if they have none.
        norms: of the inputs and outputs of attention and MLP.
        activation: of the MLP's gate, or of an MLP without a gate.
        attends, mixes: whether it has attention (or a recurrent part), and an MLP or experts.
        scale: of the scores, except in latent attention; None: head_dim ** -0.5.
        query_scaling: scales queries by position; None if they are not scaled.
        sinks: each query head has an additional score (attention sink).
        gated: attention's output is gated.
        causal: tokens do not see those that follow them; if false, prompts are computed whole, and only embedded.
        recurrent: a recurrent part instead of attention; None if there is none.
        experts: experts instead of the MLP; None if there are none.
        value_norm, value_is_key: see `Attention`.
        kv_source: the layer whose keys and values this one uses; None if it has its own.
        experts_beside: the experts are in addition to the MLP.
        scalar: the residual stream is multiplied by a number (`layer_scalar`) after the layer, whose last part has a
            post-norm.
        per_layer_input: width of the layer's own token embeddings, see `PerLayerInputs`; 0 if it has none.
        latent: latent attention instead of ordinary attention; None if it is not latent.
        index: selects the positions that latent attention sees (sparse attention); None for all.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    norms: NormNames = PRE_NORMS
    activation: Activation = "silu"
    scale: float | None = None
    query_scaling: QueryScaling | None = None
    sinks: bool = False
    gated: bool = False
    causal: bool = True
    recurrent: RecurrentConfig | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    index: IndexConfig | None = None
    value_norm: bool = False
    value_is_key: bool = False
    kv_source: int | None = None
    experts_beside: bool = False
    scalar: bool = False
    per_layer_input: int = 0
    attends: bool = True
    mixes: bool = True

    @property
    def expands(self) -> bool:
        """Whether its latent attention also has an expanded form, see `layers.latent`."""
        return self.latent is not None and self.index is None

    @property
    def kv_sides(self) -> int:
        """2 if keys and values are stored; 1 for latent attention, whose rows are both."""
        return 1 if self.latent else 2

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors, by their names in a checkpoint."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in self.norms.present}
        if self.recurrent:
            shapes |= self.recurrent.tensor_shapes(hidden)
        elif self.attends:
            shapes |= self.latent.tensor_shapes(hidden, self.num_heads) if self.latent else self._attention_shapes()
            if self.latent and self.index:
                shapes |= self.index.tensor_shapes(hidden, self.latent.q_lora_rank or 0)
        if self.experts is not None:
            shapes |= self.experts.tensor_shapes(hidden)
            if self.experts_beside:
                shapes |= beside_shapes(self.experts.names.block, hidden)
        if self.mixes and (self.experts is None or self.experts_beside):
            shapes |= mlp_shapes("mlp.", hidden, self.intermediate_size, self.mlp_bias, self.activation)
        if self.qk_norm and self.attends and not self.recurrent:
            q, k = (self.num_heads, self.num_kv_heads) if self.qk_norm == "whole" else (1, 1)
            shapes["self_attn.q_norm.weight"] = (q * self.head_dim,)
            if self.kv_source is None:
                shapes["self_attn.k_norm.weight"] = (k * self.head_dim,)
        if self.per_layer_input:
            shapes |= gate_shapes(hidden, self.per_layer_input)
        return shapes | ({"layer_scalar": (1,)} if self.scalar else {})

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        lacking = ("k", "v") if self.kv_source is not None else ("v",) if self.value_is_key else ()
        for name, rows, columns, bias in (
            ("q", q, hidden, self.qkv_bias),
            ("k", kv, hidden, self.qkv_bias),
            ("v", kv, hidden, self.qkv_bias),
            ("o", hidden, q, self.output_bias),
        ):
            if name in lacking:
                continue
            name = f"self_attn.{name}_proj"
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        if self.gated:
            shapes["self_attn.gate_proj.weight"] = (q, hidden)
        return shapes


class DecoderLayer:
    """One layer. Products with the same input are fused.

    Args:
        config: sizes and options.
        weights: makes the layer's parts by name.
        layer: its index in its cache.
        window: number of positions that a token sees, including itself; None for all.
    """

    def __init__(self, config: LayerConfig, weights: LayerWeights, layer: int, window: int | None) -> None:
        names = config.norms
        self.before_attention = _norm(weights, names.before_attention, config)
        self.attention = _attention(config, weights, layer, window) if config.attends else None
        self.after_attention = _norm(weights, names.after_attention, config)
        self.before_mlp = _norm(weights, names.before_mlp, config)
        self.after_mlp = _norm(weights, names.after_mlp, config)
        self._query_factors = self.attention.query_factors if self.attention else None
        self.mlp = _mlp(config, weights) if config.mixes else None
        self.experts = self.mlp.experts if isinstance(self.mlp, MLPBesideExperts) else None
        if isinstance(self.mlp, ExpertsLayer):
            self.experts = self.mlp
        self._gate = PerLayerGate(weights, config.rms_norm_eps) if config.per_layer_input else None
        self._scalar = float(weights.tensor("layer_scalar")) if config.scalar else None
        last = self._gate.norm if self._gate else self.after_mlp
        if self._scalar is not None and last is not None:
            last.weight.mul_(self._scalar)
        parts = self._parts(weights.dtype)
        self._whole: WholeLayer | None = weights.kernels.whole_layer(parts) if parts else None

    def _parts(self, dtype: torch.dtype) -> LayerParts | None:
        """The arguments of a kernel that computes the whole layer; None if there is none for this kind of layer."""
        if self.before_mlp is None or not isinstance(self.attention, Attention | LatentAttention):
            return None
        if not isinstance(self.mlp, MLP | ExpertsLayer):
            return None
        output, attention, mlp = self.attention.output, self.attention.parts, self.mlp.parts
        if output.reduces or attention is None or mlp is None:
            return None
        return LayerParts(
            input_norm=_weight(self.before_attention),
            attended_norm=_weight(self.after_attention),
            mlp_input_norm=self.before_mlp.weight,
            mlp_norm=_weight(self.after_mlp),
            eps=self.before_mlp.eps,
            dtype=dtype,
            layer=self.attention.layer,
            attention=attention,
            output=output.product,
            mlp=mlp,
            shared=SharedLayer(output.inputs, output.outputs) if output.inputs and output.outputs else None,
        )

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
        per_layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer.

        Args:
            x: [tokens, hidden], the previous layer's output; None in the first layer.
            residual: [tokens, hidden], to which x has not been added yet.
            tables: cos and sin of the step's positions.
            per_layer_input: [tokens, width], if the layer has one.

        Returns:
            (x, residual) for the next layer.
        """
        x, residual = self._attend_and_mix(x, residual, tables, kv, batch)
        kv.pulse[0] += 1
        if self._gate is not None and per_layer_input is not None:
            residual = x + residual
            x = self._gate(residual, per_layer_input)
        return x, residual if self._scalar is None else residual.mul_(self._scalar)

    def _attend_and_mix(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, then the MLP or experts."""
        if self._whole is not None and (self._query_factors is None or self._query_factors.of(batch) is None):
            return self._whole(x, residual, tables, kv, batch)
        if self.attention is not None:
            x, residual = _added(self.before_attention, x, residual)
            x = self.attention(x, tables, kv, batch)
            if self.after_attention is not None:
                x = self.after_attention(x)
            if self.mlp is None:
                return x, residual
        x, residual = _added(self.before_mlp, x, residual)
        if isinstance(self.mlp, MLP):
            x = self.mlp(x)
        elif isinstance(self.mlp, ExpertsLayer):
            x = self.mlp(x, batch)
        elif self.mlp is not None:
            x = self.mlp(x, residual, batch)
        return x if self.after_mlp is None else self.after_mlp(x), residual


def _norm(weights: LayerWeights, name: str | None, config: LayerConfig) -> RMSNorm | None:
    return None if name is None else weights.norm(name, config.rms_norm_eps)


def _weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _added(norm: RMSNorm | None, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual; returns the (normed) input of the layer's next part, and the sum."""
    if x is None:
        return (residual if norm is None else norm(residual)), residual
    if norm is None:
        residual = x + residual
        return residual, residual
    return norm.with_residual(x, residual)


def _mlp(config: LayerConfig, weights: LayerWeights) -> MLP | ExpertsLayer | MLPBesideExperts:
    """The layer's MLP, or experts instead of it or besides it."""
    if config.experts is None:
        return MLP(weights, "mlp.", config.mlp_bias, config.activation)
    if config.experts_beside:
        return MLPBesideExperts(config.experts, weights, config.activation, config.hidden_size, config.rms_norm_eps)
    return ExpertsLayer(config.experts, weights)


def _attention(
    config: LayerConfig, weights: LayerWeights, layer: int, window: int | None
) -> Attention | LatentAttention | SharedKVAttention | RecurrentLayer:
    """The layer's attention, or a recurrent part instead of it."""
    if config.recurrent:
        return config.recurrent.layer(weights, layer, config.rms_norm_eps)
    if config.kv_source is not None:
        shape, eps = (config.num_heads, config.num_kv_heads, config.head_dim), config.rms_norm_eps
        scale = config.scale or config.head_dim**-0.5
        return SharedKVAttention(*shape, weights, layer, window, bias=config.qkv_bias, eps=eps, scale=scale)
    if config.latent and config.index:
        both = config.latent, config.index
        return SparseLatentAttention(*both, config.num_heads, weights, layer, config.query_scaling)
    if config.latent:
        return LatentAttention(config.latent, config.num_heads, weights, layer, config.query_scaling)
    return Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        weights,
        layer,
        window,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm=config.qk_norm,
        eps=config.rms_norm_eps,
        scale=config.scale,
        query_scaling=config.query_scaling,
        sinks=config.sinks,
        value_norm=config.value_norm,
        value_is_key=config.value_is_key,
        gated=config.gated,
        causal=config.causal,
    )
