"""fp8 with one scale, or one for each output, and what NVIDIA's Model Optimizer writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

from quire.errors import CheckpointError, MissingTensorError, ModelConfigError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.ops import CodedWeight, Fp8Weight, Mxfp4Weight
from tests.checkpoints import Tensors, under, write

NAME = "model.layers.0.mlp.gate_proj"
OUTPUTS, INPUTS = 40, 288
E4M3 = torch.float8_e4m3fn


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes() -> torch.Tensor:
    return (draw(OUTPUTS, INPUTS) * 50).to(E4M3)


def positive(*shape: int) -> torch.Tensor:
    return draw(*shape, seed=1).abs() + 0.01


MX = torch.randint(120, 130, (OUTPUTS, INPUTS // 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
ONE, EACH, BLOCKS = positive(), positive(OUTPUTS, 1), positive(1, 3)
FP8: dict[str, tuple[dict[str, Any], Tensors, torch.Tensor]] = {
    "AutoFP8, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        {"weight_scale": ONE, "input_scale": positive()},
        ONE,
    ),
    "AutoFP8, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, {"weight_scale": ONE[None]}, ONE),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"weight_scale": EACH, "input_scale_ub": positive(1)},
        EACH,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"weight_scale": ONE, "input_scale": ONE}, ONE),
    "modelopt, channels": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"weight_scale": EACH[:, 0]},
        EACH,
    ),
    "modelopt, blocks": (
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        {"weight_scale": BLOCKS[:, None, :, None]},
        BLOCKS.repeat_interleave(128, 1)[:, :INPUTS],
    ),
    "modelopt, MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"weight_scale": MX},
        torch.exp2(MX.float() - 127).repeat_interleave(32, 1),
    ),
}


@pytest.mark.parametrize("case", FP8)
def test_a_number_in_fp8_is_its_code_times_its_scale(case: str, tmp_path: Path) -> None:
    section, scales, factors = FP8[case]
    plain = of_numbers(write(tmp_path, under(NAME, {"weight": codes(), **scales}), section))
    assert list(plain.entries) == [f"{NAME}.weight"]
    found, coded = plain.tensor(f"{NAME}.weight"), plain.coded(f"{NAME}.weight")
    assert torch.equal(found, codes().float() * factors)
    assert isinstance(coded, Fp8Weight) and torch.equal(coded.restored(), found)
    assert torch.equal(coded.outputs(range(3, 9)).restored(), found[3:9])


def nvfp4(seed: int = 3) -> Tensors:
    packed = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8)
    scale = (positive(OUTPUTS, INPUTS // 16) * 100).to(E4M3)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": positive(), "input_scale": positive()}


def test_nvfp4_is_that_of_compressed_tensors_with_the_whole_scale_inverted(tmp_path: Path) -> None:
    """As that library converts such files."""
    torch.manual_seed(0)
    tensors = nvfp4() | {"weight_scale_2": torch.tensor(0.25)}
    ours = of_numbers(write(tmp_path / "a", under(NAME, tensors), {"quant_algo": "NVFP4"}))
    converted = ModelOptNvfp4Converter(targets=["re:.*proj$"]).process(under(NAME, tensors))
    assert f"{NAME}.weight_global_scale" in converted
    section = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": {}}}
    theirs = of_numbers(
        write(
            tmp_path / "b",
            {name: each.reshape(-1) if each.dim() == 0 else each for name, each in converted.items()},
            section,
        )
    )
    coded = ours.coded(f"{NAME}.weight")
    assert isinstance(coded, CodedWeight) and coded.scheme.name == "NVFP4"
    assert torch.equal(ours.tensor(f"{NAME}.weight"), theirs.tensor(f"{NAME}.weight"))
    assert list(ours.entries) == list(theirs.entries) == [f"{NAME}.weight"]


def test_a_checkpoint_of_several_formats_and_a_file_of_its_own_that_says_so(tmp_path: Path) -> None:
    mxfp4 = {"weight": torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8), "weight_scale": MX}
    int8 = {"weight": torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8), "weight_scale": EACH[:, 0]}
    parts = {"a": nvfp4(), "b": {"weight": codes(), "weight_scale": ONE}, "c": mxfp4, "d": int8}
    parts["e"] = {"weight": draw(3, 3)}
    tensors = {name: each for module, own in parts.items() for name, each in under(module, own).items()}
    write(tmp_path, tensors | {"a.k_scale": ONE}, {})
    (tmp_path / "config.json").write_text("{}")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    plain = of_numbers(Checkpoint(tmp_path))
    kinds = {"a": CodedWeight, "b": Fp8Weight, "c": Mxfp4Weight, "d": CodedWeight, "e": type(None)}
    assert {name[0]: type(plain.coded(name)) for name in plain.entries} == kinds
    assert torch.equal(plain.tensor("d.weight"), int8["weight"].float() * EACH)
    assert "k_scale" in plain.notes[0]


REFUSED: list[tuple[dict[str, Any], Tensors, type[Exception], str]] = [
    ({"quant_algo": "W4A16_AWQ"}, nvfp4(), ModelConfigError, "'quant_algo' must be 'FP8' or .*found 'W4A16_AWQ'"),
    ({}, nvfp4() | {"pre_quant_scale": ONE}, CheckpointError, "pre_quant_scale', one of 1 such tensors, changes"),
    ({}, {"weight": codes()}, MissingTensorError, r"weight_scale_inv' \(or _scale\), which holds its scales, is"),
    ({}, {"weight": codes(), "weight_scale": positive(3)}, TensorShapeError, r"\[3\], not \[1, 3\].*nor \[1\] or"),
    ({"quant_method": "fp8"}, {"weight": codes(), "weight_scale": BLOCKS}, TensorShapeError, r"not \[1\] or \[40\]"),
    ({}, {"weight": codes()[None], "weight_scale": ONE}, TensorShapeError, "is not a matrix"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, {}, ModelConfigError, "'expert_dtype' is 'fp4'"),
]


@pytest.mark.parametrize("change, tensors, error, message", REFUSED)
def test_what_does_not_fit_is_named(
    change: dict[str, Any], tensors: Tensors, error: type[Exception], message: str, tmp_path: Path
) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"} | change
    tensors = under(NAME, tensors) | {"x": ONE}
    with pytest.raises(error, match=message) as caught:
        of_numbers(write(tmp_path, tensors, section))
    assert str(tmp_path) in str(caught.value)


def test_only_scales_of_a_cache_are_passed_over(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": ONE, "model.layers.0.self_attn.k_proj.k_scale": ONE}
    plain = of_numbers(write(tmp_path, tensors, {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}))
    assert list(plain.entries) == ["model.norm.weight"]


def test_a_text_model_inside_says_it_for_itself(tmp_path: Path) -> None:
    """As in Kimi K2.5."""
    section, scales, _ = FP8["modelopt"]
    write(tmp_path, under(NAME, {"weight": codes(), **scales}), {})
    text = {"hidden_size": 64, "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    plain = of_numbers(Checkpoint(tmp_path))
    assert plain.config.section("text_config").names() == {"hidden_size"} and list(plain.entries) == [f"{NAME}.weight"]
