"""Kimi K2.5 and K2.6, as in transformers' `modeling_kimi_k25.py`: their text model, which is DeepSeek V3's.

Special: it is part of a checkpoint with a vision tower. The published weights of the experts are int4
(compressed-tensors), which is refused. The architecture of Kimi K2 is called DeepSeek V3 in its own config.json.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import deepseek_v3
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.text_tower import read_text_tower

TEXTS = {"kimi_k2": deepseek_v3.read_config, "deepseek_v3": deepseek_v3.read_config}
LAYERS = (r"^model\.blocks\.", "model.layers.")
"""transformers 5.23 saves the text model's layers under the name that the vision tower has for its own."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    config = read_text_tower(fields, generation, TEXTS, ("vision_tower.", "mm_projector."))
    layout = config.layout or Layout()
    return replace(config, layout=replace(layout, renamed=(*layout.renamed, LAYERS)))
