"""GPTQ's and AWQ's layouts, and AutoRound's, which are these.

The packers here follow the layouts' definitions; `test_packers_...` compares them with digests of what GPTQModel 7.7.0
(`PackableQuantLinear.pack_original`) and AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`) make of the same codes: their
functions were run on CODES(32, 64, bits, 5, 3) with zeros CODES(32, 2, bits, 1, 7) and scales of 1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, MissingTensorError, ModelConfigError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.registry import load_model
from quire.ops import CodedWeight
from tests.checkpoints import Tensors, under, write
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint

NAME = "model.layers.0.mlp.experts.3.up_proj"
OUTPUTS, INPUTS = 32, 96
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def codes_of(rows: int, columns: int, bits: int, a: int, b: int) -> torch.Tensor:
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return (row * a + column * b + row * column) % (1 << bits)


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row's codes as one number, the first in its lowest bits, cut into words of 32 bits."""
    rows = []
    for row in codes.tolist():
        number = sum(code << place * bits for place, code in enumerate(row))
        rows.append([number >> shift & 0xFFFFFFFF for shift in range(0, len(row) * bits, 32)])
    return torch.tensor(rows).to(torch.uint32).view(torch.int32)


def pack_gptq(codes: torch.Tensor, zeros: torch.Tensor, bits: int, version: int = 2) -> Tensors:
    """Codes [out, in], zeros [out, groups]."""
    stored = zeros if version == 2 else zeros - 1
    return {"qweight": stream(codes, bits).mT, "qzeros": stream(stored.mT, bits)}


