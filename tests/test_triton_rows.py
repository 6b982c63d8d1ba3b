"""The row kernels in Triton's interpreter: equal to the reference, each row independent of the others.

The interpreter divides, takes roots and rounds as IEEE demands, and so does a GPU. What may differ from the reference
is `exp` and the order in which a mean is summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.language import bfloat16, float32
from triton.runtime import interpreter

import tests.triton_launches  # noqa: F401  # for every test
from quire.ops import Kernels
from quire.ops.triton import rows
from quire.ops.triton.kernels import TritonKernels
from tests.triton_compile import EACH_ARCHITECTURE, compile_all

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of numbers of about 1: a unit in the last place or two, since a mean may round to the other side."""

SIZES = [1, 7, 100, 257, 1024, 3001]
TRITON = TritonKernels("cpu")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounds to bf16, where the interpreter cuts off, and does not warn of numbers that are not finite."""
    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        numbers = np.ascontiguousarray(data)
        if (source, target) == (float32, bfloat16):
            return torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (bfloat16, float32):
            return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16).float().numpy()
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
    with np.errstate(all="ignore"):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == expected.dtype and out.shape == expected.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


# -- the reference's results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*SIZES, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_the_reference(dtype: torch.dtype, size: int) -> None:
    x, weight = draw(3, size, dtype=dtype) * 3, draw(size, dtype=dtype, seed=1)
    residual = draw(3, size, dtype=dtype, seed=2)
    assert_close(TRITON.rms_norm(x, weight, 1e-6), Kernels().rms_norm(x, weight, 1e-6))
    expected, expected_total = Kernels().add_rms_norm(x, residual, weight, 0.1)
    out, total = TRITON.add_rms_norm(x.clone(), residual.clone(), weight, 0.1)
    assert torch.equal(total, expected_total)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_reference_s_bits_where_the_mean_is_exact(dtype: torch.dtype) -> None:
    """So all roundings are in their places: only the order of a sum differs, which small whole numbers do not feel."""
    x = torch.randint(-8, 9, (9, 1000), generator=torch.Generator().manual_seed(3)).to(dtype)
    weight, residual = draw(1000, dtype=dtype, seed=1), x.flip(0) / 2
    assert torch.equal(TRITON.rms_norm(x, weight, 1e-6), Kernels().rms_norm(x, weight, 1e-6))
    expected = Kernels().add_rms_norm(x, residual, weight, 1e-5)
    out = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    assert all(map(torch.equal, out, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norms_weight_in_fp32_is_applied_to_what_is_not_rounded(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 9, (9, 1000), generator=torch.Generator().manual_seed(3)).to(dtype)
    weight, residual = 1 + draw(1000, seed=1), x.flip(0) / 2
    assert torch.equal(TRITON.rms_norm(x, weight, 1e-6), Kernels().rms_norm(x, weight, 1e-6))
    expected = Kernels().add_rms_norm(x, residual, weight, 1e-5)
    assert all(map(torch.equal, TRITON.add_rms_norm(x, residual, weight, 1e-5), expected))


def test_a_sum_is_rounded_before_it_is_normalized() -> None:
    """Sums of 10 binary digits, of which bf16 keeps 8; the sum of their squares is exact."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-255, 256, (50, 12), generator=generator).bfloat16()
    residual, weight = torch.randint(-255, 256, (50, 12), generator=generator).bfloat16() / 2, draw(12).bfloat16()
    expected = Kernels().add_rms_norm(x, residual, weight, 1e-6)
    assert (expected[1].float() != x.float() + residual.float()).any()
    assert all(map(torch.equal, TRITON.add_rms_norm(x, residual, weight, 1e-6), expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_groups_is_each_ones(dtype: torch.dtype) -> None:
    x, weight = draw(5, 120), draw(120, seed=1)
    found = TRITON.grouped_norm(x, weight, 3, 1e-5, dtype)
    parts = torch.nn.functional.rms_norm(x.view(5, 3, 40).double(), (40,), eps=1e-5)
    assert_close(found, (parts.flatten(1) * weight).to(dtype))
    assert torch.equal(TRITON.grouped_norm(x[2:3], weight, 3, 1e-5, dtype), found[2:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_squared_relu_is_exact_and_keeps_what_is_not_a_number(dtype: torch.dtype) -> None:
    x = 3 * draw(3, 1030, dtype=dtype)
    x[0, :3], x[1, 1029] = torch.tensor([-torch.inf, torch.inf, -0.0]), torch.nan
    torch.testing.assert_close(
        TRITON.activate(x, "relu2"), Kernels().activate(x, "relu2"), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    x = torch.cat([draw(3, size, dtype=dtype) * 10, draw(3, size, dtype=dtype, seed=1)], dim=1)
    assert_close(TRITON.activate(x, "silu"), Kernels().activate(x, "silu"))
    assert_close(TRITON.activate(x, "gelu_tanh"), Kernels().activate(x, "gelu_tanh"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_is_rounded_before_the_product(dtype: torch.dtype) -> None:
    """So nearly all bits are the reference's: another last digit of `exp` is rarely seen in so few."""
    x = draw(4, 2000, dtype=dtype)
    assert (TRITON.activate(x, "silu") == Kernels().activate(x, "silu")).float().mean() > 0.99


def test_the_gate_is_finite_for_large_inputs_and_keeps_what_is_not_a_number() -> None:
    gate = [-1e30, -200.0, 200.0, torch.inf, torch.nan]
    for activation in ("silu", "gelu_tanh"):
        out = TRITON.activate(torch.tensor([gate + [1.0] * 5]), activation)[0].tolist()
        assert out[:4] == [0.0, 0.0, 200.0, torch.inf] and out[4] != out[4]


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_equals_the_reference(table_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for size in SIZES:
        table, ids = draw(9, size, dtype=table_dtype), torch.tensor([8, 0, 0, 3])
        assert torch.equal(TRITON.embed(ids, table, dtype), Kernels().embed(ids, table, dtype))
    part = draw(9, 64, dtype=table_dtype)[:, :32]
    assert torch.equal(TRITON.embed(ids, part, dtype), Kernels().embed(ids, part, dtype))


def test_an_id_outside_the_table_gives_a_row_that_is_not_finite() -> None:
    ids = torch.tensor([0, -1, 8, 9, 2**62])
    out = TRITON.embed(ids, draw(9, 40), torch.float16)
    assert TRITON.finite_rows(out).tolist() == [True, False, True, False, False] and out[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 3001])
def test_a_row_is_finite_if_all_of_it_is(dtype: torch.dtype, size: int) -> None:
    x = draw(6, size, dtype=dtype)
    x[0, -1], x[1, 0], x[2, size // 2] = torch.nan, torch.inf, -torch.inf
    x[3, -1], x[4, -1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert torch.equal(TRITON.finite_rows(x), torch.tensor([False, False, False, True, True, True]))


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other() -> None:
    for bad in (torch.nan, torch.inf):
        x = draw(3, 100)
        x[1, 27] = bad
        for out in (
            TRITON.rms_norm(x, torch.ones(100), 1e-6),
            TRITON.activate(x, "silu"),
            TRITON.activate(x, "gelu_tanh"),
        ):
            assert TRITON.finite_rows(out).tolist() == [True, False, True]


# -- rows alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1000])
def test_rows_do_not_know_of_one_another(size: int, dtype: torch.dtype) -> None:
    x, weight = draw(12, 2 * size, dtype=dtype) * 4, draw(2 * size, dtype=dtype, seed=1)
    ids = torch.arange(11, -1, -1)

    def run(part: slice) -> tuple[torch.Tensor, ...]:
        some = x[part]
        summed = TRITON.add_rms_norm(some.clone(), some.clone(), weight, 1e-6)
        return (
            TRITON.rms_norm(some, weight, 1e-6),
            *summed,
            TRITON.activate(some, "silu"),
            TRITON.embed(ids[part], x, dtype),
        )

    whole = run(slice(0, 12))
    for first, count in ((0, 1), (7, 1), (3, 2), (5, 7)):
        part = slice(first, first + count)
        assert all(torch.equal(some, all_[part]) for some, all_ in zip(run(part), whole, strict=True)), f"{count} rows"


def test_no_rows_give_no_rows() -> None:
    x, weight = draw(0, 64), draw(64)
    assert TRITON.rms_norm(x, weight, 1e-6).shape == (0, 64) and TRITON.activate(x, "silu").shape == (0, 32)
    assert TRITON.embed(torch.zeros(0, dtype=torch.int64), draw(9, 64), torch.float32).shape == (0, 64)
    assert TRITON.finite_rows(x).shape == (0,)


# -- for GPUs that are not there -----------------------------------------------------------------------------------


def launch_all() -> None:
    """Sizes of Qwen3-0.6B and Qwen3-14B, and the widest rows; of each, steps of several sizes."""
    for hidden, inner, dtype in ((1024, 3072, torch.bfloat16), (5120, 17408, torch.float16), (20000, 8, torch.float32)):
        table, weight = torch.empty(9, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=dtype)
        for count in (1, 3, 16):
            x = torch.empty(count, hidden, dtype=dtype)
            rows.rms_norm(x, weight, 1e-6)
            rows.add_rms_norm(x, x.clone(), weight, 1e-5)
            rows.activate(torch.empty(count, 2 * inner, dtype=dtype), "silu")
            rows.activate(torch.empty(count, 2 * inner, dtype=dtype), "gelu_tanh")
            rows.activate(torch.empty(count, inner, dtype=dtype), "relu2")
            rows.finite_rows(x)
            rows.embed(torch.zeros(count, dtype=torch.int64), table, dtype)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_once_a_model_without_spills(arch: int) -> None:
    kernels = compile_all("tests.test_triton_rows", arch)
    names = ("_rms_norm", "_add_rms_norm", "_gate_mul", "_finite_rows", "_embed")
    expected = {**dict.fromkeys(names, 3), "_gate_mul": 9}  # of each activation
    assert Counter(kernel["kernel"] for kernel in kernels) == expected
    assert all(kernel["stack"] == 0 and kernel["shared"] <= 4096 for kernel in kernels), kernels
