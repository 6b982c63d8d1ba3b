"""The row kernels in C++: equal to the reference on every instruction set, each row independent of the others."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from quire.ops import HeadNorm, Kernels, KVCache, RaggedBatch
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kv_cache import KVCacheDtype, quantize

pytestmark = pytest.mark.skipif(
    not library.usable(), reason="no compiled kernels: Quire was installed without a compiler"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of numbers of about 1: a unit in the last place or two, since a mean may round to the other side."""

SIZES = [1, 15, 16, 17, 64, 100, 1024, 3001]
ROWS = [1, 2, 3, 5, 8, 33]


@pytest.fixture(params=library.usable())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, kernels: CpuKernels) -> Iterator[int]:
    with kernels.threads(request.param):
        yield request.param


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == expected.dtype and out.shape == expected.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


# -- norms, gate, embedding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_the_reference(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, weight = draw(7, size, dtype=dtype) * 3, draw(size, dtype=dtype, seed=1)
        residual = draw(7, size, dtype=dtype, seed=2)
        assert_close(kernels.rms_norm(x, weight, 1e-6), Kernels().rms_norm(x, weight, 1e-6))
        expected, total = Kernels().add_rms_norm(x, residual, weight, 0.1)
        out, our_total = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 0.1)
        assert torch.equal(our_total, total)
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norms_weight_in_fp32_is_applied_to_what_is_not_rounded(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Nearly all bits are the reference's: the order of a sum differs, which is rarely seen after one rounding."""
    for size in SIZES:
        x, weight, residual = draw(7, size, dtype=dtype) * 3, 1 + draw(size, seed=1), draw(7, size, dtype=dtype, seed=2)
        expected = Kernels().rms_norm(x, weight, 1e-6)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        assert (expected == exact.to(dtype)).float().mean() > 0.98
        assert (kernels.rms_norm(x, weight, 1e-6) == expected).float().mean() > 0.98
        ours, theirs = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 0.1), x + residual
        assert torch.equal(ours[1], theirs)
        assert (ours[0] == Kernels().rms_norm(theirs, weight, 0.1)).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_the_reference(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = torch.cat([draw(5, size, dtype=dtype) * 10, draw(5, size, dtype=dtype, seed=1)], dim=1)
        assert_close(kernels.activate(x, "silu"), Kernels().activate(x, "silu"))
        assert_close(kernels.activate(x, "gelu_tanh"), Kernels().activate(x, "gelu_tanh"))


def test_the_gate_is_finite_for_large_inputs_and_keeps_what_is_not_a_number(kernels: CpuKernels) -> None:
    gate = [-1e30, -200.0, 200.0, torch.inf, torch.nan]
    for activation in ("silu", "gelu_tanh"):
        out = kernels.activate(torch.tensor([gate + [1.0] * 5]), activation)[0].tolist()
        assert out[:4] == [0.0, 0.0, 200.0, torch.inf] and out[4] != out[4]


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(kernels: CpuKernels) -> None:
    for bad in (torch.nan, torch.inf):
        x = draw(3, 100)
        x[1, 77] = bad
        for out in (
            kernels.rms_norm(x, torch.ones(100), 1e-6),
            kernels.activate(x, "silu"),
            kernels.activate(x, "gelu_tanh"),
        ):
            assert out.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_equals_the_reference(kernels: CpuKernels, table_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for size in SIZES:
        table, ids = draw(9, size, dtype=table_dtype), torch.tensor([8, 0, 0, 3])
        assert torch.equal(kernels.embed(ids, table, dtype), Kernels().embed(ids, table, dtype))
        assert torch.equal(kernels.embed(ids[::2], table, dtype), table[[8, 0]].to(dtype))
    wide = draw(9, 64, dtype=table_dtype)[:, :32]
    assert torch.equal(kernels.embed(ids, wide, dtype), Kernels().embed(ids, wide, dtype))


@pytest.mark.parametrize("bad", [-1, 9, 2**62])
def test_an_id_outside_the_table_is_refused(kernels: CpuKernels, bad: int) -> None:
    with pytest.raises(IndexError, match=f"{bad}.*the table has 9 rows"):
        kernels.embed(torch.tensor([1, bad]), draw(9, 8), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 100, 1024])
def test_rows_of_norms_and_gate_do_not_know_of_one_another(
    kernels: CpuKernels, size: int, dtype: torch.dtype, threads: int
) -> None:
    x, weight = draw(300, 2 * size, dtype=dtype) * 4, draw(2 * size, dtype=dtype, seed=1)
    ids = torch.arange(299, -1, -1)

    def run(part: slice) -> tuple[torch.Tensor, ...]:
        rows = x[part]
        summed = kernels.add_rms_norm(rows.clone(), rows.clone(), weight, 1e-6)
        return (
            kernels.rms_norm(rows, weight, 1e-6),
            *summed,
            kernels.activate(rows, "silu"),
            kernels.embed(ids[part], x, dtype),
        )

    whole = run(slice(0, 300))
    for count in ROWS:
        part = slice(97, 97 + count)
        assert all(torch.equal(some, all_[part]) for some, all_ in zip(run(part), whole, strict=True)), f"{count} rows"


def test_a_soft_cap_is_a_tanh_whatever_else_is_there(kernels: CpuKernels, threads: int) -> None:
    logits = torch.cat([draw(5, 3001) * 40, torch.tensor([0.0, -0.0, 1e-30, 3e4, -3e4]).expand(5, -1)], dim=1)
    expected = (logits.double() / 30).tanh() * 30
    whole = kernels.soft_cap(logits.clone(), 30.0)
    for out in (whole, Kernels().soft_cap(logits.clone(), 30.0)):
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(kernels.soft_cap(logits[3:4, 1:].clone(), 30.0), whole[3:4, 1:])
    assert kernels.soft_cap(torch.tensor([[torch.nan, torch.inf]]), 30.0)[0, 0].isnan()


# -- queries, keys and values --------------------------------------------------------------------------------------


class Case:
    """Random rows, norms, angles and slots for (heads, kv_heads, head_dim)."""

    def __init__(
        self, shape: tuple[int, int, int], tokens: int, dtype: torch.dtype, block_size: int = 16, values: bool = False
    ) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.qkv = draw(tokens, (self.heads + 2 * self.kv_heads) * self.dim, dtype=dtype) * 3
        normed = self.heads + self.kv_heads * (2 if values else 1)
        self.norm = HeadNorm(draw(normed, self.dim, dtype=dtype, seed=1), 1e-6)
        angles = draw(tokens, self.dim // 2, seed=2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.blocks = -(-tokens // block_size) + 2
        slots = random.Random(tokens).sample(range(block_size, self.blocks * block_size), tokens)
        self.slots, self.block_size = torch.tensor(slots), block_size

    def cache(self, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = "auto") -> KVCache:
        kv = KVCache(self.blocks, 2, self.kv_heads, self.dim, self.block_size, dtype, kv_cache_dtype)
        kv.data.fill_(7)
        return kv

    def run(self, kernels: Kernels, kv: KVCache, rows: slice, norm: bool = True, layer: int = 1) -> torch.Tensor:
        none = torch.zeros(0, dtype=torch.int64)
        batch = RaggedBatch(none, none, self.slots[rows], [0], [], none.view(0, 0), self.block_size)
        tables = self.cos[rows], self.sin[rows]
        return kernels.rotate_and_store(self.qkv[rows].clone(), self.norm if norm else None, tables, kv, batch, layer)


SHAPES = [(4, 2, 16), (2, 2, 24), (3, 1, 80), (2, 1, 128), (1, 1, 2), (5, 1, 66)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_store_equal_the_reference(
    kernels: CpuKernels, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for tokens, norm, values in (
        (1, True, True),
        (1, False, False),
        (37, True, True),
        (37, True, False),
        (37, False, False),
    ):
        case = Case(shape, tokens, dtype, values=values)
        ours, theirs = case.cache(dtype), case.cache(dtype)
        out, expected = (case.run(k, kv, slice(None), norm) for k, kv in ((kernels, ours), (Kernels(), theirs)))
        assert out.is_contiguous() and out.shape == (tokens, case.heads, case.dim)
        compare = assert_close if norm else torch.testing.assert_close
        limits = {} if norm else {"rtol": 0, "atol": 0}  # without a norm the very bits
        compare(out, expected.contiguous(), **limits)
        compare(ours.data, theirs.data, **limits)  # and nothing but the slots was written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantized_cache_holds_the_codes_of_the_rotated_keys_and_of_the_values(
    kernels: CpuKernels, kv_cache_dtype: KVCacheDtype, dtype: torch.dtype
) -> None:
    for shape in ((4, 2, 16), (2, 1, 66)):
        case = Case(shape, 37, dtype)
        case.qkv[3] = 0.0
        case.qkv[5, -1] = torch.inf
        plain, quantized = case.cache(dtype), case.cache(dtype, kv_cache_dtype)
        before = quantized.data.clone()
        for kv in (plain, quantized):
            case.run(kernels, kv, slice(None), norm=False)
        block, offset = case.slots // 16, case.slots % 16
        codes, scales = quantize(plain.numbers[block, 1, :, :, offset], quantized.stored_dtype)
        assert quantized.scales is not None
        torch.testing.assert_close(quantized.scales[block, 1, :, :, offset], scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(quantized.numbers[block, 1, :, :, offset].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(quantized.data[:, 0], before[:, 0]) and torch.equal(quantized.data[0], before[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 80), (2, 1, 128)])
def test_rotated_rows_do_not_know_of_one_another(
    kernels: CpuKernels, shape: tuple[int, int, int], dtype: torch.dtype, threads: int
) -> None:
    case = Case(shape, 200, dtype, block_size=32)
    kv = case.cache(dtype)
    whole = case.run(kernels, kv, slice(None))
    for rows in ROWS:
        for start in (0, 97):
            part, other = slice(start, start + rows), case.cache(dtype)
            assert torch.equal(case.run(kernels, other, part), whole[part]), f"{rows} rows from {start}"
            block, offset = case.slots[part] // 32, case.slots[part] % 32
            assert torch.equal(other.data[block, :, :, :, offset], kv.data[block, :, :, :, offset])


@pytest.mark.parametrize("bad", [-1, 48, 2**62])
def test_a_slot_outside_the_cache_is_refused(kernels: CpuKernels, bad: int) -> None:
    case = Case((2, 1, 16), 2, torch.float32)
    kv = case.cache(torch.float32)
    assert kv.num_blocks == 3
    case.slots[1] = bad
    with pytest.raises(IndexError, match=f"{bad}.*the cache has 3 blocks"):
        case.run(kernels, kv, slice(None))
    assert (kv.data == 7).all()
