"""Hy3 (Hunyuan 3), as in transformers' `modeling_hy_v3.py`.

Special: each head's query and key are normalized before they are rotated; experts are DeepSeek V3's without groups,
under other names (`router`, `expert_bias`, `shared_mlp`).
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_dense_layers,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.layout import Layout

NAMES = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    fields.refuse("mlp_bias", (False,), "biases of the MLP")
    fields.refuse("qk_norm", (True,), "queries and keys that are not normalized")
    fields.refuse("route_norm", (True,), "weights of experts that are not divided by their sum")
    fields.refuse("moe_router_use_sigmoid", (True,), "experts that are not scored by a sigmoid")
    fields.refuse("moe_router_enable_expert_bias", (True,), "experts that are selected without a bias")
    routing = read_routing(
        fields, "num_experts", scoring="sigmoid", scale=fields.number("router_scaling_factor", default=2.826)
    )
    inner = fields.integer("moe_intermediate_size")
    shared = inner * fields.integer("num_shared_experts", default=1)
    bias = fields.flag("attention_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        experts=ExpertsConfig(routing, inner, shared_intermediate_size=shared, selection_bias=True),
        dense_layers=read_dense_layers(fields, num_layers, default_first=1),
        default_theta=11_158_840.0,
        default_eps=1e-5,
    )
    return replace(
        config,
        num_mtp_layers=fields.integer("num_nextn_predict_layers", default=1, min=0, max=16),
        layout=Layout(renamed=NAMES),
    )
