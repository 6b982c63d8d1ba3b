"""Granite 3 and 4.1 (dense), as in transformers' `modeling_granite.py`.

Special: embeddings, the outputs of attention and MLP, scores and logits are each multiplied by a constant. Here the
residual stream is kept in units of `residual_multiplier`: outputs then need no factor, embeddings get another one, and
norms, whose result does not depend on a factor of their input, get another eps.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import MIN_EPS, DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    fields.refuse("layer_types", (["full_attention"] * num_layers,), "all of Granite's layers see everything")
    bias = fields.flag("attention_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        read=MULTIPLIERS,
    )
    return with_multipliers(config, fields)


def with_multipliers(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """With the four constants that the fields say; raises ModelConfigError."""
    embedding, unit, scale, logits = (fields.number(name, default=1.0, above=MIN_EPS) for name in MULTIPLIERS)
    layer = replace(config.layer, scale=scale, rms_norm_eps=config.layer.rms_norm_eps / unit**2)
    return replace(config, layer=layer, embedding_scale=embedding / unit, logits_divisor=logits)
