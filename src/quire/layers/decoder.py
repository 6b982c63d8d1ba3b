"""The decoder layer of Llama's family: attention, then a gated MLP, each behind a norm and a residual.

Llama, Mistral, Qwen2 and Qwen3 share it; they differ in the options of `LayerConfig` and in the windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.ops import HeadNorm, Kernels, KVCache, LayerParts, RaggedBatch


class LayerWeights(Protocol):
    """Gives a layer's parts by their names in the checkpoint, such as "mlp.up_proj"."""

    kernels: Kernels

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the data type of the computation, such as "self_attn.q_norm.weight"."""
        ...

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """The product with a weight; with several that read the same input, their outputs side by side."""
        ...

    def norm(self, name: str, eps: float) -> RMSNorm:
        """A norm."""
        ...


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of a decoder layer, and what is optional in it.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_heads, num_kv_heads: query heads, and the key and value heads that they share.
        head_dim: width of a head; num_heads * head_dim need not be hidden_size.
        rms_norm_eps: added to the mean square.
        qkv_bias, output_bias, mlp_bias: whether q/k/v, the attention's output, and the MLP have biases.
        qk_norm: whether each head's query and key are normalized before they are turned.
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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by their names in a checkpoint, with their shapes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
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
        self._kernels = weights.kernels
        self.input_norm = weights.norm("input_layernorm", eps)
        self.qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
        head_norm = _head_norm(weights, config) if config.qk_norm else None
        self.attention = Attention(config.head_dim**-0.5, window, layer, head_norm, weights.kernels)
        self.output = weights.linear("self_attn.o_proj", bias=config.output_bias)
        self.post_attention_norm = weights.norm("post_attention_layernorm", eps)
        self.gate_up = weights.linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = weights.linear("mlp.down_proj", bias=config.mlp_bias)
        self._whole = weights.kernels.whole_layer(self._parts(config.num_heads))

    def _parts(self, heads: int) -> LayerParts:
        attention = self.attention
        return LayerParts(
            input_norm=self.input_norm.weight,
            post_attention_norm=self.post_attention_norm.weight,
            eps=self.input_norm.eps,
            qkv=self.qkv.product,
            output=self.output.product,
            gate_up=self.gate_up.product,
            down=self.down.product,
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
        if x is None:
            x = self.input_norm(residual)
        else:
            x, residual = self.input_norm.with_residual(x, residual)
        x = self.output(self.attention(self.qkv(x), tables, kv, batch))
        x, residual = self.post_attention_norm.with_residual(x, residual)
        return self.down(self._kernels.silu_mul(self.gate_up(x))), residual


def _head_norm(weights: LayerWeights, config: LayerConfig) -> HeadNorm:
    """One norm for the query and key heads, which lie side by side: a row of weights for each head."""
    q, k = weights.tensor("self_attn.q_norm.weight"), weights.tensor("self_attn.k_norm.weight")  # [head_dim] each
    rows = torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
    return HeadNorm(rows, config.rms_norm_eps)
