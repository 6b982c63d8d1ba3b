"""Nemotron-H and Nemotron 3, as in transformers' `modeling_nemotron_h.py`.

Special: a layer has one norm and one part: Mamba 2 (`layers/mamba.py`), attention without rotary embedding, an MLP
without a gate and with squared ReLU, or such experts and a shared one; in some models experts have narrower inputs and
outputs than the residual stream (`moe_latent_size`). Norms are applied in fp32. Layers that predict further tokens
(`mtp.`) are not used.

Steps (dt) are limited by `time_step_limit`. In transformers, prompts' steps (but not those of decodes) are at least
`time_step_min`, which is a parameter of initialization.
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.decoder import LayerConfig, NormNames
from quire.layers.experts import INTO, OUT_OF, ExpertsConfig
from quire.layers.mamba import MambaConfig
from quire.models.config import (
    MAX_EPS,
    MAX_HEADS,
    MAX_LAYERS,
    MIN_EPS,
    DecoderConfig,
    read_decoder_config,
)
from quire.models.deepseek_v3 import read_v3_routing
from quire.models.fields import Fields
from quire.models.layout import Layout
from quire.models.mamba import ATTENTION, MAMBA, MAX_TAPS, heads_of, joined, read_kinds, refuse_limits
from quire.models.smollm3 import some_without

EXPERTS, MLP = "moe", "mlp"
PATTERN = {"M": MAMBA, "*": ATTENTION, "E": EXPERTS, "-": MLP}
"""The letters of `hybrid_override_pattern`."""
RENAMED = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.mixer\.(in_proj|conv1d|norm|out_proj|A_log|D|dt_bias)\b", r".mamba.\1"),
    (r"\.mixer\.fc1_latent_proj\.", f".mlp.{INTO}."),
    (r"\.mixer\.fc2_latent_proj\.", f".mlp.{OUT_OF}."),
    (r"\.mixer\.", ".mlp."),
)
OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Names of fields in older checkpoints, which take precedence, as in transformers."""
ONE_NORM = "norm"
REFUSED = {
    "attention_bias": ((False,), "biases of attention"),
    "mlp_bias": ((False,), "biases of MLPs"),
    "mlp_hidden_act": (("relu2",), "another activation than a squared ReLU"),
    "mamba_hidden_act": (("silu",), "another activation in Mamba layers"),
    "residual_in_fp32": ((False,), "a residual stream in fp32"),
    "sliding_window": ((), "a sliding window"),
}


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Read config.json and generation_config.json; raises ModelConfigError."""
    for name, (allowed, why) in REFUSED.items():
        fields.refuse(name, allowed, why)
    head_dim = fields.integer("head_dim", default=128, max=MAX_HEADS)
    fields.refuse("attention_head_dim", (head_dim,), f"heads of another width than head_dim ({head_dim})")
    kinds = _kinds(fields)
    eps = fields.number("layer_norm_epsilon", default=1e-5, above=MIN_EPS, max=MAX_EPS)
    inner = fields.integer("intermediate_size", default=21504)
    experts = _read_experts(fields) if EXPERTS in kinds else None
    config = read_decoder_config(
        fields.updated({"rms_norm_eps": eps, "intermediate_size": inner}),
        generation,
        windows=(None,) * len(kinds),
        default_head_dim=128,
        activation="relu2",
        experts=experts,
        dense_layers=frozenset(index for index, kind in enumerate(kinds) if experts and kind != EXPERTS),
    )
    mamba = _read_mamba(fields, eps) if MAMBA in kinds else None
    first, second = NormNames(ONE_NORM, before_mlp=None), NormNames(None, before_mlp=ONE_NORM)
    attention = replace(config.layer, norms=first, mixes=False, experts=None)
    of_kinds: dict[str, LayerConfig] = {
        MAMBA: replace(attention, recurrent=mamba),
        ATTENTION: attention,
        EXPERTS: replace(config.layer, norms=second, attends=False),
        MLP: replace(config.layer, norms=second, attends=False, experts=None),
    }
    return replace(
        config,
        layers=tuple(of_kinds[kind] for kind in kinds),
        ropes=some_without(config.rope, [False] * len(kinds)),
        norm_offset=0.0,
        passed_over=("mtp.",),
        layout=Layout(renamed=RENAMED, joined=joined(mamba)),
    )


def _kinds(fields: Fields) -> list[str]:
    """Each layer's kind, from a list or, in older checkpoints, from letters; raises ModelConfigError."""
    others = {EXPERTS: EXPERTS, MLP: MLP}
    for name in ("layers_block_type", "layer_types"):
        if (kinds := fields.strings(name)) is not None:
            if len(kinds) > MAX_LAYERS:
                raise fields.error(name, f"at most {MAX_LAYERS} names")
            return read_kinds(fields, name, kinds, len(kinds), others)
    name = "hybrid_override_pattern"
    pattern = fields.text(name)
    if len(pattern) > MAX_LAYERS or not {*pattern} <= {*PATTERN}:
        raise fields.error(name, f"at most {MAX_LAYERS} letters of {', '.join(PATTERN)}")
    return read_kinds(fields, name, [PATTERN[letter] for letter in pattern], len(pattern), others)


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_v3_routing(fields)
    return ExpertsConfig(
        routing,
        fields.integer("moe_intermediate_size"),
        fields.integer("moe_shared_expert_intermediate_size"),
        selection_bias=True,
        activation="relu2",
        latent=fields.integer("moe_latent_size") if "moe_latent_size" in fields else 0,
    )


def _read_mamba(fields: Fields, eps: float) -> MambaConfig:
    fields = fields.updated({OLDER_NAMES[older]: value for older, value in fields.picked(OLDER_NAMES).items()})
    refuse_limits(fields)
    heads, groups = heads_of(fields, "mamba_num_heads", "n_groups", 8)
    return MambaConfig(
        groups,
        heads,
        fields.integer("mamba_head_dim", default=64, max=MAX_HEADS),
        fields.integer("ssm_state_size", default=128, max=MAX_HEADS),
        fields.integer("conv_kernel", default=4, min=2, max=MAX_TAPS),
        eps,
        fields.flag("use_bias", default=False),
        fields.flag("use_conv_bias", default=True),
    )
