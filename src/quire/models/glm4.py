"""GLM-4 of April 2025 (0414: 9B, 32B, Z1), as in transformers' `modeling_glm4.py`.

Special: norms before and after attention and MLP; half of each head is rotated, in pairs of adjacent dimensions; q, k
and v have biases; gate and up are one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import NormNames
from quire.models.config import DecoderConfig, read_decoder_config, read_head_dim, read_num_layers, read_rope
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned

NORMS = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    head_dim = read_head_dim(fields, 128)
    rope, context = read_rope(fields, head_dim, partial=0.5)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * read_num_layers(fields),
        default_head_dim=128,
        qkv_bias=fields.flag("attention_bias", default=True),
        norms=NORMS,
        default_eps=1.5625e-7,
        rope=(rope, context),
    )
    inner = config.layer.intermediate_size
    joined = (("gate_up_proj", (("gate_proj", inner), ("up_proj", inner))),)
    return replace(config, layout=Layout(joined=joined, order=partly_turned(head_dim, rope.head_dim, interleaved=True)))
