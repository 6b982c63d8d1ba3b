"""DeepSeek V2 and V2-Lite, as in transformers' `modeling_deepseek_v2.py` (https://arxiv.org/abs/2405.04434).

Special: latent attention, with compressed queries (V2) or without (V2-Lite: `q_lora_rank` is null); adjacent dimensions
are rotated in pairs; with yarn, `mscale_all_dim` scales the softmax. From layer `first_k_dense_replace` on, there are
`n_routed_experts` experts and `n_shared_experts` shared ones instead of an MLP. A softmax scores them; `topk_method`
chooses among all (`greedy`), or within the `topk_group` groups with the best experts (`group_limited_greedy`).
`norm_topk_prob`, which no published checkpoint sets and transformers ignores, divides the weights by their sum.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.layers.latent import LatentConfig
from quire.layers.rotary import RopeConfig, yarn_mscale
from quire.models.config import (
    DecoderConfig,
    read_decoder_config,
    read_dense_layers,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields
from quire.ops.experts import Routing


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    method = fields.choice("topk_method", {"greedy", "group_limited_greedy"}, default="greedy")
    fields.choice("scoring_func", {"softmax"}, default="softmax")
    routing = read_routing(
        fields,
        "n_routed_experts",
        group_score="max" if method == "group_limited_greedy" else None,
        normalize=fields.flag("norm_topk_prob", default=False),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    return read_deepseek_config(fields, generation, routing, default_first_dense=0)


def read_deepseek_config(
    fields: Fields,
    generation: Fields,
    routing: Routing,
    *,
    default_first_dense: int,
    selection_bias: bool = False,
    default_eps: float = 1e-6,
    rope: tuple[RopeConfig, int] | None = None,
) -> DecoderConfig:
    """Read the fields that V2 and V3 share; the other arguments are what differs.

    Args:
        default_first_dense: `first_k_dense_replace` if the field is absent.
        selection_bias: see `ExpertsConfig`.
        default_eps, rope: see `read_decoder_config`.

    Raises:
        ModelConfigError: a field is missing, has the wrong type, or has a value that is not supported.
    """
    num_layers = read_num_layers(fields)
    fields.refuse("moe_layer_freq", (1,), "dense layers between layers with experts")
    fields.refuse("mlp_bias", (False,), "biases of the MLP")
    fields.refuse("sliding_window", (), "latent attention has no sliding window")
    inner, rotating = fields.integer("moe_intermediate_size"), fields.integer("qk_rope_head_dim")
    if rope is None:
        fields.refuse("head_dim", (rotating,), f"a head_dim other than qk_rope_head_dim ({rotating})")
    base = read_decoder_config(
        fields,
        generation,
        windows=(None,) * num_layers,
        default_head_dim=rotating,
        experts=ExpertsConfig(
            routing,
            inner,
            shared_intermediate_size=inner * fields.integer("n_shared_experts", default=0, min=0),
            selection_bias=selection_bias,
        ),
        dense_layers=read_dense_layers(fields, num_layers, default_first_dense),
        default_eps=default_eps,
        rope=rope,
    )
    if base.layer.num_kv_heads != base.layer.num_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads ({base.layer.num_heads}): all share one latent")
    latent = _read_latent(fields, base.rope)
    return replace(base, layer=replace(base.layer, num_kv_heads=1, head_dim=latent.row, latent=latent))


def _read_latent(fields: Fields, rope: RopeConfig) -> LatentConfig:
    still = fields.integer("qk_nope_head_dim")
    scale = (still + rope.head_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return LatentConfig(
        q_lora_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=still,
        qk_rope_head_dim=rope.head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", default=False),
        scale=scale,
    )
