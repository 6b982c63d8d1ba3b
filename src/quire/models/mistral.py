"""Mistral, as in transformers' `modeling_mistral.py` (https://arxiv.org/abs/2310.06825).

Special: every layer has a sliding window of `sliding_window` tokens, including the token itself, unless the field is
null, as in later checkpoints. There are no biases.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers, read_same_window
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    return read_decoder_config(fields, generation, windows=read_same_window(fields, read_num_layers(fields)))
