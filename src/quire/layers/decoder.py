"""The decoder layer: attention, then a gated MLP or experts, each behind a norm and a residual.

All architectures share it; they differ in the options of `LayerConfig` and in the windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.attention import Attention
from quire.layers.experts import ExpertsConfig, ExpertsLayer
from quire.layers.latent import LatentAttention, LatentConfig
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, mlp_shapes
from quire.layers.weights import LayerWeights
from quire.ops import KVCache, LayerParts, RaggedBatch
from quire.ops.kernels import SharedLayer, WholeLayer


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of a decoder layer, and what is optional in it.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP; of no meaning in a layer with experts.
        num_heads, num_kv_heads: query heads, and the key and value heads that they share.
        head_dim: width of a head; num_heads * head_dim need not be hidden_size. With latent attention there is one key
            head, whose width is the cache's row.
        rms_norm_eps: added to the mean square.
        qkv_bias, output_bias, mlp_bias: whether q/k/v, the attention's output, and the MLP have biases.
        qk_norm: whether each head's query and key are normalized before they are rotated.
        input_norm: whether a norm stands before the attention; EAGLE's heads have none.
        experts: in place of the MLP; None: there are none.
        latent: of latent attention, in place of attention with keys and values of their own; None: it is not latent.
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
    qk_norm: bool = False
    input_norm: bool = True
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @property
    def kv_sides(self) -> int:
        """2: keys and values are stored; 1: rows that are both, of latent attention."""
        return 1 if self.latent else 2

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by their names in a checkpoint, with their shapes."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)} if self.input_norm else {}
        shapes |= self.latent.tensor_shapes(hidden, self.num_heads) if self.latent else self._attention_shapes()
        if self.experts is not None:
            shapes |= self.experts.tensor_shapes(hidden)
        else:
            shapes |= mlp_shapes("mlp.", hidden, self.intermediate_size, self.mlp_bias)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.output_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes


class DecoderLayer:
    """One layer. Weights that read the same input are fused into one product.

    Args:
        config: sizes and options.
        weights: gives the layer's parts by name.
        layer: which layer of its cache this is.
        window: a row sees this many positions, itself included; None: all.
    """

    def __init__(self, config: LayerConfig, weights: LayerWeights, layer: int, window: int | None) -> None:
        eps = config.rms_norm_eps
        self.input_norm = weights.norm("input_layernorm", eps) if config.input_norm else None
        self.attention = _attention(config, weights, layer, window)
        self.post_attention_norm = weights.norm("post_attention_layernorm", eps)
        self.mlp: GatedMLP | ExpertsLayer
        if config.experts is None:
            self.mlp = GatedMLP(weights, "mlp.", config.mlp_bias)
        else:
            self.mlp = ExpertsLayer(config.experts, weights)
        parts = self._parts()
        self._whole: WholeLayer | None = weights.kernels.whole_layer(parts) if parts else None

    def _parts(self) -> LayerParts | None:
        """What a kernel that computes the whole layer takes; None: there is none for this kind of layer."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
            return None
        if attention.output.reduces or mlp.down.reduces:
            return None
        return LayerParts(
            input_norm=None if self.input_norm is None else self.input_norm.weight,
            post_attention_norm=self.post_attention_norm.weight,
            eps=self.post_attention_norm.eps,
            qkv=attention.qkv.product,
            output=attention.output.product,
            gate_up=mlp.gate_up.product,
            down=mlp.down.product,
            head_norm=attention.norm,
            heads=attention.heads,
            scale=attention.scale,
            window=attention.window,
            layer=attention.layer,
            shared=_shared(attention.output, mlp.down),
        )

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step through the layer.

        Args:
            x: [tokens, hidden], what the layer before yielded; None at the first.
            residual: [tokens, hidden], to which it is still to be added.
            tables: cos and sin of the step's positions.

        Returns:
            (x, residual) for the next layer.
        """
        if self._whole is not None:
            kv.pulse[0] += 1
            return self._whole(x, residual, tables, kv, batch)
        if self.input_norm is None:
            x = residual = residual if x is None else x + residual
        elif x is None:
            x = self.input_norm(residual)
        else:
            x, residual = self.input_norm.with_residual(x, residual)
        x = self.attention(x, tables, kv, batch)
        x, residual = self.post_attention_norm.with_residual(x, residual)
        return self.mlp(x, batch) if isinstance(self.mlp, ExpertsLayer) else self.mlp(x), residual


def _shared(output: Linear, down: Linear) -> SharedLayer | None:
    """What is gathered in a layer of which these are the products that gather."""
    if output.inputs is None or down.inputs is None or output.outputs is None:
        return None
    return SharedLayer(output.inputs, down.inputs, output.outputs)


def _attention(
    config: LayerConfig, weights: LayerWeights, layer: int, window: int | None
) -> Attention | LatentAttention:
    """The attention of a layer, of the kind that it has."""
    if config.latent:
        return LatentAttention(config.latent, config.num_heads, weights, layer)
    return Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        weights,
        layer,
        window,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        norm_eps=config.rms_norm_eps if config.qk_norm else None,
    )
