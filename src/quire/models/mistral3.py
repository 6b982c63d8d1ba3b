"""Mistral Small 3.1 and 3.2, and Ministral 3, as in transformers' `modeling_mistral3.py`: their text models.

Special: only that the text model, which is Mistral's, Ministral 3's or Mistral 4's, is part of a checkpoint with a
vision tower.
"""

from __future__ import annotations

from quire.models import ministral3, mistral, mistral4
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.text_tower import read_text_tower

TEXTS = {"mistral": mistral.read_config, "ministral3": ministral3.read_config, "mistral4": mistral4.read_config}


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    return read_text_tower(fields, generation, TEXTS, ("vision_tower.", "multi_modal_projector."))
