"""Ministral 3, as in transformers' `modeling_ministral3.py`.

Special: Mistral's layers, whose queries grow with their position beyond the original context
(`llama_4_scaling_beta`, among the fields of the rotary scaling, which is yarn).
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.attention import QueryScaling
from quire.models.config import (
    MAX_CONTEXT,
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
    read_same_window,
    rope_section,
)
from quire.models.fields import Fields

MAX_STEPS = 1 << 16
"""Most lengths of the original context in the longest one: there is a table of so many factors."""
ROPE_FIELDS = ("llama_4_scaling_beta", "max_position_embeddings")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    rope = read_rope(fields, read_head_dim(fields, 128), read=ROPE_FIELDS)
    config = read_decoder_config(
        fields,
        generation,
        windows=read_same_window(fields, read_num_layers(fields)),
        default_head_dim=128,
        default_eps=1e-5,
        rope=rope,
    )
    return with_query_scaling(config, fields)


def with_query_scaling(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """With queries that grow as the section of the rotary scaling says; with a beta of 0, as Mistral Medium 3.5 has,
    they do not. Raises ModelConfigError.
    """
    section = rope_section(fields)
    beta = section.optional_number("llama_4_scaling_beta", zero=True)
    if beta is None:
        section.number("llama_4_scaling_beta", above=-1.0)  # it must be there
        return config
    scaling = QueryScaling(
        beta,
        section.integer(
            "original_max_position_embeddings", min=config.max_position_embeddings // MAX_STEPS + 1, max=MAX_CONTEXT
        ),
        config.max_position_embeddings,
    )
    return replace(config, layer=replace(config.layer, query_scaling=scaling))
