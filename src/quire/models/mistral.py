"""Mistral, as in transformers' `modeling_mistral.py` (https://arxiv.org/abs/2310.06825).

Special: every layer sees a sliding window of `sliding_window` tokens, the row's own included, unless the
field is null, as in later checkpoints. There are no biases.
"""

from __future__ import annotations

from quire.models.config import MAX_CONTEXT, DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Reads config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    window = fields.integer("sliding_window", max=MAX_CONTEXT) if "sliding_window" in fields else None
    kind = "full_attention" if window is None else "sliding_attention"
    fields.refuse("layer_types", ([kind] * num_layers,), "all of Mistral's layers see the same window")
    return read_decoder_config(fields, generation, windows=(window,) * num_layers)
