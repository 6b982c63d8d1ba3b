"""Checkpoints as llama.cpp reads them: names, shapes and sizes in GGUF, by the random models that are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.peers import gguf_layout

from quire.models.fields import Fields
from quire.models.random_checkpoint import SHAPES, tensor_shapes

TINY = ("qwen3-tiny", "qwen3-moe-tiny", "deepseek-v2-tiny", "gemma3-tiny", "qwen3.5-tiny")


def stored(shape: str) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint's tensors by name; every number is another one."""
    shapes = tensor_shapes(Fields(SHAPES[shape], "config.json"), as_published=True)
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(sizes) for name, sizes in shapes.items()}


def converted(shape: str) -> dict[str, np.ndarray[Any, Any]]:
    return dict(gguf_layout.tensors(SHAPES[shape], stored(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_model_that_quire_makes_up_has_sizes_in_gguf(shape: str) -> None:
    values = gguf_layout.metadata(SHAPES[shape])
    [arch] = {name.partition(".")[0] for name in values}
    assert arch == gguf_layout.architecture(SHAPES[shape])
    assert values[f"{arch}.block_count"] == SHAPES[shape]["num_hidden_layers"]
    assert all(type(value) in (str, bool, int, float, list) for value in values.values())


@pytest.mark.parametrize("shape", TINY)
def test_no_number_of_a_checkpoint_is_lost_or_told_twice(shape: str) -> None:
    def numbers(tensors: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        return np.sort(np.concatenate([tensor.ravel() for tensor in tensors.values()]))

    np.testing.assert_array_equal(numbers(converted(shape)), numbers(stored(shape)))


def test_the_experts_of_a_layer_are_stacked_in_their_order_whatever_the_files_is() -> None:
    source = stored("qwen3-moe-tiny")
    backwards = dict(reversed(source.items()))
    tensors = dict(gguf_layout.tensors(SHAPES["qwen3-moe-tiny"], backwards))
    assert tensors["blk.1.ffn_gate_exps.weight"].shape == (8, 32, 64)
    assert tensors["blk.1.ffn_down_exps.weight"].shape == (8, 64, 32)
    for number in range(8):
        name = f"model.layers.1.mlp.experts.{number}.up_proj.weight"
        np.testing.assert_array_equal(tensors["blk.1.ffn_up_exps.weight"][number], source[name])


def test_a_sparse_qwen_has_the_names_that_llama_cpp_asks_for() -> None:
    layer = {name.removeprefix("blk.1.") for name in converted("qwen3-moe-tiny") if name.startswith("blk.1.")}
    attention = {f"attn_{part}.weight" for part in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")}
    experts = {f"ffn_{part}.weight" for part in ("norm", "gate_inp", "gate_exps", "up_exps", "down_exps")}
    assert layer == attention | experts


def test_deepseek_has_a_dense_first_layer_and_shared_experts_behind_it() -> None:
    names = set(converted("deepseek-v2-tiny"))
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} < names
    attention = {f"attn_{part}.weight" for part in ("norm", "q", "kv_a_mqa", "kv_a_norm", "k_b", "v_b", "output")}
    dense = {f"ffn_{part}.weight" for part in ("norm", "gate", "up", "down")}
    assert {name.removeprefix("blk.0.") for name in names if name.startswith("blk.0.")} == attention | dense
    sparse = {f"ffn_{part}_{kind}.weight" for part in ("gate", "up", "down") for kind in ("exps", "shexp")}
    behind = {name.removeprefix("blk.1.") for name in names if name.startswith("blk.1.")}
    assert behind == attention | sparse | {"ffn_norm.weight", "ffn_gate_inp.weight"}


def test_a_split_kv_b_gives_the_same_scores_and_values_as_the_whole() -> None:
    config, tensors = SHAPES["deepseek-v2-tiny"], converted("deepseek-v2-tiny")
    heads, key, value, latent = 4, 16, 16, 64
    into_latent, out_of_latent = tensors["blk.1.attn_k_b.weight"], tensors["blk.1.attn_v_b.weight"]
    assert (into_latent.shape, out_of_latent.shape) == ((heads, latent, key), (heads, value, latent))
    generator = np.random.default_rng(1)
    query, compressed = generator.standard_normal((heads, key)), generator.standard_normal(config["kv_lora_rank"])
    restored = (stored("deepseek-v2-tiny")["model.layers.1.self_attn.kv_b_proj.weight"] @ compressed).reshape(heads, -1)
    for head in range(heads):
        np.testing.assert_allclose(into_latent[head] @ query[head] @ compressed, query[head] @ restored[head, :key])
        np.testing.assert_allclose(out_of_latent[head] @ compressed, restored[head, key:])


def test_deepseeks_cache_is_one_head_of_latents_and_its_scores_are_scaled_as_in_the_paper() -> None:
    values = gguf_layout.metadata(SHAPES["deepseek-v2-lite-1b"])
    expected = {
        "attention.head_count": 16,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "rope.dimension_count": 64,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "leading_dense_block_count": 1,
        "expert_count": 16,
        "expert_used_count": 6,
        "expert_shared_count": 2,
        "expert_weights_norm": False,
    }
    assert {name: values[f"deepseek2.{name}"] for name in expected} == expected
    assert values["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707)


@pytest.mark.parametrize(
    ("shape", "change", "why"),
    [
        ("qwen3-moe-tiny", {"norm_topk_prob": False}, r"norm_topk_prob is False; llama\.cpp's qwen3moe needs True"),
        ("qwen3-moe-tiny", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; .* needs \[\]"),
        ("deepseek-v2-tiny", {"q_lora_rank": 32}, r"q_lora_rank is 32; llama\.cpp's deepseek2 needs None"),
        ("deepseek-v2-tiny", {"n_group": 2}, r"n_group is 2; .* needs 1"),
        ("qwen3-tiny", {"model_type": "llama"}, r"model_type is 'llama'; only qwen3, qwen3_moe, deepseek_v2"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    shape: str, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        gguf_layout.metadata(SHAPES[shape] | change)


@pytest.mark.parametrize(("name", "value"), [("mscale", 1.0), ("beta_fast", 16), ("type", "linear")])
def test_positions_that_llama_cpp_would_stretch_otherwise_are_refused(name: str, value: Any) -> None:
    rope = SHAPES["deepseek-v2-tiny"]["rope_scaling"] | {name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; llama\.cpp's deepseek2 needs "):
        gguf_layout.metadata(SHAPES["deepseek-v2-tiny"] | {"rope_scaling": rope})


def test_a_tensor_without_a_place_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias has no place"):
        list(gguf_layout.tensors(SHAPES["qwen3-tiny"], {"model.layers.0.self_attn.q_proj.bias": np.zeros(4)}))


def test_norms_and_the_scores_of_experts_are_kept_in_fp32() -> None:
    kept = {name for name, array in converted("deepseek-v2-tiny").items() if gguf_layout.kept_in_fp32(name, array)}
    norms = {f"blk.{layer}.{part}_norm.weight" for layer in (0, 1) for part in ("attn", "attn_kv_a", "ffn")}
    assert kept == norms | {"output_norm.weight", "blk.1.ffn_gate_inp.weight"}


def test_a_windowed_gemma_has_four_norms_a_layer_and_their_weights_whole() -> None:
    layer = {name.removeprefix("blk.1.") for name in converted("gemma3-tiny") if name.startswith("blk.1.")}
    norms = {f"{name}.weight" for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
    assert norms < layer and "attn_q_norm.weight" in layer
    assert gguf_layout.adjusted("blk.1.attn_q_norm.weight", np.zeros(3), "gemma3").tolist() == [1, 1, 1]
    assert gguf_layout.adjusted("blk.1.attn_q_norm.weight", np.zeros(3), "qwen3").tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="query_pre_attn_scalar is 24"):
        gguf_layout.metadata(SHAPES["gemma3-tiny"] | {"query_pre_attn_scalar": 24})


def test_a_recurrent_layer_has_decays_and_a_convolution_of_two_dimensions() -> None:
    tensors = converted("qwen3.5-tiny")
    assert tensors["blk.0.ssm_conv1d.weight"].shape == (3 * 4 * 32, 4)
    assert tensors["blk.0.attn_qkv.weight"].shape == (3 * 4 * 32, 64)
    assert tensors["blk.3.attn_q.weight"].shape == (2 * 4 * 32, 64)  # and the gate
    assert gguf_layout.kept_in_fp32("blk.0.ssm_conv1d.weight", tensors["blk.0.ssm_conv1d.weight"])
    assert gguf_layout.adjusted("blk.0.ssm_a", np.zeros(2), "qwen35").tolist() == [-1, -1]
    assert gguf_layout.adjusted("blk.0.ssm_norm.weight", np.ones(2), "qwen35").tolist() == [1, 1]
    with pytest.raises(ValueError, match="linear_num_value_heads is 8"):
        gguf_layout.metadata(SHAPES["qwen3.5-tiny"] | {"linear_num_value_heads": 8})


@pytest.mark.parametrize("shape", ["qwen3-tiny", "qwen3-moe-tiny", "qwen3-8b", "qwen3-30b-a3b"])
def test_random_files_have_all_tensors_in_the_formats_that_llama_cpp_takes(shape: str) -> None:
    sizes = tensor_shapes(Fields(SHAPES[shape], "config.json"), as_published=True)
    layers = {f"model.layers.{number}." for number in range(1, SHAPES[shape]["num_hidden_layers"])}
    few = {name: size for name, size in sizes.items() if not name.startswith(tuple(layers))}
    arrays = {name: np.broadcast_to(np.uint8(0), size) for name, size in few.items()}
    formats = gguf_layout.random_formats(SHAPES[shape], arrays)
    assert {name: size for name, (_, size) in formats.items()} == {
        name: array.shape for name, array in gguf_layout.tensors(SHAPES[shape], arrays)
    }
    head = "token_embd.weight" if shape == "qwen3-tiny" else "output.weight"
    for name, (form, size) in formats.items():
        plain = len(size) == 1 or "ffn_gate_inp" in name
        assert form == ("F32" if plain else "Q6_K" if name == head and "tiny" not in shape else "Q4_0")


def test_random_blocks_mean_numbers_of_the_spread_of_random_weights() -> None:
    """Decoded by the formats' definition (ggml's `dequantize_row_q4_0`, `dequantize_row_q6_K`)."""
    generator = np.random.default_rng(1)
    drawn = gguf_layout.random_blocks("Q4_0", (3, 96, 512), generator)
    assert drawn.shape == (3, 96, 512 // 32 * 18)
    blocks = drawn.reshape(-1, 18)
    scale, codes = blocks[:, :2].copy().view(np.float16).astype(float), blocks[:, 2:]
    numbers = scale * (np.concatenate([codes & 15, codes >> 4], 1).astype(int) - 8)
    assert numbers.std() == pytest.approx(gguf_layout.SPREAD, rel=0.05)
    blocks = gguf_layout.random_blocks("Q6_K", (64, 512), generator).reshape(-1, 210)
    scale, scales = blocks[:, 208:].copy().view(np.float16).astype(float), blocks[:, 192:208].copy().view(np.int8)
    low, high = blocks[:, :128], blocks[:, 128:192]
    codes = np.concatenate([low & 15, low >> 4], 1) | np.concatenate([(high >> 2 * i & 3) << 4 for i in range(4)], 1)
    numbers = scale * np.repeat(scales, 16, 1) * (codes.astype(int) - 32)
    assert numbers.std() == pytest.approx(gguf_layout.SPREAD, rel=0.1)
    norm = gguf_layout.random_blocks("F32", (64,), generator)
    assert (norm.view(np.float32) == 1).all()
