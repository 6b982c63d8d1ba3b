"""Granite 4.0, as in transformers' `modeling_granitemoehybrid.py`: with and without Mamba 2 layers and experts.

Special: Granite's multipliers; in the models called H, most layers are Mamba 2's (`layers/mamba.py`) instead of
attention; there is an MLP for all tokens (`shared_mlp`), in some models besides experts; gate and up are one tensor;
there may be no rotary embedding (`position_embedding_type` is not "rope").
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import LayerConfig
from quire.layers.experts import ExpertsConfig
from quire.layers.mamba import MambaConfig
from quire.models.config import (
    MAX_EPS,
    MAX_HEADS,
    MIN_EPS,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.granite import MULTIPLIERS, with_multipliers
from quire.models.layout import Layout
from quire.models.mamba import ATTENTION, MAMBA, MAX_TAPS, heads_of, joined, read_kinds, refuse_limits
from quire.models.smollm3 import some_without

DENSE = ((r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),)
SPARSE = (
    (r"\.block_sparse_moe\.(input_linear|experts\.gate_up_proj)(\.weight)?$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.(output_linear|experts\.down_proj)(\.weight)?$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router(\.layer)?\.", ".mlp.gate."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
)


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    num_layers = read_num_layers(fields)
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    kinds = read_kinds(fields, name, fields.strings(name) or [MAMBA] * num_layers, num_layers, {})
    rotates = fields.choice("position_embedding_type", {"rope", "nope"}, default="nope") == "rope"
    bias, inner = fields.flag("attention_bias", default=False), fields.integer("shared_intermediate_size")
    experts = _read_experts(fields, inner)
    config = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        experts=experts,
        read=MULTIPLIERS,
    )
    config = with_multipliers(config, fields)
    layer = config.layer if experts else replace(config.layer, intermediate_size=inner)
    mamba = _read_mamba(fields) if MAMBA in kinds else None
    block = "mlp.shared_experts." if experts else "mlp."
    halves = (("shared_mlp.input_linear", ((f"{block}gate_proj", inner), (f"{block}up_proj", inner))),)
    return replace(
        config,
        layer=layer,
        layers=None if mamba is None else tuple(_layer(layer, kind == ATTENTION, mamba) for kind in kinds),
        ropes=None if rotates else some_without(config.rope, [False] * num_layers),
        layout=Layout(renamed=SPARSE if experts else DENSE, joined=(*halves, *joined(mamba))),
    )


def _layer(layer: LayerConfig, attends: bool, mamba: MambaConfig) -> LayerConfig:
    return layer if attends else replace(layer, recurrent=mamba)


def _read_experts(fields: Fields, shared: int) -> ExpertsConfig | None:
    """The experts, which are in addition to the MLP; None if there are none."""
    if fields.integer("num_local_experts", default=8, min=0) == 0:
        return None
    return ExpertsConfig(read_routing(fields, "num_local_experts"), fields.integer("intermediate_size"), shared)


def _read_mamba(fields: Fields) -> MambaConfig:
    """Raises ModelConfigError."""
    refuse_limits(fields)
    heads, groups = heads_of(fields, "mamba_n_heads", "mamba_n_groups", 1)
    inner = fields.integer("mamba_expand", default=2, max=MAX_HEADS) * fields.integer("hidden_size")
    fields.refuse("mamba_d_head", ("auto", inner // heads), f"it must be mamba_expand * hidden_size / {heads}")
    if inner % heads:
        raise fields.error("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    return MambaConfig(
        groups,
        heads,
        inner // heads,
        fields.integer("mamba_d_state", default=256, max=MAX_HEADS),
        fields.integer("mamba_d_conv", default=4, min=2, max=MAX_TAPS),
        fields.number("rms_norm_eps", default=1e-6, above=MIN_EPS, max=MAX_EPS),
        fields.flag("mamba_proj_bias", default=False),
        fields.flag("mamba_conv_bias", default=True),
    )
