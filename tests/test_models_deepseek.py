"""DeepSeek V2 and V3 give transformers' logits and greedy tokens; FP8 weights, the layer behind the last, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.errors import ConfigError, MissingTensorError, ModelConfigError, TensorShapeError, UnexpectedTensorError
from quire.models.fields import Fields
from quire.models.formats.fp8 import restore
from quire.models.formats.quantizing import Quantization
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model, read_config
from quire.ops import Kernels, KVCache, RaggedBatch
from quire.runner.memory_plan import plan_memory
from tests.oracle import (
    VOCAB,
    assert_errs_no_more,
    assert_parity,
    chunked_logits,
    edit_json,
    load_reference,
    random_prompt,
    reference_logits,
    save_checkpoint,
)

PROMPT = random_prompt(90)
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}


def rope(kind: str = "yarn", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v2-group_limited_greedy": ("deepseek_v2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}),
    "v2-attention_bias": ("deepseek_v2", {"attention_bias": True}),
    "v2-lite-attention_bias": ("deepseek_v2", {"attention_bias": True, "q_lora_rank": None}),
    "v2-yarn": ("deepseek_v2", rope(**YARN)),
    "v2-yarn-older": (
        "deepseek_v2",
        {"edit": {"rope_parameters": ..., "rope_theta": 10000, "rope_scaling": {"type": "yarn", **YARN}}},
    ),
    "v2-yarn-equal-mscales": ("deepseek_v2", rope(**{**YARN, "mscale": 1.0})),
    "v2-all-dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "v2-no-dense": ("deepseek_v2", {"first_k_dense_replace": 0}),
    "v3": ("deepseek_v3", {}),
    "v3-q_lora_rank-null": ("deepseek_v3", {"q_lora_rank": None}),
    "v3-norm_topk_prob-false": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "v3-one-shared-expert": ("deepseek_v3", {"n_shared_experts": 1}),
    "v3-yarn": ("deepseek_v3", rope(**YARN)),
    "v3-linear": ("deepseek_v3", rope("linear", factor=2.0)),
    "v3-as-published": (
        "deepseek_v3",
        {"edit": {"head_dim": ..., "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}},
    ),
    "v3-values-wider-than-keys": ("deepseek_v3", {"v_head_dim": 40}),
    "v3-tied": ("deepseek_v3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = OPTIONS[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


def test_weights_of_experts_are_normalized_where_v2_asks_for_it(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "deepseek_v2", edit={"norm_topk_prob": True, "num_experts_per_tok": 1})
    reference = load_reference(folder)
    for layer in reference.model.layers[1:]:  # one expert of weight 1: transformers knows no such thing, so it is told
        layer.mlp.gate.register_forward_hook(lambda _, __, out: (out[0], torch.ones_like(out[1]), out[2]))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(chunked_logits(load_model(folder), PROMPT, 37), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_a_half_precision_model_errs_no_more_than_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16)
    assert_errs_no_more(folder, PROMPT, 1.2)


@pytest.mark.quick("float32-chosen")
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        pytest.param("bfloat16", None, id="bfloat16-chosen"),
        pytest.param("float32", None, id="float32-chosen"),
        pytest.param("bfloat16", Kernels(), id="bfloat16-torch"),
        pytest.param("float32", Kernels(), id="float32-torch"),
    ],
)
def test_chunks_of_any_length_give_the_same_bits(dtype: str, kernels: Kernels | None, tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16), dtype, kernels=kernels)
    whole = chunked_logits(model, PROMPT, len(PROMPT))
    for chunk in (1, 3, 16, 37):
        assert torch.equal(chunked_logits(model, PROMPT, chunk), whole), f"chunks of {chunk}"


# What a token costs


def test_the_plan_tells_bytes_of_kv_and_compares_them_with_full_keys_and_values(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "deepseek_v2", dtype=torch.bfloat16))
    plan = plan_memory(EngineConfig(model="m"), model, 2**30)
    assert plan.kv_bytes_per_token == 3 * (32 + 8) * 2
    assert model.new_caches([3], 16)[0].bytes_per_block == 16 * plan.kv_bytes_per_token
    assert plan.kv_saving == 4 * (16 + 8 + 12) / (32 + 8)
    assert "(240 B a token; 3.6 times less than full keys and values)" in dict(plan.table())["KV cache"]


def test_v3_keeps_71_times_less_than_full_keys_and_values() -> None:
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
        "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "eos_token_id": 1,
        "rope_theta": 10000, "rope_scaling": {"type": "yarn", **YARN, "factor": 40, "mscale": 1.0},
    }  # fmt: skip
    config = read_config(Fields(published, "config.json"), Fields({}, "none"))
    latent = config.layer.latent
    assert (config.layer.num_kv_heads, config.layer.head_dim, latent.row) == (1, 576, 576)
    assert round(config.layer.num_heads * (latent.qk_head_dim + latent.v_head_dim) / latent.row) == 71
    assert latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 0.1 ln 40 + 1
    sizes = config.tensor_shapes()
    assert sum(torch.Size(shape).numel() for shape in sizes.values()) == 671_026_419_200  # as published: 671 B


# 8-bit floating point weights


def save_fp8(folder: Path, block: tuple[int, int], dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A V3 checkpoint of such weights in `folder`/fp8, and in `folder`/plain what they stand for, in fp32."""
    plain = save_checkpoint(folder / "plain", "deepseek_v3", **options)
    tensors = load_file(plain / "model.safetensors")
    coded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name or tensor.dim() != 2:
            coded[name] = tensor.to(dtype) if tensor.dim() == 2 else tensor
            tensors[name] = coded[name].float()
            continue
        scales = torch.zeros(tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=True)))
        codes = torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn)
        for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scales.shape)).tolist():
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = tensor[part].abs().max() / 448
            codes[part] = (tensor[part] / scales[i, j]).to(torch.float8_e4m3fn)
            tensors[name][part] = codes[part].float() * scales[i, j]
        coded[name], coded[f"{name}_scale_inv"] = codes, scales
    save_file(tensors, plain / "model.safetensors")
    coded_folder = folder / "fp8"
    coded_folder.mkdir()
    save_file(coded, coded_folder / "model.safetensors")
    (coded_folder / "config.json").write_text((plain / "config.json").read_text())
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    edit_json(coded_folder / "config.json", {"quantization_config": how})
    return folder


