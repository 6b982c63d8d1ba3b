"""Qwen3 (dense), as in transformers' `modeling_qwen3.py` (https://arxiv.org/abs/2505.09388).

Special: each head's query and key are normalized before rotation; `head_dim` is a field (default 128) and does not
depend on the hidden size; `attention_bias` is for q, k, v and the output; some layers may have a sliding window.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers, read_windows
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    bias = fields.flag("attention_bias", default=False)
    return read_decoder_config(
        fields,
        generation,
        windows=read_windows(fields, read_num_layers(fields)),
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        may_see_ahead=True,
    )
