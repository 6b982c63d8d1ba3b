"""The families of models that are read from GGUF: of each, config.json's fields and its tensors' names.

As llama.cpp's converter writes them and its models read them (https://github.com/ggml-org/llama.cpp, the folders
`conversion` and `src/models`). Its architectures are coarser than those of `transformers`: "llama" is Llama's,
Mistral's and Mixtral's, "deepseek2" that of all with latent attention.
"""

from __future__ import annotations

import math
from typing import Any

from quire.errors import UnknownArchitectureError
from quire.models.gguf.gemma import GEMMAS
from quire.models.gguf.hybrids import HYBRIDS
from quire.models.gguf.metadata import Said, common, whole_heads
from quire.models.gguf.names import Attention, Described, Family, Naming, joined_experts, layer_types, turned


def _llama(said: Said) -> Described:
    """Llama, Mistral, and with experts Mixtral. Rotated pairs lie side by side."""
    if said.integer("expert_count", 0):
        return _mixtral(said)
    bias = said.has("attn_q.bias")
    alone = bias and not said.has("attn_output.bias")  # the output has no bias: Qwen2 is Llama with such ones
    names = ("Qwen2ForCausalLM", "qwen2") if alone else ("LlamaForCausalLM", "llama")
    fields = common(said, *names)
    if bias and not alone:
        fields["attention_bias"] = True
    if said.has("ffn_up.bias"):
        fields["mlp_bias"] = True
    whole_heads(said, fields["head_dim"])
    return fields, _of_llama(Attention.of(fields))


def _of_llama(attention: Attention, layer: dict[str, str] | None = None) -> Naming:
    orders = {"attn_q": turned(attention.heads), "attn_k": turned(attention.kv_heads)}
    return Naming(layer=layer or {}, splits=attention.joined, orders=orders)


def _mixtral(said: Said) -> Described:
    fields = common(said, "MixtralForCausalLM", "mixtral")
    fields |= {
        "num_local_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
    }
    whole_heads(said, fields["head_dim"])
    block = "block_sparse_moe"
    layer = {
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.experts.{{}}.w1",
        "ffn_up_exps": f"{block}.experts.{{}}.w3",
        "ffn_down_exps": f"{block}.experts.{{}}.w2",
    }
    return fields, _of_llama(Attention.of(fields), layer)


def _qwen2(said: Said) -> Described:
    fields = common(said, "Qwen2ForCausalLM", "qwen2")
    whole_heads(said, fields["head_dim"])
    return fields, Naming(splits=Attention.of(fields).joined)


def _qwen3(said: Said) -> Described:
    fields = common(said, "Qwen3ForCausalLM", "qwen3") | {"attention_bias": said.has("attn_q.bias")}
    whole_heads(said, fields["head_dim"])
    return fields, Naming(splits=Attention.of(fields).joined)


def _qwen3moe(said: Said) -> Described:
    """The chosen experts' weights are divided by their sum."""
    inner = said.same("expert_feed_forward_length")
    fields = common(said, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "attention_bias": said.has("attn_q.bias"),
        "num_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": said.flag("expert_weights_norm", True),
    }
    whole_heads(said, fields["head_dim"])
    return fields, Naming(splits=Attention.of(fields).joined | joined_experts(said, inner))


def _qwen2moe(said: Said) -> Described:
    """The chosen experts' weights are not divided by their sum."""
    inner = said.same("expert_feed_forward_length")
    fields = common(said, "Qwen2MoeForCausalLM", "qwen2_moe")
    fields |= {
        "num_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": said.integer(
            "expert_shared_feed_forward_length", fields["intermediate_size"]
        ),
        "qkv_bias": said.has("attn_q.bias") or said.has("attn_qkv.bias"),
    }
    whole_heads(said, fields["head_dim"])
    layer = {"ffn_gate_inp_shexp": "mlp.shared_experts.gate"}
    splits = Attention.of(fields).joined | joined_experts(said, inner)
    return fields, Naming(layer=layer, splits=splits, changes={"ffn_gate_inp_shexp.weight": "row"})


