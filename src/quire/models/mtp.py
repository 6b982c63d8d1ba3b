"""Multi-token prediction, as in DeepSeek V3: section 2.2 of the report (https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.layers.decoder import DecoderLayer
from quire.layers.embedding import Embedding
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import DecoderConfig
from quire.models.weights import Weights
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.parallel.group import OneRank


class MultiTokenPrediction:
    """The layer after the last one, which predicts the token after the next.

    Embedding and output head are shared with the model; their copies in checkpoints are not read. It is replicated on
    every rank, so that all have the same drafts.

    Args:
        config: of the model.
        weights: of the checkpoint.
        embedding, rotary, logits: the model's, which are shared.
        kv_shape: of a token's KV in all of the model's layers.

    Attributes:
        kv_shape: of a token's KV.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        embedding: Embedding,
        rotary: RotaryEmbedding,
        logits: Callable[[torch.Tensor], torch.Tensor],
        kv_shape: KVShape,
    ) -> None:
        eps, own = config.layer.rms_norm_eps, weights.under(config.mtp_prefix(), OneRank())
        self.embedding, self.rotary, self.logits = embedding, rotary, logits
        self.enorm, self.hnorm = own.norm("enorm", eps), own.norm("hnorm", eps)
        self.eh_proj = own.linear("eh_proj")
        self.layer = DecoderLayer(config.layer, own, layer=0, window=None)
        self.norm = own.norm("shared_head.norm", eps)
        self.kv_shape = dataclasses.replace(kv_shape, layers=1)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """From the model's `forward` [tokens, hidden] to the input of `forward`."""
        return features

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """One step.

        Args:
            hidden: [tokens, hidden], the result of the model's `forward` at these positions.
            batch: its `token_ids` are those of the position after each.
            kv: a cache of one layer.

        Returns [tokens, hidden], from which `logits` computes the scores of the position after those.
        """
        both = torch.cat([self.enorm(self.embedding(batch.token_ids)), self.hnorm(hidden)], dim=1)
        x, residual = self.layer(None, self.eh_proj(both), self.rotary.tables(batch.positions), kv, batch)
        return self.norm.with_residual(x, residual)[0]
