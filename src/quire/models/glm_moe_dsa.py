"""GLM-5 to 5.2, as in transformers' `modeling_glm_moe_dsa.py`.

Special, compared with DeepSeek V3.2: the indexer rotates adjacent dimensions in pairs, and some layers may reuse the
positions chosen by the layer before them (`indexer_types`, or older fields that imply it). Rows of the cache have room
for an index key in all layers, so that there is one KV group.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import LayerConfig
from quire.models import deepseek_v32
from quire.models.config import MAX_LAYERS, DecoderConfig
from quire.models.fields import Fields

TYPES = {"full": False, "shared": True}
LETTERS = {"F": "full", "S": "shared"}


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    config = deepseek_v32.read_config(fields, generation, default_eps=1e-5, default_heads=32, interleaved=True)
    types = _types(fields, config.num_layers)
    if not any(TYPES[kind] for kind in types):
        return config
    layers = [_sharing(config.layer) if TYPES[kind] else config.layer for kind in types]
    return replace(config, layers=tuple(layers))


def _sharing(layer: LayerConfig) -> LayerConfig:
    return replace(layer, index=layer.index and replace(layer.index, shared=True))


def _types(fields: Fields, num_layers: int) -> list[str]:
    """Of each layer, whether it chooses for itself."""
    types = fields.strings("indexer_types")
    if types is None and "index_topk_pattern" in fields:
        types = [LETTERS.get(letter, letter) for letter in fields.text("index_topk_pattern")]
    if types is None:
        frequency = fields.integer("index_topk_freq", default=1, max=MAX_LAYERS)
        offset = fields.integer("index_skip_topk_offset", default=2, min=0, max=MAX_LAYERS)
        types = ["shared" if max(index - offset + 1, 0) % frequency else "full" for index in range(num_layers)]
    if len(types) != num_layers or {*types} - {*TYPES} or types[0] != "full":
        raise fields.error("indexer_types", f"{num_layers} of full and shared, the first of which is full")
    return types
