"""Llama 2 and 3.x, as in transformers' `modeling_llama.py` (https://arxiv.org/abs/2407.21783).

Special: rotary scaling of kinds linear, llama3 and yarn; `attention_bias` is for q, k, v and the output
alike, `mlp_bias` for the MLP. Every layer sees the whole context.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    fields.refuse("sliding_window", (), "Llama has no sliding window")
    fields.refuse("layer_types", (["full_attention"] * num_layers,), "all of Llama's layers see everything")
    bias = fields.flag("attention_bias", default=False)
    return read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        may_see_ahead=True,
    )
