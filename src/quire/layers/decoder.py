"""The decoder layer of Llama's family: attention, then a gated MLP or experts, each behind a norm and a residual.

Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE share it; they differ in the options of `LayerConfig` and in the
windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.attention import Attention
from quire.layers.experts import ExpertsConfig, ExpertsLayer
from quire.layers.mlp import GatedMLP, mlp_shapes
from quire.layers.weights import LayerWeights
from quire.ops import HeadNorm, KVCache, LayerParts, RaggedBatch
from quire.ops.kernels import WholeLayer


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of a decoder layer, and what is optional in it.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP; of no meaning in a layer with experts.
        num_heads, num_kv_heads: query heads, and the key and value heads that they share.
        head_dim: width of a head; num_heads * head_dim need not be hidden_size.
        rms_norm_eps: added to the mean square.
        qkv_bias, output_bias, mlp_bias: whether q/k/v, the attention's output, and the MLP have biases.
        qk_norm: whether each head's query and key are normalized before they are turned.
        input_norm: whether a norm stands before the attention; EAGLE's heads have none.
        experts: in place of the MLP; None: there are none.
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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by their names in a checkpoint, with their shapes."""
        hidden = self.hidden_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)} if self.input_norm else {}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.output_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.experts is not None:
            shapes |= self.experts.tensor_shapes(hidden)
        else:
            shapes |= mlp_shapes("mlp.", hidden, self.intermediate_size, self.mlp_bias)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        return shapes


class DecoderLayer:
    """One layer. Weights that read the same input are fused into one product.

    Args:
        config: sizes and options.
        weights: gives the layer's parts by name.
        layer: which one this is.
        window: a row sees this many positions, itself included; None: all.
    """

    def __init__(self, config: LayerConfig, weights: LayerWeights, layer: int, window: int | None) -> None:
        eps = config.rms_norm_eps
        self.input_norm = weights.norm("input_layernorm", eps) if config.input_norm else None
        self.qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
        head_norm = _head_norm(weights, config) if config.qk_norm else None
        self.attention = Attention(config.head_dim**-0.5, window, layer, head_norm, weights.kernels)
        self.output = weights.linear("self_attn.o_proj", bias=config.output_bias)
        self.post_attention_norm = weights.norm("post_attention_layernorm", eps)
        self.mlp: GatedMLP | ExpertsLayer
        self._whole: WholeLayer | None = None
        if config.experts is None:
            self.mlp = GatedMLP(weights, "mlp.", config.mlp_bias)
            self._whole = weights.kernels.whole_layer(self._parts(self.mlp, config.num_heads))
        else:
            self.mlp = ExpertsLayer(config.experts, weights)

    def _parts(self, mlp: GatedMLP, heads: int) -> LayerParts:
        attention = self.attention
        return LayerParts(
            input_norm=None if self.input_norm is None else self.input_norm.weight,
            post_attention_norm=self.post_attention_norm.weight,
            eps=self.post_attention_norm.eps,
            qkv=self.qkv.product,
            output=self.output.product,
            gate_up=mlp.gate_up.product,
            down=mlp.down.product,
            head_norm=attention.norm,
            heads=heads,
            scale=attention.scale,
            window=attention.window,
            layer=attention.layer,
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
        x = self.output(self.attention(self.qkv(x), tables, kv, batch))
        x, residual = self.post_attention_norm.with_residual(x, residual)
        return self.mlp(x, batch) if isinstance(self.mlp, ExpertsLayer) else self.mlp(x), residual


def _head_norm(weights: LayerWeights, config: LayerConfig) -> HeadNorm:
    """One norm for the query and key heads, which lie side by side: a row of weights for each head."""
    q, k = weights.tensor("self_attn.q_norm.weight"), weights.tensor("self_attn.k_norm.weight")  # [head_dim] each
    rows = torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
    return HeadNorm(rows, config.rms_norm_eps)
