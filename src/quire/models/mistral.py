"""Mistral, as in transformers' `modeling_mistral.py` (https://arxiv.org/abs/2310.06825).

Special: every layer has a sliding window of `sliding_window` tokens, including the token itself, unless the field is
null, as in later checkpoints; left out, it is 4096. There are no biases.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers, read_same_window
from quire.models.fields import Fields

WINDOW = 4096
"""Where config.json does not say sliding_window."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    windows = read_same_window(fields.filled({"sliding_window": WINDOW}), read_num_layers(fields))
    return read_decoder_config(fields, generation, windows=windows, may_see_ahead=True)
