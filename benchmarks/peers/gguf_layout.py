"""What a GGUF file says of a model, and how its tensors lie there: Qwen3, dense and sparse, DeepSeek V2, Gemma 3 and
Qwen3.5.

As llama.cpp's own converter writes them (https://github.com/ggml-org/llama.cpp, the folder `conversion`). Only NumPy
is needed. A tensor may be of any type: it is at most split, turned or stacked; what else becomes of its numbers, in
fp32, is `adjusted`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Array = np.ndarray[Any, Any]

ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
}
"""llama.cpp's names, by `model_type`."""

ONLY: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False},
    "qwen3_moe": {"attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v2": {
        "attention_bias": False,
        "q_lora_rank": None,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
    "gemma3_text": {"attention_bias": False, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    "qwen3_5_text": {"attention_bias": False},
}
"""By `model_type`, what config.json must say: llama.cpp takes it for granted, or it is not converted here."""
ONLY_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1}
"""The same of `rope_scaling`. llama.cpp reads the two numbers for other architectures alone."""

OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHERS = {"gemma3": AFTER, "qwen35": {"post_attention_layernorm": "post_attention_norm"}}
"""What stands otherwise in `LAYER_NAMES`, by llama.cpp's name of the architecture."""
BARE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
"""Tensors whose names do not end with "weight"."""
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
BARE_LAYER = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, BARE))})")


def architecture(config: Config) -> str:
    """llama.cpp's name of the model's architecture.

    Raises:
        ValueError: the model is none of those that are converted.
    """
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; only {', '.join(ARCHITECTURES)} are converted")
    _require(config, ONLY[kind], ARCHITECTURES[kind])
    return ARCHITECTURES[kind]


def _require(config: Config, only: Config, arch: str) -> None:
    for name, value in only.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]!r}; llama.cpp's {arch} needs {value!r} here")


def metadata(config: Config) -> dict[str, Any]:
    """The model's sizes by their keys in GGUF. What is an integer there is one here, and so on.

    Raises:
        ValueError: the model is none of those that are converted.
    """
    arch = architecture(config)
    own = {"qwen3": _heads, "qwen3moe": _sparse, "deepseek2": _latent, "gemma3": _windowed, "qwen35": _recurrent}
    rope = config.get("rope_parameters", config)
    values = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    return {f"{arch}.{name}": value for name, value in (values | own[arch](config)).items()}


def _heads(config: Config) -> dict[str, Any]:
    return {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }


def _windowed(config: Config) -> dict[str, Any]:
    """llama.cpp takes it for granted that five of six layers see a window, and how their positions turn."""
    if config["query_pre_attn_scalar"] != config["head_dim"]:
        raise ValueError(f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}; llama.cpp needs head_dim here")
    return _heads(config) | {"attention.sliding_window": config["sliding_window"]}


def _recurrent(config: Config) -> dict[str, Any]:
    heads, rope = config["linear_num_value_heads"], config["rope_parameters"]
    if heads != config["linear_num_key_heads"]:
        raise ValueError(f"linear_num_value_heads is {heads}; only as many as linear_num_key_heads are converted")
    return _heads(config) | {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": config["full_attention_interval"],
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }


def _sparse(config: Config) -> dict[str, Any]:
    return _heads(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _latent(config: Config) -> dict[str, Any]:
    """The cache holds one head: its key is the latent vector and the turned part, its value the latent vector."""
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return _yarn(config["rope_scaling"]) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 0,  # may be left out of a model of 26 or 27 layers alone
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turned,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 1,  # softmax
    }


def _yarn(rope: Config) -> dict[str, Any]:
    """One factor of the scores is taken for `mscale` and `mscale_all_dim`, so that queries and keys have none."""
    weight = rope["mscale_all_dim"]
    _require(rope, ONLY_YARN | {"mscale": weight}, "deepseek2")
    return {
        "rope.scaling.type": rope["type"],
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * weight,  # for this architecture alone, llama.cpp divides it by 0.1
    }


