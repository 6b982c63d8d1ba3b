"""Granite 4.0 without recurrent layers and experts (350M, 1B, Micro), as in `modeling_granitemoehybrid.py`.

Special: Granite's multipliers; gate and up lie in one tensor (`shared_mlp`); layers may rotate nothing
(`position_embedding_type` is not "rope"). Mamba layers and experts, of the models that have them, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import DecoderConfig, read_decoder_config, read_num_layers
from quire.models.fields import Fields
from quire.models.granite import MULTIPLIERS, with_multipliers
from quire.models.layout import Layout
from quire.models.smollm3 import some_without

DOWN = (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj.")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Reads config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    for name in ("layer_types", "layers_block_type"):
        all_of_them = ([kind] * num_layers for kind in ("attention", "full_attention"))
        fields.refuse(name, tuple(all_of_them), "recurrent layers")
    if "layer_types" not in fields and "layers_block_type" not in fields:
        raise fields.error("layer_types", f"{num_layers} of 'attention'")
    rotates = fields.choice("position_embedding_type", {"rope", "nope"}, default="nope") == "rope"
    bias, inner = fields.flag("attention_bias", default=False), fields.integer("shared_intermediate_size")
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        read=MULTIPLIERS,
    )
    config = with_multipliers(config, fields)
    joined = (("shared_mlp.input_linear", (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),)
    return replace(
        config,
        layer=replace(config.layer, intermediate_size=inner),
        ropes=None if rotates else some_without(config.rope, [False] * num_layers),
        layout=Layout(renamed=(DOWN,), joined=joined),
    )
