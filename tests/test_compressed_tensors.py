"""compressed-tensors' formats: what that library writes is read as it reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, MissingTensorError, ModelConfigError, TensorDtypeError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.layout import LaidOutCheckpoint
from quire.models.registry import load_model, read_config
from quire.ops import CodedWeight, Fp8Weight, Kernels, Mxfp4Weight, StoredWeight
from tests.checkpoints import Tensors, under, write
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint

NAME = "model.layers.0.self_attn.q_proj"
OUTPUTS, INPUTS = 48, 160

BY_ROW = {"num_bits": 8, "dynamic": True, "strategy": "token"}
INT8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "group_size": 32}),
    "W4A16, with zeros": ("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False}),
    "W4A16, channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "W4A16, channels with zeros": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "W4A16, a tensor": ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}),
    "W8A16": ("pack-quantized", {"num_bits": 8, "group_size": 16}),
    "W8A16, with zeros": ("pack-quantized", {"num_bits": 8, "group_size": 16, "symmetric": False}),
    **{f"W{bits}A16": ("pack-quantized", {"num_bits": bits, "group_size": 32}) for bits in (2, 3, 5, 6, 7)},
    "W3A16, with zeros": ("pack-quantized", {"num_bits": 3, "group_size": 32, "symmetric": False}),
    "W6A16, with zeros": ("pack-quantized", {"num_bits": 6, "group_size": 32, "symmetric": False}),
    "W8A8": ("int-quantized", INT8),
    "W8A8, a tensor": ("int-quantized", {**INT8, "strategy": "tensor"}),
    "W8A8, with zeros": ("int-quantized", {**INT8, "symmetric": False}),
    "naive int8": ("naive-quantized", {"num_bits": 8, "group_size": 32}),
    "FP8, a tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "FP8, channels": ("float-quantized", {**FP8, "strategy": "channel"}),
    "FP8, blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 64]}),
    "naive FP8": ("naive-quantized", {**FP8, "strategy": "channel"}),
    "MXFP8": ("mxfp8-quantized", {**FP8, "group_size": 32, "scale_dtype": "torch.uint8"}),
    "NVFP4": ("nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group", "group_size": 16}),
    "MXFP4": ("mxfp4-pack-quantized", {**FP4, "group_size": 32, "scale_dtype": "torch.uint8"}),
}


def scales_of(weight: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
    """Scales with which most numbers fit, and a few do not."""
    strategy = args.get("strategy", "group")
    most = {"int": 2 ** (args["num_bits"] - 1), "float": 6 if args["num_bits"] == 4 else 448}[args.get("type", "int")]
    if strategy == "tensor":
        return weight.abs().amax().reshape(1) / most
    if strategy == "channel":
        return weight.abs().amax(dim=1, keepdim=True) / most
    if strategy == "block":
        rows, columns = args["block_structure"]
        blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        return blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3)) / most
    return weight.unflatten(1, (-1, args["group_size"])).abs().amax(dim=-1) / most


def compressed(
    weight: torch.Tensor, format: str, args: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensors, torch.Tensor]:
    """A module's tensors as the library writes them, and the numbers that it reads from them, in fp32."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(format)
    scale, state = scales_of(weight, args).to(dtype), {"weight": weight}
    if args.get("scale_dtype"):
        scale = torch.exp2(scale.float().log2().ceil()).to(dtype)
    if format.startswith("nvfp4"):
        state["weight_global_scale"] = 448 / scale.float().amax().reshape(1)
        scale = (scale.float() * state["weight_global_scale"]).to(torch.float8_e4m3fn)
    if not args.get("symmetric", True):
        top = 2 ** (args["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-top, top, scale.shape, dtype=torch.int8)
    written = library.compress(state | {"weight_scale": scale.to(dtype) if scale.dtype != dtype else scale}, scheme)
    if format.endswith("fp4-pack-quantized"):
        codes = unpack_fp4_from_uint8(written["weight_packed"], *weight.shape, dtype=torch.float32)
        stored = written["weight_scale"]
        real = torch.exp2(stored.float() - 127) if stored.dtype == torch.uint8 else stored.float()
        whole = written.get("weight_global_scale")
        return written, dequantize(codes, real, args=scheme.weights, global_scale=whole, dtype=torch.float32)
    if format == "mxfp8-quantized":
        read = dict(written)
    else:
        read = written | {"weight_scale": written["weight_scale"].float()}
    return written, library.decompress(read, scheme)["weight"].float()


def section_of(format: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    inputs = {"input_activations": BY_ROW} if format == "int-quantized" else {}
    group = {"targets": ["Linear"], "weights": args, **inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_bit_by_bit_those_of_the_library(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    format, args = CASES[case]
    tensors, expected = compressed(torch.randn(OUTPUTS, INPUTS), format, args)
    plain = of_numbers(write(tmp_path, under(NAME, tensors), section_of(format, args)))
    assert list(plain.entries) == [f"{NAME}.weight"] and "quantization_config" not in plain.config
    assert plain.entries[f"{NAME}.weight"].shape == (OUTPUTS, INPUTS)
    found, coded = plain.tensor(f"{NAME}.weight"), plain.coded(f"{NAME}.weight")
    assert found.dtype == torch.float32 and found.count_nonzero() > 0.5 * found.numel()
    if case == "NVFP4":  # a product with the reciprocal of the global scale, not a quotient
        torch.testing.assert_close(found, expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(found, expected)
    assert coded is not None and torch.equal(coded.restored(), found)
    kind = Mxfp4Weight if case == "MXFP4" else Fp8Weight if "FP8" in case else CodedWeight
    assert isinstance(coded, kind)
    if isinstance(coded, CodedWeight):
        assert coded.scheme.activations == ("row" if case.startswith("W8A8") else "block")
        assert coded.nbytes < 0.6 * expected.nbytes / 2 if coded.scheme.bits == 4 else 0.6 * expected.nbytes


def test_inputs_that_are_ordered_by_their_activations_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    args = {"num_bits": 4, "group_size": 32, "actorder": "group", "symmetric": False}
    tensors, consecutive = compressed(torch.randn(OUTPUTS, INPUTS), "pack-quantized", args | {"actorder": None})
    codes = unpack_from_int32(tensors["weight_packed"], 4, torch.Size((OUTPUTS, INPUTS)))
    zeros = unpack_from_int32(tensors["weight_zero_point"], 4, torch.Size((OUTPUTS, INPUTS // 32)), packed_dim=0)
    groups = (torch.arange(INPUTS) // 32)[torch.randperm(INPUTS)]
    for order in (groups, groups.sort().values):
        tensors["weight_g_idx"] = order.int()
        plain = of_numbers(write(tmp_path, under(NAME, tensors), section_of("pack-quantized", args)))
        expected = (codes.float() - zeros[:, order]) * tensors["weight_scale"].float()[:, order]
        assert torch.equal(plain.tensor(f"{NAME}.weight"), expected)
        assert (plain.coded(f"{NAME}.weight") is None) == (order is groups) and "actorder" in plain.notes[0]
    assert torch.equal(expected, consecutive)


def test_scales_that_are_not_used_are_left_out_and_those_of_the_cache_are_named(tmp_path: Path) -> None:
    format, args = CASES["FP8, a tensor"]
    tensors, _ = compressed(torch.randn(OUTPUTS, INPUTS), format, args)
    more = {
        f"{NAME}.input_scale": torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.0.self_attn.v_scale": torch.ones(1),
        "model.norm.weight": torch.ones(4),
    }
    plain = of_numbers(write(tmp_path, under(NAME, tensors) | more, section_of(format, args)))
    assert sorted(plain.entries) == [f"{NAME}.weight", "model.norm.weight"]
    assert [note[:30] for note in plain.notes] == ["2 scales for a KV cache in fp8"] and "k_scale" in plain.notes[0]


INT4, INT8_CHANNELS = CASES["W4A16, with zeros"], CASES["W8A8"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": "marlin-24"}, "'format' must be 'float-quantized' or.*found 'marlin-24'"),
    ({"format": "dense"}, "'format'"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config' is .*sparse weights"),
    ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "'transform_config' is .*rotated"),
    ({"config_groups": {}}, "'config_groups' must be an object with at least one group"),
    ({"config_groups": {"a": {"weights": {"num_bits": 4, "codebook": 3}}}}, "'codebook' is not known"),
    ({"config_groups": {"a": {"weights": {"num_bits": 9}}}}, "'num_bits' must be a whole number from 1 to 8"),
    ({"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "x"}}}}, "'strategy' must be 'block' or"),
    ({"config_groups": {"a": []}}, "'a' must be an object"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors, _ = compressed(torch.randn(OUTPUTS, INPUTS), *INT4)
    with pytest.raises(ModelConfigError, match=f"config.json, quantization_config.*{message}"):
        of_numbers(write(tmp_path, under(NAME, tensors), section_of(*INT4) | change))


WRONG: list[tuple[str, Tensors, type[Exception], str]] = [
    ("W4A16", {"weight_scale": ...}, MissingTensorError, "weight_packed' is there, but .*weight_scale'.* is missing"),
    ("W4A16", {"weight_scale": torch.ones(OUTPUTS, 7)}, TensorShapeError, r"weight_scale' is \[48, 7\], not"),
    ("W4A16", {"weight_scale": torch.ones(OUTPUTS, 5).int()}, TensorDtypeError, "weight_scale' is of type I32"),
    ("W4A16", {"weight_scale": torch.full((OUTPUTS, 5), torch.inf)}, CheckpointError, "scales are not finite"),
    ("W4A16", {"weight_shape": ...}, MissingTensorError, "weight_shape"),
    ("W4A16", {"weight_shape": torch.tensor([OUTPUTS, 9])}, TensorShapeError, r"\[48, 20\], but .* \[48, 9\]"),
    ("W4A16", {"weight_shape": torch.tensor([OUTPUTS, -160])}, TensorShapeError, r"\[48, -160\]"),
    ("W4A16", {"weight_shape": torch.tensor([OUTPUTS])}, TensorShapeError, r"weight_shape' is \[1\], not \[2\]"),
    ("W4A16, with zeros", {"weight_zero_point": ...}, MissingTensorError, "weight_zero_point"),
    ("W4A16, with zeros", {"weight_zero_point": torch.ones(5, 5).int()}, TensorShapeError, r"not \[6, 5\]"),
    ("W4A16", {"weight_g_idx": torch.full((INPUTS,), 5).int()}, CheckpointError, "groups 0 to 4, found 5 to 5"),
    ("W4A16", {"weight_g_idx": torch.zeros(3).int()}, TensorShapeError, r"weight_g_idx' is \[3\]"),
    ("W4A16", {"weight": torch.ones(3, 3)}, CheckpointError, "are the same weight"),
    ("W8A8", {"weight_scale": ...}, MissingTensorError, "weight' is there, but .*weight_scale"),
    ("W8A8, with zeros", {"weight_zero_point": ...}, MissingTensorError, "weight_zero_point"),
    ("NVFP4", {"weight_global_scale": ...}, MissingTensorError, "weight_global_scale"),
    ("NVFP4", {"weight_global_scale": torch.zeros(1)}, CheckpointError, "factors are not all finite"),
    ("NVFP4", {"weight_scale": torch.ones(OUTPUTS, 9).to(torch.float8_e4m3fn)}, TensorShapeError, r"not \[48, 10\]"),
    ("MXFP4", {"weight_scale": torch.ones(OUTPUTS, 6, dtype=torch.uint8)}, TensorShapeError, r"not \[48, 5\]"),
    ("FP8, blocks", {"weight_scale": torch.ones(2, 4)}, TensorShapeError, r"not \[2, 3\], as .* of 32 x 64"),
    ("FP8, channels", {"weight_scale": torch.ones(47, 1)}, TensorShapeError, r"not \[1\] or \[48\]"),
]


@pytest.mark.parametrize("case, change, error, message", WRONG)
def test_tensors_that_do_not_fit_are_named(
    case: str, change: Tensors, error: type[Exception], message: str, tmp_path: Path
) -> None:
    tensors, _ = compressed(torch.randn(OUTPUTS, INPUTS), *CASES[case])
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not ...}
    with pytest.raises(error, match=message) as caught:
        of_numbers(write(tmp_path, under(NAME, tensors), section_of(*CASES[case]))).tensor(f"{NAME}.weight")
    assert str(tmp_path) in str(caught.value)


SEVERAL = ("W4A16, with zeros", "W8A8", "NVFP4", "FP8, channels", "MXFP4")


def compressed_folder(folder: Path, architecture: str, cases: Sequence[str] = SEVERAL) -> tuple[Path, Path]:
    """A tiny model in several formats at once, and the same with the numbers that they stand for."""
    coded, plain = (save_checkpoint(folder / name, architecture) for name in ("coded", "plain"))
    ways = [CASES[case] for case in cases]
    tensors = load_file(coded / "model.safetensors")
    stored, numbers = dict(tensors), dict(tensors)
    kinds = sorted({re.sub(r"\d+", "", name) for name in tensors})
    for name, weight in tensors.items():
        if (name.endswith("_proj.weight") or name == "lm_head.weight") and weight.shape[1] % 32 == 0:
            parts, numbers[name] = compressed(weight, *ways[kinds.index(re.sub(r"\d+", "", name)) % len(ways)])
            del stored[name]
            stored |= under(name.removesuffix(".weight"), parts)
    groups = {
        f"group_{index}": {"targets": ["Linear"], "format": format, "weights": args}
        for index, (format, args) in enumerate(ways)
    }
    for group, case in zip(groups.values(), cases, strict=True):
        group |= {"input_activations": BY_ROW} if case == "W8A8" else {}
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    edit_json(coded / "config.json", {"quantization_config": section})
    for each, content in ((coded, stored), (plain, numbers)):
        content = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(content, each / "model.safetensors", metadata={"format": "pt"})
    return coded, plain


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("architecture", ["phi3", "glm4", "qwen3_next"])
def test_codes_follow_a_familys_layout(architecture: str, case: str, tmp_path: Path) -> None:
    """Parts of fused tensors, one after the other or head by head, and permuted heads have codes, too."""
    folder, _ = compressed_folder(tmp_path, architecture, [case])
    base = of_numbers(Checkpoint(folder))
    layout = read_config(base.config, base.generation).layout
    assert layout is not None
    checkpoint, count = LaidOutCheckpoint(base, layout), 0
    for name in checkpoint.entries:
        if (coded := checkpoint.coded(name)) is not None:
            assert torch.equal(coded.restored(), checkpoint.tensor(name)), name
            count += 1
    assert count >= 18


class Restoring(Kernels):
    """Kernels that use no weight as it is stored."""

    def keeps(self, weight: StoredWeight) -> bool:
        return False


@pytest.mark.parametrize("architecture", ["llama", "phi3", "glm4", "deepseek_v3"])
def test_a_model_computes_what_its_numbers_do(architecture: str, tmp_path: Path) -> None:
    """Also with fused tensors and with permuted heads. Some of its products quantize activations."""
    coded, plain = compressed_folder(tmp_path, architecture)
    prompt = random_prompt(40)
    expected = chunked_logits(load_model(plain), prompt, 17)
    restored = chunked_logits(load_model(coded, kernels=Restoring()), prompt, 17)
    torch.testing.assert_close(restored, expected, rtol=0, atol=1e-4)
    found = chunked_logits(load_model(coded), prompt, 17)
    rounded = 0.3 if architecture == "deepseek_v3" else 0.1  # other experts may be chosen
    assert 0 < (found - expected).square().mean().sqrt() < rounded * expected.std()
