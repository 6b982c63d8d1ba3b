"""Mistral Small 4, as in transformers' `modeling_mistral4.py`.

Special: DeepSeek V3's layers, except that a softmax scores the experts (a group's score is the sum of its two best),
that queries are scaled by position as in Ministral 3, and that a layer's experts may be one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import DecoderConfig, read_rope, read_routing, rope_section
from quire.models.deepseek_v2 import read_deepseek_config
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.ministral3 import ROPE_FIELDS, with_query_scaling


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    fields.refuse("rope_interleave", (True,), "rotary pairs that do not lie side by side")
    turning = fields.integer("qk_rope_head_dim")
    whole = turning + fields.integer("qk_nope_head_dim")
    fields.refuse("head_dim", (turning, whole), f"a head_dim other than qk_rope_head_dim or all of a head ({whole})")
    section = rope_section(fields)
    section.refuse("partial_rotary_factor", (turning / whole, 1, 1.0), f"other than {turning} of {whole} dimensions")
    routing = read_routing(
        fields,
        "n_routed_experts",
        group_score="top2",
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    rope = read_rope(fields, turning, read=ROPE_FIELDS, scaling=section.without("partial_rotary_factor"))
    config = read_deepseek_config(fields, generation, routing, default_first_dense=0, rope=rope)
    return replace(with_query_scaling(config, fields), layout=Layout())
