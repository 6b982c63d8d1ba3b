"""Attention in C++: equal to the torch reference, and bit-equal however a sequence is cut, batched and stored."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
from collections.abc import Sequence

import pytest
import torch

from quire.ops import BLOCK_SIZES, Kernels, KVCache, RaggedBatch, paged_attention, store_kv
from quire.ops.cpu import attention, library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kv_cache import KVCacheDtype

ISAS = library.usable()
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LAYERS, LAYER = 2, 1

Span = tuple[int, int]
"""First position and rows."""

pytestmark = pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built: there was no compiler")


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


class Request:
    """Queries, keys and values of one request, [tokens, heads, head_dim] each."""

    def __init__(self, tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        heads, kv_heads, dim = shape
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(tokens, n, dim, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
        )


def poisoned_cache(
    blocks: int, shape: tuple[int, int, int], size: int, dtype: torch.dtype, stored: KVCacheDtype
) -> KVCache:
    """A cache in which every number or scale is NaN."""
    kv = KVCache(blocks, LAYERS, shape[1], shape[2], size, dtype, stored)
    kv.data.view(torch.uint8).fill_(255)
    return kv


def batch_of(spans: Sequence[Span], tables: Sequence[torch.Tensor], size: int) -> RaggedBatch:
    at = [torch.arange(start, start + rows) for start, rows in spans]
    return RaggedBatch(
        token_ids=torch.zeros(sum(rows for _, rows in spans), dtype=torch.int64),
        positions=torch.cat(at),
        slots=torch.cat([table[p // size] * size + p % size for p, table in zip(at, tables, strict=True)]),
        row_starts=[0, *itertools.accumulate(rows for _, rows in spans)],
        context_lens=[start + rows for start, rows in spans],
        block_tables=torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
        block_size=size,
    )


def random_step(
    rng: random.Random, dtype: torch.dtype, stored: KVCacheDtype, most: int = 300
) -> tuple[torch.Tensor, KVCache, RaggedBatch, int | None]:
    """Queries of some spans, their cache filled up to each span's end, the batch, and a window."""
    group, kv_heads = rng.choice([1, 2, 4, 5, 7, 8]), rng.choice([1, 2, 3])
    shape = group * kv_heads, kv_heads, rng.choice([8, 16, 24, 64, 80, 96, 128, 256])
    size, window = rng.choice(BLOCK_SIZES), rng.choice([None, None, 1, 50, 200])
    spans = [(rng.choice([0, 5, 130, 300]), rng.choice([1, 1, 2, 17, rng.randint(1, most)])) for _ in range(3)]
    counts = [-(-(start + rows) // size) for start, rows in spans]
    kv = poisoned_cache(sum(counts) + 1, shape, size, dtype, stored)
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    requests = [Request(start + rows, shape, dtype, rng.randint(0, 999)) for start, rows in spans]
    fill = batch_of([(0, start + rows) for start, rows in spans], tables, size)
    store_kv(torch.cat([r.k for r in requests]), torch.cat([r.v for r in requests]), kv, fill, LAYER)
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    return q, kv, batch_of(spans, tables, size), window


def compare(kernels: CpuKernels, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, window: int | None) -> None:
    scale = kv.head_dim**-0.5
    out = kernels.attend(q, kv, batch, LAYER, scale, window).view(q.shape)
    expected = paged_attention(q, kv, batch, LAYER, scale, window)
    # With bf16 products the softmax's weights are rounded to bf16 too: an error relative to the values, which are
    # about 1, not to their sum. Both ends of the tolerance are some of bf16's or fp16's last places.
    last_place = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[q.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=2 * last_place, rtol=2 * last_place)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_reference(kernels: CpuKernels, dtype: torch.dtype, stored: KVCacheDtype) -> None:
    torch.manual_seed(0)
    for seed in range(3):
        compare(kernels, *random_step(random.Random(seed), dtype, stored))


def test_a_long_prompt_equals_the_reference() -> None:
    kernels, shape = CpuKernels(ISAS[0]), (4, 2, 64)
    request, kv = Request(2048, shape, torch.bfloat16, 1), poisoned_cache(130, shape, 16, torch.bfloat16, "auto")
    batch = batch_of([(0, 2048)], [torch.randperm(128) + 1], 16)
    store_kv(request.k, request.v, kv, batch, LAYER)
    compare(kernels, request.q, kv, batch, None)


LENGTH = 300


def in_chunks(
    kernels: Kernels, request: Request, lengths: Sequence[int], size: int, stored: KVCacheDtype, window: int | None
) -> torch.Tensor:
    """The output of a request computed in chunks, each beside a chunk of another request."""
    shape = request.q.shape[1], request.k.shape[1], request.q.shape[2]
    other = Request(LENGTH, shape, request.q.dtype, seed=2)
    blocks = -(-LENGTH // size)
    kv = poisoned_cache(2 * blocks + 1, shape, size, request.q.dtype, stored)
    mine, others = torch.split(torch.randperm(2 * blocks) + 1, blocks)
    out, start = [], 0
    for length in lengths:
        batch = batch_of([(start, length), (0, length)], [mine, others], size)
        part = slice(start, start + length)
        q, k, v = (
            torch.cat([a[part], b[:length]])
            for a, b in ((request.q, other.q), (request.k, other.k), (request.v, other.v))
        )
        store_kv(k, v, kv, batch, LAYER)
        out.append(kernels.attend(q, kv, batch, LAYER, shape[2] ** -0.5, window)[:length])
        start += length
    return torch.cat(out)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("stored, window", [("auto", None), ("auto", 150), ("int8", 70), ("fp8", None)])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 24), (4, 1, 80), (3, 3, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_depend_on_the_request_alone(
    kernels: CpuKernels,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    stored: KVCacheDtype,
    window: int | None,
) -> None:
    request = Request(LENGTH, shape, dtype, seed=1)
    with kernels.threads(2):
        whole = in_chunks(kernels, request, [LENGTH], 16, stored, window)
    assert whole.isfinite().all()
    for size, lengths in (
        (16, [LENGTH]),
        (64, [1, 2, 3, 5, 7, 9, 127, 130, 16]),
        (256, [150, 120, *[1] * 5, 25]),
    ):
        out = in_chunks(kernels, request, lengths, size, stored, window)
        assert torch.equal(out, whole), f"blocks of {size}, chunks {lengths}"


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_every_code_is_read_as_its_number(kernels: CpuKernels, stored: KVCacheDtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255] if stored == "fp8" else [128]] = 0  # NaN in fp8; -128, which no number becomes
    kv = poisoned_cache(2, (2, 1, 256), 16, torch.bfloat16, stored)
    assert kv.scales is not None
    kv.numbers.view(torch.uint8)[1, LAYER, 0, :, 0] = codes  # the only key, and its value
    kv.scales[1, LAYER, 0, :, 0] = 1.0
    q = torch.zeros(1, 2, 256, dtype=torch.bfloat16)
    out = kernels.attend(q, kv, batch_of([(0, 1)], [torch.tensor([1])], 16), LAYER, 1.0, None).view(2, 256)
    assert torch.equal(out, kv.numbers[1, LAYER, 0, 1, 0].to(torch.bfloat16).expand(2, 256))


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(kernels: CpuKernels, stored: KVCacheDtype) -> None:
    shape = (2, 1, 16)
    for name, at in (("k", 3), ("v", 200)):
        request = Request(256, shape, torch.bfloat16, seed=1)
        getattr(request, name)[at, 0, 5] = float("inf")
        kv = poisoned_cache(17, shape, 16, torch.bfloat16, stored)
        batch = batch_of([(0, 256)], [torch.arange(1, 17)], 16)
        store_kv(request.k, request.v, kv, batch, LAYER)
        decode = batch_of([(at, 1)], [torch.arange(1, 17)], 16)
        out = kernels.attend(request.q[at : at + 1], kv, decode, LAYER, 0.25, None)
        assert not out.isfinite().all(), f"{name} at {at}"


def unreadable_behind(numbers: Sequence[int]) -> torch.Tensor:
    """int64 numbers at the end of a page, after which nobody may read."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory = torch.frombuffer(pages, dtype=torch.int64)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(memory.data_ptr() + mmap.PAGESIZE)
    assert libc.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, ctypes.get_errno()
    numbers_there = memory[: mmap.PAGESIZE // 8][-len(numbers) :]
    return numbers_there.copy_(torch.tensor(numbers))


@pytest.mark.parametrize("rows", [1, 16])
def test_nothing_behind_the_block_tables_is_read(kernels: CpuKernels, rows: int) -> None:
    """Keys are multiplied 16 or 32 at a time, and the last block may be the first half of these."""
    for tokens in (16, 48, 144):
        request, blocks = Request(tokens, (2, 1, 32), torch.bfloat16, seed=1), list(range(1, tokens // 16 + 1))
        kv = poisoned_cache(len(blocks) + 1, (2, 1, 32), 16, torch.bfloat16, "auto")
        store_kv(request.k, request.v, kv, batch_of([(0, tokens)], [torch.tensor(blocks)], 16), LAYER)
        batch = batch_of([(tokens - rows, rows)], [torch.tensor(blocks)], 16)
        batch.block_tables = unreadable_behind(blocks).view(1, -1)
        compare(kernels, request.q[-rows:], kv, batch, None)


def test_queries_may_lie_beside_keys_and_values() -> None:
    torch.manual_seed(0)
    kernels, (q, kv, batch, window) = CpuKernels(ISAS[0]), random_step(random.Random(5), torch.bfloat16, "auto")
    beside = torch.cat([q, q], dim=1)[:, : q.shape[1]]
    assert torch.equal(
        kernels.attend(beside, kv, batch, LAYER, 0.1, window), kernels.attend(q, kv, batch, LAYER, 0.1, window)
    )


def test_items_cover_every_row_and_head_once() -> None:
    starts, contexts = [0, 1, 301, 303], [900, 300, 70]
    for threads in (1, 2, 64):
        items = attention.plan_items(starts, contexts, 64, 6, threads)
        seen = [
            (row, head)
            for _, first, rows, _, _, start, heads in items.tolist()
            for row in range(first, first + rows)
            for head in range(start, start + heads)
        ]
        assert sorted(seen) == list(itertools.product(range(303), range(6)))
        for span, row, rows, position, end, _, _ in items.tolist():
            assert rows <= 64
            assert contexts[span] - position == starts[span + 1] - row
            assert end == position + rows


def test_a_tile_has_many_rows_where_enough_items_are_left() -> None:
    few, many = sorted(attention.ROW_TILES)
    assert attention.rows_of_tile([0, 2048], 2, 8, 2) == many // 2
    assert attention.rows_of_tile([0, 2048], 2, 8, 64) == few // 2
    assert attention.rows_of_tile([0, 1, 31], 2, 8, 2) == 30, "no more than a span has"
    assert attention.rows_of_tile([0, 4], 2 * many, 1, 1) == 1


def test_what_does_not_fit_is_refused() -> None:
    torch.manual_seed(0)
    kernels, (q, kv, batch, _) = CpuKernels(ISAS[0]), random_step(random.Random(5), torch.bfloat16, "auto")
    with pytest.raises(ValueError, match="do not fit a batch of"):
        kernels.attend(q[1:], kv, batch, LAYER, 1.0, None)
    with pytest.raises(ValueError, match="do not fit a batch of"):
        kernels.attend(q, kv, batch, LAYERS, 1.0, None)
    with pytest.raises(ValueError, match="do not fit a cache of"):
        kernels.attend(q.float(), kv, batch, LAYER, 1.0, None)
    batch.block_tables[0, 0] = kv.num_blocks
    with pytest.raises(ValueError, match=f"the cache has 0 to {kv.num_blocks - 1}"):
        kernels.attend(q, kv, batch, LAYER, 1.0, None)


def seen_both_ways(request: Request, window: int | None) -> torch.Tensor:
    """The definition, in float64: each row sees all keys, or those less than a window away."""
    q, k, v = (tensor.double() for tensor in (request.q, request.k, request.v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    apart = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    if window is not None:
        scores = scores.masked_fill(apart.abs() >= window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_prompts_see_what_follows_and_not_their_company(
    kernels: CpuKernels, dtype: torch.dtype, window: int | None
) -> None:
    shape, size, lengths = (4, 2, 24), 16, (1, 17, 128, 300, 129)
    requests = [Request(length, shape, dtype, seed) for seed, length in enumerate(lengths)]
    counts = [-(-length // size) for length in lengths]
    kv = poisoned_cache(sum(counts) + 1, shape, size, dtype, "auto")
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    spans = [(0, length) for length in lengths]
    batch, q = batch_of(spans, tables, size), torch.cat([request.q for request in requests])
    store_kv(torch.cat([r.k for r in requests]), torch.cat([r.v for r in requests]), kv, batch, LAYER)

    def attend(used: Kernels, q: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        return used.attend(q, kv, batch, LAYER, shape[2] ** -0.5, window, causal=False).view(q.shape)

    for used in (kernels, Kernels()):
        together = attend(used, q, batch).split(lengths)
        for request, table, span, out in zip(requests, tables, spans, together, strict=True):
            last_place = 2**-8 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(out.double(), seen_both_ways(request, window), atol=4 * last_place, rtol=0)
            assert torch.equal(attend(used, request.q, batch_of([span], [table], size)), out)