def pack_awq(codes: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return stream(numbers.unflatten(1, (-1, 8))[..., list(ORDER)].flatten(1), 4)

    return {"qweight": packed(codes.mT), "qzeros": packed(zeros.mT)}


def digests(tensors: Tensors) -> list[str]:
    return [hashlib.sha256(each.contiguous().numpy().tobytes()).hexdigest()[:16] for each in tensors.values()]


def test_packers_make_what_the_libraries_make() -> None:
    made = {bits: (codes_of(32, 64, bits, 5, 3), codes_of(32, 2, bits, 1, 7)) for bits in (2, 3, 4, 8)}
    assert {bits: digests(pack_gptq(*both, bits)) for bits, both in made.items()} == {
        2: ["313cbf39f5161d30", "bb088c41204c32c7"],
        3: ["e6aa82308a8e7500", "00f2222abe0991e6"],
        4: ["705d9df65b1aa4ed", "3ccfdfd08628e9ce"],
        8: ["1982a2fd6674d797", "63e9ef3311991e8a"],
    }
    assert digests(pack_awq(*made[4])) == ["5151120907865d7f", "3cdb5f07e05f9e39"]


def draw(bits: int, groups: int, least: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, zeros and scales."""
    torch.manual_seed(bits)
    zeros = torch.randint(least, 1 << bits, (OUTPUTS, groups))
    return torch.randint(0, 1 << bits, (OUTPUTS, INPUTS)), zeros, torch.rand(OUTPUTS, groups).half() + 0.01


def numbers(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, order]) * scales.float()[:, order]


def read(folder: Path, tensors: Tensors, section: dict[str, Any]) -> tuple[torch.Tensor, Any, Any]:
    plain = of_numbers(write(folder, under(NAME, tensors), section))
    assert list(plain.entries) == [f"{NAME}.weight"]
    return plain.tensor(f"{NAME}.weight"), plain.coded(f"{NAME}.weight"), plain


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
WAYS: list[tuple[dict[str, Any], int]] = [
    (GPTQ, 1),
    ({**GPTQ, "checkpoint_format": "gptq"}, 1),
    ({**GPTQ, "checkpoint_format": "gptq_v2"}, 2),
    ({"quant_method": "auto-round", "bits": 4}, 1),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, 1),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"}, 2),
]


@pytest.mark.parametrize("section, version", WAYS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqs_numbers(bits: int, section: dict[str, Any], version: int, tmp_path: Path) -> None:
    """Whatever the configuration says of bits: modules may differ. Zeros of 0 have no code in the first version."""
    codes, zeros, scales = draw(bits, 3, least=1 if version == 1 else 0)
    tensors = pack_gptq(codes, zeros, bits, version) | {"scales": scales.mT}
    order = torch.arange(INPUTS) // 32
    for more in ({}, {"g_idx": order.int()}):
        found, coded, _ = read(tmp_path, tensors | more, section)
        assert torch.equal(found, numbers(codes, zeros, scales, order))
        assert isinstance(coded, CodedWeight) and torch.equal(coded.restored(), found)
        assert (coded.scheme.bits, coded.scheme.group) == (8 if bits == 8 else 4, 32)
    symmetric = pack_gptq(codes, torch.full_like(zeros, 1 << (bits - 1)), bits, version) | {"scales": scales.mT}
    found, coded, _ = read(tmp_path, symmetric, section)
    assert coded.offsets is None and torch.equal(found, numbers(codes, zeros * 0 + (1 << (bits - 1)), scales, order))


def test_zeros_of_which_1_was_subtracted_word_by_word_are_restored(tmp_path: Path) -> None:
    """As GPTQModel writes the first version: a zero of 0 borrows from the next one."""
    codes, zeros, scales = draw(4, 3)
    assert bool((zeros == 0).any())
    tensors = pack_gptq(codes, zeros, 4) | {"scales": scales.mT}
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    found, _, _ = read(tmp_path, tensors, GPTQ)
    assert torch.equal(found, numbers(codes, zeros, scales, torch.arange(INPUTS) // 32))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptqs_inputs_that_are_ordered_by_activations(bits: int, tmp_path: Path) -> None:
    codes, zeros, scales = draw(bits, 3)
    order = (torch.arange(INPUTS) // 32)[torch.randperm(INPUTS)]
    tensors = pack_gptq(codes, zeros, bits) | {"scales": scales.mT, "g_idx": order.int()}
    section = GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}
    found, coded, plain = read(tmp_path, tensors, section)
    assert coded is None and torch.equal(found, numbers(codes, zeros, scales, order))
    assert "desc_act" in plain.notes[0]


@pytest.mark.parametrize("groups", [1, 5])
def test_gptqs_groups_of_all_inputs_and_such_as_do_not_divide_them(groups: int, tmp_path: Path) -> None:
    """Without zeros of their own, channels have factors. The last group may be smaller than the others."""
    codes, zeros, scales = draw(4, groups)
    section = GPTQ | {"checkpoint_format": "gptq_v2"}
    for own in (zeros, torch.full_like(zeros, 8)):
        found, coded, _ = read(tmp_path, pack_gptq(codes, own, 4) | {"scales": scales.mT}, section)
        order = torch.arange(INPUTS) // -(-INPUTS // groups)
        assert torch.equal(found, numbers(codes, own, scales, order))
        assert (coded is None) == (groups == 5)
    assert coded is None or (coded.scheme.group == 0 and coded.scales is None)


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"},
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
    ],
)
def test_awqs_numbers(section: dict[str, Any], tmp_path: Path) -> None:
    codes, zeros, scales = draw(4, 3)
    found, coded, _ = read(tmp_path, pack_awq(codes, zeros) | {"scales": scales.mT}, section)
    assert torch.equal(found, numbers(codes, zeros, scales, torch.arange(INPUTS) // 32))
    assert isinstance(coded, CodedWeight) and coded.offsets is not None and torch.equal(coded.restored(), found)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_older_checkpoints_say_it_in_a_file_of_its_own(file: str, tmp_path: Path) -> None:
    codes, zeros, scales = draw(4, 3, least=1)
    gptq = file == "quantize_config.json"
    tensors = (pack_gptq(codes, zeros, 4, 1) if gptq else pack_awq(codes, zeros)) | {"scales": scales.mT}
    write(tmp_path, under(NAME, tensors), {})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text('{"bits": 4, "desc_act": false}' if gptq else '{"w_bit": 4, "version": "GEMM"}')
    found = of_numbers(Checkpoint(tmp_path)).tensor(f"{NAME}.weight")
    assert torch.equal(found, numbers(codes, zeros, scales, torch.arange(INPUTS) // 32))


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format' must be 'gptq' or 'gptq_v2', found 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "'is_marlin_format' is True"),
    (GPTQ | {"pack_dtype": "int16"}, "'pack_dtype' is 'int16'"),
    (GPTQ | {"desc_act": 1}, "'desc_act' must be true or false"),
    (GPTQ | {"bits": "4"}, "'bits' must be a whole number"),
    (AWQ | {"version": "gemv"}, "'version' must be 'gemm', the only layout of AWQ that Quire reads, found 'gemv'"),
    (AWQ | {"version": "gemv_fast"}, "found 'gemv_fast'"),
    (AWQ | {"version": "exllama"}, "found 'exllama'"),
    (AWQ | {"backend": "llm-awq"}, "'backend' is 'llm-awq'"),
    (AWQ | {"bits": 8}, "'bits' must be 4, found 8"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:fake"}, "'packing_format' must be"),
]


@pytest.mark.parametrize("section, message", REFUSED)
def test_other_layouts_are_refused_by_name(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    codes, zeros, scales = draw(4, 3)
    with pytest.raises(ModelConfigError, match=f"config.json, quantization_config.*{message}"):
        read(tmp_path, pack_gptq(codes, zeros, 4) | {"scales": scales.mT}, section)


WRONG: list[tuple[Any, Tensors, type[Exception], str]] = [
    (GPTQ, {"scales": ...}, MissingTensorError, "qweight' is there, but .*scales'.* is missing"),
    (GPTQ, {"qzeros": ...}, MissingTensorError, "qzeros"),
    (GPTQ, {"qzeros": torch.zeros(3, 9).int()}, TensorShapeError, "no number of bits from 2 to 8"),
    (GPTQ, {"qzeros": torch.zeros(2, 4).int()}, TensorShapeError, r"qzeros' is \[2, 4\], not \[3, 4\]"),
    (GPTQ, {"scales": torch.ones(3, 31)}, TensorShapeError, r"qweight' is \[12, 32\], not \[12, 31\]"),
    (GPTQ, {"g_idx": torch.full((INPUTS,), 3).int()}, CheckpointError, "groups 0 to 2, found 3 to 3"),
    (GPTQ, {"g_idx": torch.zeros(5).int()}, TensorShapeError, "no number of bits"),
    (GPTQ, {"scales": torch.full((3, OUTPUTS), torch.nan)}, CheckpointError, "scales are not finite"),
    (AWQ, {"scales": torch.ones(3, 31)}, TensorShapeError, r"scales' is \[3, 31\], not \[3, 32\]"),
    (AWQ, {"qzeros": torch.zeros(2, 4).int()}, TensorShapeError, r"qzeros' is \[2, 4\], not \[3, 4\]"),
    (AWQ, {"qzeros": ...}, MissingTensorError, "qzeros"),
]


@pytest.mark.parametrize("section, change, error, message", WRONG)
def test_tensors_that_do_not_fit_are_named(
    section: dict[str, Any], change: Tensors, error: type[Exception], message: str, tmp_path: Path
) -> None:
    codes, zeros, scales = draw(4, 3)
    tensors = pack_awq(codes, zeros) if section is AWQ else pack_gptq(codes, zeros, 4)
    changed = {name: each for name, each in (tensors | {"scales": scales.mT} | change).items() if each is not ...}
    with pytest.raises(error, match=message) as caught:
        read(tmp_path, changed, section)
    assert str(tmp_path) in str(caught.value)


def test_a_configuration_whose_weights_are_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"GPTQ weights of 4 bits.*but no tensor of .* is such a one"):
        read(tmp_path, {"weight": torch.ones(3, 3)}, GPTQ)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_model_computes_what_its_numbers_do(architecture: str, tmp_path: Path) -> None:
    """With biases of 0, which AutoGPTQ writes for every module."""
    coded, plain = (save_checkpoint(tmp_path / name, architecture) for name in ("coded", "plain"))
    tensors = load_file(coded / "model.safetensors")
    stored, restored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        scales = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 8).half()
        order = torch.arange(weight.shape[1]) // 32
        codes = (weight / scales.float()[:, order] + 8).round().clamp(0, 15).long()
        zeros = torch.full(scales.shape, 8)
        del stored[name]
        restored[name] = numbers(codes, zeros, scales, order)
        parts = pack_gptq(codes, zeros, 4, 1) | {"scales": scales.mT, "bias": torch.zeros(len(weight)).half()}
        stored |= under(name.removesuffix(".weight"), parts)
    edit_json(coded / "config.json", {"quantization_config": GPTQ})
    for folder, content in ((coded, stored), (plain, restored)):
        content = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = random_prompt(40)
    expected = chunked_logits(load_model(plain), prompt, 17)
    found = chunked_logits(load_model(coded), prompt, 17)
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()
