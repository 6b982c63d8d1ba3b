"""GLM-4.7-Flash, as in transformers' `modeling_glm4_moe_lite.py`.

Special: nothing; its layers are DeepSeek V3's, with other values where fields are absent. `mlp_layer_types` may name
the dense ones.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import DecoderConfig, read_routing
from quire.models.deepseek_v2 import read_deepseek_config
from quire.models.fields import Fields
from quire.models.layout import Layout


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
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
        scale=fields.number("routed_scaling_factor", default=1.8),
    )
    config = read_deepseek_config(
        fields, generation, routing, default_first_dense=1, selection_bias=True, default_eps=1e-5
    )
    return replace(
        config, num_mtp_layers=fields.integer("num_nextn_predict_layers", default=1, min=0, max=16), layout=Layout()
    )
