"""gpt-oss, as in transformers' `modeling_gpt_oss.py` (https://arxiv.org/abs/2508.10925).

Special: each query head has an attention sink; every second layer has a window; each layer has experts with biases and
a clamped gate; the router's softmax is over the chosen experts only, which equals one over all, divided by the sum of
the chosen. Norms multiply by their weights before rounding. Experts may be in MXFP4 (see `mxfp4`).
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    MAX_CONTEXT,
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_routing,
    rope_section,
)
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT

ROUTER = (r"\.mlp\.router\.", ".mlp.gate.")
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""The rotary scaling where config.json does not say any."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    fields.refuse("swiglu_limit", (SWIGLU_LIMIT, int(SWIGLU_LIMIT)), "another limit of the gate")
    fields.refuse("swiglu_alpha", (SWIGLU_ALPHA,), "another gain of the gate")
    types = read_layer_types(fields, num_layers) or [
        "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
    ]
    window = fields.integer("sliding_window", default=128, max=MAX_CONTEXT)
    bias = fields.flag("attention_bias", default=True)
    routing = read_routing(fields, "num_local_experts")
    experts = ExpertsConfig(routing, fields.integer("intermediate_size"), bias=True, activation="clamped_swiglu")
    section = rope_section(fields)
    scaling = section if section.names() else Fields(YARN, fields.source)
    config = read_decoder_config(
        fields,
        generation,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        default_head_dim=64,
        qkv_bias=bias,
        output_bias=bias,
        experts=experts,
        default_eps=1e-5,
        rope=read_rope(fields, read_head_dim(fields, 64), 150000.0, scaling=scaling),
    )
    return replace(
        config,
        layer=replace(config.layer, sinks=True),
        norm_offset=0.0,
        layout=Layout(renamed=(ROUTER,), experts_by_turns=True, experts_transposed=True),
    )
