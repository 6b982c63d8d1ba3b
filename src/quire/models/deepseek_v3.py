"""DeepSeek V3, V3.1 and R1, as in transformers' `modeling_deepseek_v3.py` (https://arxiv.org/abs/2412.19437).

Special, beside what DeepSeek V2 has: a sigmoid scores the experts, and a bias (`e_score_correction_bias`) is added for
their selection alone; a group's score is the sum of its two best (`topk_method` noaux_tc). Weights may be 8-bit
floating point numbers with a scale for each block (see `fp8`). Behind the last layer lies one that predicts one token
more (`num_nextn_predict_layers`), for speculation: it is loaded when it is asked for.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.errors import ConfigError
from quire.layers.latent import LatentDecoderLayer
from quire.models.config import DecoderConfig, read_routing
from quire.models.deepseek_v2 import DeepseekConfig, DeepseekV2, read_deepseek_config
from quire.models.fields import Fields
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch


class DeepseekV3(DeepseekV2):
    """DeepSeek V3: see the head of this file.

    Attributes:
        mtp: what predicts one token more; None unless it was asked for.
    """

    def __init__(self, config: DeepseekConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.mtp = MultiTokenPrediction(config, weights, self) if config.mtp else None

    @staticmethod
    def read_config(fields: Fields, generation: Fields) -> DeepseekConfig:
        """Reads config.json and generation_config.json; raises ModelConfigError."""
        fields.choice("topk_method", {"noaux_tc"}, default="noaux_tc")
        fields.choice("scoring_func", {"sigmoid"}, default="sigmoid")
        fields.refuse("rope_interleave", (True,), "rotary pairs that do not lie side by side")
        routing = read_routing(
            fields,
            "n_routed_experts",
            scoring="sigmoid",
            group_score="top2",
            normalize=fields.flag("norm_topk_prob", default=True),
            scale=fields.number("routed_scaling_factor", default=2.5),
        )
        config = read_deepseek_config(fields, generation, routing, default_first_dense=3, selection_bias=True)
        behind = fields.integer("num_nextn_predict_layers", default=1, min=0, max=16)
        return replace(config, skipped=tuple(f"model.layers.{config.num_layers + i}." for i in range(behind)))

    @staticmethod
    def with_mtp(config: DecoderConfig) -> DecoderConfig:
        """See Model."""
        if not isinstance(config, DeepseekConfig) or len(config.skipped) != 1:
            raise ConfigError(
                "mtp=True, and speculation with method mtp, need one layer behind the last, but "
                "num_nextn_predict_layers is not 1; choose another method"
            )
        return replace(config, mtp=True)


class MultiTokenPrediction:
    """Predicts the token after the next: section 2.2 of the report.

    Embedding and output head are the model's own; the copies of them that checkpoints hold are not read.

    Args:
        config: of the model.
        weights: the checkpoint's.
        model: whose embedding, rotary tables and head are shared.
    """

    def __init__(self, config: DeepseekConfig, weights: Weights, model: DeepseekV2) -> None:
        eps, own = config.layer.rms_norm_eps, weights.under(f"model.layers.{config.num_layers}.")
        self.embedding, self.rotary, self.logits = model.embedding, model.rotary, model.logits
        self.enorm, self.hnorm = own.norm("enorm", eps), own.norm("hnorm", eps)
        self.eh_proj = own.linear("eh_proj")
        self.layer = LatentDecoderLayer(config.layer, own, config.num_layers)
        self.norm = own.norm("shared_head.norm", eps)

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """One step.

        Args:
            hidden: [tokens, hidden], what the model's `forward` returned at these positions.
            batch: its `token_ids` are those of the position after each.
            kv: a cache with one layer more than the model has, whose last is this one's.

        Returns [tokens, hidden], of which `logits` gives the scores of the position after those.
        """
        both = torch.cat([self.enorm(self.embedding(batch.token_ids)), self.hnorm(hidden)], dim=1)
        x, residual = self.layer(None, self.eh_proj(both), self.rotary.tables(batch.positions), kv, batch)
        return self.norm.with_residual(x, residual)[0]
