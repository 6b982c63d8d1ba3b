"""A step's inputs, rotation and store, and block copies, in Triton's interpreter: equal to the reference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

import tests.triton_launches  # noqa: F401  # for every test
from quire.core.step import FROM_PREVIOUS
from quire.ops import Kernels, KVCache, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype, quantize
from quire.ops.ragged import DeviceSpans
from quire.ops.triton.kernels import TritonKernels
from tests.test_cpu_rows import Case
from tests.test_triton_rows import DTYPES, TOLERANCE, as_on_a_gpu
from tests.triton_compile import EACH_ARCHITECTURE, compile_all

__all__ = ["as_on_a_gpu"]

TRITON = TritonKernels("cpu")
BOTH = pytest.mark.parametrize("kernels", [Kernels(), TRITON], ids=["torch", "triton"])


def ints(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# -- a step's inputs -----------------------------------------------------------------------------------------------


def step(seed: int, padded_spans: int) -> tuple[list[tuple[int, int, list[int]]], DeviceSpans]:
    """Spans (request, start, tokens) of some of 9 requests, and the same with padding as kernels read it."""
    draw = random.Random(seed)
    spans = []
    for request in draw.sample(range(9), draw.randint(1, 9)):
        count = draw.choice([1, 1, 2, 40])
        spans.append((request, draw.randrange(300), [draw.randrange(100) for _ in range(count)]))
        if count == 1 and draw.random() < 0.7:
            spans[-1][2][0] = FROM_PREVIOUS
    row_starts = [0]
    for _, _, tokens in spans:
        row_starts.append(row_starts[-1] + len(tokens))
    tables = torch.randint(1, 2**20, (9, 30), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return spans, DeviceSpans(
        row_starts=ints(row_starts + [row_starts[-1]] * padded_spans),
        starts=ints([start for _, start, _ in spans] + [0] * padded_spans),
        context_lens=ints([-7] * (len(spans) + padded_spans)),
        table_rows=ints([request for request, _, _ in spans] + [0] * padded_spans),
        block_tables=tables,
    )


@BOTH
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("padded_rows, padded_spans", [(0, 0), (5, 3), (0, 300), (300, 1)])
def test_a_step_s_inputs_are_what_its_spans_say(
    kernels: Kernels, seed: int, padded_rows: int, padded_spans: int
) -> None:
    spans, on_device = step(seed, padded_spans)
    last_tokens = torch.tensor([50, -1, 2**31 + 5, 0, -1, 9, 8, 7, -3])
    recent = last_tokens[:, None]
    owners = [index for index, span in enumerate(spans) for _ in span[2]]
    tokens = [token for span in spans for token in span[2]]
    made = kernels.place(
        ints(tokens + [17] * padded_rows), ints(owners + [0] * padded_rows), recent, on_device, block_size=16
    )
    ids, positions, slots = [], [], []
    for request, start, tokens in spans:
        last = max(int(last_tokens[request]), 0)
        for position, token in enumerate(tokens, start):
            block = int(on_device.block_tables[request, position // 16])
            ids.append(last if token == FROM_PREVIOUS else token)
            positions.append(position)
            slots.append(block * 16 + position % 16)
    assert all(tensor.dtype == torch.int64 for tensor in made)
    assert [tensor.tolist() for tensor in made] == [column + [0] * padded_rows for column in (ids, positions, slots)]
    ends = [start + len(tokens) for _, start, tokens in spans]
    assert on_device.context_lens.tolist() == ends + [0] * padded_spans


@BOTH
def test_tokens_that_only_the_device_knows_are_found_by_their_positions(kernels: Kernels) -> None:
    recent = 100 * torch.arange(9)[:, None] + torch.arange(8)  # at position p, request r has 100 r + p % 8
    recent[3, 7] = -1
    spans = DeviceSpans(ints([0, 3, 5, 6, 6]), ints([4, 21, 8, 0]), ints([0] * 4), ints([2, 3, 7, 0]), torch.ones(9, 3))
    spans.block_tables = spans.block_tables.to(torch.int32)
    made = kernels.place(ints([-1, -1, -1, -2, -2, 9, -1]), ints([0, 0, 0, 1, 1, 2, 0]), recent, spans, block_size=16)
    assert made[0].tolist() == [204, 205, 206, 306, 0, 9, 0]
    assert made[1].tolist() == [4, 5, 6, 21, 22, 8, 0]


@BOTH
def test_slots_may_be_beyond_32_bits(kernels: Kernels) -> None:
    spans = DeviceSpans(ints([0, 1]), ints([255]), ints([0]), ints([0]), ints([2**31 - 1]).view(1, 1))
    made = kernels.place(ints([5]), ints([0]), torch.tensor([[0]]), spans, block_size=256)
    assert [tensor.tolist() for tensor in made] == [[5], [255], [(2**31 - 1) * 256 + 255]]


# -- block copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("block_size, head_dim, sides", [(16, 20, 2), (32, 80, 2), (16, 40, 1)])
def test_a_copy_moves_the_heads_of_blocks_and_nothing_else(
    kv_cache_dtype: KVCacheDtype, block_size: int, head_dim: int, sides: int
) -> None:
    shape = 7, 2, sides, head_dim, block_size
    ours, theirs = (KVCache(*shape, torch.bfloat16, kv_cache_dtype, sides=sides) for _ in range(2))
    whole = torch.randint(0, 256, (ours.data.nbytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for kv in (ours, theirs):
        kv.data.view(-1).view(torch.uint8).copy_(whole)
    copies = [(1, 2, 5), (1, 3, block_size), (4, 6, 1)]
    TRITON.copy_blocks(ours, copies)
    Kernels().copy_blocks(theirs, copies)
    assert torch.equal(ours.data.view(-1).view(torch.uint8), theirs.data.view(-1).view(torch.uint8))
    assert not torch.equal(theirs.data.view(-1).view(torch.uint8), whole)
    TRITON.copy_blocks(ours, [])
    assert torch.equal(ours.data.view(-1).view(torch.uint8), theirs.data.view(-1).view(torch.uint8))


# -- queries, keys and values --------------------------------------------------------------------------------------


def assert_same(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


SHAPES = [(4, 2, 16), (2, 2, 24), (3, 1, 80), (6, 3, 96), (2, 1, 128), (1, 1, 2)]


@pytest.mark.quick("shape0-dtype1", "shape1-dtype2", "shape2-dtype2", "shape3-dtype2", "shape4-dtype1", "shape5-dtype0")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_store_equal_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for tokens, norm, values in ((1, True, True), (5, False, False), (5, True, False), (5, True, True)):
        case = Case(shape, tokens, dtype, values=values)
        ours, theirs = case.cache(dtype), case.cache(dtype)
        out, expected = (case.run(k, kv, slice(None), norm) for k, kv in ((TRITON, ours), (Kernels(), theirs)))
        assert out.shape == (tokens, case.heads, case.dim)
        tolerance = 4 * TOLERANCE[dtype] if norm else 0.0  # without a norm the very bits
        assert_same(out, expected, tolerance)
        assert_same(ours.data, theirs.data, tolerance)
        untouched = theirs.data == 7
        assert_same(ours.data[untouched], theirs.data[untouched])  # nothing but the slots was written


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalized_heads_are_the_reference_s_bits_where_the_mean_is_exact(dtype: torch.dtype) -> None:
    case = Case((4, 2, 80), 6, dtype)
    case.qkv = torch.randint(-8, 9, case.qkv.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    ours, theirs = case.cache(dtype), case.cache(dtype)
    assert_same(case.run(TRITON, ours, slice(None)), case.run(Kernels(), theirs, slice(None)))
    assert_same(ours.data, theirs.data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(4, 2, 16), (2, 1, 66)])
def test_a_quantized_cache_holds_the_codes_of_the_rotated_keys_and_of_the_values(
    shape: tuple[int, int, int], kv_cache_dtype: KVCacheDtype, dtype: torch.dtype
) -> None:
    case = Case(shape, 9, dtype)
    case.qkv[1] = 0.0
    case.qkv[2, -1] = torch.inf
    case.qkv[3, -2] = -torch.nan
    case.qkv[4] *= torch.finfo(dtype).tiny
    case.qkv[5] = case.qkv[5].clamp(-1, 1) * torch.finfo(dtype).max  # a turned key may be infinite
    case.qkv[6] = case.qkv[6].sign() * 2.0**-142  # fp32's scale is subnormal, and so coarse that int8's codes are cut
    case.qkv[7] = case.qkv[7].sign() * 2.0**-140  # that fp8's are
    ours, theirs = case.cache(dtype, kv_cache_dtype), case.cache(dtype, kv_cache_dtype)
    for kernels, kv in ((TRITON, ours), (Kernels(), theirs)):
        case.run(kernels, kv, slice(None), norm=False)
    assert ours.scales is not None and theirs.scales is not None
    assert torch.equal(ours.numbers.view(torch.uint8), theirs.numbers.view(torch.uint8))
    assert_same(ours.scales, theirs.scales)
    written = theirs.scales[case.slots // 16, 1, :, :, case.slots % 16]  # [tokens, kv_heads, 2]
    assert (written[1] == 0).all() and written[2:4, -1, 1].isnan().all() and written[0].isfinite().all()


@pytest.mark.quick("int8-127.0")
@pytest.mark.parametrize("kv_cache_dtype, largest", [("int8", 127.0), ("fp8", 448.0)])
def test_codes_are_rounded_as_the_definition_says(kv_cache_dtype: KVCacheDtype, largest: float) -> None:
    """Every number of fp16 up to the largest, in rows whose scale is 1: so all codes occur, and all ties."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = numbers[numbers.abs() <= largest]
    rows = F.pad(F.pad(numbers, (0, -len(numbers) % 255)).view(-1, 255), (0, 1), value=largest)
    none, slots = torch.zeros(0, dtype=torch.int64), torch.arange(256, 256 + len(rows))
    kv = KVCache(-(-len(rows) // 256) + 1, 1, 1, 256, 256, torch.float32, kv_cache_dtype)
    batch = RaggedBatch(none, none, slots, [0], [], none.view(0, 0), 256)
    tables = torch.ones(len(rows), 128), torch.zeros(len(rows), 128)
    TRITON.rotate_and_store(rows.repeat(1, 3), None, tables, kv, batch, 0)
    codes, _ = quantize(rows, kv.stored_dtype)
    values = kv.numbers[1:, 0, 0, 1].flatten(0, 1)[: len(rows)]
    assert torch.equal(values.view(torch.uint8), codes.view(torch.uint8))
    assert len(codes.view(torch.uint8).unique()) == (255 if kv_cache_dtype == "int8" else 254)  # two are NaN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_rotated_rows_do_not_know_of_one_another(dtype: torch.dtype, kv_cache_dtype: KVCacheDtype) -> None:
    case = Case((3, 1, 80), 12, dtype, block_size=32)
    kv = case.cache(dtype, kv_cache_dtype)
    whole = case.run(TRITON, kv, slice(None))
    for first, count in ((0, 1), (7, 1), (3, 2), (5, 7)):
        part, other = slice(first, first + count), case.cache(dtype, kv_cache_dtype)
        assert torch.equal(case.run(TRITON, other, part), whole[part])
        block, offset = case.slots[part] // 32, case.slots[part] % 32
        assert torch.equal(other.numbers[block, :, :, :, offset], kv.numbers[block, :, :, :, offset])
        if kv.scales is not None and other.scales is not None:
            assert torch.equal(other.scales[block, :, :, :, offset], kv.scales[block, :, :, :, offset])


def test_rows_of_padding_write_to_the_null_block_alone() -> None:
    case = Case((4, 2, 16), 5, torch.float32)
    kv, other = case.cache(torch.float32), case.cache(torch.float32)
    case.run(TRITON, other, slice(0, 3))
    case.slots[3:] = 0
    case.run(TRITON, kv, slice(None))
    assert torch.equal(kv.data[1:], other.data[1:]) and not torch.equal(kv.data[0], other.data[0])


# -- for GPUs that are not there -----------------------------------------------------------------------------------


KINDS: list[tuple[KVCacheDtype, torch.dtype, tuple[int, int, int], bool]] = [
    ("auto", torch.bfloat16, (16, 8, 128), True),
    ("int8", torch.bfloat16, (32, 4, 128), True),
    ("fp8", torch.float16, (40, 8, 128), False),
    ("auto", torch.float16, (3, 1, 80), True),
    ("fp8", torch.float32, (8, 4, 256), True),
]
"""Heads of Qwen3-0.6B, of Qwen3-14B but for the norm, and of other dimensions."""


def launch_all() -> None:
    """Of each kind, steps of several sizes and layers."""
    for seed, padding in ((0, 0), (1, 3), (2, 16)):
        spans, on_device = step(seed, padding)
        ids = torch.zeros(sum(len(tokens) for _, _, tokens in spans) + padding, dtype=torch.int32)
        TRITON.place(ids, ids, torch.zeros(9, 4, dtype=torch.int64), on_device, 16)
    for kv_cache_dtype, dtype, shape, norm in KINDS:
        for tokens, layer in ((1, 0), (3, 1), (16, 16)):
            case = Case(shape, tokens, dtype)
            kv = case.cache(dtype, kv_cache_dtype)
            case.run(TRITON, kv, slice(None), norm, layer)
            TRITON.copy_blocks(kv, [(1, 2, 3)] * tokens)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_once_a_model_without_spills(arch: int) -> None:
    kernels = compile_all("tests.test_triton_cache", arch)
    times = {"_place": 1, "_copy_blocks": len(KINDS), "_rotate_and_store": len(KINDS)}
    assert Counter(kernel["kernel"] for kernel in kernels) == times
    assert all(kernel["stack"] == 0 and kernel["shared"] <= 8192 for kernel in kernels), kernels