def tensors(config: Config, stored: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Each tensor's name and array in GGUF, given all of the checkpoint's by their names.

    The experts of a layer are stacked: [experts, out, in]. `kv_b_proj` is split into the part that takes queries into
    the latent space, [heads, latent, key], and the one that takes values out of it, [heads, value, latent]. Rotary
    pairs stay where they are: llama.cpp takes each architecture's own.

    Raises:
        ValueError: a tensor has no place there.
    """
    for name, array in stored.items():
        expert, layer = EXPERT.fullmatch(name), LAYER.fullmatch(name)
        if expert and layer:
            if expert[2] == "0":
                yield f"blk.{layer[1]}.ffn_{expert[3]}_exps.weight", _stacked(stored, expert[1], expert[3])
        elif layer and layer[2] == "self_attn.kv_b_proj":
            keys, values = _split(config, array)
            yield f"blk.{layer[1]}.attn_k_b.weight", keys
            yield f"blk.{layer[1]}.attn_v_b.weight", values
        elif layer and layer[2] == "linear_attn.conv1d":
            yield gguf_name(name, architecture(config)), array.reshape(array.shape[0], -1)
        else:
            yield gguf_name(name, architecture(config)), array


def _stacked(stored: Mapping[str, Array], prefix: str, part: str) -> Array:
    """One product of all experts of a layer, by their numbers (whatever the order in which they are stored)."""
    count = sum(name.startswith(prefix) and name.endswith(f".{part}_proj.weight") for name in stored)
    return np.stack([stored[f"{prefix}{number}.{part}_proj.weight"] for number in range(count)])


def _split(config: Config, array: Array) -> tuple[Array, Array]:
    """`kv_b_proj`, [heads * (key + value), latent], as [heads, latent, key] and [heads, value, latent]."""
    both = array.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, values = np.split(both, [config["qk_nope_head_dim"]], axis=1)
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values)


def gguf_name(name: str, arch: str) -> str:
    """A tensor's name in GGUF, by its name in the checkpoint, where it goes there as it is.

    Args:
        arch: llama.cpp's name of the architecture.

    Raises:
        ValueError: it has none.
    """
    layer, outer = LAYER.fullmatch(name), name.removesuffix(".weight")
    names = LAYER_NAMES | OTHERS.get(arch, {})
    if layer and layer[2] in names:
        return f"blk.{layer[1]}.{names[layer[2]]}.weight"
    if bare := BARE_LAYER.fullmatch(name):
        return f"blk.{bare[1]}.{BARE[bare[2]]}"
    if outer != name and outer in OUTER_NAMES:
        return f"{OUTER_NAMES[outer]}.weight"
    raise ValueError(f"the tensor {name} has no place in a GGUF file of a model that is converted here")


def kept_in_fp32(name: str, array: Array) -> bool:
    """Whether llama.cpp wants this tensor of a GGUF file in fp32: norms, convolutions and the scores of experts."""
    return array.ndim == 1 or name.endswith((".ffn_gate_inp.weight", ".ssm_conv1d.weight"))


def adjusted(name: str, numbers: Array, arch: str) -> Array:
    """The numbers of a tensor that is kept in fp32, as llama.cpp wants them: norms whole, where checkpoints hold what
    they have more than 1, and decays themselves, where they hold logarithms."""
    if name.endswith(".ssm_a"):
        return -np.exp(numbers)
    whole = arch in OTHERS and name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight")
    return numbers + 1 if whole else numbers


BLOCKS = {"F32": (1, 4), "Q4_0": (32, 18), "Q6_K": (256, 210)}
"""Numbers of a block of a row, and its bytes."""
SPREAD = 0.02
"""Standard deviation of random weights."""


def random_formats(config: Config, stored: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's format and shape in GGUF in a model in Q4_0: the head is in Q6_K, where its rows have whole blocks.

    Args:
        stored: see `tensors`; the numbers play no part.
    """
    arrays = {name: (kept_in_fp32(name, array), array.shape) for name, array in tensors(config, stored)}
    head = "output.weight" if "output.weight" in arrays else "token_embd.weight"
    whole = arrays[head][1][-1] % BLOCKS["Q6_K"][0] == 0
    return {
        name: ("F32" if plain else "Q6_K" if name == head and whole else "Q4_0", shape)
        for name, (plain, shape) in arrays.items()
    }


def byte_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in this format as bytes; what is in fp32 is one of fp32 all the same."""
    numbers, size = BLOCKS[form]
    return (*shape[:-1], shape[-1] // numbers * size)


def random_blocks(form: str, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """A random tensor, uint8 [..., bytes of a row]; norms are ones.

    Of a block in Q4_0, the first two bytes are the scale of 4-bit numbers from -8; of one in Q6_K the last two are that
    of 6-bit numbers from -32, which have 16 scales in int8 besides (ggml's `block_q4_0` and `block_q6_K`).
    """
    if form == "F32":
        plain = np.ones(shape) if len(shape) == 1 else generator.normal(0, SPREAD, shape)
        return plain.astype(np.float32).view(np.uint8)
    numbers, size = BLOCKS[form]
    drawn = generator.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
    scale, place = (SPREAD / 4.6, 0) if form == "Q4_0" else (SPREAD / (18.5 * 74), size - 2)
    drawn[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return drawn.reshape(byte_shape(form, shape))
