"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, as in transformers' `modeling_phi3.py` (https://arxiv.org/abs/2404.14219).

Special: q, k and v are one tensor, gate and up another; a part of each head may be rotated (`partial_rotary_factor`).
With longrope, the longest context of the model selects one of two lists of factors, for all texts: see `layers.rotary`.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
    read_same_window,
)
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    fields = fields.with_defaults({"original_max_position_embeddings": 4096})
    head_dim = read_head_dim(fields)
    rope, context = read_rope(fields, head_dim, partial=1.0)
    if rope.kind not in ("default", "longrope"):
        raise fields.error("rope_scaling", "absent, or of type 'longrope'")
    config = read_decoder_config(
        fields,
        generation,
        windows=read_same_window(fields, read_num_layers(fields)),
        default_eps=1e-5,
        rope=(rope, context),
    )
    if config.windows[0] is not None and config.windows[0] >= context:
        config = replace(config, windows=(None,) * config.num_layers)  # Phi-4-mini's: it never passes a token
    layer = config.layer
    q, kv, inner = layer.num_heads * head_dim, layer.num_kv_heads * head_dim, layer.intermediate_size
    joined = (
        ("qkv_proj", (("q_proj", q), ("k_proj", kv), ("v_proj", kv))),
        ("gate_up_proj", (("gate_proj", inner), ("up_proj", inner))),
    )
    return replace(config, layout=Layout(joined=joined, order=partly_turned(head_dim, rope.head_dim)))