BIAS_OF_V3 = "exp_probs_b.bias"
SIGMOID = 2
"""The number of that function among those that score experts."""
FURTHER = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
"""Of a layer that predicts one token more, in DeepSeek's way."""


def _experts(said: Said, count: str) -> dict[str, Any]:
    """The fields of DeepSeek's experts and of those like them; `count`: name of the field with their number."""
    return {
        count: said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "n_shared_experts": said.integer("expert_shared_count", 0),
        "moe_intermediate_size": said.same("expert_feed_forward_length", zero=True),
        "mlp_layer_types": _kinds_of_mlp(said),
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "routed_scaling_factor": said.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": said.integer("expert_group_count", 1) or 1,
        "topk_group": said.integer("expert_group_used_count", 1) or 1,
    }


def _kinds_of_mlp(said: Said) -> list[str]:
    """Of each layer, by its tensors: some files' number of dense layers (`leading_dense_block_count`) is wrong."""
    said.ignore("leading_dense_block_count")
    sparse = (f"blk.{layer}.ffn_gate_inp.weight" in said.tensors for layer in range(said.layers))
    return ["sparse" if each else "dense" for each in sparse]


def _deepseek2(said: Said) -> Described:
    """All with latent attention: V2 scores experts by a softmax, V3 (and GLM-4.7-Flash, Kimi K2) by a sigmoid, with a
    bias for their selection. In older files `kv_b_proj` is whole."""
    if not said.integer("expert_count", 0):
        raise said.refusal("latent attention without experts is not supported")
    third = said.integer("expert_gating_func", 1) == SIGMOID or said.has(BIAS_OF_V3)
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if third else ("DeepseekV2ForCausalLM", "deepseek_v2")
    rotating = said.integer("rope.dimension_count")
    keys = said.integer("attention.key_length_mla", said.integer("attention.key_length"))
    values = said.integer("attention.value_length_mla", said.integer("attention.value_length"))
    fields = common(said, *names, width=rotating) | _experts(said, "n_routed_experts")
    said.ignore("attention.head_count_kv")  # one of latents, or as many as queries
    fields |= {
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": said.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": said.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotating,
        "qk_nope_head_dim": keys - rotating,
        "v_head_dim": values,
        "num_nextn_predict_layers": said.further,
    }
    if not third:
        fields["topk_method"] = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    if fields.get("rope_scaling", {}).get("rope_type") == "yarn":
        weight = round(10 * said.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        fields["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    layer = {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b.weight": "self_attn.kv_b_proj.weight",
        **FURTHER,
    }
    return fields, Naming(
        layer=layer,
        splits=joined_experts(said, fields["moe_intermediate_size"]),
        joins={"attn_k_b.weight": ("attn_v_b.weight",)},
        changes={"attn_k_b.weight": "keys_and_values"},
    )


def _glm4moe(said: Said) -> Described:
    fields = common(said, "Glm4MoeForCausalLM", "glm4_moe") | _experts(said, "n_routed_experts")
    fields |= {
        "attention_bias": said.has("attn_q.bias"),
        "use_qk_norm": said.has("attn_q_norm.weight"),
        "partial_rotary_factor": _rotating_part(said, fields["head_dim"]),
        "num_nextn_predict_layers": said.further,
    }
    said.ignore("expert_gating_func")
    layer = {"post_attention_norm": "post_attention_layernorm", **FURTHER}
    splits = Attention.of(fields).joined | joined_experts(said, fields["moe_intermediate_size"])
    return fields, Naming(layer=layer, splits=splits)


def _rotating_part(said: Said, width: int) -> float:
    return said.integer("rope.dimension_count", width) / width


def _glm4(said: Said) -> Described:
    """Gate and up are one tensor."""
    fields = common(said, "Glm4ForCausalLM", "glm4")
    fields |= {
        "attention_bias": said.has("attn_q.bias") or said.has("attn_qkv.bias"),
        "partial_rotary_factor": _rotating_part(said, fields["head_dim"]),
    }
    layer = {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        **FURTHER,
    }
    return fields, Naming(layer=layer, splits=Attention.of(fields).joined | _gate_and_up(fields))


def _gate_and_up(fields: dict[str, Any]) -> dict[str, tuple[tuple[str, int], ...]]:
    """The parts of a tensor of the MLP's gate and input."""
    inner = fields["intermediate_size"]
    return {"ffn_up": (("ffn_gate", inner), ("ffn_up", inner))}


def _gpt_oss(said: Said) -> Described:
    fields = common(said, "GptOssForCausalLM", "gpt_oss")
    fields |= {
        "intermediate_size": said.same("expert_feed_forward_length"),
        "num_local_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "sliding_window": said.integer("attention.sliding_window"),
        "attention_bias": said.has("attn_q.bias"),
    }
    if isinstance(said.value("attention.sliding_window_pattern"), list):
        fields["layer_types"] = layer_types(said.of_layers("attention.sliding_window_pattern"))
    if "rope_scaling" in fields:
        fields["rope_scaling"]["truncate"] = False
    whole_heads(said, fields["head_dim"])
    layer = {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"}
    splits = Attention.of(fields).joined | joined_experts(said, fields["intermediate_size"])
    return fields, Naming(layer=layer, splits=splits)


def _granite(said: Said) -> Described:
    fields = common(said, "GraniteForCausalLM", "granite") | multipliers(said)
    whole_heads(said, fields["head_dim"])
    fields |= {"attention_bias": said.has("attn_q.bias"), "mlp_bias": said.has("ffn_up.bias")}
    return fields, _of_llama(Attention.of(fields))


def multipliers(said: Said) -> dict[str, Any]:
    """Granite's."""
    return {
        "attention_multiplier": said.number("attention.scale", 1.0),
        "embedding_multiplier": said.number("embedding_scale", 1.0),
        "residual_multiplier": said.number("residual_scale", 1.0),
        "logits_scaling": said.number("logit_scale", 1.0),
    }


def _phi3(said: Said) -> Described:
    """The window, which llama.cpp does not use, is at least the context of the models that it reads well."""
    fields = common(said, "Phi3ForCausalLM", "phi3")
    context = fields["max_position_embeddings"]
    original = said.integer("rope.scaling.original_context_length", context)
    fields |= {
        "partial_rotary_factor": _rotating_part(said, fields["head_dim"]),
        "sliding_window": said.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }
    long, short = (said.numbers(f"rope_factors_{length}.weight") for length in ("long", "short"))
    if long and short:
        fields["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        usual = math.sqrt(1 + math.log(max(context / max(original, 1), 1)) / math.log(max(original, 2)))
        if abs(said.number("rope.scaling.attn_factor", usual) - usual) > 1e-5:
            fields["rope_scaling"]["attention_factor"] = said.number("rope.scaling.attn_factor")
    return fields, Naming(splits=Attention.of(fields).joined | _gate_and_up(fields))


def _smollm3(said: Said) -> Described:
    """Every fourth layer rotates nothing. Rotated pairs lie side by side."""
    fields = common(said, "SmolLM3ForCausalLM", "smollm3") | {"no_rope_layer_interval": 4}
    fields |= {"attention_bias": said.has("attn_q.bias"), "mlp_bias": said.has("ffn_up.bias")}
    whole_heads(said, fields["head_dim"])
    return fields, _of_llama(Attention.of(fields))


def _mistral3(said: Said) -> Described:
    """Ministral 3, whose queries grow with their position; without that, Mistral Small 3. Pairs lie side by side."""
    beta = said.number("attention.temperature_scale", 0.0)
    names = ("Ministral3ForCausalLM", "ministral3") if beta else ("LlamaForCausalLM", "llama")
    fields = common(said, *names)
    weight = said.number("rope.scaling.yarn_log_multiplier", 0.0)
    if beta:
        weights = {"mscale": weight, "mscale_all_dim": weight} if weight else {}
        fields["rope_scaling"] = fields.get("rope_scaling", {}) | weights | {"llama_4_scaling_beta": beta}
    whole_heads(said, fields["head_dim"])
    return fields, _of_llama(Attention.of(fields))


POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def _olmo2(said: Said) -> Described:
    """With windows OLMo 3, whose rotary scaling is for the layers without one."""
    window = said.integer("attention.sliding_window", 0)
    names = ("Olmo3ForCausalLM", "olmo3") if window else ("Olmo2ForCausalLM", "olmo2")
    fields = common(said, *names) | {"attention_bias": said.has("attn_q.bias")}
    if window:
        fields["sliding_window"] = window
        fields["layer_types"] = layer_types(said.of_layers("attention.sliding_window_pattern"))
        base = said.number("rope.freq_base_swa", fields["rope_theta"])
        if base != fields["rope_theta"]:
            scaling = fields.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": fields["rope_theta"]}
            fields["rope_parameters"] = {"full_attention": scaling, "sliding_attention": {"rope_theta": base}}
    whole_heads(said, fields["head_dim"])
    return fields, Naming(layer=POST_NORMS, splits=Attention.of(fields).joined)


def _exaone4(said: Said) -> Described:
    """Every fourth layer of a model with windows has none, and rotates nothing."""
    fields = common(said, "Exaone4ForCausalLM", "exaone4")
    window = said.integer("attention.sliding_window", 0)
    pattern = said.value("attention.sliding_window_pattern", 4)
    fields["sliding_window"] = window or None
    if window and isinstance(pattern, list):
        fields["layer_types"] = layer_types(said.of_layers("attention.sliding_window_pattern"))
    elif window:
        fields["sliding_window_pattern"] = pattern
    whole_heads(said, fields["head_dim"])
    return fields, Naming(layer=POST_NORMS, splits=Attention.of(fields).joined)


def _seed_oss(said: Said) -> Described:
    biases = {"attention_bias": said.has("attn_q.bias"), "attention_out_bias": said.has("attn_output.bias")}
    fields = common(said, "SeedOssForCausalLM", "seed_oss") | biases
    whole_heads(said, fields["head_dim"])
    layer = {"post_attention_norm": "post_attention_layernorm"}
    return fields, Naming(layer=layer, splits=Attention.of(fields).joined)


def _ernie4_5(said: Said) -> Described:
    fields = common(said, "Ernie4_5ForCausalLM", "ernie4_5") | {"use_bias": said.has("attn_q.bias")}
    whole_heads(said, fields["head_dim"])
    return fields, Naming(splits=Attention.of(fields).joined)


def _hunyuan(said: Said) -> Described:
    """A larger base stands for the rotary scaling."""
    fields = common(said, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense") | {"attention_bias": said.has("attn_q.bias")}
    whole_heads(said, fields["head_dim"])
    return fields, Naming(splits=Attention.of(fields).joined)


def _minimax_m2(said: Said) -> Described:
    fields = common(said, "MiniMaxM2ForCausalLM", "minimax_m2")
    inner, block = said.same("expert_feed_forward_length"), "block_sparse_moe"
    fields |= {
        "intermediate_size": inner,
        "num_local_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "rotary_dim": said.integer("rope.dimension_count", fields["head_dim"]),
    }
    said.ignore("expert_gating_func")
    layer = {
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.experts.{{}}.w1",
        "ffn_up_exps": f"{block}.experts.{{}}.w3",
        "ffn_down_exps": f"{block}.experts.{{}}.w2",
        BIAS_OF_V3: f"{block}.gate.e_score_correction_bias",
    }
    return fields, Naming(layer=layer, splits=Attention.of(fields).joined | joined_experts(said, inner))


FAMILIES: dict[str, Family] = {
    "deepseek2": _deepseek2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "llama": _llama,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    **GEMMAS,
    **HYBRIDS,
}
"""By llama.cpp's name of the architecture."""


def describe(said: Said) -> Described:
    """The fields of config.json, and what the tensors are called.

    Raises:
        UnknownArchitectureError: the architecture is none of these.
        ModelConfigError: a key is missing, or has a value that is not supported.
    """
    family = FAMILIES.get(said.architecture)
    if family is None:
        raise UnknownArchitectureError(
            f"{said.source}: the architecture {said.architecture} is not read from GGUF files; known are "
            f"{', '.join(sorted(FAMILIES))}. Give the model's own checkpoint (safetensors), if Quire has its family."
        )
    return family(said)
