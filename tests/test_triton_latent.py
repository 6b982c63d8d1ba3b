"""Latent attention in Triton: equal to the reference, and bit-equal however a sequence is cut, batched and split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import triton

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.ops import Kernels, KVCache, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.latent import latent_attention
from quire.ops.triton import attention, latent, splits
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_dense import TALL_INSTRUCTION
from quire.runner import device_forward
from tests.oracle import save_checkpoint
from tests.test_cpu_attention import batch_of
from tests.test_triton_attention import on_device
from tests.test_triton_engine import run, start
from tests.test_triton_rows import DTYPES, TOLERANCE, as_on_a_gpu
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

__all__ = ["as_on_a_gpu"]

TRITON = TritonKernels("cpu")
LAYERS, LAYER, EPS = 2, 1, 1e-6
SPLIT = 64
"""Keys a split in these tests, so that short contexts have some."""
V2_LITE = (16, 512, 64)
"""Heads, latent and rope numbers."""

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # idle rows of a tile, and padding


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SPLIT", SPLIT)
    monkeypatch.setattr(attention, "MERGED_AT_ONCE", 2)


class Request:
    """What a layer computes of one request's tokens: queries, and compressed vectors with keys behind them."""

    def __init__(self, tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 1) -> None:
        self.heads, self.width, self.rope = shape
        generator = torch.Generator().manual_seed(seed)
        row = self.width + self.rope
        self.q = torch.randn(tokens, self.heads, row, generator=generator).to(dtype)
        self.compressed = (2 * torch.randn(tokens, row, generator=generator)).to(dtype)
        self.norm = 1 + torch.randn(self.width, generator=torch.Generator().manual_seed(0)).mul_(0.2).to(dtype)
        angles = torch.randn(tokens, self.rope // 2, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()

    def store(self, kernels: Kernels, kv: KVCache, slots: torch.Tensor, rows: slice) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        batch = RaggedBatch(none, none, slots, [0], [], none.view(0, 0), kv.block_size)
        tables = self.cos[rows], self.sin[rows]
        kernels.store_latent(self.compressed[rows], self.norm, EPS, tables, kv, batch, LAYER)


def poisoned(blocks: int, request: Request, size: int, how: KVCacheDtype) -> KVCache:
    """A cache in which every number or scale is NaN."""
    row = request.width + request.rope
    kv = KVCache(blocks, LAYERS, 1, row, size, request.q.dtype, how, sides=1)
    kv.data.view(torch.uint8).fill_(255)
    return kv


def stored(
    requests: Sequence[Request], size: int, how: KVCacheDtype, spare: int = 0
) -> tuple[KVCache, list[torch.Tensor]]:
    """A cache that holds the requests' rows, all else NaN, and their block tables."""
    counts = [-(-len(r.q) // size) for r in requests]
    kv = poisoned(sum(counts) + spare + 1, requests[0], size, how)
    tables = list(torch.split(torch.randperm(sum(counts)) + 1, counts))
    for request, table in zip(requests, tables, strict=True):
        at = torch.arange(len(request.q))
        request.store(Kernels(), kv, table[at // size] * size + at % size, slice(None))
    return kv, tables


def attend(q: torch.Tensor, kv: KVCache, batch: RaggedBatch, width: int) -> torch.Tensor:
    rows = len(batch.token_ids) - len(q)
    q = torch.cat([q, q.new_full((rows, *q.shape[1:]), float("nan"))])
    return latent.attend_latent(q, kv, batch, LAYER, kv.head_dim**-0.5, width)[: len(q) - rows]


# -- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.quick("dtype0-auto-shape0-16-227", "dtype1-int8-shape1-256-227", "dtype6-int8-shape6-16-99")
@pytest.mark.parametrize(
    "dtype, how, shape, size, room",
    [
        (torch.float32, "auto", (4, 32, 8), 16, 227),
        (torch.float32, "int8", (7, 48, 20), 256, 227),
        (torch.float16, "auto", V2_LITE, 16, 227),
        pytest.param(torch.float16, "auto", (128, 16, 8), 64, 227, marks=pytest.mark.slow),
        pytest.param(torch.float16, "fp8", (70, 64, 16), 32, 99, marks=pytest.mark.slow),
        (torch.float16, "fp8", (20, 64, 16), 32, 99),
        (torch.float16, "int8", (3, 32, 8), 16, 99),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype,
    how: KVCacheDtype,
    shape: tuple[int, int, int],
    size: int,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "_shared_memory", lambda device: room * 1024)
    rng = random.Random(shape[0])
    torch.manual_seed(0)
    spans = [(rng.randint(65, 130), 1), (0, rng.randint(2, 5)), (rng.randint(60, 100), 3)]
    rng.shuffle(spans)
    requests = [Request(sum(span), shape, dtype, rng.randint(0, 99)) for span in spans]
    kv, tables = stored(requests, size, how)
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    host = batch_of(spans, tables, size)
    exact = latent_attention(q.float(), kv, host, LAYER, kv.head_dim**-0.5, shape[1])
    out = attend(q, kv, on_device(spans, tables, size, (3, 2)), shape[1])
    last_place = {torch.float32: 1e-6, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.float(), exact, atol=3 * last_place, rtol=3 * last_place)


LENGTH = 100


def in_chunks(
    request: Request, lengths: Sequence[int], size: int, how: KVCacheDtype, padding: tuple[int, int]
) -> torch.Tensor:
    """The output of a request in chunks, each behind a token of another request. What is not yet there is NaN."""
    shape = request.heads, request.width, request.rope
    other, blocks = Request(70, shape, request.q.dtype, seed=2), -(-LENGTH // size)
    kv, (others,) = stored([other], size, how, spare=blocks)
    mine = kv.num_blocks - 1 - torch.randperm(blocks)
    out, start = [], 0
    for length in lengths:
        at = torch.arange(start, start + length)
        part = slice(start, start + length)
        request.store(Kernels(), kv, mine[at // size] * size + at % size, part)
        batch = on_device([(69, 1), (start, length)], [others, mine], size, padding)
        out.append(attend(torch.cat([other.q[69:], request.q[part]]), kv, batch, request.width)[1:])
        start += length
    return torch.cat(out)


@pytest.mark.quick("dtype1-fp8-False")
@pytest.mark.parametrize(
    "dtype, how, side_by_side",
    [
        (torch.float32, "auto", True),
        (torch.float16, "fp8", False),
        pytest.param(torch.float16, "auto", True, marks=pytest.mark.slow),
        pytest.param(torch.float16, "auto", False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "int8", True, marks=pytest.mark.slow),
    ],
)
def test_bits_depend_on_the_request_alone(
    dtype: torch.dtype,
    how: KVCacheDtype,
    side_by_side: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    if not side_by_side:
        monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    request = Request(LENGTH, (2, 32, 8), dtype)
    whole = in_chunks(request, [LENGTH], 16, how, (0, 0))
    assert whole.isfinite().all()
    for size, lengths, padding in (
        (64, [1, 2, 61, 34, 1, 1], (5, 3)),
        (256, [70, 21, 8, 1], (0, 0)),
    ):
        out = in_chunks(request, lengths, size, how, padding)
        assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8)), f"blocks of {size}, chunks {lengths}"


def test_splits_lie_side_by_side_within_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(512, (128, 16, 4), torch.float16)
    kv, tables = stored([request], 16, "auto")
    spans = on_device([(511, 1)] * 4, tables * 4, 16).spans
    assert spans is not None

    def listed() -> splits.Work:
        return latent._make_plan(request.q[:4], kv, spans, 16).work

    monkeypatch.setattr(splits, "WORKERS", 20)
    assert listed().item_count.tolist() == [32]
    assert listed().workers == 10  # for each of two groups of heads
    most = listed().out.nbytes + listed().sums.nbytes
    used = 4 * 128 * 8 * 18 * 4
    assert most >= used
    monkeypatch.setattr(splits, "SCRATCH_BYTES", used)
    assert listed().item_count.tolist() == [32]
    assert listed().out.nbytes + listed().sums.nbytes == used
    monkeypatch.setattr(splits, "SCRATCH_BYTES", used - 1)
    assert listed().item_count.tolist() == [24]


@pytest.mark.quick("auto")
@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
def test_a_row_that_is_not_finite_reaches_the_tokens_that_see_it(how: KVCacheDtype) -> None:
    for column, at in ((5, 3), (35, 80)):  # in the vector, in the key
        request = Request(85, (2, 32, 8), torch.float16)
        request.compressed[at, column] = float("nan")
        kv, tables = stored([request], 16, how)
        out = attend(request.q[at:], kv, on_device([(at, 85 - at)], tables, 16), 32)
        assert not out.isfinite().all(2).any()


def test_a_batch_whose_spans_are_on_the_host_is_refused() -> None:
    request = Request(7, (2, 32, 8), torch.float32)
    kv, tables = stored([request], 16, "auto")
    with pytest.raises(ValueError, match="not on the device"):
        latent.attend_latent(request.q, kv, batch_of([(0, 7)], tables, 16), LAYER, 1.0, 32)


# -- queries and keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, rope", [(3, 8), (40, 64), (1, 20)])
def test_queries_are_turned_where_they_lie_beside_others(heads: int, rope: int, dtype: torch.dtype) -> None:
    q = torch.randn(5, heads, rope + 24, generator=torch.Generator().manual_seed(0)).to(dtype)[..., 24:]
    angles = torch.randn(5, rope // 2, generator=torch.Generator().manual_seed(1))
    tables = angles.cos(), angles.sin()
    out = TRITON.rotate_interleaved(q, tables)
    assert out.is_contiguous() and torch.equal(out, Kernels().rotate_interleaved(q, tables))


@pytest.mark.quick(
    "shape0-auto-dtype2",
    "shape1-auto-dtype0",
    "shape1-auto-dtype1",
    "shape1-int8-dtype0",
    "shape2-auto-dtype0",
    "shape2-auto-dtype1",
    "shape2-auto-dtype2",
    "shape2-fp8-dtype1",
    "shape2-fp8-dtype2",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 32, 8), (1, 512, 64), (1, 12, 20)])
def test_the_cache_holds_what_the_reference_stores(
    shape: tuple[int, int, int], how: KVCacheDtype, dtype: torch.dtype
) -> None:
    request = Request(9, shape, dtype)
    # Sums of squares are exact, so that they do not depend on their order.
    request.compressed = torch.randint(-8, 9, request.compressed.shape).to(dtype)
    request.compressed[1] = 0.0
    request.compressed[2, 3] = torch.inf
    request.compressed[3, -1] = -torch.nan
    slots = torch.tensor(random.Random(0).sample(range(16, 64), 9))
    ours, theirs = poisoned(4, request, 16, how), poisoned(4, request, 16, how)
    for kernels, kv in ((TRITON, ours), (Kernels(), theirs)):
        kv.data.view(torch.uint8).fill_(7)
        request.store(kernels, kv, slots, slice(None))
    if how == "auto":
        # torch's rsqrt may be a last place off; then a rounding falls the other way.
        torch.testing.assert_close(
            ours.data, theirs.data, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype], equal_nan=True
        )
        written = torch.zeros(4 * 16, dtype=torch.bool).index_fill_(0, slots, True).view(4, 16)
        untouched = ours.numbers.view(torch.uint8)[:, LAYER, 0, 0][~written], ours.numbers.view(torch.uint8)[:, 0]
        assert all((part == 7).all() for part in untouched)
        return
    assert ours.scales is not None and theirs.scales is not None
    assert torch.equal(ours.numbers.view(torch.uint8), theirs.numbers.view(torch.uint8))
    torch.testing.assert_close(ours.scales, theirs.scales, atol=0, rtol=1e-6, equal_nan=True)


def test_rows_of_padding_write_to_the_null_block_alone() -> None:
    request = Request(5, (1, 32, 8), torch.float32)
    kv, other = poisoned(4, request, 16, "auto"), poisoned(4, request, 16, "auto")
    request.store(TRITON, other, torch.tensor([17, 40, 41]), slice(0, 3))
    request.store(TRITON, kv, torch.tensor([17, 40, 41, 0, 0]), slice(None))
    bits, others = kv.data.view(torch.uint8), other.data.view(torch.uint8)
    assert torch.equal(bits[1:], others[1:]) and not torch.equal(bits[0], others[0])


# -- the whole engine ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_gives_the_tokens_of_the_plain_kernels_whatever_is_around_a_request(tmp_path) -> None:
    """With the prefix cache, which copies the head of a block."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    folder = str(save_checkpoint(tmp_path, "deepseek_v3", dtype=torch.float32, **sizes))
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", max_model_len=48))
    theirs = run(plain, [0, 3])
    with mock.patch.object(device_forward, "CHUNK", 8):  # the interpreter is slow: steps are padded to few rows
        engine = start(folder, {})
        together = run(engine, [0, 3])
        assert run(engine, [3]) == {3: together[3]}
    assert engine.stats.cached_tokens > 0
    for index, ours in together.items():
        assert [token for token, _ in ours] == [token for token, _ in theirs[index]]
        for (_, [got, *_]), (_, [want, *_]) in zip(ours, theirs[index], strict=True):
            assert got == pytest.approx(want, abs=1e-4)


# -- for GPUs that are not there -----------------------------------------------------------------------------------


KINDS: list[tuple[torch.dtype, int, KVCacheDtype, int]] = [
    (torch.bfloat16, 16, "auto", 227),
    (torch.bfloat16, 128, "auto", 227),
    (torch.float16, 128, "fp8", 227),
    (torch.bfloat16, 128, "auto", 99),
]
"""Data type, heads (V2-Lite's and V3's), how the cache is stored, and KiB of shared memory."""


@contextmanager
def tiles_of(room: int) -> Iterator[None]:
    """Those for the GPU that is compiled for, with so many KiB of shared memory, or what it has."""
    arch = triton.runtime.driver.active.get_current_target().arch
    most = min(room, 163 if arch == 80 else 227) * 1024
    with (
        mock.patch.object(latent, "_shared_memory", lambda device: most),
        mock.patch.object(attention, "one_instruction", lambda device: arch // 10 not in TALL_INSTRUCTION),
    ):
        yield


def launch_all() -> None:
    """Of each kind, steps of several sizes."""
    for dtype, heads, how, room in KINDS:
        request = Request(4, (heads, 512, 64), dtype)
        kv = KVCache(3, 28, 1, 576, 16, dtype, how, sides=1)
        with tiles_of(room):
            for tokens in (2, 4):
                batch = on_device([(0, 1)] * tokens, [torch.zeros(512, dtype=torch.int64)] * tokens, 16)
                attend(request.q[:tokens], kv, batch, 512)
                request.store(TRITON, kv, batch.slots, slice(0, tokens))
                queries = torch.empty(tokens, heads, 192, dtype=dtype)[..., 128:]
                TRITON.rotate_interleaved(queries, (request.cos[:tokens], request.sin[:tokens]))


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_once_a_model(arch: int) -> None:
    found = compile_all("tests.test_triton_latent", arch)
    count = Counter(use["kernel"] for use in found)
    instruction, most = {80: ("mma.sync", 163), 90: ("wgmma", 227), 100: ("tcgen05", 227)}[arch]
    assert count["_attend_latent"] == len(KINDS) and count["_rotate_interleaved"] <= len(KINDS)
    decoding, *large, consumer = [use for use in found if use["kernel"] == "_attend_latent"]
    assert all(use["matrix"] == [instruction] and use["shared"] <= most * 1024 for use in large), large
    # A row's totals do not fit beside its split's sums, 512 bytes a thread: they are spilled, once a split. So are
    # addresses, which the loop over keys reads.
    assert max(use["stack"] for use in large) <= 1856, large
    if arch == 100:
        assert decoding == large[0] | {"kernel": "_attend_latent"}, decoding
    else:  # two of them fit a multiprocessor
        assert decoding["matrix"] == ["mma.sync"] and decoding["shared"] <= 113 * 1024, decoding
        assert decoding["warps"] == 4 and decoding["stack"] <= 448, decoding
    assert consumer["shared"] <= 99 * 1024 and consumer["stack"] <= 320, consumer
    assert all(use["asynchronous"] for use in (decoding, *large, consumer))
    others = [use for use in found if use["kernel"] != "_attend_latent"]
    names = {"_list_work", "_merge_splits", "_store_latent", "_rotate_interleaved"}
    assert {use["kernel"] for use in others} == names
    assert all(use["stack"] == 0 and use["shared"] <= 8192 for use in others), others
