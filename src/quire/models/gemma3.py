"""Gemma 3, as in transformers' `modeling_gemma3.py` (https://arxiv.org/abs/2503.19786), with or without a vision tower.

Special: norms come before and after attention and MLP, and checkpoints store their weights minus 1; queries and keys
have norms per head; scores are scaled by `query_pre_attn_scalar`, embeddings by the square root of their width; the
MLP's gate is a GELU; five of six layers have a window, and a rotary base of their own. EmbeddingGemma
(https://arxiv.org/abs/2509.20354) is such a model without a head and with bidirectional attention.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import SANDWICH_NORMS
from quire.layers.rotary import RopeConfig
from quire.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_THETA,
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_layer_types,
    read_num_layers,
    read_rope,
    with_older_scaling,
)
from quire.models.fields import Fields
from quire.models.text_tower import read_text_tower

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
"""Published configurations leave out what has these values."""

LOCAL, GLOBAL = "sliding_attention", "full_attention"
THETAS = {LOCAL: ("rope_local_base_freq", 10000.0), GLOBAL: ("rope_theta", 1000000.0)}
"""By kind of layer, the older field of its base, and the base where that is absent."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    if "text_config" in fields:
        texts = {"gemma3_text": read_text}
        return read_text_tower(fields, generation, texts, ("vision_tower.", "multi_modal_projector."))
    return read_text(fields, generation)


def read_text(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read the text model's configuration; raises ModelConfigError."""
    fields = fields.with_defaults(DEFAULTS)
    fields.choice("hidden_activation", {"gelu_pytorch_tanh"}, default="gelu_pytorch_tanh")
    num_layers = read_num_layers(fields)
    pattern = fields.integer("sliding_window_pattern", max=MAX_LAYERS)
    types = read_layer_types(fields, num_layers) or [
        LOCAL if (index + 1) % pattern else GLOBAL for index in range(num_layers)
    ]
    window = fields.integer("sliding_window", max=MAX_CONTEXT)
    both_ways = fields.flag("use_bidirectional_attention", default=False)
    if both_ways:  # half of it back, and half ahead
        window = window // 2 + 1
    ropes = {kind: _read_rope(fields, kind) for kind in THETAS}
    bias = fields.flag("attention_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=tuple(window if kind == LOCAL else None for kind in types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        # The length is that after scaling, unlike others'.
        rope=(ropes[GLOBAL], fields.integer("max_position_embeddings", max=MAX_CONTEXT)),
    )
    return replace(
        config,
        layer=replace(config.layer, scale=fields.number("query_pre_attn_scalar") ** -0.5, causal=not both_ways),
        ropes=tuple(ropes[kind] for kind in types),
        embedding_scale=config.layer.hidden_size**0.5,
        embedding_scale_rounded=True,
        norm_offset=1.0,
    )


def _read_rope(fields: Fields, kind: str) -> RopeConfig:
    """The rotary embedding of one kind of layers. Newer checkpoints have a section for each; in older ones, scaling is
    for the global layers only."""
    name, theta = THETAS[kind]
    base = fields.number(name, default=theta, above=1.0, max=MAX_THETA)
    sections = fields.section("rope_parameters")
    unknown = sections.names() - THETAS.keys()
    if unknown:
        raise sections.error(min(unknown), f"absent, beside {' and '.join(THETAS)}")
    section = sections.section(kind)
    if kind == GLOBAL:
        section = with_older_scaling(section, fields)
    return read_rope(fields.without("rope_theta"), read_head_dim(fields), base, scaling=section)[0]
