"""The quantized formats and the product with them, in plain torch; quantizing in C++ gives the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.errors import CheckpointError, ConfigError
from quire.ops import Kernels, Quantization, QuantizedWeight, choose_kernels
from quire.ops.cpu import library
from quire.ops.quantized import (
    GROUP_SIZES,
    MAX_INPUTS,
    PANEL,
    QuantizedProduct,
    codes_of,
    layout,
    quantize,
    quantize_rows,
)
from tests.quantized import dequantize

INT8 = Quantization("int8")
INT4 = [Quantization("int4", group) for group in GROUP_SIZES]
HOWS = [INT8, *INT4]
SHAPES = [(1, 32), (33, 64), (100, 128), (64, 96), (7, 2176)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 5, 8, 31, 65]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def cases(extra: tuple[tuple[int, int], ...] = ()) -> list[tuple[int, int, Quantization]]:
    """Shapes and what each may be quantized to; int8 takes any number of inputs."""
    fits = [(o, i, how) for (o, i), how in itertools.product(SHAPES, HOWS) if i % (how.group or 1) == 0]
    return fits + [(o, i, INT8) for o, i in ((5, 7), (40, 1), (3, 1100), *extra)]


# The formats


def test_int8_codes_lie_where_the_format_says() -> None:
    weight = quantize(draw(40, 70), INT8)
    codes = codes_of(weight)
    assert weight.packed.shape == (2, 32, 32, 4)
    for panel, quad, output, byte in [(0, 0, 0, 0), (0, 3, 5, 2), (1, 17, 7, 1), (1, 10, 0, 3)]:
        assert weight.packed[panel, quad, output, byte] == codes[32 * panel + output, 4 * quad + byte]
    assert not weight.packed[:, 18:].any() and not weight.packed[1, :, 8:].any() and not weight.scales[40:].any()


def test_int4_codes_lie_where_the_format_says() -> None:
    weight = quantize(draw(40, 64), Quantization("int4", 32))
    codes = codes_of(weight).int() + 8
    assert weight.packed.shape == (2, 8, 32, 4)
    assert weight.scales.shape == (2, 2, 32)
    for panel, eight, output, byte in [(0, 0, 0, 0), (0, 3, 5, 2), (1, 7, 7, 1), (1, 1, 0, 3)]:
        low, high = codes[32 * panel + output, 8 * eight + byte], codes[32 * panel + output, 8 * eight + 4 + byte]
        assert weight.packed[panel, eight, output, byte] == low | high << 4
    assert not weight.scales[1, :, 8:].any()


def test_sizes_of_a_qwen3_0_6b_projection() -> None:
    assert layout(INT8, 3072, 1024).packed == (96, 256, 32, 4)
    four = quantize(torch.zeros(3072, 1024), INT4[1])
    assert (four.nbytes, four.scheme, four.group) == (3072 * 1024 // 2 + 3072 * 16 * 2, "int4", 64)


@pytest.mark.parametrize("outputs, inputs, how", cases())
def test_a_quantized_weight_is_near_the_weight(outputs: int, inputs: int, how: Quantization) -> None:
    weight = draw(outputs, inputs, spread=0.02)
    error = (dequantize(quantize(weight, how)) - weight).abs()
    if how.group is None:
        step = weight.abs().amax(1, keepdim=True) / 127
    else:
        step = weight.view(outputs, -1, how.group).abs().amax(2).repeat_interleave(how.group, 1) / 7
    assert (error <= step * 3).all()  # int4 may cut a group's largest number
    assert error.norm() <= {None: 0.01, 32: 0.09, 64: 0.1, 128: 0.11}[how.group] * weight.norm()


def test_the_scales_of_int4_beat_the_plain_choice() -> None:
    weight = draw(64, 512)
    for how in INT4:
        groups = weight.view(64, -1, how.group)
        scale = groups.abs().amax(2, keepdim=True) / 7
        plain = ((groups / scale).round() * scale).view_as(weight)
        assert (dequantize(quantize(weight, how)) - weight).norm() < 0.9 * (plain - weight).norm()


def test_what_a_format_can_hold_exactly_comes_back_exactly() -> None:
    codes = torch.randint(-127, 128, (8, 96), generator=torch.Generator().manual_seed(0))
    codes[:, 5] = 127
    assert torch.equal(dequantize(quantize(codes * 2.0**-9, INT8)), codes * 2.0**-9)
    assert not dequantize(quantize(torch.zeros(3, 64), INT4[0])).any()


@pytest.mark.parametrize("isa", library.usable() or [pytest.param("none", marks=pytest.mark.skip("no library"))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_makes_the_same_codes_and_scales(isa: str, dtype: torch.dtype) -> None:
    kernels = choose_kernels(isa)
    for number, (outputs, inputs, how) in enumerate(cases()):
        weight = draw(outputs, inputs, dtype=dtype, seed=number, spread=0.02)
        weight[0, : inputs // 2] = 0.0
        weight[-1, 0] = 1e-7  # among the subnormal numbers of fp16
        weight[outputs // 2, inputs // 2] = 3.0
        expected, found = quantize(weight, how), kernels.quantize(weight, how)
        assert torch.equal(found.packed, expected.packed), (outputs, inputs, how)
        assert torch.equal(found.scales, expected.scales), (outputs, inputs, how)


@pytest.mark.parametrize("name", ["torch", *library.usable()])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    weight = draw(40, 128)
    weight[35, 77] = bad
    for how in HOWS:
        with pytest.raises(CheckpointError, match="not finite"):
            choose_kernels(name).quantize(weight, how)


def test_a_scale_that_fp16_cannot_hold_is_refused() -> None:
    with pytest.raises(CheckpointError, match="too large"):
        quantize(torch.full((1, 32), 1e6), INT4[0])


@pytest.mark.parametrize(
    "how, shape, words",
    [
        (INT4[1], (4, 96), "groups of 64 do not divide its 96 inputs; group sizes that do are: 32$"),
        (INT4[2], (4, 704), "groups of 128 do not divide its 704 inputs; group sizes that do are: 32, 64$"),
        (INT4[0], (4, 33), "do not divide its 33 inputs; no group size does, so choose int8"),
        (INT8, (4, MAX_INPUTS + 1), f"it has {MAX_INPUTS + 1} inputs; quantized weights have at most {MAX_INPUTS}"),
    ],
)
def test_a_shape_that_a_format_cannot_hold_is_refused(how: Quantization, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        quantize(torch.zeros(shape), how)


@pytest.mark.parametrize(
    "scheme, group, words",
    [
        ("int2", None, "quantization='int2' is not supported; allowed: int8, int4"),
        ("int4", 48, "groups of 48 is not supported; allowed: 32, 64, 128"),
        ("int8", 32, "int8 has no groups, found a group size of 32"),
    ],
)
def test_a_quantization_that_does_not_exist_is_refused(scheme: str, group: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Quantization.of(scheme, group)  # type: ignore[arg-type]


def test_int4_has_groups_of_64_unless_said() -> None:
    assert Quantization.of("int4", None) == Quantization("int4", 64)
    assert Quantization.of(None, None) is None


@pytest.mark.parametrize("how", HOWS)
def test_tensors_that_are_not_those_of_the_format_are_refused(how: Quantization) -> None:
    good = quantize(draw(40, 128), how)
    for packed, scales in [
        (good.packed[:1], good.scales),
        (good.packed, good.scales[:1]),
        (good.packed.float(), good.scales),
        (good.packed, good.scales.double()),
        (good.packed.flatten(), good.scales),
        (good.packed.transpose(1, 2).contiguous().transpose(1, 2), good.scales),
    ]:
        with pytest.raises(CheckpointError, match="must be torch"):
            QuantizedWeight(how, packed, scales, 128, 40)
    with pytest.raises(CheckpointError, match="must be"):
        QuantizedWeight(how, good.packed, good.scales, 128, 80)


# Activations


def test_rows_become_codes_by_their_own_scale() -> None:
    codes, scales = quantize_rows(torch.tensor([[127.0, 2.5, 3.5, -127.0], [0.0, 0.0, 0.0, 0.0], [1e-38, 0, 0, 0]]))
    assert codes.tolist() == [[127, 2, 4, -127], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan_and_its_neighbours_are_as_ever(how: Quantization, bad: float) -> None:
    product = QuantizedProduct(quantize(draw(40, 128), how), draw(40))
    x = draw(3, 128, seed=1)
    before = product.matmul(x)
    x[1, 7] = bad
    after = product.matmul(x)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


# The product


@pytest.mark.parametrize("outputs, inputs, how", cases())
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_the_one_of_the_integers(
    outputs: int, inputs: int, how: Quantization, dtype: torch.dtype
) -> None:
    weight, bias = quantize(draw(outputs, inputs), how), draw(outputs, dtype=dtype, seed=1)
    x = draw(4, inputs, dtype=dtype, seed=2)
    q, s = quantize_rows(x)
    if how.group is None:
        sums = q.long() @ codes_of(weight)[:outputs].long().T
        expected = sums.float() * (s[:, None] * weight.scales[:outputs]) + bias.float()
    else:
        exact = (q.double() @ dequantize(weight).double().T) * s.double()[:, None] + bias.double()
        expected = exact.float()
    out = QuantizedProduct(weight, bias).matmul(x, torch.float32)
    torch.testing.assert_close(
        out, expected, atol=0 if how.group is None else 1e-4, rtol=0 if how.group is None else 1e-5
    )
    assert torch.equal(QuantizedProduct(weight, bias).matmul(x), out.to(dtype))


@pytest.mark.parametrize("how", HOWS)
def test_the_product_is_near_that_of_the_weight(how: Quantization) -> None:
    weight, x = draw(96, 512), draw(16, 512, seed=1)
    exact = x @ weight.T
    error = (Kernels().pack_quantized(quantize(weight, how)).matmul(x) - exact).norm() / exact.norm()
    assert error < (0.015 if how.group is None else 0.12)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("inputs", [128, 2176])
def test_rows_of_a_quantized_product_do_not_know_of_one_another(how: Quantization, inputs: int) -> None:
    product = QuantizedProduct(quantize(draw(PANEL + 8, inputs), how), draw(PANEL + 8))
    x = draw(150, inputs, dtype=torch.bfloat16, seed=1)
    whole = product.matmul(x)
    for rows, first in itertools.product(ROWS, (0, 3, 77)):
        assert torch.equal(product.matmul(x[first : first + rows]), whole[first : first + rows])
    assert product.matmul(x[:0]).shape == (0, PANEL + 8)
