"""Qwen3-Next, as in transformers' `modeling_qwen3_next.py`; Qwen3.5 and its successors differ only in names.

Special: three of four layers are gated delta nets (`layers/delta_net.py`) instead of attention; attention's output is
gated, with the gate next to each head's query in the checkpoint; a quarter of each head is rotated; norms' weights are
stored minus 1, except those of delta nets. Layers have experts and a gated shared one. Layers that predict further
tokens (`mtp.`) are not used.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.delta_net import DeltaNetConfig
from quire.layers.experts import ExpertsConfig
from quire.models.config import (
    MAX_HEADS,
    MAX_LAYERS,
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.layout import Layout, partly_turned
from quire.models.qwen3_moe import read_sparse_step

HEAD_DIM = 256
RECURRENT, ATTENTION = "linear_attention", "full_attention"
SHARED_EXPERT = (
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_experts.gate."),
)
MAX_TAPS = 16


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    if fields.integer("num_experts", default=512, min=0):
        dense = read_sparse_step(fields, read_num_layers(fields))
        config = read_hybrid(fields, generation, read_experts(fields), dense)
    else:
        config = read_hybrid(fields.without("num_experts"), generation)
    net = config.recurrent
    if not isinstance(net, DeltaNetConfig):
        return config
    each = net.heads // net.key_heads
    parts = [(name, net.key_dim) for name in "qk"] + [(name, each * net.value_dim) for name in "vz"]
    return _with_joined(
        config,
        by_heads=(
            ("linear_attn.in_proj_qkvz", net.key_heads, _projections(parts)),
            ("linear_attn.in_proj_ba", net.key_heads, _projections([("b", each), ("a", each)])),
        ),
    )


def read_qwen3_5(fields: Fields, generation: Fields, experts: ExpertsConfig | None = None) -> DecoderConfig:
    """Read a text model of Qwen3.5, in which a delta net's projections are fused in another way; raises
    ModelConfigError."""
    config = read_hybrid(fields, generation, experts)
    net = config.recurrent
    if not isinstance(net, DeltaNetConfig):
        return config
    keys = net.key_heads * net.key_dim
    parts = _projections([("q", keys), ("k", keys), ("v", net.heads * net.value_dim)])
    return _with_joined(config, joined=(("linear_attn.in_proj_qkv", parts),))


def read_experts(fields: Fields) -> ExpertsConfig:
    """The experts and the shared one; raises ModelConfigError."""
    routing = read_routing(fields, "num_experts", normalize=fields.flag("norm_topk_prob", default=True))
    shared = fields.integer("shared_expert_intermediate_size")
    return ExpertsConfig(routing, fields.integer("moe_intermediate_size"), shared, shared_gate=True)


def read_hybrid(
    fields: Fields, generation: Fields, experts: ExpertsConfig | None = None, dense: frozenset[int] = frozenset()
) -> DecoderConfig:
    """Read what all of them have in common.

    Raises:
        ModelConfigError: a field is missing, has the wrong type, or has a value that is not supported.
    """
    num_layers = read_num_layers(fields)
    fields.refuse("attention_bias", (False,), "biases of attention beside a gate")
    interval = fields.integer("full_attention_interval", default=4, max=MAX_LAYERS)
    types = fields.strings("layer_types") or [
        RECURRENT if (index + 1) % interval else ATTENTION for index in range(num_layers)
    ]
    if len(types) != num_layers or not set(types) <= {RECURRENT, ATTENTION}:
        raise fields.error("layer_types", f"{num_layers} of {RECURRENT!r} or {ATTENTION!r}")
    if ATTENTION not in types:
        raise fields.error("layer_types", f"such that at least one is {ATTENTION!r}")
    head_dim = read_head_dim(fields, HEAD_DIM)
    rope = read_rope(fields, head_dim, partial=0.25)
    if experts is not None and "intermediate_size" not in fields:  # of layers that there are none of
        fields = fields.updated({"intermediate_size": experts.intermediate_size})
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        default_head_dim=HEAD_DIM,
        qk_norm="head",
        experts=experts,
        dense_layers=dense,
        rope=rope,
    )
    gate = ("self_attn.q_proj", head_dim), ("self_attn.gate_proj", head_dim)
    layer, net = replace(config.layer, gated=True), _read_net(fields)
    return replace(
        config,
        layer=layer,
        layers=tuple(layer if kind == ATTENTION else replace(layer, recurrent=net) for kind in types),
        norm_offset=1.0,
        passed_over=("mtp.",),
        layout=Layout(
            renamed=SHARED_EXPERT,
            by_heads=(("self_attn.q_proj", config.layer.num_heads, gate),),
            order=partly_turned(head_dim, rope[0].head_dim),
        ),
    )


def _read_net(fields: Fields) -> DeltaNetConfig:
    key_heads = fields.integer("linear_num_key_heads", default=16, max=MAX_HEADS)
    heads = fields.integer("linear_num_value_heads", default=32, max=MAX_HEADS)
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return DeltaNetConfig(
        key_heads,
        heads,
        key_dim=fields.integer("linear_key_head_dim", default=128, max=MAX_HEADS),
        value_dim=fields.integer("linear_value_head_dim", default=128, max=MAX_HEADS),
        taps=fields.integer("linear_conv_kernel_dim", default=4, min=2, max=MAX_TAPS),
    )


def _projections(parts: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((f"linear_attn.in_proj_{name}", rows) for name, rows in parts)


def _with_joined(
    config: DecoderConfig,
    by_heads: tuple[tuple[str, int, tuple[tuple[str, int], ...]], ...] = (),
    joined: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = (),
) -> DecoderConfig:
    """The same with further fused tensors in the layout."""
    layout = config.layout or Layout()
    return replace(config, layout=replace(layout, by_heads=(*layout.by_heads, *by_heads), joined=joined))
