"""MiniMax M2, M2.1 and M2.5, as in transformers' `modeling_minimax_m2.py`.

Special: queries are normalized over all heads together before rotation, and so are keys; a part of each head is rotated
(`rotary_dim`). Every layer has experts under Mixtral's names; a sigmoid scores them, and a bias is added for their
selection only. Weights may be in fp8 with a scale per block (see `fp8`).
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertNames, ExpertsConfig
from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
BIAS = (r"\.block_sparse_moe\.e_score_correction_bias$", ".block_sparse_moe.gate.e_score_correction_bias")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers, head_dim = read_num_layers(fields), read_head_dim(fields, 128)
    fields.choice("scoring_func", {"sigmoid"}, default="sigmoid")
    fields.choice("qk_norm_type", {"per_layer"}, default="per_layer")
    fields.refuse("use_qk_norm", (True,), "queries and keys that are not normalized")
    fields.refuse("use_routing_bias", (True,), "experts that are selected without a bias")
    fields.refuse("shared_intermediate_size", (0,), "experts that all tokens go through")
    fields.refuse("attn_type_list", ([1] * num_layers,), "linear attention")
    partial = fields.integer("rotary_dim", default=head_dim, max=head_dim) / head_dim
    rope, context = read_rope(fields, head_dim, 5e6, partial=partial)
    routing = read_routing(fields, "num_local_experts", scoring="sigmoid")
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        default_head_dim=128,
        qk_norm="whole",
        experts=ExpertsConfig(routing, fields.integer("intermediate_size"), selection_bias=True, names=NAMES),
        rope=(rope, context),
    )
    return replace(config, layout=Layout(renamed=(BIAS,), order=partly_turned(head_dim, rope.head_dim)))
