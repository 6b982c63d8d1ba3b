"""Hunyuan (dense: 0.5B to 7B), as in transformers' `modeling_hunyuan_v1_dense.py`.

Special: each head's query and key are normalized *after* rotation; rotary scaling of kind dynamic with a fixed `alpha`
is a larger base.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.rotary import RopeConfig
from quire.models.config import (
    DEFAULT_THETA,
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
    rope_section,
)
from quire.models.fields import Fields
from quire.models.layout import Layout

NORMS = (
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
)


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    fields.refuse("use_qk_norm", (True,), "queries and keys that are not normalized")
    fields.refuse("use_cla", (False,), "layers that share keys and values")
    bias = fields.flag("attention_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * read_num_layers(fields),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="turned",
        default_eps=1e-5,
        rope=_read_rope(fields, read_head_dim(fields)),
    )
    return replace(config, layout=Layout(renamed=NORMS))


def _read_rope(fields: Fields, head_dim: int) -> tuple[RopeConfig, int]:
    section = rope_section(fields)
    kinds = section.picked(["rope_type", "type"]).values()
    if "dynamic" not in kinds or "alpha" not in section:
        return read_rope(fields, head_dim)
    theta = section.number("rope_theta", default=fields.number("rope_theta", default=DEFAULT_THETA, max=1e12), max=1e12)
    stretched = theta * section.number("alpha") ** (head_dim / (head_dim - 2))
    return read_rope(fields, head_dim, scaling=Fields({"rope_theta": stretched}, section.source))
