"""Qwen3-VL (dense), as in transformers' `modeling_qwen3_vl.py`: its text model, which is Qwen3's.

Special: it is part of a checkpoint with a vision tower. Rotary embedding has sections for time, height and width; for
text, all three are a token's position, so it is the ordinary one.
"""

from __future__ import annotations

from quire.models import qwen3
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.text_tower import read_text_tower

THETA = 500000.0
"""Where the text model's configuration does not say rope_theta."""
SECTIONS = {"mrope_section", "mrope_interleaved"}


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    return read_text_tower(fields, generation, {"qwen3_vl_text": _read_text}, ("visual.",))


def _read_text(fields: Fields, generation: Fields) -> DecoderConfig:
    return qwen3.read_config(of_text(fields.with_defaults({"rope_theta": THETA})), generation)


def of_text(fields: Fields) -> Fields:
    """The fields without those of rotary embedding for images."""
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.section(name)
        if section.names() & SECTIONS:
            kept = section.picked(section.names() - SECTIONS)
            plain = {key: "default" if value == "mrope" else value for key, value in kept.items()}
            fields = fields.updated({name: plain})
    return fields
