"""Latent attention in C++: equal to sums in fp64, and bit-equal however a sequence is cut, batched and stored."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops import BLOCK_SIZES, Kernels, KVCache, RaggedBatch
from quire.ops.cpu import latent, library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kv_cache import KVCacheDtype
from tests.test_cpu_attention import batch_of

ISAS = library.usable()
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
STORED: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")
LAYERS, LAYER, EPS = 2, 1, 1e-6

pytestmark = pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built: there was no compiler")


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


class Request:
    """What one request's tokens bring: queries [tokens, heads, width + rope], and rows that are not yet normalized
    and turned, [tokens, width + rope].
    """

    def __init__(self, tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        heads, width, rope = shape
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(tokens, heads, width + rope, generator=generator).to(dtype)
        self.rows = torch.randn(tokens, width + rope, generator=generator).to(dtype)


def poisoned_cache(
    blocks: int, shape: tuple[int, int, int], size: int, dtype: torch.dtype, stored: KVCacheDtype
) -> KVCache:
    """A cache in which every number or scale is NaN."""
    kv = KVCache(blocks, LAYERS, 1, shape[1] + shape[2], size, dtype, stored, sides=1)
    kv.data.view(torch.uint8).fill_(255)
    return kv


def turns(positions: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.unsqueeze(1) * 1e4 ** (torch.arange(0, rope, 2) / -rope)
    return angles.cos(), angles.sin()


def weight(width: int, dtype: torch.dtype) -> torch.Tensor:
    return (1 + torch.randn(width, generator=torch.Generator().manual_seed(7)) / 4).to(dtype)


def store(kernels: Kernels, rows: torch.Tensor, shape: tuple[int, int, int], kv: KVCache, batch: RaggedBatch) -> None:
    tables = turns(batch.positions, shape[2])
    kernels.store_latent(rows, weight(shape[1], rows.dtype), EPS, tables, kv, batch, LAYER)


def in_fp64(q: torch.Tensor, kv: KVCache, batch: RaggedBatch, scale: float, width: int) -> torch.Tensor:
    """Attention of each row over what it sees in the cache, written out."""
    out = []
    for span, (first, last) in enumerate(itertools.pairwise(batch.row_starts)):
        numbers = kv.numbers[batch.block_tables[span], LAYER, 0, 0].double()
        if kv.scales is not None:
            numbers *= kv.scales[batch.block_tables[span], LAYER, 0, 0].double().unsqueeze(-1)
        keys = numbers.flatten(0, 1).numpy()
        for row in range(first, last):
            seen = keys[: batch.context_lens[span] - (last - row) + 1]
            scores = q[row].double().numpy() @ seen.T * scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ seen[:, :width])
    return torch.from_numpy(np.stack(out))


def random_step(
    rng: random.Random, dtype: torch.dtype, stored: KVCacheDtype
) -> tuple[torch.Tensor, KVCache, RaggedBatch, tuple[int, int, int]]:
    """Queries of some spans, their cache filled up to each span's end, the batch, and heads, width and rope."""
    shape = rng.choice([1, 2, 5, 16, 70]), rng.choice([16, 24, 64, 72, 128]), rng.choice([2, 8, 16, 64])
    size = rng.choice(BLOCK_SIZES)
    spans = [(rng.choice([0, 5, 130, 511, 1100]), rng.choice([1, 1, 2, 17, rng.randint(1, 150)])) for _ in range(3)]
    counts = [-(-(start + rows) // size) for start, rows in spans]
    kv = poisoned_cache(sum(counts) + 1, shape, size, dtype, stored)
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    requests = [Request(start + rows, shape, dtype, rng.randint(0, 999)) for start, rows in spans]
    fill = batch_of([(0, start + rows) for start, rows in spans], tables, size)
    store(Kernels(), torch.cat([r.rows for r in requests]), shape, kv, fill)
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    return q, kv, batch_of(spans, tables, size), shape


def last_place(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]


# -- attention ------------------------------------------------------------------------------------------------------


EVERY_PAIR = [
    pytest.param(dtype, stored, seed, marks=() if (i + j + seed) % 3 == 0 else pytest.mark.slow)
    for i, dtype in enumerate(DTYPES)
    for j, stored in enumerate(STORED)
    for seed in range(3)
]
"""Each type meets each format and each step, and these each other; `make test-slow` adds the rest."""


@functools.lru_cache(maxsize=16)
def known_step(dtype: torch.dtype, stored: KVCacheDtype, seed: int) -> tuple[Any, ...]:
    """A random step and its attention in fp64: the same for the kernels of all instruction sets."""
    torch.manual_seed(seed)
    q, kv, batch, shape = random_step(random.Random(seed), dtype, stored)
    scale = (shape[1] + shape[2]) ** -0.5
    return q, kv, batch, shape, scale, in_fp64(q, kv, batch, scale, shape[1])


@pytest.mark.parametrize(("dtype", "stored", "seed"), EVERY_PAIR)
def test_attention_equals_sums_in_fp64(
    kernels: CpuKernels, dtype: torch.dtype, stored: KVCacheDtype, seed: int
) -> None:
    q, kv, batch, (heads, width, _), scale, expected = known_step(dtype, stored, seed)
    batch = replace(batch)  # without what kernels of another instruction set have made for it
    out = kernels.attend_latent(q, kv, batch, LAYER, scale, width)
    assert out.shape == (len(q), heads, width) and out.dtype == dtype
    # As in test_cpu_attention.py: the softmax's weights are rounded to bf16 too.
    tolerance = 2 * last_place(dtype)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_attention_equals_the_reference(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    for stored in STORED:
        q, kv, batch, (_, width, _) = random_step(random.Random(4), torch.float32, stored)
        out = kernels.attend_latent(q, kv, batch, LAYER, 0.1, width)
        torch.testing.assert_close(out, Kernels().attend_latent(q, kv, batch, LAYER, 0.1, width), atol=2e-6, rtol=2e-6)


LENGTH = 1100
"""Three splits, the last one not full."""


def in_chunks(
    kernels: Kernels,
    request: Request,
    shape: tuple[int, int, int],
    lengths: Sequence[int],
    size: int,
    stored: KVCacheDtype,
    alone: bool = False,
) -> torch.Tensor:
    """The output of a request computed in chunks, each beside a chunk of another request unless it is `alone`."""
    other = Request(LENGTH, shape, request.q.dtype, seed=2)
    blocks = -(-LENGTH // size)
    kv = poisoned_cache(2 * blocks + 1, shape, size, request.q.dtype, stored)
    tables = torch.split(torch.randperm(2 * blocks) + 1, blocks)
    out, start, others = [], 0, 1 - alone
    for length in lengths:
        batch = batch_of([(start, length), (0, length)][: 1 + others], tables[: 1 + others], size)
        q, rows = (
            torch.cat([a[start : start + length], b[: length * others]])
            for a, b in ((request.q, other.q), (request.rows, other.rows))
        )
        store(kernels, rows, shape, kv, batch)
        out.append(kernels.attend_latent(q, kv, batch, LAYER, q.shape[2] ** -0.5, shape[1])[:length])
        start += length
    return torch.cat(out)


@pytest.mark.parametrize(
    ("stored", "shape", "dtype"),
    [
        pytest.param(stored, shape, dtype, marks=() if (i + j + k) % 2 else pytest.mark.slow)
        for i, stored in enumerate(STORED)
        for j, shape in enumerate(((3, 24, 8), (16, 64, 16)))
        for k, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
)
def test_bits_depend_on_the_request_alone(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int], stored: KVCacheDtype
) -> None:
    torch.manual_seed(0)
    request = Request(LENGTH, shape, dtype, seed=1)
    with kernels.threads(2):
        whole = in_chunks(kernels, request, shape, [LENGTH], 16, stored)
    assert whole.isfinite().all()
    for count, size, lengths, alone in (
        (1, 16, [LENGTH], True),
        (1, 64, [1, 2, 3, 5, 7, 9, 127, 130, 420, *[1] * 3, 393], False),
        (2, 256, [510, 1, 1, 1, 1, 510, 70, *[1] * 6], True),  # one token at a time: items share its splits
    ):
        with kernels.threads(count):
            out = in_chunks(kernels, request, shape, lengths, size, stored, alone)
        assert torch.equal(out, whole), f"blocks of {size}, chunks {lengths}"


def test_one_token_has_the_same_bits_whoever_shares_its_splits(kernels: CpuKernels) -> None:
    shape, length = (70, 32, 8), 2500
    request, kv = Request(length, shape, torch.bfloat16, seed=1), poisoned_cache(158, shape, 16, torch.bfloat16, "auto")
    tables = [torch.randperm(157) + 1]
    store(kernels, request.rows, shape, kv, batch_of([(0, length)], tables, 16))
    outputs = []
    for count in (1, 2, 3):
        with kernels.threads(count):
            decode = batch_of([(length - 1, 1)], tables, 16)
            outputs.append(kernels.attend_latent(request.q[-1:], kv, decode, LAYER, 0.1, 32))
    pair = batch_of([(length - 2, 2)], tables, 16)
    assert torch.equal(kernels.attend_latent(request.q[-2:], kv, pair, LAYER, 0.1, 32)[1:], outputs[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("stored", STORED)
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(kernels: CpuKernels, stored: KVCacheDtype) -> None:
    shape = (2, 16, 8)
    for column, at in ((20, 3), (5, 600)):  # of the key alone, in another split; of the value too
        request = Request(640, shape, torch.bfloat16, seed=1)
        request.rows[at, column] = float("inf")
        kv = poisoned_cache(41, shape, 16, torch.bfloat16, stored)
        store(kernels, request.rows, shape, kv, batch_of([(0, 640)], [torch.arange(1, 41)], 16))
        for row, sees in ((at, True), (600, True), (at - 1, False)):
            decode = batch_of([(row, 1)], [torch.arange(1, 41)], 16)
            out = kernels.attend_latent(request.q[row : row + 1], kv, decode, LAYER, 0.25, 16)
            assert bool(out.isfinite().all()) != sees, f"row {row}, column {column} at {at}"


def test_queries_may_be_a_part_of_wider_rows() -> None:
    torch.manual_seed(0)
    kernels, (q, kv, batch, shape) = CpuKernels(ISAS[0]), random_step(random.Random(5), torch.bfloat16, "auto")
    expected = kernels.attend_latent(q, kv, batch, LAYER, 0.1, shape[1])
    for part in (torch.cat([q, q], dim=1)[:, : q.shape[1]], torch.cat([q, q], dim=2)[:, :, : q.shape[2]]):
        assert torch.equal(kernels.attend_latent(part, kv, batch, LAYER, 0.1, shape[1]), expected)


# -- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 16, 70, 128])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_items_cover_every_row_head_and_split_once(heads: int, threads: int) -> None:
    for starts, contexts in (([0, 1, 31, 33], [900, 30, 1200]), ([0, 1], [9000])):
        items, merges, left = latent.plan(starts, contexts, heads, threads)
        seen: list[tuple[int, int, int]] = []
        states: list[int] = []
        for span, row, tokens, position, head, count, split, splits, at in items.tolist():
            assert tokens * count <= latent.ROW_TILE
            assert contexts[span] - position == starts[span + 1] - row
            ends = -(-(position + tokens) // latent.SPLIT)
            assert split + splits <= ends and (at >= 0) == (splits < ends)
            seen += itertools.product(range(row, row + tokens), range(head, head + count), range(split, split + splits))
            states += range(at, at + tokens * count * splits) if at >= 0 else []
        merged = [
            state
            for _, tokens, _, count, splits, at in merges.tolist()
            for state in range(at, at + tokens * count * splits)
        ]
        assert sorted(states) == sorted(merged) == list(range(left))
        assert len(set(seen)) == len(seen)
        for span, context in enumerate(contexts):
            for row in range(starts[span], starts[span + 1]):
                number = -(-(context - (starts[span + 1] - 1 - row)) // latent.SPLIT)
                needed = set(itertools.product([row], range(heads), range(number)))
                assert needed <= set(seen)


def test_one_token_keeps_all_threads_busy() -> None:
    assert len(latent.plan([0, 1], [8192], 16, 8)[0]) == 16
    assert len(latent.plan([0, 1], [8192], 128, 2)[0]) >= 4


# -- the store and the rotation -------------------------------------------------------------------------------------


def stored_rows(kv: KVCache, batch: RaggedBatch) -> torch.Tensor:
    numbers = kv.numbers.float() if kv.scales is None else kv.numbers.float() * kv.scales.unsqueeze(-1)
    return numbers[:, LAYER].flatten(0, 3)[batch.slots]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_equals_the_reference(kernels: CpuKernels, dtype: torch.dtype, stored: KVCacheDtype) -> None:
    torch.manual_seed(0)
    for shape in ((1, 512, 64), (1, 24, 2), (1, 40, 24)):
        tokens = 40
        rows = torch.randn(tokens, shape[1] + shape[2] + 8).to(dtype)[:, : shape[1] + shape[2]]  # of a wider product
        batch = batch_of([(0, tokens)], [torch.tensor([2, 1, 3])], 16)
        mine, expected = (poisoned_cache(4, shape, 16, dtype, stored) for _ in range(2))
        store(kernels, rows, shape, mine, batch)
        store(Kernels(), rows, shape, expected, batch)

        code = {"auto": 0.0, "int8": 2**-5, "fp8": 2**-3}[stored]  # a code may round to the other side
        tolerance = 4 * last_place(dtype) + code
        torch.testing.assert_close(
            stored_rows(mine, batch), stored_rows(expected, batch), atol=tolerance, rtol=tolerance
        )
        unwritten = torch.ones(4 * 16, dtype=torch.bool)
        unwritten[batch.slots] = False
        assert (mine.data[:, 1 - LAYER].contiguous().view(torch.uint8) == 255).all()
        assert mine.numbers[:, LAYER].flatten(0, 3)[unwritten].contiguous().view(torch.uint8).eq(255).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_equals_the_reference(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for rope in (2, 16, 24, 64):
        wide = torch.randn(300, 5, 48 + rope, generator=torch.Generator().manual_seed(1)).to(dtype)
        tables = turns(torch.arange(300), rope)
        out = kernels.rotate_interleaved(wide[..., 48:], tables)
        assert out.is_contiguous() and torch.equal(out, Kernels().rotate_interleaved(wide[..., 48:], tables))


def test_what_does_not_fit_is_refused() -> None:
    torch.manual_seed(0)
    kernels, (q, kv, batch, shape) = CpuKernels(ISAS[0]), random_step(random.Random(5), torch.bfloat16, "auto")
    width = shape[1]
    with pytest.raises(ValueError, match="do not fit a batch of"):
        kernels.attend_latent(q[1:], kv, batch, LAYER, 1.0, width)
    with pytest.raises(ValueError, match="do not fit a batch of"):
        kernels.attend_latent(q, kv, batch, LAYERS, 1.0, width)
    with pytest.raises(ValueError, match="values of 0 numbers"):
        kernels.attend_latent(q, kv, batch, LAYER, 1.0, 0)
    with pytest.raises(ValueError, match="need a cache of one plane a layer"):
        kernels.attend_latent(q.float(), kv, batch, LAYER, 1.0, width)
    full = KVCache(kv.num_blocks, LAYERS, 1, kv.head_dim, kv.block_size, torch.bfloat16)
    with pytest.raises(ValueError, match="need a cache of one plane a layer"):
        kernels.attend_latent(q, full, batch, LAYER, 1.0, width)
    rows = Request(len(q), shape, torch.bfloat16, seed=0).rows
    with pytest.raises(ValueError, match="do not fit a cache"):
        store(kernels, rows[:, :-1], shape, kv, batch)
    batch.slots[0] = kv.num_blocks * kv.block_size
    with pytest.raises(IndexError, match=f"the cache has {kv.num_blocks} blocks"):
        store(kernels, rows, shape, kv, batch)
    batch.block_tables[0, 0] = kv.num_blocks
    with pytest.raises(ValueError, match=f"the cache has 0 to {kv.num_blocks - 1}"):
        kernels.attend_latent(q, kv, replace(batch), LAYER, 1.0, width)