@pytest.mark.parametrize("block", [(128, 128), (16, 20)])
def test_fp8_weights_are_their_codes_times_their_blocks_scales(block: tuple[int, int], tmp_path: Path) -> None:
    folder = save_fp8(tmp_path, block, hidden_size=144)  # more than one block of 128, the second a part of one
    expected = chunked_logits(load_model(folder / "plain"), PROMPT, 90)
    coded = load_model(folder / "fp8")
    assert coded.dtype == torch.float32
    assert torch.equal(chunked_logits(coded, PROMPT, 90), expected)
    torch.testing.assert_close(expected, reference_logits(load_reference(folder / "plain"), PROMPT), rtol=0, atol=1e-4)


def test_fp8_weights_are_rounded_once_to_the_data_type_of_the_computation(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path, (128, 128), torch.bfloat16)
    model = load_model(folder / "fp8", "bfloat16")
    assert torch.equal(
        chunked_logits(model, PROMPT, 90), chunked_logits(load_model(folder / "plain", "bfloat16"), PROMPT, 90)
    )


def test_fp8_weights_can_be_quantized_further(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path, (128, 128))
    quantize_folder(folder / "fp8", tmp_path / "int8", "int8")
    expected = chunked_logits(load_model(folder / "plain", quantization="int8"), PROMPT, 90)
    assert torch.equal(chunked_logits(load_model(tmp_path / "int8"), PROMPT, 90), expected)


