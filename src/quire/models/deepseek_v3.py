"""DeepSeek V3, V3.1 and R1, as in transformers' `modeling_deepseek_v3.py` (https://arxiv.org/abs/2412.19437).

Special, compared with DeepSeek V2: a sigmoid scores the experts; for their selection only, a bias
(`e_score_correction_bias`) is added; a group's score is the sum of its two best (`topk_method` noaux_tc). Weights may
be in fp8 with a scale per block (see `fp8`). The last layer is followed by one that predicts one more token
(`num_nextn_predict_layers`), for speculation; it is loaded if requested.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import DecoderConfig, read_routing
from quire.models.deepseek_v2 import read_deepseek_config
from quire.models.fields import Fields
from quire.ops.experts import Routing


def read_config(
    fields: Fields,
    generation: Fields,
    *,
    default_scale: float = 2.5,
    default_first_dense: int = 3,
    default_eps: float = 1e-6,
) -> DecoderConfig:
    """Reads config.json and generation_config.json; raises ModelConfigError.

    Args:
        default_scale, default_first_dense, default_eps: routed_scaling_factor, first_k_dense_replace and rms_norm_eps
            if the field is absent.
    """
    fields.choice("topk_method", {"noaux_tc"}, default="noaux_tc")
    fields.choice("scoring_func", {"sigmoid"}, default="sigmoid")
    fields.refuse("rope_interleave", (True,), "rotary pairs that do not lie side by side")
    routing = read_v3_routing(fields, default_scale)
    config = read_deepseek_config(
        fields,
        generation,
        routing,
        default_first_dense=default_first_dense,
        selection_bias=True,
        default_eps=default_eps,
    )
    return replace(config, num_mtp_layers=fields.integer("num_nextn_predict_layers", default=1, min=0, max=16))


def read_v3_routing(fields: Fields, default_scale: float = 1.0) -> Routing:
    """The routing of V3, and of families that adopted it; raises ModelConfigError.

    Args:
        default_scale: routed_scaling_factor if the field is absent.
    """
    return read_routing(
        fields,
        "n_routed_experts",
        scoring="sigmoid",
        group_score="top2",
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=default_scale),
    )
