"""Seed-OSS, as in transformers' `modeling_seed_oss.py`.

Special: q, k and v have biases (`attention_bias`), the attention's output has one of its own (`attention_out_bias`).
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    return read_decoder_config(
        fields,
        generation,
        windows=(None,) * read_num_layers(fields),
        default_head_dim=128,
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
    )
