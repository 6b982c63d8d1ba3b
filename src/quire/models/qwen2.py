"""Qwen2 and Qwen2.5 (dense), as in transformers' `modeling_qwen2.py` (https://arxiv.org/abs/2407.10671).

Special: q, k and v always have biases, the attention's output never; some layers may see a sliding window.
"""

from __future__ import annotations

import torch

from quire.layers.decoder import DecoderLayer
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers, read_windows
from quire.models.fields import Fields
from quire.models.model import Model, Taps
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch


class Qwen2(Model):
    """Qwen2 and Qwen2.5: see the head of this file."""

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
        return read_decoder_config(
            fields,
            generation,
            windows=read_windows(fields, read_num_layers(fields)),
            qkv_bias=True,
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