def test_the_last_blocks_may_be_parts() -> None:
    codes = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 10.0).view(3, 3)
    expected = [[float(3 * (i // 2) + j // 3 + 1) for j in range(7)] for i in range(5)]
    assert restore(codes, scales, (2, 3)).tolist() == expected


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replaces tensors; one set to `...` is removed."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, file)


Q_A = "model.layers.0.self_attn.q_a_proj.weight"


def test_missing_and_wrong_scales_are_named(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path, (128, 128)) / "fp8"
    edit_tensors(folder, **{f"{Q_A}_scale_inv": torch.ones(2, 1)})
    with pytest.raises(TensorShapeError, match=r"q_a_proj.weight_scale_inv' is \[2, 1\], not \[1, 1\].*128 x 128"):
        load_model(folder)
    edit_tensors(folder, **{f"{Q_A}_scale_inv": ...})
    with pytest.raises(MissingTensorError, match=r"q_a_proj.weight_scale_inv'.* missing"):
        load_model(folder)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"quant_method": "fp8"}, "config.json, quantization_config says.*fp8 weights.*no tensor of"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size.*two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "'fmt' must be 'e4m3'"),
        ({"quant_method": "hqq", "nbits": 4}, "HQQ weights, which Quire does not read; give the checkpoint that it"),
    ],
)
def test_other_quantizations_are_refused_by_name(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "deepseek_v3", edit={"quantization_config": section})
    with pytest.raises(ModelConfigError, match=message):
        load_model(folder)


# Quantized weights


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_quantized_folder_gives_the_bits_of_quantizing_at_load(how: Quantization, tmp_path: Path) -> None:
    # Sizes that int4 can group: no product may be narrower than 32.
    sizes = {"q_lora_rank": 32, "v_head_dim": 16}
    folder = save_checkpoint(tmp_path / "m", "deepseek_v3", dtype=torch.bfloat16, **sizes)
    quantize_folder(folder, tmp_path / "q", how)
    at_load, stored = load_model(folder, quantization=how), load_model(tmp_path / "q")
    logits = chunked_logits(stored, PROMPT, 37)
    assert torch.equal(logits, chunked_logits(at_load, PROMPT, 90))
    exact = chunked_logits(load_model(folder), PROMPT, 90)
    assert 0 < (logits - exact).square().mean().sqrt() < 0.7 * exact.std()


# The layer behind the last


def save_with_mtp(
    folder: Path, architecture: str = "deepseek_v3", **options: Any
) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A V3 checkpoint of 3 layers and one behind them, transformers' model of 4 layers, and the extra tensors."""
    save_checkpoint(folder, architecture, num_hidden_layers=4, **options)
    reference = load_reference(folder)
    generator = torch.Generator().manual_seed(9)
    shapes = {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}
    extra = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": table, "shared_head.head.weight": table.clone()}
    edit_tensors(folder, **{f"model.layers.3.{name}": tensor for name, tensor in (extra | copies).items()})
    fields = json.loads((folder / "config.json").read_text())
    lists = {name: fields[name][:3] for name in ("mlp_layer_types", "layer_types") if name in fields}
    edit_json(folder / "config.json", {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, **lists})
    return folder, reference, extra


def test_the_layer_behind_the_last_is_skipped_unless_asked_for(tmp_path: Path) -> None:
    folder, reference, _ = save_with_mtp(tmp_path)
    reference.model.layers = reference.model.layers[:3]
    model = load_model(folder)
    assert model.mtp is None and model.num_layers == 3
    assert "of layers that predict further tokens are not loaded" in model.notes[0]
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(chunked_logits(model, PROMPT, 37), expected, rtol=0, atol=1e-4)
    with_mtp = load_model(folder, mtp=True)
    assert with_mtp.notes == ()
    assert torch.equal(chunked_logits(with_mtp, PROMPT, 37), chunked_logits(model, PROMPT, 37))
    assert with_mtp.num_parameters > model.num_parameters


