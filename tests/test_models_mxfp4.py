"""gpt-oss' experts as they are published, in MXFP4: computed as they are stored, with the bits of what that means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.errors import CheckpointError, MissingTensorError, TensorShapeError
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import Kernels
from quire.runner.memory_plan import plan_memory
from tests import test_determinism as product
from tests.oracle import chunked_logits, edit_json, greedy, load_reference, random_prompt, save_checkpoint
from tests.test_models_families import DETERMINED, ORDER, OSS, each_alone

PROMPT = random_prompt(90)
CASES: list[dict[str, Any]] = [{}, {"cpu_kernels": "torch"}, {"tensor_parallel_size": 2}]


def packed_folder(
    folder: Path, numbers: Path | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """A checkpoint whose experts are in MXFP4; into `numbers` goes the same as transformers restores it."""
    convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
    save_checkpoint(folder, "gpt_oss", dtype=dtype, **{**OSS, **options})
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    plain, codes = dict(stored), dict(stored)
    for name, weight in stored.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 127, blocks.shape[:3], dtype=torch.uint8, generator=generator)
            del codes[name]
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert(blocks, scales, dtype=dtype).contiguous()
    if numbers is not None:
        save_checkpoint(numbers, "gpt_oss", dtype=dtype, **{**OSS, **options})
        save_file(plain, numbers / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "mxfp4"}})
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_bit_by_bit_those_of_the_restored_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    packed = packed_folder(tmp_path / "packed", tmp_path / "plain", dtype)
    ours, plain = load_model(packed), load_model(tmp_path / "plain")
    expected = chunked_logits(plain, PROMPT, 37)
    exact = ours.kernels.name != "amx" or dtype == torch.float32
    found = chunked_logits(ours, PROMPT, 37)
    assert expected.abs().max() > 0.5
    assert torch.equal(found, expected) if exact else (found - expected).abs().max() < 0.1
    numbers = 3 * 8 * (192 * 64 + 64 * 96)
    assert plain.expert_bytes - ours.expert_bytes == numbers * dtype.itemsize - numbers * 17 // 32
    assert plain.weight_bytes - ours.weight_bytes == plain.expert_bytes - ours.expert_bytes


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    packed_folder(tmp_path / "packed", tmp_path / "plain")
    reference, model = load_reference(tmp_path / "plain"), load_model(tmp_path / "packed")
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(chunked_logits(model, PROMPT, 37), logits, rtol=0, atol=1e-4)
    output = greedy(model, PROMPT, 16)
    plain = load_model(tmp_path / "plain", kernels=Kernels())
    assert output == greedy(plain, PROMPT, 16)


def test_other_formats_are_made_of_the_numbers(tmp_path: Path) -> None:
    """int4 of what MXFP4 stands for, whether now or in a folder of its own."""
    packed = packed_folder(tmp_path / "packed", tmp_path / "plain")
    int4 = {"quantization": "int4"}
    expected = chunked_logits(load_model(tmp_path / "plain", **int4), PROMPT, 37)  # type: ignore[arg-type]
    assert torch.equal(chunked_logits(load_model(packed, **int4), PROMPT, 37), expected)  # type: ignore[arg-type]
    quantize_folder(packed, tmp_path / "int4", "int4")
    assert torch.equal(chunked_logits(load_model(tmp_path / "int4"), PROMPT, 37), expected)


def test_blocks_without_scales_or_such_as_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed = packed_folder(tmp_path)
    codes = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    changes: list[tuple[dict[str, torch.Tensor], type[Exception], str]] = [
        ({}, MissingTensorError, "down_proj_blocks"),
        ({name: codes[name][1:]}, TensorShapeError, "down_proj_blocks"),
        (
            {name: torch.full_like(codes[name], 255)},
            CheckpointError,
            "expert 0: scales of numbers that are not 0 must be",
        ),
    ]
    for change, error, words in changes:
        without = {other: tensor for other, tensor in codes.items() if other != name}
        save_file(without | change, packed / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(error, match=words):
            load_model(packed)


@pytest.mark.parametrize("options", [pytest.param(each, marks=pytest.mark.slow if each else ()) for each in CASES])
def test_nothing_around_a_request_changes_its_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, dtype=torch.bfloat16, **{"num_hidden_layers": 2, **DETERMINED["gpt_oss"]})
    alone = each_alone(
        {"model": str(folder), "threads": 1, **({} if "tensor_parallel_size" in options else options)}, ORDER
    )
    setting = {"model": str(folder), "threads": 1, **options}
    engine = product.engine_of(setting, product.PART[0])
    assert product.run(engine, ORDER) == alone
    assert product.run(engine, ORDER[::-1], first_id=100, stagger=2) == alone
    assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0


def test_the_plan_counts_what_is_stored(tmp_path: Path) -> None:
    model = load_model(packed_folder(tmp_path, dtype=torch.bfloat16))
    plan = plan_memory(EngineConfig(model="m"), model, 2**30)
    assert plan.weights == model.weight_bytes < model.num_parameters * 2
