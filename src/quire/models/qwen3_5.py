"""Qwen3.5, 3.6 and 3.8 (dense), as in transformers' `modeling_qwen3_5.py`, alone or beside a vision tower.

Special: Qwen3-Next's layers (see there) without experts. Rotary embedding has sections for images, as Qwen3-VL's.
"""

from __future__ import annotations

from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.qwen3_next import read_qwen3_5
from quire.models.qwen3_vl import of_text
from quire.models.text_tower import read_text_tower


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    if "text_config" in fields:
        return read_text_tower(fields, generation, {"qwen3_5_text": _read_text}, ("visual.",))
    return _read_text(fields, generation)


def _read_text(fields: Fields, generation: Fields) -> DecoderConfig:
    return read_qwen3_5(of_text(fields), generation)
