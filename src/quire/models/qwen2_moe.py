"""Qwen1.5-MoE and Qwen2-MoE, as in transformers' `modeling_qwen2_moe.py` (https://arxiv.org/abs/2407.10671).

Special: as Qwen3-MoE, but that queries and keys have biases in place of norms, and beside the experts there is a shared
one for all tokens, whose output is multiplied by the sigmoid of a projection of its input.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
    read_windows,
)
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.qwen3_moe import read_sparse_step
from quire.models.qwen3_next import SHARED_EXPERT


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    if "layer_types" not in fields:  # every other one of the first layers has the window, unlike Qwen2's
        first = fields.integer("max_window_layers", default=28, min=0, max=MAX_LAYERS)
        wide = not fields.flag("use_sliding_window", default=False)
        types = ["full_attention" if wide or i % 2 or i >= first else "sliding_attention" for i in range(num_layers)]
        fields = fields.updated({"layer_types": types})
    routing = read_routing(fields, "num_experts", normalize=fields.flag("norm_topk_prob", default=False))
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("shared_expert_intermediate_size")
    config = read_decoder_config(
        fields,
        generation,
        windows=read_windows(fields, num_layers),
        qkv_bias=fields.flag("qkv_bias", default=True),
        experts=ExpertsConfig(routing, inner, shared, shared_gate=True),
        dense_layers=read_sparse_step(fields, num_layers),
    )
    return replace(config, layout=Layout(renamed=SHARED_EXPERT))
