"""GLM-4.5, 4.6 and 4.7, as in transformers' `modeling_glm4_moe.py` (https://arxiv.org/abs/2508.06471).

Special: half of each head is rotated (`partial_rotary_factor`); each head's query and key may be normalized before that
(`use_qk_norm`); q, k and v may have biases, the output never. Experts are as in DeepSeek V3: a sigmoid scores them, and
a bias is added for their selection only. The last layer is followed by one that predicts one more token.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_dense_layers,
    read_head_dim,
    read_num_layers,
    read_rope,
)
from quire.models.deepseek_v3 import read_v3_routing
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers, head_dim = read_num_layers(fields), read_head_dim(fields)
    routing = read_v3_routing(fields)
    inner = fields.integer("moe_intermediate_size")
    shared = inner * fields.integer("n_shared_experts", default=1, min=0)
    rope, context = read_rope(fields, head_dim, partial=0.5)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else None,
        experts=ExpertsConfig(routing, inner, shared_intermediate_size=shared, selection_bias=True),
        dense_layers=read_dense_layers(fields, num_layers, default_first=1),
        default_eps=1e-5,
        rope=(rope, context),
    )
    return replace(
        config,
        num_mtp_layers=fields.integer("num_nextn_predict_layers", default=1, min=0, max=16),
        layout=Layout(order=partly_turned(head_dim, rope.head_dim)),
    )
