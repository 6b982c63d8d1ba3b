"""Kimi Linear, as in transformers' `modeling_kimi_linear.py` (https://arxiv.org/abs/2510.26692).

Special: three of four layers are Kimi delta attention (`layers/kimi_delta.py`), listed in `linear_attn_config`, counted
from 1; the others are DeepSeek's latent attention without positions: nothing is rotated, though keys have the part that
would be. Experts are DeepSeek V3's. Fields have other names, some of which transformers writes in another way.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.kimi_delta import KimiDeltaConfig
from quire.layers.rotary import RopeConfig
from quire.models.config import (
    DEFAULT_THETA,
    MAX_CONTEXT,
    MAX_HEADS,
    DecoderConfig,
    read_num_layers,
)
from quire.models.deepseek_v2 import read_deepseek_config
from quire.models.deepseek_v3 import read_v3_routing
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.smollm3 import some_without

RECURRENT, ATTENTION = "linear_attention", "full_attention"
CONTEXT, MAX_TAPS = 1048576, 16
RENAMED = (
    (r"\.block_sparse_moe\.", ".mlp."),
    *(
        (rf"(\.mlp\.experts\..*)\b{old}\.", rf"\1{new}_proj.")
        for old, new in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
)
USUAL = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_local_experts": "n_routed_experts",
}
"""Names of fields in this family, and DeepSeek's names."""
OF_NET = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Names of fields as transformers writes them, and their names in `linear_attn_config`."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    fields.choice("moe_router_activation_func", {"sigmoid"}, default="sigmoid")
    fields.refuse("mla_use_nope", (True,), "latent attention with positions")
    fields.refuse("num_nextn_predict_layers", (0,), "layers that predict further tokens")
    fields.refuse("rope_scaling", (), "latent attention with positions")
    fields.refuse("rope_parameters", (), "latent attention with positions")
    kinds, net = _kinds(fields), _net(fields)
    usual = {USUAL[name]: value for name, value in fields.picked(USUAL).items()}
    others = *USUAL, *OF_NET, "linear_attn_config", "layer_types", "head_dim", "rope_theta"
    fields = fields.without(*others).updated(usual)
    routing = read_v3_routing(fields, 2.446)
    context = fields.integer("max_position_embeddings", default=CONTEXT, max=MAX_CONTEXT)
    config = read_deepseek_config(
        fields,
        generation,
        routing,
        default_first_dense=1,
        selection_bias=True,
        default_eps=1e-5,
        rope=(RopeConfig(fields.integer("qk_rope_head_dim", max=MAX_HEADS), DEFAULT_THETA), context),
    )
    layer = config.layer
    return replace(
        config,
        layers=tuple(layer if kind == ATTENTION else replace(layer, recurrent=net) for kind in kinds),
        ropes=some_without(config.rope, [False] * len(kinds)),
        layout=Layout(renamed=RENAMED),
    )


def _kinds(fields: Fields) -> list[str]:
    """Each layer's kind, from `linear_attn_config` or else `layer_types`. Raises ModelConfigError."""
    count, net = read_num_layers(fields), fields.section("linear_attn_config")
    if "full_attn_layers" in net:
        full, linear = (set(net.integers(name, below=count + 1)) for name in ("full_attn_layers", "kda_layers"))
        if full | linear != set(range(1, count + 1)) or full & linear:
            raise net.error("full_attn_layers", f"with kda_layers each of the layers 1 to {count}, once")
        kinds = [ATTENTION if index + 1 in full else RECURRENT for index in range(count)]
    else:
        every = [ATTENTION if index and index % 4 == 0 else RECURRENT for index in range(count)]
        kinds = fields.strings("layer_types") or every
    if len(kinds) != count or not {*kinds} <= {RECURRENT, ATTENTION}:
        raise fields.error("layer_types", f"{count} of {RECURRENT!r} or {ATTENTION!r}")
    if {*kinds} == {RECURRENT}:
        raise fields.error("layer_types", f"such that at least one is {ATTENTION!r}")
    return kinds


def _net(fields: Fields) -> KimiDeltaConfig:
    """Sizes, from `linear_attn_config` if it has them."""
    section = fields.section("linear_attn_config")
    given = {OF_NET[name]: value for name, value in fields.picked(OF_NET).items()} | section.picked(section.names())
    net = Fields(given, fields.source)
    return KimiDeltaConfig(
        heads=net.integer("num_heads", default=32, max=MAX_HEADS),
        head_dim=net.integer("head_dim", default=128, max=MAX_HEADS),
        taps=net.integer("short_conv_kernel_size", default=4, min=2, max=MAX_TAPS),
    )
