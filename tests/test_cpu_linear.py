"""The products in C++: equal to their torch reference, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from quire.ops import Kernels, choose_kernels
from quire.ops.cpu import library
from quire.ops.cpu.instruction_sets import bits_of
from quire.ops.linear import Product
from tests.quantized import coded

pytestmark = pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = ("int8", "int4", "int6")
SHAPES = ((1, 2), (31, 33), (32, 64), (65, 128), (160, 1024), (48, 3072), (513, 70))
"""(outputs, inputs): panels of 32 that are not full, odd inputs, long sums."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=library.usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_products_equal_those_in_fp64(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, bias = draw(*shape, dtype=dtype, seed=1), draw(outputs, dtype=dtype, seed=2)
    for used in (None, bias):
        product = kernels.pack([weight], used)
        assert (product.in_features, product.out_features) == (inputs, outputs)
        for rows in (0, 1, 5, 12, 13, 37):
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            expected = x.double() @ weight.double().T + (0 if used is None else used.double())
            wide = product.matmul(x, torch.float32)
            assert (wide.dtype, wide.shape) == (torch.float32, (rows, outputs))
            torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-3)
            assert torch.equal(product.matmul(x), wide.to(dtype))  # rounded once


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (33, 256), (160, 1024), (96, 3072)])
def test_quantized_products_equal_their_reference(kernels: Kernels, shape: tuple[int, int], how: str) -> None:
    weight, bias = coded(draw(*shape, seed=1), how), draw(shape[0], seed=2)
    for used in (None, bias):
        ours, reference = kernels.pack_coded([weight], used), Kernels().pack_coded([weight], used)
        for rows in (1, 5, 25):
            x = draw(rows, shape[1], dtype=torch.bfloat16, seed=rows)
            torch.testing.assert_close(  # sse2 rounds products before they are added
                ours.matmul(x, torch.float32), reference.matmul(x, torch.float32), rtol=2e-6, atol=2e-4
            )


@pytest.mark.parametrize("isa", [isa for isa in library.usable() if bits_of(isa) != isa])
@pytest.mark.parametrize("how", SCHEMES[:2], ids=str)
def test_sets_that_only_multiply_bytes_faster_give_the_same_bits(isa: str, how: str) -> None:
    if bits_of(isa) not in library.usable():
        pytest.skip(f"the kernels for {bits_of(isa)} were not built here")
    weight = coded(draw(513, 3072, seed=1), how)
    ours, theirs = (choose_kernels(name).pack_coded([weight]) for name in (isa, bits_of(isa)))
    for rows in (1, 3, 7, 25, 150):
        x = draw(rows, 3072, dtype=torch.bfloat16, seed=rows)
        assert torch.equal(ours.matmul(x), theirs.matmul(x))


@pytest.mark.parametrize("how", SCHEMES[:2], ids=str)
def test_codes_at_their_limits_do_not_overflow(kernels: Kernels, how: str) -> None:
    weight = coded(torch.ones(32, 8192), how)
    x = torch.ones(2, 8192)
    x[1] = -1
    out = kernels.pack_coded([weight]).matmul(x)
    torch.testing.assert_close(out, torch.tensor([[8192.0], [-8192.0]]).expand(2, 32), rtol=1e-3, atol=0)


@pytest.mark.parametrize("how", SCHEMES[:2], ids=str)
def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_gives_zeros(kernels: Kernels, how: str) -> None:
    product = kernels.pack_coded([coded(draw(40, 64), how)])
    x = draw(5, 64, seed=4)
    x[0, 3], x[1, 60], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
    out = product.matmul(x)
    assert out[:3].isnan().all()
    assert (out[3] == 0).all()
    assert torch.equal(out[4], product.matmul(x[4:])[0])


def every_product(kernels: Kernels, outputs: int, inputs: int) -> list[tuple[Product, torch.dtype]]:
    weight = draw(outputs, inputs)
    dense = [(kernels.pack([weight.to(dtype)], weight[:, 0].to(dtype)), dtype) for dtype in DTYPES]
    return dense + [(kernels.pack_coded([coded(weight, how)]), torch.bfloat16) for how in SCHEMES]


def test_a_rows_bits_do_not_depend_on_the_other_rows_or_on_threads(kernels: Kernels) -> None:
    for product, dtype in every_product(kernels, 96, 256):
        x = draw(300, 256, dtype=dtype, seed=5)
        whole = product.matmul(x)
        for rows in (*range(1, 40), 64, 127, 299):
            for first in (0, 300 - rows):
                part = slice(first, first + rows)
                assert torch.equal(product.matmul(x[part]), whole[part]), (product, dtype, rows, first)
        with kernels.threads(2):
            assert torch.equal(product.matmul(x), whole)
            assert torch.equal(product.matmul(x[:7]), whole[:7])


def test_quantized_products_give_the_same_bits_on_every_instruction_set_with_fused_multiply_adds() -> None:
    x = draw(9, 256, dtype=torch.bfloat16)
    for how in SCHEMES:
        weight = coded(draw(64, 256), how)
        outs = [choose_kernels(isa).pack_coded([weight]).matmul(x) for isa in library.usable() if isa != "sse2"]
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    product = kernels.pack([draw(8, 16)])
    with pytest.raises(ValueError, match="16 columns"):
        product.matmul(draw(2, 17))
    with pytest.raises(ValueError, match="bfloat16"):
        product.matmul(draw(2, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out_dtype"):
        product.matmul(draw(2, 16), torch.float16)


def test_strided_rows_are_taken_as_they_stand(kernels: Kernels) -> None:
    product, x = kernels.pack([draw(8, 16)]), draw(6, 32)
    assert torch.equal(product.matmul(x[::2, ::2]), product.matmul(x[::2, ::2].contiguous()))


def test_parts_of_a_weight_come_side_by_side(kernels: Kernels) -> None:
    parts, x = [draw(outputs, 24, seed=outputs) for outputs in (40, 7, 33)], draw(5, 24)
    assert torch.equal(kernels.pack(parts).matmul(x), kernels.pack([torch.cat(parts)]).matmul(x))
    with pytest.raises(ValueError, match="differ"):
        kernels.pack([parts[0], parts[1].half()])
