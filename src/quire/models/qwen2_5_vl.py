"""Qwen2.5-VL, as in transformers' `modeling_qwen2_5_vl.py`: its text model, which is Qwen2's.

Special: it is part of a checkpoint with a vision tower; published configurations have its fields at the top level. For
rotary embedding see `qwen3_vl`.
"""

from __future__ import annotations

from quire.models import qwen2
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.qwen3_vl import of_text
from quire.models.text_tower import read_text_tower

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
"""Of the text model, unlike Qwen2's; configurations that transformers wrote may leave out what has these values."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    if "text_config" not in fields:
        inner = fields.picked(fields.names() - {"vision_config"}) | {"model_type": "qwen2_5_vl_text"}
        fields = Fields({"text_config": inner}, fields.source)
    return read_text_tower(fields, generation, {"qwen2_5_vl_text": _read_text}, ("visual.",))


def _read_text(fields: Fields, generation: Fields) -> DecoderConfig:
    return qwen2.read_config(of_text(fields.with_defaults(DEFAULTS)), generation)
