"""Weights in fp8 that stay in 8 bits: their products are those of the numbers that they stand for, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from quire.models.formats.fp8 import restore
from quire.ops import Fp8Weight, Kernels
from quire.ops.fp8 import joined
from quire.ops.linear import Product
from quire.ops.triton import fp8, linear_fp8
from quire.ops.triton.experts import GroupedExperts
from quire.ops.triton.heads import GroupedHeads
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_fp8 import Fp8Product
from tests.oracle import edit_json, save_checkpoint
from tests.test_triton_engine import run, small_steps, start  # noqa: F401
from tests.triton_compile import compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
"""The interpreter multiplies bf16 wrongly, and does not round to it."""
KERNELS = TritonKernels("cpu", deterministic=True)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(outputs: int, inputs: int, group: int = 128, seed: int = 0) -> Fp8Weight:
    """Of every code but those that are no number."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (outputs, inputs), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7
    scales = torch.rand(outputs, -(-inputs // group), generator=generator) / 100 + 1e-4
    return Fp8Weight(codes, scales, group)


def dense(weight: Fp8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None, **more: Any) -> DenseProduct:
    return DenseProduct(weight.restored().to(dtype), bias, **more)


def test_a_number_is_its_code_times_its_groups_scale() -> None:
    weight = weight_of(7, 300)
    codes = weight.codes.view(torch.float8_e4m3fn).float()
    expected = [[float(codes[i, j] * weight.scales[i, j // 128]) for j in range(300)] for i in range(7)]
    assert weight.restored().tolist() == expected
    picked = weight.outputs(torch.tensor([5, 0]))
    assert torch.equal(picked.restored(), weight.restored()[[5, 0]])
    assert torch.equal(weight.outputs(range(2, 6)).restored(), weight.restored()[2:6])
    assert torch.equal(joined([picked, weight], CPU).restored(), torch.cat([picked.restored(), weight.restored()]))


def test_what_is_no_such_weight_is_refused() -> None:
    good = weight_of(3, 300)
    codes, scales = good.codes, good.scales
    for pair in ((codes, scales[:, :2]), (codes[0], scales), (codes, scales[1:])):
        with pytest.raises(CheckpointError, match=r"codes \[out, in\] and scales \[out, in / 128\]; found"):
            Fp8Weight(*pair, 128)
    with pytest.raises(CheckpointError, match=r"uint8 codes and float32 scales; found torch.uint8 and torch.float64"):
        Fp8Weight(good.codes, good.scales.double(), 128)
    with pytest.raises(CheckpointError, match="differ in inputs or groups"):
        joined([good, weight_of(3, 300, 64)], CPU)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs, group", [(1, 2, 128), (150, 328, 256), (40, 1024, 128)])
def test_products_are_bit_by_bit_those_of_a_dense_weight_of_the_same_numbers(
    outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    """The last has several chunks."""
    weight, bias = weight_of(outputs, inputs, group), draw(outputs, seed=1).to(dtype)
    ours, plain = KERNELS.pack_fp8([weight], dtype, bias), dense(weight, dtype, bias)
    for rows in (0, 1, 70):
        x = draw(rows, inputs, seed=rows, dtype=dtype)
        for out_dtype in (None, torch.float32):
            found, expected = ours.matmul(x, out_dtype), plain.matmul(x, out_dtype)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(found, expected)


def test_many_rows_have_the_bits_that_few_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """From some number on the weight is restored whole; of a rank's share, sums are cut as the whole's are."""
    restored: list[tuple[int, ...]] = []
    usual = linear_fp8.restored_weight
    monkeypatch.setattr(linear_fp8, "MANY_ROWS", 5)
    monkeypatch.setattr(linear_fp8, "restored_weight", lambda *args: restored.append(args[0].shape) or usual(*args))
    for outputs in (None, 4096):
        weight, x = weight_of(40, 1100), draw(9, 1100, dtype=torch.float16)
        ours = KERNELS.pack_fp8([weight], torch.float16, None, outputs)
        few = torch.cat([ours.matmul(x[:4]), ours.matmul(x[4:8]), ours.matmul(x[8:])])
        assert not restored
        assert torch.equal(ours.matmul(x), few)
        assert torch.equal(few, dense(weight, torch.float16, outputs=outputs).matmul(x))
        assert restored.pop() == (40, 1100)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_no_weight_is_restored_for_many_rows_where_its_sums_would_have_another_order(
    arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the compiled kernels for codes and for dense weights, which all of the module's launches are."""
    kernels = [each for each in compile_all("tests.test_triton_linear", arch) if each["kernel"] == "_dense_kernel"]
    orders = {tuple(each["k_widths"].get("f32", ())) for each in kernels if each["matrix"]}
    restored: list[int] = []
    usual = linear_fp8.restored_weight
    monkeypatch.setattr(linear_fp8, "MANY_ROWS", 5)
    monkeypatch.setattr(linear_fp8, "restored_weight", lambda *args: restored.append(1) or usual(*args))
    monkeypatch.setattr(linear_fp8, "major", lambda device: arch // 10)
    weight, x = weight_of(40, 328), draw(9, 328, dtype=torch.float16)
    found = KERNELS.pack_fp8([weight], torch.float16).matmul(x)
    assert torch.equal(found, dense(weight, torch.float16).matmul(x))
    assert bool(restored) == (len(orders) == 1), orders


def test_a_device_with_fp8_finds_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes as Triton's own type, as GPUs from 8.9 on read them; elsewhere they are bytes."""
    weight, x = weight_of(40, 328), draw(3, 328, dtype=torch.float16)
    expected = KERNELS.pack_fp8([weight], torch.float16).matmul(x)
    monkeypatch.setattr(linear_fp8, "as_read", lambda codes: codes.view(torch.float8_e4m3fn))
    ours = KERNELS.pack_fp8([weight], torch.float16)
    assert isinstance(ours, Fp8Product) and ours.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(ours.matmul(x), expected)
    assert torch.equal(linear_fp8.restored_weight(ours.weight, ours.scales), weight.restored().half())
    assert fp8.as_read(weight.codes).dtype == torch.uint8  # the interpreter


def test_without_the_contract_products_are_close_to_the_numbers() -> None:
    weight, x = weight_of(40, 328), draw(9, 328)
    expected = x.double() @ weight.restored().double().T
    for kernels in (Kernels(), TritonKernels("cpu")):
        found = kernels.pack_fp8([weight], torch.float32).matmul(x).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_codes_that_are_no_numbers_are_refused_and_groups_that_no_kernel_takes_are_restored() -> None:
    weight = weight_of(3, 128)
    weight.codes[1, 5] = 0xFF
    with pytest.raises(CheckpointError, match="not finite"):
        KERNELS.pack_fp8([weight], torch.float16)
    assert KERNELS.keeps(weight) and not KERNELS.keeps(weight_of(3, 128, 64)) and not Kernels().keeps(weight)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        KERNELS.pack_fp8([weight_of(3, 128)], torch.float16).matmul(draw(2, 128))


def experts_of(pack: Any) -> tuple[list[Product], list[Product]]:
    """Five experts' products; their gate and up are two parts."""
    gate_up = [pack([weight_of(70, 200, seed=seed), weight_of(70, 200, seed=seed + 50)]) for seed in range(5)]
    return gate_up, [pack([weight_of(200, 70, seed=seed)]) for seed in range(10, 15)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_bit_by_bit_those_of_dense_weights(dtype: torch.dtype) -> None:
    def plain(parts: Sequence[Fp8Weight]) -> Product:
        return dense(joined(parts, CPU), dtype)

    def kept(parts: Sequence[Fp8Weight]) -> Product:
        return KERNELS.pack_fp8(parts, dtype)

    ours, expected = KERNELS.experts(*experts_of(kept)), KERNELS.experts(*experts_of(plain))
    x, weights = draw(9, 200, dtype=dtype), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(row))[:2] for row in range(9)])
    found = ours(x, ids, weights)
    assert torch.equal(found, expected(x, ids, weights)) and float(found.abs().max()) > 0.01


def test_products_of_several_formats_are_not_grouped() -> None:
    kept = [KERNELS.pack_fp8([weight_of(64, 64)], torch.float16) for _ in range(2)]
    plain = dense(weight_of(64, 64), torch.float16)
    down = [dense(weight_of(64, 32), torch.float16)] * 2
    with pytest.raises(ValueError, match=r"in one format; found \[.*group=128.*group=0"):
        GroupedExperts([kept[0], plain], down)
    with pytest.raises(ValueError, match="must be dense"):
        GroupedHeads(kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_an_engine_that_keeps_fp8_gives_the_tokens_of_the_restored_numbers(tmp_path: Path) -> None:
    """Experts, heads whose dimensions change places, and the memory plan."""
    options = {"num_hidden_layers": 1, "rotary_dim": 8}
    folders = [save_checkpoint(tmp_path / name, "minimax_m2", **options) for name in ("a", "b")]
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit_json(folders[0] / "config.json", {"quantization_config": section})
    tensors = load_file(folders[1] / "model.safetensors")
    coded, plain, count = dict(tensors), dict(tensors), 0
    for name, weight in tensors.items():
        if re.search(r"layers.*(_proj|w[123])\.weight$", name):
            scales = torch.full([-(-size // 128) for size in weight.shape], 0.7)
            coded[name], coded[f"{name}_scale_inv"] = weight.to(torch.float8_e4m3fn), scales
            plain[name] = restore(coded[name], scales, (128, 128))
            count += weight.numel()
    for folder, each in zip(folders, (coded, plain), strict=True):
        save_file(each, folder / "model.safetensors", metadata={"format": "pt"})
    engines = [start(str(folder), {}) for folder in folders]
    kept, whole = (engine.memory_plan.weights for engine in engines)
    assert 2.9 * count < whole - kept < 3 * count  # of 4 bytes each, but for the scales
    assert run(engines[0], [0, 3]) == run(engines[1], [0, 3])
