"""EXAONE 4.0, as in transformers' `modeling_exaone4.py` (https://arxiv.org/abs/2507.11407).

Special: norms come after attention and MLP, not before; each head's query and key are normalized before rotation; if
some layers have a window (`layer_types`, `sliding_window`), the others have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import POST_NORMS
from quire.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_layer_types,
    read_num_layers,
)
from quire.models.fields import Fields
from quire.models.smollm3 import some_without


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    window = fields.integer("sliding_window", max=MAX_CONTEXT) if "sliding_window" in fields else None
    types = read_layer_types(fields, num_layers)
    if types is None:
        pattern = fields.integer("sliding_window_pattern", default=4, max=MAX_LAYERS) if window else 1
        types = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(num_layers)]
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "a number, since layer_types has such layers")
    config = read_decoder_config(
        fields,
        generation,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        qk_norm="head",
        norms=POST_NORMS,
        default_eps=1e-5,
    )
    if window is None:
        return config
    return replace(config, ropes=some_without(config.rope, [kind == "sliding_attention" for kind in types]))
