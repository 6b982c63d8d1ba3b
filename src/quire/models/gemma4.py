"""Gemma 4, as in transformers' `modeling_gemma4.py` and `modeling_gemma4_unified.py`, with or without other towers.

Special, compared with Gemma 3: full layers have heads of another width, which are partly rotated, and may use keys as
values; values have a norm, and scores no scale; the residual stream is multiplied by a number after each layer; logits
have a soft cap. Some models have experts besides each layer's MLP. In others, layers have their own token embeddings,
and the last layers read the keys and values of the last layer of their kind before them, and have an MLP twice as wide.
Norms multiply by their weights before rounding.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import SANDWICH_NORMS, LayerConfig
from quire.layers.experts import ExpertNames, ExpertsConfig
from quire.layers.rotary import RopeConfig
from quire.models.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_layer_types,
    read_num_layers,
    read_rope,
)
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.text_tower import read_text_tower
from quire.ops.experts import Routing

LOCAL, GLOBAL = "sliding_attention", "full_attention"
PATTERN = 6
"""Every sixth layer sees all positions if no field says which ones do."""
DEFAULTS: dict[str, int | str] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
"""Defaults of fields that published configurations may omit."""
OF_KIND: dict[str, dict[str, int | str]] = {
    "gemma4_text": {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
}
"""The same by `model_type`. The text model of larger ones has another type only for its fields."""
OVERRIDES = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
"""Fields of the layers that see all positions, and their names in `per_layer_config`."""
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    GLOBAL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
EXPERTS = ExpertNames(block="moe")
NAMES = (
    (r"\.router\.proj\.", f".{EXPERTS.block}.gate."),
    (r"\.router\.", f".{EXPERTS.block}."),
    (r"(\.\d+)\.experts\.", rf"\1.{EXPERTS.block}.experts."),
)
OTHERS = ("vision_tower.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.")


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    if "text_config" in fields:
        return read_text_tower(fields, generation, dict.fromkeys(OF_KIND, read_text), OTHERS)
    return read_text(fields, generation)


def read_text(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read the text model's configuration; raises ModelConfigError."""
    kind = fields.choice("model_type", OF_KIND, default="gemma4_text")
    fields = fields.with_defaults(DEFAULTS | OF_KIND[kind])
    fields.choice("hidden_activation", {"gelu_pytorch_tanh"}, default="gelu_pytorch_tanh")
    fields.refuse("use_bidirectional_attention", ("vision",), "attention of text to what follows it")
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers) or [
        GLOBAL if (index + 1) % PATTERN == 0 else LOCAL for index in range(num_layers)
    ]
    types[-1] = GLOBAL  # as transformers does
    window = fields.integer("sliding_window", max=MAX_CONTEXT)
    bias = fields.flag("attention_bias", default=False)
    wide, kv_heads = _global_heads(fields, types)
    ropes = {LOCAL: _read_rope(fields, LOCAL, fields.integer("head_dim", max=MAX_HEADS))}
    ropes[GLOBAL] = _read_rope(fields, GLOBAL, wide)
    experts = _read_experts(fields)
    config = read_decoder_config(
        fields,
        generation,
        windows=tuple(window if kind == LOCAL else None for kind in types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norms=SANDWICH_NORMS,
        activation="gelu_tanh",
        experts=experts,
        rope=(ropes[LOCAL], fields.integer("max_position_embeddings", max=MAX_CONTEXT)),
        read=("final_logit_softcapping", "per_layer_config"),
    )
    width = fields.integer("hidden_size_per_layer_input", min=0)
    layer = replace(
        config.layer,
        scale=1.0,
        value_norm=True,
        scalar=True,
        per_layer_input=width,
        experts_beside=experts is not None,
    )
    if layer.num_heads % kv_heads:
        raise fields.error("num_global_key_value_heads", f"a divisor of num_attention_heads ({layer.num_heads})")
    is_key = fields.flag("attention_k_eq_v", default=False)
    of_kind = {LOCAL: layer, GLOBAL: replace(layer, num_kv_heads=kv_heads, head_dim=wide, value_is_key=is_key)}
    layers = _sharing(fields, [of_kind[kind] for kind in types], types)
    rows = fields.integer("vocab_size_per_layer_input", min=config.vocab_size) if width else 0
    return replace(
        config,
        layer=layer,
        layers=layers,
        ropes=tuple(ropes[kind] for kind in types),
        embedding_scale=layer.hidden_size**0.5,
        embedding_scale_rounded=True,
        norm_offset=0.0,
        logits_cap=fields.optional_number("final_logit_softcapping"),
        per_layer_vocab_size=rows,
        layout=Layout(renamed=NAMES, skipped=_unread(layers)),
    )


def _global_heads(fields: Fields, types: list[str]) -> tuple[int, int]:
    """Width of a head, and number of key heads, of the layers that see all positions.

    They have their own fields, or are in a section for each such layer, by its number.
    """
    head_dim = fields.integer("head_dim", max=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", max=MAX_HEADS)
    sections = fields.section("per_layer_config")
    if not sections.names():
        wide = fields.integer("global_head_dim", default=512, max=MAX_HEADS)
        if fields.flag("attention_k_eq_v", default=False):
            kv_heads = fields.integer("num_global_key_value_heads", default=kv_heads, max=MAX_HEADS)
        return wide, kv_heads
    numbers = {str(index) for index, kind in enumerate(types) if kind == GLOBAL}
    found: set[tuple[int, int]] = set()
    for number in sorted(numbers | sections.names()):
        section = sections.section(number)
        unknown = section.names() - {*OVERRIDES.values()}
        if unknown or number not in numbers:
            raise sections.error(number, "an object of head_dim and num_key_value_heads, of a full_attention layer")
        found.add(
            (
                section.integer("head_dim", default=head_dim, max=MAX_HEADS),
                section.integer("num_key_value_heads", default=kv_heads, max=MAX_HEADS),
            )
        )
    if len(found) != 1:
        raise fields.error("per_layer_config", "the same for all full_attention layers")
    return found.pop()


def _read_experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.flag("enable_moe_block", default=False):
        return None
    count = fields.integer("num_experts", max=MAX_EXPERTS)
    routing = Routing(count, fields.integer("top_k_experts", max=count))
    inner = fields.integer("moe_intermediate_size")
    return ExpertsConfig(routing, inner, names=EXPERTS, activation="gelu_tanh", scales=True)


def _sharing(fields: Fields, layers: list[LayerConfig], types: list[str]) -> tuple[LayerConfig, ...]:
    """The last layers read the keys and values of the last layer of their kind before them."""
    count = fields.integer("num_kv_shared_layers", default=0, min=0, max=MAX_LAYERS)
    own, factor = types[: len(types) - count], 2 if fields.flag("use_double_wide_mlp", default=False) else 1
    if count and set(own) != set(types):
        raise fields.error("num_kv_shared_layers", "so small that a layer of each kind has keys and values of its own")
    for index in range(len(own), len(layers)):
        source = len(own) - 1 - own[::-1].index(types[index])
        inner = factor * layers[index].intermediate_size
        layers[index] = replace(layers[index], kv_source=source, value_is_key=False, intermediate_size=inner)
    return tuple(layers)


def _unread(layers: tuple[LayerConfig, ...]) -> tuple[str, ...]:
    """Prefixes of tensors for keys and values that checkpoints may have in layers that read those of others."""
    return tuple(
        f"{prefix}layers.{index}.self_attn.{side}_"
        for index, layer in enumerate(layers)
        if layer.kv_source is not None
        for prefix in ("model.", "model.language_model.", "language_model.model.")
        for side in "kv"
    )


def _read_rope(fields: Fields, kind: str, head_dim: int) -> RopeConfig:
    """The rotary embedding of one kind of layers, which has its own section."""
    sections = fields.section("rope_parameters")
    unknown = sections.names() - ROPES.keys()
    if unknown:
        raise sections.error(min(unknown), f"absent, beside {' and '.join(ROPES)}")
    fields.refuse("rope_scaling", (), "the older spelling; rope_parameters has a section for each kind of layers")
    section = sections.section(kind) if sections.names() else Fields(ROPES[kind], sections.source)
    if section.choice("rope_type", {"default", "proportional"}, default="default") == "default":
        section.refuse("partial_rotary_factor", (1, 1.0), "a part of each head in layers whose rope_type is default")
    return read_rope(fields, head_dim, partial=1.0, scaling=section)[0]
