"""Models with experts give transformers' logits and greedy tokens, from the checkpoints that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.bench.ceilings import Work
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.recorder import Recorder
from quire.errors import MissingTensorError, ModelConfigError, UnexpectedTensorError
from quire.models.formats.quantizing import Quantization
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from tests.oracle import (
    assert_parity,
    chunked_logits,
    edit_json,
    load_reference,
    random_prompt,
    reference_choices,
    reference_logits,
    save_checkpoint,
)

PROMPT = random_prompt(90)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-normalized": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-one-expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "qwen3_moe-every-expert": ("qwen3_moe", {"num_experts_per_tok": 8}),
    "qwen3_moe-published-spelling": ("qwen3_moe", {"edit": {"num_local_experts": ..., "num_experts": 8}}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-mlp-only-layers": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    "qwen3_moe-attention_bias": ("qwen3_moe", {"attention_bias": True}),
    "qwen3_moe-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-normalized": ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3, "edit": {"layer_types": ...}},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 20}),
    "mixtral-three-of-five": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "mixtral-without-theta": ("mixtral", {"edit": {"rope_parameters": ...}}),
    "mixtral-head_dim-apart": ("mixtral", {"head_dim": 24}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = OPTIONS[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_the_engine_gives_transformers_greedy_tokens_in_chunks_and_from_the_prefix_cache(
    architecture: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture)
    reference = load_reference(folder)
    prompts = [PROMPT, [*PROMPT[:70], 5, 6, 7], random_prompt(33, seed=2)]
    engine = Engine(EngineConfig(model=str(folder), max_num_batched_tokens=40, max_num_seqs=4, threads=1))
    for first in (0, 3):  # the second time with a warm cache
        outputs = run(engine, first, prompts, 64)
        assert outputs == [reference_choices(reference, *pair) for pair in zip(prompts, outputs, strict=True)]
    assert engine.stats.cached_tokens > sum(map(len, prompts)) // 2


def run(engine: Engine, first: int, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy continuations, all prompts at once."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, ignore_eos=True).resolved()
        engine.add(Request(first + number, prompt, params, max_tokens=steps))
    outputs: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            outputs[update.request - first] += update.tokens
    return outputs


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_bf16_model_errs_no_more_than_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16)
    exact = reference_logits(load_reference(folder), PROMPT)
    theirs = reference_logits(load_reference(folder, torch.bfloat16), PROMPT)
    ours = chunked_logits(load_model(folder), PROMPT, 37)
    # Where an expert is chosen otherwise, one token's logits are far off: so the typical error is compared.
    assert (ours - exact).abs().median() < 1.1 * (theirs - exact).abs().median()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_any_length_give_the_same_bits(architecture: str, dtype: str, tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16), dtype)
    whole = chunked_logits(model, PROMPT, len(PROMPT))
    for chunk in (1, 2, 3, 7, 16, 37):
        assert torch.equal(chunked_logits(model, PROMPT, chunk), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("how", ["int8", "int4"], ids=str)
def test_quantized_experts_are_stored_and_read_back(architecture: str, how: Quantization, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "base", architecture, dtype=torch.bfloat16)
    fresh = load_model(folder, quantization=how)
    quantize_folder(folder, tmp_path / "quantized", how)
    stored = load_model(tmp_path / "quantized")
    assert torch.equal(chunked_logits(stored, PROMPT, 90), chunked_logits(fresh, PROMPT, 90))
    assert (stored.expert_bytes, stored.weight_bytes) == (fresh.expert_bytes, fresh.weight_bytes)
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    assert stored.expert_bytes == sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    routers = [tensor for name, tensor in tensors.items() if ".gate." in name]
    assert [router.dtype for router in routers] == [torch.bfloat16] * 3  # stay as they are


# What a step of one token takes


def test_active_parameters_are_those_of_the_experts_that_a_token_is_sent_to(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[1]))  # 3 of 8 experts, in 2 layers
    one = 3 * 64 * 32
    assert model.expert_parameters == 2 * 8 * one
    assert model.num_parameters - model.active_parameters == 2 * 5 * one
    work = Work.of(model, kv_bytes_per_token=0)
    assert model.weight_bytes - work.weights_read(1) == 2 * 5 * one * 4
    assert model.weight_bytes - work.weights_read(2) == round(2 * 8 * one * (5 / 8) ** 2 * 4)
    assert work.weights_read(1000) == model.weight_bytes
    products = work.step(batch=1, context=10).products
    assert products == 2 * (model.active_parameters - 160 * 64)  # the table is looked up


def test_the_balance_of_the_experts_load_is_told(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[1])
    engine, recorder = Engine(EngineConfig(model=str(folder), threads=1, prefix_cache="off")), Recorder()
    assert "expert_load_balance" not in recorder.stats(engine)  # trial steps do not count
    run(engine, 0, [PROMPT], 11)
    loads = {str(layer): load.tolist() for layer, load in engine.model.expert_loads.items()}
    assert list(loads) == ["0", "2"]
    assert [sum(load) for load in loads.values()] == [3 * (90 + 10)] * 2
    stats = json.loads(recorder.document(engine, "stats"))
    assert stats["expert_tokens"] == loads
    assert stats["expert_load_balance_by_layer"] == {name: max(load) / (300 / 8) for name, load in loads.items()}
    assert stats["expert_load_balance"] == max(stats["expert_load_balance_by_layer"].values()) > 1


def test_a_dense_model_tells_of_no_load(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(save_checkpoint(tmp_path, "qwen3")), threads=1))
    run(engine, 0, [PROMPT], 2)
    assert not [name for name in Recorder().stats(engine) if "expert" in name]


# What cannot be


@pytest.mark.parametrize(
    ("architecture", "edit", "field", "reason"),
    [
        ("qwen3_moe", {"num_local_experts": ...}, "num_experts", "found nothing"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok", "at most num_local_experts (8)"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size", "found nothing"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers", "from 0 to 2"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "from 1 to"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob", "true or false"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types", "the same window"),
        ("mixtral", {"num_local_experts": ...}, "num_local_experts", "found nothing"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok", "at most num_local_experts (6)"),
        ("qwen3", {"num_experts": 8}, "num_experts", "an architecture without them"),
    ],
)
def test_fields_that_cannot_be_are_refused_with_field_and_file(
    architecture: str, edit: dict[str, Any], field: str, reason: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture, edit=edit)
    with pytest.raises(ModelConfigError) as caught:
        load_model(folder)
    for part in (str(folder / "config.json"), repr(field), reason):
        assert part in str(caught.value)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_missing_experts_are_told_with_the_field_that_counts_them(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture)
    count = json.loads((folder / "config.json").read_text())["num_local_experts"]
    edit_json(folder / "config.json", {"num_local_experts": count + 1})
    with pytest.raises(MissingTensorError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert f"experts.{count}." in message
    assert "num_experts (num_local_experts" in message


def test_a_single_lost_tensor_of_an_expert_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingTensorError, match=lost):
        load_model(folder)


def test_more_experts_than_config_json_says_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe", edit={"num_local_experts": 7})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = tensors[name][:7].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnexpectedTensorError, match=r"experts\.7\."):
        load_model(folder)


def test_layers_with_experts_keep_their_numbers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2])
    model = load_model(folder)
    assert {index: model.layers[index].mlp for index in (1, 3)} == model.expert_layers
    assert list(model.expert_loads) == [1, 3]
