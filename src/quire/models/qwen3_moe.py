"""Qwen3-MoE, as in transformers' `modeling_qwen3_moe.py` (https://arxiv.org/abs/2505.09388).

Special: the MLP of most layers is experts, `num_experts_per_tok` of `num_experts` for each token, scored by a softmax
over all of them; layers in `mlp_only_layers`, and those that `decoder_sparse_step` passes over, are dense. Each head's
query and key are normalized before they are turned; `attention_bias` is for q, k, v and the output alike. With
`use_sliding_window`, every layer sees the same window.
"""

from __future__ import annotations

import torch

from quire.layers.decoder import DecoderLayer
from quire.layers.experts import ExpertsConfig, expert_layers
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import (
    EXPERT_COUNTS,
    MAX_CONTEXT,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.model import Model, Taps
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch


class Qwen3Moe(Model):
    """Qwen3-MoE: see the head of this file."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        # The largest tensor first: memory's peak is then not the whole model and once more this.
        self.head = weights.linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        self.embedding = weights.embedding("model.embed_tokens")
        self.rotary = RotaryEmbedding(config.rope, weights.kernels.device)
        self.layers = [
            DecoderLayer(config.layer_at(index), weights.under(f"model.layers.{index}."), index, window)
            for index, window in enumerate(config.windows)
        ]
        self.norm = weights.norm("model.norm", config.layer.rms_norm_eps)
        self.expert_layers = expert_layers(layer.mlp for layer in self.layers)

    @staticmethod
    def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
        """Reads config.json and generation_config.json; raises ModelConfigError."""
        num_layers = read_num_layers(fields)
        window = None
        if fields.flag("use_sliding_window", default=False) and "sliding_window" in fields:
            window = fields.integer("sliding_window", max=MAX_CONTEXT)
        kind = "full_attention" if window is None else "sliding_attention"
        fields.refuse("layer_types", ([kind] * num_layers,), "all of Qwen3-MoE's layers see the same window")
        count_field = next((name for name in EXPERT_COUNTS if name in fields), EXPERT_COUNTS[0])
        routing = read_routing(fields, count_field, normalize=fields.flag("norm_topk_prob", default=False))
        bias = fields.flag("attention_bias", default=False)
        return read_decoder_config(
            fields,
            generation,
            windows=(window,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            experts=ExpertsConfig(routing, fields.integer("moe_intermediate_size")),
            dense_layers=_dense_layers(fields, num_layers),
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


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer has experts, the first one being that many layers in."""
    step = fields.integer("decoder_sparse_step", default=1, max=MAX_LAYERS)
    passed_over = {index for index in range(num_layers) if (index + 1) % step}
    return frozenset(passed_over.union(fields.integers("mlp_only_layers", below=num_layers)))
