"""The families of models that are read from GGUF: of each, config.json's fields and its tensors' names.

As llama.cpp's converter writes them and its models read them (https://github.com/ggml-org/llama.cpp, the folders
`conversion` and `src/models`). Its architectures are coarser than those of `transformers`: "llama" is Llama's, Mistral's
and Mixtral's, "deepseek2" that of all with latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.errors import UnknownArchitectureError
from quire.models.gguf_metadata import Said, common, whole_heads
from quire.models.gguf_names import Naming, less_one, turned

Described = tuple[dict[str, Any], Naming]
Family = Callable[[Said], Described]


@dataclass(frozen=True, slots=True)
class Attention:
    """Numbers of query heads and of key heads, and a head's width."""

    heads: int
    kv_heads: int
    width: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Attention:
        return cls(fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"])

    @property
    def joined(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The parts of a tensor of queries, keys and values."""
        keys = self.kv_heads * self.width
        return {"attn_qkv": (("attn_q", self.heads * self.width), ("attn_k", keys), ("attn_v", keys))}


def joined_experts(said: Said, inner: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The parts of a tensor of all experts' gates and inputs."""
    return {"ffn_gate_up_exps": (("ffn_gate_exps", inner), ("ffn_up_exps", inner))}


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
        fields["layer_types"] = layer_types(said, said.of_layers("attention.sliding_window_pattern"))
    else:
        fields["sliding_window_pattern"] = pattern if window else 1
    whole_heads(said, fields["head_dim"])
    norms = ("attn_norm", "attn_q_norm", "attn_k_norm", "output_norm", *SANDWICH)
    return fields, Naming(layer=SANDWICH, splits=Attention.of(fields).joined, changes=less_one(*norms))


def layer_types(said: Said, windowed: list[int]) -> list[str]:
    """The field of that name, given which layers have a window."""
    return ["sliding_attention" if each else "full_attention" for each in windowed]


FAMILIES: dict[str, Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
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
