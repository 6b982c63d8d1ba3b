"""Qwen2 and Qwen2.5 (dense), as in transformers' `modeling_qwen2.py` (https://arxiv.org/abs/2407.10671).

Special: q, k and v always have biases, the attention's output never; some layers may see a sliding window.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers, read_windows
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    return read_decoder_config(
        fields,
        generation,
        windows=read_windows(fields, read_num_layers(fields)),
        qkv_bias=True,
        may_see_ahead=True,
    )
