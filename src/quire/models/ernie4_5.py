"""ERNIE 4.5 (dense: 0.3B), as in transformers' `modeling_ernie4_5.py`.

Special: adjacent dimensions are rotated in pairs; one field is for all biases (`use_bias`).
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    bias = fields.flag("use_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * read_num_layers(fields),
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        default_theta=500000.0,
        default_eps=1e-5,
        default_tied=True,
    )
    head_dim = config.layer.head_dim
    return replace(config, layout=Layout(order=partly_turned(head_dim, head_dim, interleaved=True)))
