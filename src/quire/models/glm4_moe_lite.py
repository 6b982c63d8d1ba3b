"""GLM-4.7-Flash, as in transformers' `modeling_glm4_moe_lite.py`.

Special: nothing; its layers are DeepSeek V3's, with other defaults. `mlp_layer_types` may list the dense ones.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import deepseek_v3
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.layout import Layout


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    config = deepseek_v3.read_config(fields, generation, default_scale=1.8, default_first_dense=1, default_eps=1e-5)
    return replace(config, layout=Layout())
