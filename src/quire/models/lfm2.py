"""LFM2 and LFM2.5, dense and with experts, as in transformers' `modeling_lfm2.py` and `modeling_lfm2_moe.py`.

Special: most layers are gated short convolutions (`layers/short_conv.py`) instead of attention; tensors have other
names; the width of the MLP is computed from the configured one. Experts are DeepSeek's, under other names.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.experts import ExpertsConfig
from quire.layers.short_conv import GATES, PREFIX, ShortConvConfig
from quire.models.config import (
    MAX_EPS,
    MAX_LAYERS,
    MIN_EPS,
    DecoderConfig,
    read_decoder_config,
    read_num_layers,
    read_routing,
)
from quire.models.fields import Fields
from quire.models.layout import Layout

CONV, ATTENTION = "conv", "full_attention"
THETA, EPS, MAX_TAPS = 1e6, 1e-5, 16
RENAMED = (
    (r"\.conv\.conv\.", ".short_conv.conv1d."),
    (r"\.conv\.(in|out)_proj\.", r".short_conv.\1_proj."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
    *((rf"(\.mlp\..*)\b{old}\.", rf"\1{new}_proj.") for old, new in (("w1", "gate"), ("w2", "down"), ("w3", "up"))),
    (r"^model\.embedding_norm\.", "model.norm."),
)
OLDER = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
"""Names of fields in older checkpoints, and their names now; if both are present, the older ones are used."""


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json of a dense model; raises ModelConfigError."""
    config = _read(fields, generation)
    inner = _adjusted(fields, config.layer.intermediate_size)
    return replace(
        config,
        layer=replace(config.layer, intermediate_size=inner),
        layers=tuple(replace(each, intermediate_size=inner) for each in config.layers or ()),
    )


def read_moe_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """The same for a model with experts."""
    routing = read_routing(
        fields,
        "num_experts",
        scoring="sigmoid",
        normalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    experts = ExpertsConfig(
        routing,
        fields.integer("moe_intermediate_size"),
        selection_bias=fields.flag("use_expert_bias", default=True),
    )
    dense = fields.integer("num_dense_layers", default=2, min=0, max=MAX_LAYERS)
    return _read(fields, generation, experts, dense)


def _read(
    fields: Fields, generation: Fields, experts: ExpertsConfig | None = None, num_dense: int = 0
) -> DecoderConfig:
    num_layers, kinds = read_num_layers(fields), _kinds(fields)
    eps = fields.number("norm_eps", default=EPS, above=MIN_EPS, max=MAX_EPS)
    older = {OLDER[name]: value for name, value in fields.picked(OLDER).items()}
    config = read_decoder_config(
        fields.without(*OLDER, "norm_eps").updated(older | {"rms_norm_eps": eps}),
        generation,
        windows=(None,) * num_layers,
        qk_norm="head",
        experts=experts,
        dense_layers=frozenset(range(min(num_dense, num_layers))),
        default_theta=THETA,
        default_tied=True,
    )
    layer, hidden = config.layer, config.layer.hidden_size
    taps = fields.integer("conv_L_cache", default=3, min=2, max=MAX_TAPS)
    conv = ShortConvConfig(hidden, taps, fields.flag("conv_bias", default=False))
    joined = tuple((name, hidden) for name in GATES)
    return replace(
        config,
        layers=tuple(layer if kind == ATTENTION else replace(layer, recurrent=conv) for kind in kinds),
        layout=Layout(renamed=RENAMED, joined=((f"{PREFIX}in_proj", joined),)),
    )


def _kinds(fields: Fields) -> list[str]:
    """Each layer's kind: `layer_types`, or in older checkpoints `full_attn_idxs`. Raises ModelConfigError."""
    num_layers, kinds = read_num_layers(fields), fields.strings("layer_types")
    if kinds is None:
        named = fields.integers("full_attn_idxs", below=num_layers)
        attending = named if "full_attn_idxs" in fields else range(num_layers)
        kinds = [ATTENTION if index in attending else CONV for index in range(num_layers)]
    if len(kinds) != num_layers or not {*kinds} <= {CONV, ATTENTION}:
        raise fields.error("layer_types", f"{num_layers} of {CONV!r} or {ATTENTION!r}")
    if ATTENTION not in kinds:
        raise fields.error("layer_types", f"such that at least one is {ATTENTION!r}")
    return kinds


def _adjusted(fields: Fields, inner: int) -> int:
    """The width of the MLP; the configured one is that of an MLP without a gate."""
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    multiple = fields.integer("block_multiple_of", default=256)
    inner = int(fields.number("block_ffn_dim_multiplier", default=1.0) * (2 * inner // 3))
    return max(1, -(-inner // multiple)) * multiple
