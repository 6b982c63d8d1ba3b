"""Weights in MXFP4: their products are those of the numbers that they stand for, in every implementation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.errors import CheckpointError
from quire.ops import Kernels, Mxfp4Weight
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.experts import LoopedExperts
from quire.ops.linear import PackedWeight, Product
from quire.ops.triton.kernels import TritonKernels
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
ON_CPU = [CpuKernels(isa) for isa in library.usable()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 5, 12, 13, 40]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(outputs: int, inputs: int, seed: int = 0, least: int = 118, most: int = 126) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(least, most, codes.shape[:2], dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(codes, scales)


def test_every_code_and_scale_stands_for_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    both = (codes[::2] | codes[1::2] << 4).view(1, 1, 8).expand(1, 4, 8).repeat(1, 1, 2)
    scales = torch.tensor([[2, 126, 127, 252]], dtype=torch.uint8)
    found = Mxfp4Weight(both, scales).restored().view(4, 2, 16)
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for part, scale in zip(found, scales[0].tolist(), strict=True):
        expected = torch.tensor([*numbers, *(-number for number in numbers)]) * 2.0 ** (scale - 127)
        assert torch.equal(part, expected.expand(2, -1))


def test_what_is_no_such_weight_is_refused() -> None:
    good = weight_of(3, 64)
    for codes, scales in (
        (good.codes.int(), good.scales),
        (good.codes[:, :, :15], good.scales),
        (good.codes, good.scales[:2]),
    ):
        with pytest.raises(CheckpointError, match="an MXFP4 weight has uint8 codes"):
            Mxfp4Weight(codes, scales)
    for scale in (0, 1, 253, 255):
        scales = torch.full_like(good.scales, scale)
        with pytest.raises(CheckpointError, match=f"must be from 2 to 252, found {scale} to {scale}"):
            replace(good, scales=scales)
        zeros = Mxfp4Weight(good.codes & 0x88, scales)  # 0 and -0
        assert (CpuKernels(library.usable()[0]).pack_mxfp4([zeros]).matmul(draw(2, 64)) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_products_are_bit_by_bit_those_of_a_dense_weight_of_the_same_numbers(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    """But in tile registers, where a dense weight's bf16 sums are made in another order; then they are close."""
    exact = not (kernels.name == "amx" and dtype == torch.bfloat16)
    for outputs, inputs in ((1, 32), (70, 96), (64, 2880)):
        weight, bias = weight_of(outputs, inputs), draw(outputs, seed=1).to(dtype)
        ours, dense = kernels.pack_mxfp4([weight], bias), kernels.pack([weight.restored().to(dtype)], bias)
        assert torch.equal(weight.restored().to(dtype).float(), weight.restored())
        for rows in ROWS:
            x = draw(rows, inputs, seed=rows).to(dtype)
            for out_dtype in (None, torch.float32):
                found, expected = ours.matmul(x, out_dtype), dense.matmul(x, out_dtype)
                if exact:
                    assert torch.equal(found, expected), (outputs, inputs, rows)
                else:
                    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_scales_from_the_least_to_the_largest_give_finite_products(kernels: CpuKernels) -> None:
    for least, most in ((2, 4), (100, 140), (251, 253)):
        weight = weight_of(40, 64, least=least, most=most)
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        for place in range(64):
            x[0, place - 1], x[0, place] = 0, 1
            found = kernels.pack_mxfp4([weight]).matmul(x, torch.float32)
            assert torch.equal(found[0], weight.restored()[:, place])


@pytest.mark.parametrize("kernels", [Kernels(), *ON_CPU, TritonKernels("cpu", True)], ids=lambda kernels: kernels.name)
def test_parts_lie_side_by_side_and_may_be_every_second_row_of_a_tensor(kernels: Kernels) -> None:
    both = weight_of(80, 96)
    gate, up = (Mxfp4Weight(both.codes[place::2], both.scales[place::2]) for place in (0, 1))
    x = draw(3, 96)
    joined = kernels.pack_mxfp4([gate, up]).matmul(x)
    assert torch.equal(joined[:, :40], kernels.pack_mxfp4([gate]).matmul(x))
    assert torch.equal(joined[:, 40:], kernels.pack_mxfp4([up]).matmul(x))
    torch.testing.assert_close(joined[:, :40], kernels.pack_mxfp4([both]).matmul(x)[:, ::2])


def test_plain_torch_multiplies_the_numbers() -> None:
    for dtype in DTYPES:
        weight, x, bias = weight_of(70, 96), draw(37, 96, seed=2).to(dtype), draw(70, seed=3).to(dtype)
        found = Kernels().pack_mxfp4([weight], bias).matmul(x)
        if dtype != torch.float16:
            dense = PackedWeight(weight.restored().to(dtype), bias, packed=False)
            assert torch.equal(found, dense.matmul(x))
        expected = x.double() @ weight.restored().double().T + bias.double()
        places = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=places, atol=places)
        assert torch.equal(Kernels().pack_mxfp4([weight], bias).matmul(x[5:6]), found[5:6])


def experts_of(kernels: Kernels, dtype: torch.dtype | None) -> tuple[list[Product], list[Product]]:
    """Five experts' products with biases; in `dtype`, or else in MXFP4."""

    def product(outputs: int, inputs: int, seed: int) -> Product:
        weight, bias = weight_of(outputs, inputs, seed, 122, 125), draw(outputs, seed=seed + 50)
        if dtype is None:
            return kernels.pack_mxfp4([weight], bias)
        return kernels.pack([weight.restored().to(dtype)], bias)

    return [product(192, 64, seed) for seed in range(5)], [product(64, 96, seed) for seed in range(10, 15)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kernels", [*ON_CPU, TritonKernels("cpu", True)], ids=lambda kernels: kernels.name)
def test_experts_are_those_of_dense_weights_of_the_same_numbers(kernels: Kernels, dtype: torch.dtype) -> None:
    rnd = random.Random(0)
    x, weights = draw(40, 64, dtype=dtype, seed=3), draw(40, 2, seed=4).abs()
    ids = torch.tensor([sorted(rnd.sample(range(5), 2)) for _ in range(40)])
    ours = kernels.experts(*experts_of(kernels, None), None, "clamped_swiglu")
    dense = kernels.experts(*experts_of(kernels, dtype), None, "clamped_swiglu")
    found = ours(x, ids, weights)
    assert torch.equal(found, dense(x, ids, weights)) and found.isfinite().all() and found.abs().max() > 1
    assert torch.equal(ours(x[7:9], ids[7:9], weights[7:9]), found[7:9])
    looped = LoopedExperts(*experts_of(Kernels(), None), None, "clamped_swiglu")(x, ids, weights)
    last_place = {torch.float32: 1e-5, torch.float16: 2**-8}[dtype]
    torch.testing.assert_close(found, looped, rtol=last_place, atol=10 * last_place)


def test_experts_of_both_kinds_are_refused() -> None:
    kernels = TritonKernels("cpu", True)
    coded, dense = experts_of(kernels, None), experts_of(kernels, torch.float32)
    with pytest.raises(ValueError, match=r"in one format; found \[.*group=32.*group=0"):
        kernels.experts([coded[0][0], *dense[0][1:]], dense[1])
