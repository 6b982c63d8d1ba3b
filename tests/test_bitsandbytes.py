"""bitsandbytes' formats. The vectors are what bitsandbytes 0.50.2 makes (`functional.quantize_4bit`, on a CPU) of
((arange(256) * 37 % 101 - 50) / 25).view(2, 128), whose halves of rows are multiplied by 1, 0.3, 2 and 0.7; digests are
of what its `backends.default.ops` restore from these in fp32."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError, MissingTensorError, ModelConfigError, TensorDtypeError, TensorShapeError
from quire.models.formats.choose import of_numbers
from quire.ops import CodedWeight
from tests.checkpoints import Tensors, write

NF4_CODES = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d"
    "18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af"
    "4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05"
)
FP4_CODES = (
    "bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73c5be2"
    "a12d7bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73"
    "c5be2a12d7bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be"
)
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
    *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
]
NESTED = {131: 2.1249998098937795e-05, 21: -0.6976562738418579, 255: 1.0, 49: -0.30390626192092896}
NAME = "model.layers.0.mlp.up_proj.weight"
SECTION = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def state(**change: Any) -> torch.Tensor:
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 128]}
    fields |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2.0, **change}
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def stored(kind: str, nested: bool) -> Tensors:
    codes, numbers = (NF4_CODES, NF4) if kind == "nf4" else (FP4_CODES, FP4)
    tensors = {
        NAME: torch.tensor(list(bytes.fromhex(codes)), dtype=torch.uint8)[:, None],
        f"{NAME}.quant_map": torch.tensor(numbers),
        f"{NAME}.absmax": torch.tensor([2.0, 0.6000000238418579, 4.0, 1.399999976158142]),
        f"{NAME}.quant_state.bitsandbytes__{kind}": state(),
    }
    if nested:
        numbers_of_scales = torch.zeros(256)
        numbers_of_scales[list(NESTED)] = torch.tensor(list(NESTED.values()))
        tensors |= {
            f"{NAME}.absmax": torch.tensor([131, 21, 255, 49], dtype=torch.uint8),
            f"{NAME}.nested_absmax": torch.tensor([2.0]),
            f"{NAME}.nested_quant_map": numbers_of_scales,
        }
    return tensors


@pytest.mark.parametrize(
    "kind, nested, digest",
    [
        ("nf4", False, "bd3367d714c4a92f"),
        ("nf4", True, "ff4d49cf7854c010"),
        ("fp4", False, "be1bed17e555d5a2"),
        ("fp4", True, "37f1f89869dfb96a"),
    ],
)
def test_numbers_of_4_bits_are_restored_bit_by_bit(kind: str, nested: bool, digest: str, tmp_path: Path) -> None:
    plain = of_numbers(write(tmp_path, stored(kind, nested), SECTION))
    assert list(plain.entries) == [NAME] and plain.entries[NAME].shape == (2, 128)
    assert plain.coded(NAME) is None and "restored" in plain.notes[0]
    assert hashlib.sha256(plain.tensor(NAME).numpy().tobytes()).hexdigest()[:16] == digest


def test_int8_is_kept_with_a_scale_for_each_output(tmp_path: Path) -> None:
    codes, most = torch.randint(-127, 128, (6, 40), dtype=torch.int8), torch.rand(6) + 0.1
    tensors = {NAME: codes, NAME.replace("weight", "SCB"): most}
    layout = {NAME + "_format": torch.tensor(0, dtype=torch.uint8)}
    for section in ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"load_in_8bit": True}):
        plain = of_numbers(write(tmp_path, tensors | layout, section))
        coded = plain.coded(NAME)
        assert list(plain.entries) == [NAME] and isinstance(coded, CodedWeight)
        assert torch.equal(plain.tensor(NAME), codes.float() * (most / 127)[:, None])
    other = {NAME + "_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*weight_format is 2, the layout of a kernel"):
        of_numbers(write(tmp_path, tensors | other, section)).coded(NAME)
    with pytest.raises(MissingTensorError, match=r"up_proj.weight' is there, but .*SCB' *, which"):
        of_numbers(write(tmp_path, {NAME: codes}, section))


STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    (NAME, ..., MissingTensorError, "up_proj.weight'.* is missing"),
    (NAME, torch.zeros(128, 1), TensorDtypeError, "is of type F32; in this format it is U8"),
    (NAME, torch.zeros(64, 1, dtype=torch.uint8), TensorShapeError, r"\[64, 1\], not \[128, 1\]"),
    (f"{NAME}.absmax", torch.zeros(3, dtype=torch.uint8), TensorShapeError, r"\[3\], not \[4\], as a weight of"),
    (f"{NAME}.quant_map", torch.zeros(15), TensorShapeError, r"\[15\], not \[16\]"),
    (f"{NAME}.quant_map", torch.full((16,), torch.nan), CheckpointError, "not finite"),
    (f"{NAME}.nested_absmax", ..., MissingTensorError, "nested_absmax"),
    (f"{NAME}.nested_quant_map", torch.zeros(16), TensorShapeError, r"\[16\], not \[256\]"),
    (STATE, state(shape=[2, 2**40]), ModelConfigError, "'shape' must be two whole numbers"),
    (STATE, state(shape=None), ModelConfigError, "'shape'"),
    (STATE, state(blocksize=0), ModelConfigError, "'blocksize' must be a whole number"),
    (STATE, state(nested_blocksize=-1), ModelConfigError, "'nested_blocksize'"),
    (STATE, state(nested_offset=None), ModelConfigError, "'nested_offset' must be a finite number"),
    (STATE, torch.tensor([255, 3], dtype=torch.uint8), CheckpointError, "holds no description of its weight"),
    (STATE, torch.tensor(list(b"[1]"), dtype=torch.uint8), CheckpointError, "a JSON list, not an object"),
    (STATE, torch.zeros(1 << 17, dtype=torch.uint8), CheckpointError, "131072 bytes; at most 65536 are read"),
]


@pytest.mark.parametrize("part, tensor, error, message", WRONG)
def test_tensors_that_do_not_fit_are_named(
    part: str, tensor: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    tensors = {name: each for name, each in (stored("nf4", True) | {part: tensor}).items() if each is not ...}
    with pytest.raises(error, match=message) as caught:
        of_numbers(write(tmp_path, tensors, SECTION)).tensor(NAME)
    assert str(tmp_path) in str(caught.value)
