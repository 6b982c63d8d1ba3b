"""EAGLE and EAGLE-2 heads, as in the authors' `cnets1.py` (https://arxiv.org/abs/2401.15077, 2406.16858).

One decoder layer continues the target's last hidden states: from the one at a position and the token after it, it
predicts the one at the next position. Embedding (unless the head has its own) and output head are the target's.
Published heads have no norm before the attention and none at the end; biases and norms are used if the checkpoint has
their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from quire.layers.decoder import DecoderLayer, LayerConfig, NormNames
from quire.layers.rotary import RopeConfig, RotaryEmbedding
from quire.models.config import read_decoder_config
from quire.models.fields import Fields
from quire.models.model import Model
from quire.models.weights import Weights
from quire.ops import KVCache, KVShape, RaggedBatch

TABLE = "embed_tokens.weight"
SKIPPED = ("lm_head.",)
"""A copy of the target's output head in some checkpoints."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of one layer.

    Attributes:
        layer: sizes and options of its layer.
        rope: its rotary embedding.
        vocab_size, target_hidden_size: of its target.
        shapes: of every tensor that it needs, by name.
    """

    layer: LayerConfig
    rope: RopeConfig
    vocab_size: int
    target_hidden_size: int
    shapes: Mapping[str, tuple[int, ...]]


class Head:
    """The interface of heads.

    Attributes:
        config: from config.json and the names of the tensors.
        hidden_size: of the input and output of `forward`.
        aux_layers: layers of the target whose inputs are its features; empty if the features are the output of the
            target's `forward`.
        dtype: of activations, KV and weights: the target's.
        kv_shape: of a token's KV.
        weight_bytes: bytes of its own weights read in a step, without an embedding table.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: HeadConfig, weights: Weights, target: Model) -> None:
        self.config = config
        self.hidden_size = config.layer.hidden_size
        self.dtype = weights.dtype
        self.kv_shape = KVShape(1, config.layer.num_kv_heads, config.layer.head_dim, self.dtype)
        numbers = sum(math.prod(shape) for name, shape in config.shapes.items() if name != TABLE)
        self.weight_bytes = numbers * weights.dtype.itemsize
        self.embedding = weights.embedding("embed_tokens") if TABLE in config.shapes else target.embedding
        self.rotary = RotaryEmbedding(config.rope, weights.kernels.device)


class Eagle(Head):
    """One decoder layer that continues the target's last hidden states, given the embedding of the token after each.

    Args:
        config: of the head.
        weights: of its checkpoint.
        target: its embedding and output head are shared.
    """

    def __init__(self, config: HeadConfig, weights: Weights, target: Model) -> None:
        super().__init__(config, weights, target)
        self._target = target
        self.fc = weights.linear("fc", bias="fc.bias" in config.shapes)
        self.layer = DecoderLayer(config.layer, weights.under("layers.0."), layer=0, window=None)

    @staticmethod
    def read_config(fields: Fields, names: Collection[str]) -> HeadConfig:
        """Read config.json, and optional parts from the names of the tensors; raises ModelConfigError."""
        layer, rope, vocab_size = read_layer(fields, names)
        layer = replace(
            layer,
            qk_norm="head" if "layers.0.self_attn.q_norm.weight" in names else None,
            norms=NormNames() if "layers.0.input_layernorm.weight" in names else NormNames(before_attention=None),
        )
        hidden = layer.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if "fc.bias" in names:
            shapes["fc.bias"] = (hidden,)
        if TABLE in names:
            shapes[TABLE] = (vocab_size, hidden)
        shapes |= {f"layers.0.{name}": shape for name, shape in layer.tensor_shapes().items()}
        return HeadConfig(layer, rope, vocab_size, hidden, shapes)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """From the target's `forward` [tokens, hidden] to the input of `forward`."""
        return features

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """One step.

        Args:
            hidden: [tokens, hidden], the target's at these positions, or this method's result for the position before.
            batch: its `token_ids` are those of the position after each.
            kv: a cache of one layer.

        Returns [tokens, hidden], a prediction of the target's at the position after each.
        """
        x = self.fc(torch.cat([self.embedding(batch.token_ids), hidden], dim=1))
        x, residual = self.layer(None, x, self.rotary.tables(batch.positions), kv, batch)
        return x + residual

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """out: [rows, hidden] of `forward`. Returns [rows, vocabulary] fp32, of two positions after each row's."""
        return self._target.logits(out)


def read_layer(fields: Fields, names: Collection[str]) -> tuple[LayerConfig, RopeConfig, int]:
    """A head's layer, its rotary embedding, and the size of the vocabulary; raises ModelConfigError."""
    if fields.integer("num_hidden_layers", default=1) != 1:
        raise fields.error("num_hidden_layers", "1: heads of several layers are not supported")
    config = read_decoder_config(
        fields,
        Fields({}, fields.source),
        windows=(None,),
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        mlp_bias="layers.0.mlp.down_proj.bias" in names,
    )
    return config.layer, config.rope, config.vocab_size
