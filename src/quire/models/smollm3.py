"""SmolLM3, as in transformers' `modeling_smollm3.py`.

Special: Llama's layers, some of which rotate nothing (`no_rope_layers` holds a 0 for each of these, unless said every
fourth one); with `use_sliding_window` these see a window.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.rotary import RopeConfig
from quire.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_layer_types,
    read_num_layers,
)
from quire.models.fields import Fields


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    turns = fields.integers("no_rope_layers", below=2)
    if not turns:
        interval = fields.integer("no_rope_layer_interval", default=4, max=MAX_LAYERS)
        turns = [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(turns) < num_layers:
        raise fields.error("no_rope_layers", f"a list of at least {num_layers} numbers, 0 or 1, one for each layer")
    window = None
    if fields.flag("use_sliding_window", default=False) and "sliding_window" in fields:
        window = fields.integer("sliding_window", max=MAX_CONTEXT)
    types = read_layer_types(fields, num_layers)
    sees = [kind == "sliding_attention" for kind in types] if types else [not turn for turn in turns[:num_layers]]
    bias = fields.flag("attention_bias", default=False)
    config = read_decoder_config(
        fields,
        generation,
        windows=tuple(window if narrow else None for narrow in sees),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        default_theta=2e6,
        default_tied=True,
        read=("no_rope_layers",),
    )
    return replace(config, ropes=some_without(config.rope, turns[:num_layers]))


def some_without(rope: RopeConfig, turns: list[int] | list[bool]) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer: that one where `turns` says so, else none."""
    still = RopeConfig(0, rope.theta, still=rope.head_dim + rope.still)
    return tuple(rope if turn else still for turn in turns)
