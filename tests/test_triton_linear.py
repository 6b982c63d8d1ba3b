"""The products in Triton: equal to their references, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from quire.ops import Fp8Weight
from quire.ops.linear import Product
from quire.ops.triton import coded, linear, linear_chunks, linear_dense
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_chunks import MOST_CHUNKS, PROGRAMS, Chunks, waves
from quire.ops.triton.linear_dense import SHORT, TALL, DenseProduct, quicker
from quire.ops.triton.linear_vendor import VendorProduct
from tests.quantized import coded as in_codes
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
"""The interpreter multiplies bf16 wrongly, and does not round to it."""
MAKES: tuple[linear.Make, ...] = (VendorProduct, DenseProduct)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    return linear.pack([weight], bias, CPU, DenseProduct)


def quantized_product(weight: torch.Tensor, how: str, bias: torch.Tensor | None = None) -> Product:
    return TritonKernels("cpu").pack_coded([in_codes(weight, how)], bias)


def launch_all() -> None:
    """The launches of a step that differ in code: few rows and many, chunks side by side and one after the other."""
    weight = torch.empty(1024, 3072, dtype=torch.bfloat16)
    x = torch.empty(2500, 3072, dtype=torch.bfloat16)
    projection = dense(weight)
    for rows in (16, 2500):
        projection.matmul(x[:rows])
    head = dense(torch.empty(151_936, 64, dtype=torch.bfloat16))
    head.matmul(torch.empty(256, 64, dtype=torch.bfloat16), torch.float32)
    dense(torch.empty(200, 1000), torch.empty(200)).matmul(torch.empty(16, 1000))
    codes = Fp8Weight(torch.zeros(8192, 3072, dtype=torch.uint8), torch.zeros(8192, 24), 128)
    kept = TritonKernels("cpu", deterministic=True).pack_fp8([codes], torch.bfloat16)
    for rows in (16, 1000, 2500):
        kept.matmul(x[:rows])


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_without_spills_and_with_matrix_instructions(arch: int) -> None:
    used = compile_all("tests.test_triton_linear", arch)
    instructions = {80: {"mma.sync"}, 90: {"wgmma"}, 100: {"tcgen05", "mma.sync"}}[arch]
    for kernel in used:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 99 * 1024, kernel  # what a consumer's card has
    found = [kernel["matrix"] for kernel in used if kernel["kernel"] == "_dense_kernel"]
    assert len(found) == 6
    assert found.count([]) == 1  # fp32
    assert all(set(matrix) <= instructions for matrix in found), found


@pytest.mark.parametrize(("capability", "tall"), [((8, 6), True), ((9, 0), True), ((10, 3), False), ((12, 0), True)])
def test_many_rows_take_tall_tiles_where_one_instruction_computes_both(
    capability: tuple[int, int], tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert linear_dense.one_instruction(torch.device("cuda", 0)) == tall


# Dense products


@pytest.mark.quick("shape0-dtype0", "shape1-dtype1", "shape2-dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (80, 360), (300, 128)])
def test_dense_products_equal_those_in_fp64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    outputs, inputs = shape
    weight, bias = draw(*shape, dtype=dtype, seed=1), draw(outputs, dtype=dtype, seed=2)
    for used in (None, bias):
        product = dense(weight, used)
        assert (product.in_features, product.out_features) == (inputs, outputs)
        for rows in (0, 1, 70):
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            expected = x.double() @ weight.double().T + (0 if used is None else used.double())
            wide = product.matmul(x, torch.float32)
            assert (wide.dtype, wide.shape) == (torch.float32, (rows, outputs))
            torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-4)
            assert torch.equal(product.matmul(x), wide.to(dtype))  # rounded once


def test_every_tile_of_a_large_product_is_computed() -> None:
    weight, x = draw(200, 16, seed=1), draw(1100, 16, seed=2)  # 18 row tiles: two groups of eight, and two more
    torch.testing.assert_close(dense(weight).matmul(x), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_the_librarys_product_is_not_rounded_on_its_way_to_fp32(dtype: torch.dtype) -> None:
    weight, bias, x = draw(80, 100, dtype=dtype, seed=1), draw(80, dtype=dtype, seed=2), draw(7, 100, dtype=dtype)
    for used in (None, bias):
        product = linear.pack([weight], used, CPU, VendorProduct)
        expected = x.double() @ weight.double().T + (0 if used is None else used.double())
        torch.testing.assert_close(product.matmul(x, torch.float32).double(), expected, rtol=1e-5, atol=1e-4)
        assert product.matmul(x).dtype == dtype
        torch.testing.assert_close(product.matmul(x).double(), expected, rtol=0.02, atol=0.05)
        assert product.matmul(x[:0]).shape == (0, 80)


def test_a_row_that_is_not_finite_leaves_the_other_rows_as_they_are() -> None:
    product, x = dense(draw(80, 100)), draw(70, 100, seed=1)  # 100 inputs fill no block: what is behind is the next row
    before = product.matmul(x)
    x[[5, 69]] = torch.nan
    after = product.matmul(x)
    rest = [row for row in range(70) if row not in (5, 69)]
    assert after[[5, 69]].isnan().all()
    assert torch.equal(after[rest], before[rest])


# The same bits


def every_product(outputs: int, inputs: int) -> list[tuple[Product, torch.dtype]]:
    weight = draw(outputs, inputs)
    found = [(dense(weight.to(dtype), weight[:, 0].to(dtype)), dtype) for dtype in DTYPES]
    return found + [(quantized_product(weight, how, weight[:, 0]), torch.bfloat16) for how in ("int8", "int4")]


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    for product, dtype in every_product(40, 512):
        x = draw(66, 512, dtype=dtype, seed=5)
        whole = product.matmul(x, torch.float32)
        for rows in (1, 17, 65):
            part = slice(66 - rows, 66)
            assert torch.equal(product.matmul(x[part], torch.float32), whole[part]), (product, dtype, rows)


def test_chunks_side_by_side_and_one_after_the_other_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    products = every_product(40, 1152)  # the last chunk is shorter
    inputs = [draw(20, 1152, dtype=dtype, seed=6) for _, dtype in products]
    side_by_side = [product.matmul(x, torch.float32) for (product, _), x in zip(products, inputs, strict=True)]
    monkeypatch.setattr(Chunks, "side_by_side", lambda chunks, tiles, sum_bytes: False)
    monkeypatch.setattr(linear_chunks, "add_up", None)  # nothing is left to add up
    for (product, _), x, expected in zip(products, inputs, side_by_side, strict=True):
        assert torch.equal(product.matmul(x, torch.float32), expected), product


def test_tiles_of_more_rows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    products = every_product(40, 512)
    inputs = [draw(40, 512, dtype=dtype, seed=7) for _, dtype in products]
    small = [product.matmul(x, torch.float32) for (product, _), x in zip(products, inputs, strict=True)]
    monkeypatch.setattr(linear_dense, "quicker", lambda short, tall, rows, columns: tall)
    monkeypatch.setattr(coded, "FEW", coded.MANY_WHOLE)
    for (product, _), x, expected in zip(products, inputs, small, strict=True):
        assert torch.equal(product.matmul(x, torch.float32), expected), product


@pytest.mark.parametrize(
    "out_tiles, blocks",
    [(1, 1), (1, 1000), (8, 48), (32, 16), (40, 272), (56, 80), (131, 64), (133, 80), (272, 80), (1187, 16)],
)
def test_chunks_hold_all_blocks_and_fill_the_device(out_tiles: int, blocks: int) -> None:
    chunks = Chunks.of(out_tiles, blocks, 4, 128 * 64 * 2)
    assert (chunks.count - 1) * chunks.length < blocks <= chunks.count * chunks.length
    assert chunks.count == 1 or chunks.length >= 4
    programs = out_tiles * chunks.count
    taken = programs / (waves(programs) * PROGRAMS)
    assert taken >= 0.7 or chunks.length < 8 or chunks.count == MOST_CHUNKS  # fewer blocks would be too short


def test_a_wave_and_a_few_more_tiles_are_cut_up_while_there_are_few_rows() -> None:
    """Qwen3-14B's gate and up: 272 tiles of outputs, where 264 programs run at once."""
    chunks = Chunks.of(272, 80, 4, 128 * 64 * 2)
    assert chunks.count == 4
    sums = 128 * 4  # a row of a tile
    assert [chunks.side_by_side(272, rows * sums) for rows in (1, 8, 64)] == [True] * 3  # 5 fourths of a wave, not 2
    assert not chunks.side_by_side(2 * 272, 64 * sums)  # 3 waves against 9 fourths, with sums that cost a fifth
    assert not chunks.side_by_side(100 * 272, sums)  # too much would be left


