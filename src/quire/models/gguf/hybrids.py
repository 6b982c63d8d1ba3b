"""Families with recurrent layers in GGUF: Qwen3-Next and Qwen3.5, Granite 4, LFM2, Nemotron-H. See `families`."""

from __future__ import annotations

from quire.models.gguf.metadata import Said, common
from quire.models.gguf.names import (
    Attention,
    Change,
    Described,
    Family,
    Naming,
    joined_experts,
    less_one,
    turned,
    untiled,
)

NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv_q": "linear_attn.in_proj_q",
    "attn_qkv_k": "linear_attn.in_proj_k",
    "attn_qkv_v": "linear_attn.in_proj_v",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_experts.gate",
}


def _qwen3next(said: Said) -> Described:
    return _with_delta_nets(said, "Qwen3NextForCausalLM", "qwen3_next", tiled=False)


def _qwen35(said: Said) -> Described:
    return _with_delta_nets(said, "Qwen3_5ForCausalLM", "qwen3_5_text", tiled=True)


def _qwen35moe(said: Said) -> Described:
    return _with_delta_nets(said, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", tiled=True)


def _with_delta_nets(said: Said, architecture: str, model_type: str, *, tiled: bool) -> Described:
    """Norms have 1 added, but for the delta nets'. In Qwen3.5's files the heads of values are tiled: see `untiled`."""
    fields = common(said, architecture, model_type)
    heads, groups = said.integer("ssm.time_step_rank"), said.integer("ssm.group_count")
    keys, inner = said.integer("ssm.state_size"), said.integer("ssm.inner_size")
    if not heads or not groups or heads % groups or inner % heads:
        raise said.error("ssm.time_step_rank", "a multiple of ssm.group_count, and a divisor of ssm.inner_size")
    interval = said.integer("full_attention_interval", 4)
    recurrent = said.value("attention.recurrent_layers")
    fields |= {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys,
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": said.integer("ssm.conv_kernel"),
        "full_attention_interval": interval,
        "partial_rotary_factor": said.integer("rope.dimension_count") / fields["head_dim"],
    }
    if isinstance(recurrent, list):
        kinds = said.of_layers("attention.recurrent_layers")
        fields["layer_types"] = ["linear_attention" if each else "full_attention" for each in kinds]
    splits: dict[str, tuple[tuple[str, int], ...]] = {}
    if said.integer("expert_count", 0):
        own = said.same("expert_feed_forward_length")
        fields |= {
            "num_experts": said.integer("expert_count"),
            "num_experts_per_tok": said.integer("expert_used_count"),
            "moe_intermediate_size": own,
            "shared_expert_intermediate_size": said.integer("expert_shared_feed_forward_length", own),
            "norm_topk_prob": said.flag("expert_weights_norm", True),
        }
        fields["intermediate_size"] = fields["intermediate_size"] or own
        splits |= joined_experts(said, own)
    parts = ("attn_qkv_q", groups * keys), ("attn_qkv_k", groups * keys), ("attn_qkv_v", inner)
    naming = Naming(
        layer=DELTA_NET,
        splits=splits | {"attn_qkv": parts},
        changes={
            **less_one(*NORMS),
            "ssm_a": "log",
            "ssm_conv1d.weight": "taps",
            "ffn_gate_inp_shexp.weight": "row",
        },
    )
    if not tiled or heads == groups:
        return fields, naming
    each, before = untiled(groups, heads // groups), 2 * groups * keys
    orders = dict.fromkeys(("attn_qkv_v", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), each)
    orders["ssm_conv1d"] = untiled(groups, heads // groups, before)
    return fields, Naming(
        naming.layer, splits=naming.splits, orders=orders, columns={"ssm_out": each}, changes=naming.changes
    )


MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_CHANGES: dict[str, Change] = {
    "ssm_a": "log",
    "ssm_d": "flat",
    "ssm_norm.weight": "flat",
    "ssm_conv1d.weight": "taps",
}


def _granitehybrid(said: Said) -> Described:
    """Rotated pairs lie side by side, if any turn."""
    experts, heads = said.integer("expert_count", 0), said.integer("ssm.time_step_rank")
    fields = common(said, "GraniteMoeHybridForCausalLM", "granitemoehybrid")
    said.ignore("rope.dimension_count")
    hidden, inner = fields["hidden_size"], said.integer("ssm.inner_size")
    shared = said.integer("expert_shared_feed_forward_length", fields["intermediate_size"])
    fields |= {
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": said.integer("expert_used_count", 0),
        "layer_types": said.kinds({"ssm_in.weight": "mamba"}, "attention"),
        "position_embedding_type": "rope" if said.flag("rope.scaling.finetuned", False) else "nope",
        "attention_bias": said.has("attn_q.bias"),
        "mamba_n_heads": heads,
        "mamba_n_groups": said.integer("ssm.group_count"),
        "mamba_d_state": said.integer("ssm.state_size"),
        "mamba_d_conv": said.integer("ssm.conv_kernel"),
        "mamba_d_head": inner // max(heads, 1),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": said.has("ssm_conv1d.bias"),
        "mamba_proj_bias": said.has("ssm_in.bias"),
        "attention_multiplier": said.number("attention.scale", 1.0),
        "embedding_multiplier": said.number("embedding_scale", 1.0),
        "residual_multiplier": said.number("residual_scale", 1.0),
        "logits_scaling": said.number("logit_scale", 1.0),
    }
    attention = Attention.of(fields)
    orders = {"attn_q": turned(attention.heads), "attn_k": turned(attention.kv_heads)}
    splits = attention.joined | joined_experts(said, fields["intermediate_size"])
    return fields, Naming(layer=MAMBA, splits=splits, orders=orders, changes=MAMBA_CHANGES)


UNUSED_OF_EXPERTS = (
    *("count", "used_count", "feed_forward_length", "shared_feed_forward_length", "shared_count"),
    *("weights_norm", "weights_scale", "group_count", "group_used_count"),
)


def _nemotron_h(said: Said) -> Described:
    """A layer has one norm and one part. Queries and keys are in Llama's order, though nothing turns."""
    fields = common(said, "NemotronHForCausalLM", "nemotron_h")
    said.ignore("rope.dimension_count", "attention.layer_norm_epsilon")
    heads, width = said.integer("ssm.time_step_rank"), said.integer("ssm.inner_size")
    parts = {"ssm_in.weight": "linear_attention", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
    kinds = said.kinds(parts, "full_attention")
    fields |= {
        "layers_block_type": kinds,
        "intermediate_size": said.rows("ffn_up.weight") or fields["intermediate_size"],
        "layer_norm_epsilon": fields["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": width // max(heads, 1),
        "ssm_state_size": said.integer("ssm.state_size"),
        "n_groups": said.integer("ssm.group_count"),
        "conv_kernel": said.integer("ssm.conv_kernel"),
        "use_conv_bias": said.has("ssm_conv1d.bias"),
        "use_bias": said.has("ssm_in.bias"),
    }
    if "moe" in kinds:
        own = said.same("expert_feed_forward_length", zero=True)
        fields |= {
            "n_routed_experts": said.integer("expert_count"),
            "num_experts_per_tok": said.same("expert_used_count", zero=True),
            "moe_intermediate_size": own,
            "moe_shared_expert_intermediate_size": said.integer("expert_shared_feed_forward_length", 0),
            "n_shared_experts": said.integer("expert_shared_count", 0),
            "norm_topk_prob": said.flag("expert_weights_norm", True),
            "routed_scaling_factor": said.number("expert_weights_scale", 1.0),
            "n_group": said.integer("expert_group_count", 1),
            "topk_group": said.integer("expert_group_used_count", 1),
            "moe_latent_size": said.value("moe_latent_size"),
        }
    else:
        said.ignore(*(f"expert_{key}" for key in UNUSED_OF_EXPERTS), "moe_latent_size")
    layer = {
        **MAMBA,
        "attn_norm": "norm",
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    }
    attention = Attention.of(fields)
    orders = {"attn_q": turned(attention.heads), "attn_k": turned(attention.kv_heads)}
    return fields, Naming(layer=layer, splits=attention.joined, orders=orders, changes=MAMBA_CHANGES)


LFM = {
    "shortconv.conv": "short_conv.conv1d",
    "shortconv.in_proj_b": "short_conv.in_proj_b",
    "shortconv.in_proj_c": "short_conv.in_proj_c",
    "shortconv.in_proj_x": "short_conv.in_proj_x",
    "shortconv.out_proj": "short_conv.out_proj",
}


def _lfm2(said: Said) -> Described:
    fields, naming = _with_convolutions(said, "Lfm2ForCausalLM", "lfm2")
    return fields | {"block_auto_adjust_ff_dim": False}, naming


def _lfm2moe(said: Said) -> Described:
    fields, naming = _with_convolutions(said, "Lfm2MoeForCausalLM", "lfm2_moe")
    said.ignore("expert_gating_func")
    return fields | {
        "num_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "moe_intermediate_size": said.same("expert_feed_forward_length"),
        "num_dense_layers": said.integer("leading_dense_block_count", 0),
        "use_expert_bias": said.has("exp_probs_b.bias"),
        "norm_topk_prob": said.flag("expert_weights_norm", True),
        "routed_scaling_factor": said.number("expert_weights_scale", 1.0),
    }, naming


def _with_convolutions(said: Said, architecture: str, model_type: str) -> Described:
    """The last norm has the name of one that follows embeddings."""
    fields = common(said, architecture, model_type)
    hidden = fields["hidden_size"]
    fields |= {
        "norm_eps": fields.pop("rms_norm_eps"),
        "conv_L_cache": said.integer("shortconv.l_cache"),
        "conv_bias": said.has("shortconv.conv.bias"),
        "layer_types": said.kinds({"shortconv.conv.weight": "conv"}, "full_attention"),
    }
    gates = tuple((f"shortconv.in_proj_{name}", hidden) for name in "bcx")
    return fields, Naming(
        layer=LFM,
        outer={"token_embd_norm.weight": "model.norm.weight"},
        splits=Attention.of(fields).joined | {"shortconv.in_proj": gates},
        changes={"shortconv.conv.weight": "taps"},
    )


HYBRIDS: dict[str, Family] = {
    "granitehybrid": _granitehybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
}