def test_the_layer_behind_the_last_predicts_from_a_hidden_state_and_the_next_token(tmp_path: Path) -> None:
    folder, reference, extra = save_with_mtp(tmp_path)
    model = load_model(folder, mtp=True)
    assert model.mtp is not None
    assert model.mtp.embedding is model.embedding
    tokens, hidden = torch.tensor(PROMPT[:40]), torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40)
    batch = RaggedBatch(tokens, positions, positions + 16, [0, 40], [40], torch.tensor([[1, 2, 3]]), 16)
    kv = KVCache(5, 1, 1, model.head_dim, 16, torch.float32, sides=1)
    with torch.inference_mode():
        ours = model.mtp.logits(model.mtp.forward(hidden, batch, kv))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * extra[f"{name}.weight"]

        both = torch.cat([norm(reference.model.embed_tokens(tokens), "enorm"), norm(hidden, "hnorm")], dim=-1)
        x = (both @ extra["eh_proj.weight"].T)[None]
        mask = torch.full((1, 1, 40, 40), float("-inf")).triu(1)
        tables = reference.model.rotary_emb(x, positions[None])
        x = reference.model.layers[3](x, attention_mask=mask, position_ids=positions[None], position_embeddings=tables)
        theirs = reference.lm_head(norm(x[0], "shared_head.norm"))
    assert theirs.shape == (40, VOCAB) and theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_layer_behind_the_last_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "v3", "deepseek_v3")
    with pytest.raises(MissingTensorError, match=r"model.layers.3.enorm.weight"):
        load_model(folder, mtp=True)
    edit_json(folder / "config.json", {"num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        load_model(folder, mtp=True)
    with pytest.raises(ConfigError, match=r"one layer that predicts one token more .* this one has 0"):
        load_model(save_checkpoint(tmp_path / "v2", "deepseek_v2"), mtp=True)


# Bad input

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "topk_method": ("deepseek_v2", {"topk_method": "noaux_tc"}, "'topk_method' must be 'greedy' or"),
    "topk_method-v3": ("deepseek_v3", {"topk_method": "greedy"}, "'topk_method' must be 'noaux_tc'"),
    "scoring_func": ("deepseek_v2", {"scoring_func": "sigmoid"}, "'scoring_func' must be 'softmax'"),
    "groups": ("deepseek_v3", {"n_group": 3}, "'n_group' must be a divisor of n_routed_experts"),
    "top_k": ("deepseek_v3", {"num_experts_per_tok": 5}, "'num_experts_per_tok' must be at most"),
    "rope_interleave": ("deepseek_v3", {"rope_interleave": False}, "'rope_interleave' is False"),
    "moe_layer_freq": ("deepseek_v3", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
    "mlp_bias": ("deepseek_v2", {"mlp_bias": True}, "'mlp_bias' is True"),
    "kv_heads": ("deepseek_v2", {"num_key_value_heads": 2}, "'num_key_value_heads' must be num_attention_heads"),
    "head_dim": ("deepseek_v2", {"head_dim": 16}, "'head_dim' is 16.*qk_rope_head_dim"),
    "kv_lora_rank": ("deepseek_v2", {"kv_lora_rank": ...}, "'kv_lora_rank' must be a whole number"),
    "rope_head_dim": ("deepseek_v2", {"qk_rope_head_dim": 7, "head_dim": ...}, "even"),
    "scaling": ("deepseek_v2", {"routed_scaling_factor": 0}, "'routed_scaling_factor' must be a finite number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields_are_named(case: str, tmp_path: Path) -> None:
    architecture, edit, message = BAD[case]
    folder = save_checkpoint(tmp_path, architecture, edit=edit)
    with pytest.raises(ModelConfigError, match=message) as error:
        load_model(folder)
    assert str(folder / "config.json") in str(error.value)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "deepseek_v3")
    edit_tensors(folder, **{"model.layers.4.enorm.weight": torch.ones(64)})
    with pytest.raises(UnexpectedTensorError, match=r"model\.layers\.4\.enorm\.weight"):
        load_model(folder)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit_tensors(folder, **{"model.layers.4.enorm.weight": ..., bias: ...})
    with pytest.raises(MissingTensorError, match="e_score_correction_bias"):
        load_model(folder)
