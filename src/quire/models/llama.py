"""Llama 2 and 3.x, as in transformers' `modeling_llama.py` (https://arxiv.org/abs/2407.21783).

Special: rotary scaling of kinds linear, llama3 and yarn; `attention_bias` is for q, k, v and the output
alike, `mlp_bias` for the MLP. Every layer sees the whole context.
"""

from __future__ import annotations

import torch

from quire.layers.decoder import DecoderLayer
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields
from quire.models.model import Model, Taps
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch


class Llama(Model):
    """Llama: see the head of this file."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        # The largest tensor first: memory's peak is then not the whole model and once more this.
        self.head = weights.linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        self.embedding = weights.embedding("model.embed_tokens")
        self.rotary = RotaryEmbedding(config.rope, weights.kernels.device)
        self.layers = [
            DecoderLayer(config.layer, weights.under(f"model.layers.{index}."), index, window)
            for index, window in enumerate(config.windows)
        ]
        self.norm = weights.norm("model.norm", config.layer.rms_norm_eps)

    @staticmethod
    def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
        """Reads config.json and generation_config.json; raises ModelConfigError."""
        num_layers = read_num_layers(fields)
        fields.refuse("sliding_window", (), "Llama has no sliding window")
        fields.refuse("layer_types", (["full_attention"] * num_layers,), "all of Llama's layers see everything")
        bias = fields.flag("attention_bias", default=False)
        return read_decoder_config(
            fields,
            generation,
            windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=fields.flag("mlp_bias", default=False),
        )

    def forward(self, batch: RaggedBatch, kv: KVCache, taps: Taps | None = None) -> torch.Tensor:
        """See Model."""
        tables = self.rotary.tables(batch.positions)
        x, residual = None, self.embedding(batch.token_ids)  # [tokens, hidden]
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, x, residual)
            x, residual = layer(x, residual, tables, kv, batch)
        return self.norm(residual) if x is None else self.norm.with_residual(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.head(hidden, torch.float32)