def test_many_rows_are_summed_by_one_program_each() -> None:
    chunks = Chunks.of(56, 80, 4, 128 * 64 * 2)
    found = [rows for rows in (1, 64, 128, 512, 4096) if chunks.side_by_side(56 * -(-rows // 64), min(rows, 64) * 512)]
    assert found == [1, 64, 128]


@pytest.mark.parametrize(
    "columns, rows, tall", [(272, 1, False), (272, 64, False), (272, 2048, True), (32, 256, False)]
)
def test_taller_tiles_are_for_many_rows_that_fill_the_device_all_the_same(columns: int, rows: int, tall: bool) -> None:
    assert quicker(SHORT, TALL, rows, columns) is (TALL if tall else SHORT)


# What products take


def test_what_does_not_fit_is_refused() -> None:
    products = [linear.pack([draw(8, 64)], None, CPU, make) for make in MAKES]
    for product in products:
        with pytest.raises(ValueError, match="bfloat16"):
            product.matmul(draw(2, 64, dtype=torch.bfloat16))
    for product in (*products, quantized_product(draw(8, 64), "int8")):
        with pytest.raises(ValueError, match="64 columns"):
            product.matmul(draw(2, 65))
        with pytest.raises(ValueError, match="out_dtype"):
            product.matmul(draw(2, 64), torch.float16)


def test_strided_rows_are_taken_as_they_stand() -> None:
    x = draw(6, 128)
    for product in (dense(draw(8, 64)), quantized_product(draw(8, 64), "int8")):
        assert torch.equal(product.matmul(x[::2, ::2]), product.matmul(x[::2, ::2].contiguous()))


@pytest.mark.parametrize("make", MAKES)
def test_parts_of_a_weight_come_side_by_side(make: linear.Make) -> None:
    parts, x = [draw(outputs, 24, seed=outputs) for outputs in (40, 7, 33)], draw(5, 24)
    joined = linear.pack([torch.cat(parts)], None, CPU, make)
    assert torch.equal(linear.pack(parts, None, CPU, make).matmul(x), joined.matmul(x))
    with pytest.raises(ValueError, match="differ"):
        linear.pack([parts[0], parts[1].half()], None, CPU, make)
