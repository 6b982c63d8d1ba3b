"""Gemma 3 and 4 in GGUF: see `families`."""

from __future__ import annotations

from typing import Any

from quire.models.gguf.metadata import FACTORS, Said, common, whole_heads
from quire.models.gguf.names import Attention, Described, Family, Naming, joined_experts, layer_types, less_one

SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYERS_OF_GEMMA3_27B = 62
"""Its scores are scaled otherwise, which its files do not say."""


def _gemma3(said: Said) -> Described:
    fields = common(said, "Gemma3ForCausalLM", "gemma3_text")
    window = said.integer("attention.sliding_window", 0)
    pattern = said.value("attention.sliding_window_pattern", 6)
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    fields |= {
        "query_pre_attn_scalar": hidden // heads if said.layers == LAYERS_OF_GEMMA3_27B else fields["head_dim"],
        "rope_local_base_freq": said.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or 4096,
        "final_logit_softcapping": said.value("final_logit_softcapping"),
    }
    if isinstance(pattern, list):
        fields["layer_types"] = layer_types(said.of_layers("attention.sliding_window_pattern"))
    else:
        fields["sliding_window_pattern"] = pattern if window else 1
    whole_heads(said, fields["head_dim"])
    norms = ("attn_norm", "attn_q_norm", "attn_k_norm", "output_norm", *SANDWICH)
    return fields, Naming(layer=SANDWICH, splits=Attention.of(fields).joined, changes=less_one(*norms))


BESIDE_EXPERTS = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
LAYER_OF_GEMMA4 = {
    **SANDWICH,
    **BESIDE_EXPERTS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
OUTER_OF_GEMMA4 = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


def _gemma4(said: Said) -> Described:
    """Layers with a window have heads, and turn, otherwise than the others, which come first in the metadata."""
    wide, width = said.integer("attention.key_length"), said.integer("attention.key_length_swa")
    if (said.integer("attention.value_length"), said.integer("attention.value_length_swa")) != (wide, width):
        raise said.error("attention.value_length", f"that of keys, {wide}, and with _swa {width}")
    windowed = said.of_layers("attention.sliding_window_pattern")
    fields = common(said, "Gemma4ForCausalLM", "gemma4_text", width, scaled=False)
    inner, shared = said.of_layers("feed_forward_length"), said.integer("attention.shared_kv_layers", 0)
    per_layer = said.integer("embedding_length_per_layer_input", 0)
    fields |= {
        "layer_types": layer_types(windowed),
        "sliding_window": said.integer("attention.sliding_window"),
        "global_head_dim": wide,
        "intermediate_size": min(inner),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len({*inner}) > 1,
        "hidden_size_per_layer_input": per_layer,
        "final_logit_softcapping": said.value("final_logit_softcapping"),
        "rope_parameters": _ropes(said),
    } | _heads(said, windowed, wide)
    said.ignore("rope.dimension_count", "rope.dimension_count_swa")
    if per_layer and (table := said.tensors.get("per_layer_token_embd.weight")) is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    if said.integer("expert_count", 0):
        fields |= {
            "enable_moe_block": True,
            "num_experts": said.integer("expert_count"),
            "top_k_experts": said.integer("expert_used_count"),
            "moe_intermediate_size": said.same("expert_feed_forward_length"),
        }
    splits = joined_experts(said, fields.get("moe_intermediate_size", 0))
    return fields, Naming(layer=LAYER_OF_GEMMA4, outer=OUTER_OF_GEMMA4, splits=splits)


def _heads(said: Said, windowed: list[int], wide: int) -> dict[str, Any]:
    """Heads of keys, of both kinds of layers. Those that see all positions may use keys as values."""
    counts = said.of_layers("attention.head_count_kv")
    own, others = (
        {count for count, each in zip(counts, windowed, strict=True) if bool(each) is kind} for kind in (True, False)
    )
    if len(own) > 1 or len(others) != 1:
        raise said.error("attention.head_count_kv", "the same in all layers of a kind")
    [count] = others
    fields: dict[str, Any] = {"num_key_value_heads": own.pop() if own else count}
    first = windowed.index(0)
    if f"blk.{first}.attn_v.weight" not in said.tensors:
        return fields | {"attention_k_eq_v": True, "num_global_key_value_heads": count}
    if fields["num_key_value_heads"] != count:
        each = {"head_dim": wide, "num_key_value_heads": count}
        fields["per_layer_config"] = {str(index): each for index, kind in enumerate(windowed) if not kind}
    return fields


def _ropes(said: Said) -> dict[str, Any]:
    """Divisors of 1 are of the pairs that turn."""
    divisors = said.numbers(FACTORS) or [1.0]
    turning = sum(each == 1.0 for each in divisors)
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": said.number("rope.freq_base_swa", 10000.0)},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": said.number("rope.freq_base", 1000000.0),
            "partial_rotary_factor": turning / len(divisors),
        },
    }


GEMMAS: dict[str, Family] = {"gemma3": _gemma3, "gemma4": _gemma4}
