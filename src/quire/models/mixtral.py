"""Mixtral, as in transformers' `modeling_mixtral.py` (https://arxiv.org/abs/2401.04088).

Special: the MLP of every layer is experts, `num_experts_per_tok` of `num_local_experts` for each token, whose weights
are the softmax over the chosen ones; they lie under `block_sparse_moe`, as w1 (gate), w3 (up) and w2 (down).
`intermediate_size` is the width inside an expert; `router_jitter_noise` is for training. Every layer sees a sliding
window of `sliding_window` tokens unless the field is null, as in the published checkpoints. There are no biases.
"""

from __future__ import annotations

from quire.layers.experts import ExpertNames, ExpertsConfig
from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
    read_same_window,
)
from quire.models.fields import Fields

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
THETA = 1e6
"""Where config.json does not say rope_theta."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Reads config.json and generation_config.json; raises ModelConfigError."""
    routing = read_routing(fields, "num_local_experts")
    return read_decoder_config(
        fields,
        generation,
        windows=read_same_window(fields, read_num_layers(fields)),
        experts=ExpertsConfig(routing, fields.integer("intermediate_size"), names=NAMES),
        default_theta=THETA,
    )
