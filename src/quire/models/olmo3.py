"""OLMo 3, as in transformers' `modeling_olmo3.py` (https://arxiv.org/abs/2512.13961).

Special, compared with OLMo 2: three of four layers have a window (`layer_types`, `sliding_window`), and rotary scaling
applies only to the others. `rope_parameters` may have a section for each kind of layer.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import (
    MAX_CONTEXT,
    DecoderConfig,
    read_head_dim,
    read_layer_types,
    read_num_layers,
    read_rope,
    rope_section,
    with_older_scaling,
)
from quire.models.fields import Fields
from quire.models.olmo2 import read_olmo_config

THETA = 500000.0
"""Where config.json does not say rope_theta."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers, head_dim = read_num_layers(fields), read_head_dim(fields)
    types = read_layer_types(fields, num_layers) or [
        "full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(num_layers)
    ]
    window = fields.integer("sliding_window", default=4096, max=MAX_CONTEXT)
    nested, scaling = fields.section("rope_parameters"), rope_section(fields)
    sections = {"full_attention": scaling, "sliding_attention": Fields(scaling.picked(["rope_theta"]), scaling.source)}
    if nested.names() & sections.keys():
        unknown = nested.names() - sections.keys()
        if unknown:
            raise nested.error(min(unknown), f"absent, beside {' and '.join(sections)}")
        sections = {kind: nested.section(kind) for kind in sections}
        sections["full_attention"] = with_older_scaling(sections["full_attention"], fields)
    ropes = {kind: read_rope(fields, head_dim, THETA, scaling=section) for kind, section in sections.items()}
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    config = read_olmo_config(fields, generation, windows, ropes["full_attention"])
    return replace(config, ropes=tuple(ropes[kind][0] for kind in types))
