"""Mixtral, as in transformers' `modeling_mixtral.py` (https://arxiv.org/abs/2401.04088).

Special: every layer has experts instead of an MLP, `num_experts_per_tok` of `num_local_experts` for each token, with
the softmax over the chosen ones as weights; their names are `block_sparse_moe` and w1 (gate), w3 (up) and w2 (down).
`intermediate_size` is the inner width of an expert; `router_jitter_noise` is for training. Every layer has a sliding
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
    """Read config.json and generation_config.json; raises ModelConfigError."""
    routing = read_routing(fields, "num_local_experts")
    return read_decoder_config(
        fields,
        generation,
        windows=read_same_window(fields, read_num_layers(fields)),
        experts=ExpertsConfig(routing, fields.integer("intermediate_size"), names=NAMES),
        default_theta=THETA,
        default_eps=1e-5,
    )
