"""OLMo 2, as in transformers' `modeling_olmo2.py` (https://arxiv.org/abs/2501.00656).

Special: norms come after attention and MLP, not before; queries are normalized over all heads together before rotation,
and so are keys.
"""

from __future__ import annotations

from quire.layers.decoder import POST_NORMS
from quire.layers.rotary import RopeConfig
from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    fields.refuse("layer_types", (["full_attention"] * num_layers,), "all of OLMo 2's layers see everything")
    return read_olmo_config(fields, generation, (None,) * num_layers)


def read_olmo_config(
    fields: Fields,
    generation: Fields,
    windows: tuple[int | None, ...],
    rope: tuple[RopeConfig, int] | None = None,
) -> DecoderConfig:
    """Reads the fields that OLMo 2 and 3 share; for the others see `read_decoder_config`."""
    bias = fields.flag("attention_bias", default=False)
    return read_decoder_config(
        fields,
        generation,
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="whole",
        norms=POST_NORMS,
        default_eps=1e-5,
        rope=rope,
    )
