"""Attention in Triton: equal to the torch reference, and bit-equal however a sequence is cut, batched and split."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from quire.ops import KVCache, RaggedBatch, paged_attention, store_kv
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.ragged import DeviceSpans
from quire.ops.triton import attention, fp8, splits
from tests.test_cpu_attention import LAYER, Request, Span, batch_of, poisoned_cache, seen_both_ways
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

SPLIT = 128
"""Keys a split in these tests, so that short contexts have some."""


pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # idle rows of a tile


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SPLIT", SPLIT)
    monkeypatch.setattr(attention, "MERGED_AT_ONCE", 2)


def on_device(
    spans: Sequence[Span], tables: Sequence[torch.Tensor], size: int, padding: tuple[int, int] = (0, 0)
) -> RaggedBatch:
    """The batch as kernels read it, with `padding` (rows, spans); the requests' tables lie in another order."""
    host = batch_of(spans, tables, size)
    rows, empty = padding
    count = len(spans)

    def padded(numbers: Sequence[int], value: int) -> torch.Tensor:
        return torch.tensor([*numbers, *[value] * empty], dtype=torch.int32)

    of_tokens = (torch.cat([t, t.new_zeros(rows)]) for t in (host.token_ids, host.positions, host.slots))
    return RaggedBatch(
        *of_tokens,
        row_starts=[],
        context_lens=[],
        block_tables=torch.empty(0, 0, dtype=torch.int64),
        block_size=size,
        spans=DeviceSpans(
            row_starts=padded(host.row_starts, host.row_starts[-1]),
            starts=padded([start for start, _ in spans], 0),
            context_lens=padded(host.context_lens, 0),
            table_rows=padded([count - 1 - span for span in range(count)], 0),
            block_tables=host.block_tables.flip(0).int(),
        ),
    )


def attend(q: torch.Tensor, kv: KVCache, batch: RaggedBatch, window: int | None) -> torch.Tensor:
    rows = len(batch.token_ids) - len(q)
    q = torch.cat([q, q.new_full((rows, *q.shape[1:]), float("nan"))]) if rows else q
    return attention.attend(q, kv, batch, LAYER, kv.head_dim**-0.5, window)[: len(q) - rows]


def stored(
    requests: Sequence[Request], size: int, how: KVCacheDtype, spare: int = 0
) -> tuple[KVCache, list[torch.Tensor]]:
    """A cache that holds the requests' keys and values, all else NaN, and their block tables."""
    shape = requests[0].q.shape[1], requests[0].k.shape[1], requests[0].q.shape[2]
    counts = [-(-len(r.k) // size) for r in requests]
    kv = poisoned_cache(sum(counts) + spare + 1, shape, size, requests[0].q.dtype, how)
    tables = list(torch.split(torch.randperm(sum(counts)) + 1, counts))
    fill = batch_of([(0, len(r.k)) for r in requests], tables, size)
    store_kv(torch.cat([r.k for r in requests]), torch.cat([r.v for r in requests]), kv, fill, LAYER)
    return kv, tables


@pytest.mark.quick(
    "dtype0-auto-1-2-64-16-None",
    "dtype1-auto-5-1-80-32-150",
    "dtype2-auto-2-1-256-64-1",
    "dtype3-int8-8-1-24-256-None",
    "dtype4-fp8-2-1-128-16-50",
)
@pytest.mark.parametrize(
    "dtype, how, group, kv_heads, dim, size, window",
    [
        (torch.float32, "auto", 1, 2, 64, 16, None),
        (torch.float32, "auto", 5, 1, 80, 32, 150),
        (torch.float32, "auto", 2, 1, 256, 64, 1),
        (torch.float32, "int8", 8, 1, 24, 256, None),
        (torch.float32, "fp8", 2, 1, 128, 16, 50),
        (torch.float16, "auto", 8, 1, 128, 128, None),
        (torch.float16, "auto", 2, 2, 96, 16, 50),
        (torch.float16, "int8", 2, 1, 64, 16, None),
        (torch.float16, "fp8", 5, 1, 80, 32, 150),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype,
    how: KVCacheDtype,
    group: int,
    kv_heads: int,
    dim: int,
    size: int,
    window: int | None,
) -> None:
    rng = random.Random(dim)
    torch.manual_seed(0)
    spans = [(rng.randint(130, 200), 1), (0, rng.randint(5, 30)), (rng.randint(90, 260), 3), (40, 33)]
    rng.shuffle(spans)
    requests = [Request(sum(span), (group * kv_heads, kv_heads, dim), dtype, rng.randint(0, 99)) for span in spans]
    kv, tables = stored(requests, size, how)
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    exact = paged_attention(q.float(), kv, batch_of(spans, tables, size), LAYER, dim**-0.5, window).flatten(1)
    last_place = {torch.float32: 1e-6, torch.float16: 2**-11}[dtype]
    out = attend(q, kv, on_device(spans, tables, size, (3, 2)), window)
    torch.testing.assert_close(out.float(), exact, atol=2 * last_place, rtol=2 * last_place)


@pytest.mark.parametrize(
    "spans, rows", [([(200, 1), (130, 1), (3, 1)], 16), ([(0, 300)], 64), ([(0, 1)], 16), ([(9, 8), (0, 9)], 64)]
)
def test_tiles_suit_the_step(spans: list[Span], rows: int) -> None:
    requests = [Request(sum(span), (2, 1, 64), torch.float32, seed=1) for span in spans]
    kv, tables = stored(requests, 16, "auto")
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    for empty in (0, 200) if rows == 64 else (0,):  # spans of mixed steps are padded to the most that there may be
        batch = on_device(spans, tables, 16, (0, empty))
        assert batch.spans is not None
        plan = attention._make_plan(q, kv, batch.spans, None)
        assert (plan.rows, plan.least) == (rows, 16)


def test_short_tiles_are_taken_where_their_instruction_sums_as_the_one_for_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for capability, wanted in (((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        q = mock.Mock(device=torch.device("cuda", 0))
        for how in ("auto", "int8", "fp8"):
            kv = KVCache(2, 1, 1, 16, 16, torch.float16, how)  # type: ignore[arg-type]
            assert attention.short_tiles(q, kv) == (wanted and how == "auto")
    assert [attention._row_tiles(group, short) for short in (True, False) for group in (2, 20)] == [
        (64, 16),
        (64, 32),
        (64, 64),
        (64, 64),
    ]


@pytest.mark.quick("50")
@pytest.mark.parametrize("window", [None, 50])
def test_whole_prompts_see_what_follows_and_not_their_company(window: int | None) -> None:
    lengths, size = (1, 17, 150, 290), 32
    requests = [Request(length, (4, 2, 24), torch.float32, seed=length) for length in lengths]
    kv, tables = stored(requests, size, "auto")

    def both_ways(q: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        return attention.attend(q, kv, batch, LAYER, 24**-0.5, window, causal=False).view(q.shape)

    batch = on_device([(0, length) for length in lengths], tables, size, (0, 2))
    together = both_ways(torch.cat([r.q for r in requests]), batch).split(lengths)
    for request, table, out in zip(requests, tables, together, strict=True):
        torch.testing.assert_close(out.double(), seen_both_ways(request, window), atol=2e-6, rtol=0)
        assert torch.equal(both_ways(request.q, on_device([(0, len(request.q))], [table], size)), out)


LENGTH = 150


def in_chunks(
    request: Request, lengths: Sequence[int], size: int, how: KVCacheDtype, window: int | None, padding: tuple[int, int]
) -> torch.Tensor:
    """The output of a request in chunks, each behind a token of another request. What is not yet there is NaN."""
    shape = request.q.shape[1], request.k.shape[1], request.q.shape[2]
    other = Request(70, shape, request.q.dtype, seed=2)
    blocks = -(-LENGTH // size)
    kv, (others,) = stored([other], size, how, spare=blocks)
    mine = kv.num_blocks - 1 - torch.randperm(blocks)
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        fill = batch_of([(start, length)], [mine], size)
        store_kv(request.k[part], request.v[part], kv, fill, LAYER)
        batch = on_device([(69, 1), (start, length)], [others, mine], size, padding)
        out.append(attend(torch.cat([other.q[69:], request.q[part]]), kv, batch, window)[1:])
        start += length
    return torch.cat(out)


def alone(request: Request, how: KVCacheDtype, window: int | None) -> torch.Tensor:
    kv, tables = stored([request], 16, how)
    return attend(request.q, kv, on_device([(0, LENGTH)], tables, 16), window)


@pytest.mark.parametrize(
    "dtype, how, window, shape, side_by_side",
    [
        (torch.float32, "auto", None, (2, 1, 64), True),
        pytest.param(torch.float16, "int8", 80, (3, 1, 64), False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "fp8", None, (2, 1, 48), True, marks=pytest.mark.slow),
        pytest.param(torch.float32, "auto", None, (2, 1, 64), False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "int8", 80, (3, 1, 64), True, marks=pytest.mark.slow),
        pytest.param(torch.float16, "fp8", None, (2, 1, 48), False, marks=pytest.mark.slow),
    ],
)
def test_bits_depend_on_the_request_alone(
    dtype: torch.dtype,
    how: KVCacheDtype,
    window: int | None,
    shape: tuple[int, int, int],
    side_by_side: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(splits, "SPLIT", 64)
    monkeypatch.setattr(attention, "TILE_BYTES", 32 * 64 * dtype.itemsize)  # two tiles a split
    monkeypatch.setattr(splits, "WORKERS", 2)  # workers for three splits
    monkeypatch.setattr(splits, "RESIDENT", 1000 if side_by_side else 1)
    if not side_by_side:
        monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    request = Request(LENGTH, shape, dtype, seed=1)
    whole = alone(request, how, window)
    assert whole.isfinite().all()
    for size, lengths, padding in (
        (16, [LENGTH], (5, 3)),
        (64, [1, 2, 65, 66, 16], (0, 0)),
        (256, [80, 54, 1, 8, 1, 6], (1, 1)),
    ):
        out = in_chunks(request, lengths, size, how, window, padding)
        assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8)), f"blocks of {size}, chunks {lengths}"


def listed(spans: Sequence[Span], tokens: int, window: int | None = None) -> splits.Work:
    """The lists for a step of these spans, 4 query heads and 2 KV heads of 16 numbers."""
    requests = [Request(tokens, (4, 2, 16), torch.float16, seed=1)] * len(spans)
    kv, tables = stored(requests[:1], 16, "auto")
    q = torch.cat([requests[0].q[:rows] for _, rows in spans])
    at = on_device(spans, tables * len(spans), 16).spans
    assert at is not None
    return attention._make_plan(q, kv, at, window).work


def items_of(work: splits.Work, spans: int) -> list[int]:
    """How many items each span has, and that the records of its tiles say so."""
    tiles, items = work.records[: work.tiles], work.records[work.tiles :][: int(work.item_count)]
    tiles = tiles[tiles[:, 2] > 0]
    found = items[:, 5].bincount(minlength=spans).tolist()
    said = [tiles[(tiles[:, 5] == span) & (tiles[:, 6] >= 0), 7].sum().item() for span in range(spans)]
    assert found == said
    for *_, span, first, count in tiles[tiles[:, 6] >= 0].tolist():
        mine = items[first : first + count]
        assert mine[:, 5].unique().tolist() == [span]
        assert mine[:, 6].tolist() == list(range(count))
    return found


ITEM_BYTES = 4 * 4 * 18
"""Scratch memory of an item with one row: 4 heads with 16 numbers, a maximum and a sum in fp32."""


def test_each_row_of_a_step_is_in_one_tile_and_long_walks_come_first() -> None:
    spans = [(1000, 1), (600, 41), (0, 0), (900, 100)]
    work = listed(spans, 1008)
    tiles = work.records[: work.tiles]
    rows = [list(range(first, first + tokens)) for first, _, tokens, *_ in tiles.tolist()]
    assert sorted(row for one in rows for row in one) == list(range(142))
    assert (tiles[:, 1] - tiles[:, 0])[tiles[:, 2] > 0].unique().tolist() == [599, 858, 1000]  # positions of rows
    assert tiles[0, :2].tolist() == [138, 996]  # the last rows of the last span


def test_the_list_has_the_splits_of_tiles_that_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = [(1000, 1), (127, 1), (128, 1), (500, 1)]
    assert items_of(listed(decode, 1008), 4) == [8, 0, 2, 4]  # one split is none to share
    monkeypatch.setattr(splits, "SPANS_AT_ONCE", tl.constexpr(2))
    assert items_of(listed(decode, 1008), 4) == [8, 0, 2, 4]
    assert items_of(listed(decode, 1008, window=100), 4) == [0, 0, 2, 0]
    # The 15 splits, for each of two KV heads, are 8 for each of four programs, or 15 for each of two.
    monkeypatch.setattr(splits, "RESIDENT", 4)
    assert items_of(listed(decode, 1008), 4) == [8, 0, 0, 0]
    monkeypatch.setattr(splits, "RESIDENT", 2)
    assert items_of(listed(decode, 1008), 4) == [8, 0, 0, 0]
    monkeypatch.setattr(splits, "RESIDENT", 1)
    assert items_of(listed(decode, 1008), 4) == [0, 0, 0, 0]


def test_a_few_rows_behind_a_long_prefix_are_shared_too() -> None:
    mixed = listed([(1000, 1), (600, 41), (900, 100)], 1008)
    assert items_of(mixed, 3) == [8, 2 * 6, 4 * 8]  # tiles of 32 tokens
    assert mixed.short == 32


def test_spans_that_find_no_room_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = [(1000, 1), (500, 1), (900, 1), (300, 1)]
    monkeypatch.setattr(splits, "SCRATCH_BYTES", 15 * ITEM_BYTES)
    few = listed(decode, 1008)
    assert items_of(few, 4) == [8, 4, 0, 0]
    assert few.out.nbytes + few.sums.nbytes == 15 * ITEM_BYTES
    monkeypatch.setattr(splits, "SCRATCH_BYTES", ITEM_BYTES - 1)
    none = listed(decode, 1008)
    assert (none.workers, items_of(none, 4), len(none.out), len(none.sums)) == (0, [0] * 4, 0, 0)


def test_workers_are_as_many_as_fill_the_device_and_no_more_than_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "WORKERS", 20)
    assert listed([(1000, 1)] * 8, 1008).workers == 10  # for each of two KV heads
    monkeypatch.setattr(splits, "WORKERS", 1000)
    decode = listed([(1000, 1)] * 8, 1008)
    assert decode.workers == decode.tiles * 8  # as many splits as a context may have
    assert listed([(100, 1)] * 4, 112).workers == 0


@pytest.mark.quick("9")
@pytest.mark.parametrize("room", [10**6, 9])
def test_long_and_short_contexts_share_the_workers(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of unlike contexts, some of which find no room, has the bits of each request alone."""
    monkeypatch.setattr(splits, "WORKERS", 6)
    monkeypatch.setattr(splits, "SCRATCH_BYTES", room * ITEM_BYTES)
    monkeypatch.setattr(splits, "SPANS_AT_ONCE", tl.constexpr(2))
    spans = [(40, 1), (700, 1), (129, 1), (380, 1), (260, 1)]
    requests = [Request(sum(span), (4, 2, 16), torch.float32, seed) for seed, span in enumerate(spans)]
    kv, tables = stored(requests, 16, "auto")
    q = torch.cat([r.q[start:] for r, (start, _) in zip(requests, spans, strict=True)])
    together = attend(q, kv, on_device(spans, tables, 16, (0, 3)), None)
    monkeypatch.setattr(splits, "SCRATCH_BYTES", 0)
    for place, (span, table) in enumerate(zip(spans, tables, strict=True)):
        alone = attend(q[place : place + 1], kv, on_device([span], [table], 16), None)
        assert torch.equal(together[place], alone[0]), span


@triton.jit
def _widen_256(codes, out):
    at = tl.arange(0, 256)
    tl.store(out + at, fp8.widen(tl.load(codes + at), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cannot multiply in bf16
def test_codes_are_widened_exactly(dtype: torch.dtype) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=dtype)
    _widen_256[(1,)](codes, out)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    assert torch.equal(out.float()[finite], numbers[finite])
    _widen_256[(1,)](codes.view(torch.float8_e4m3fn), out.zero_())  # as GPUs that have the type read them
    assert torch.equal(out.float()[finite], numbers[finite])
    _widen_256[(1,)](codes.view(torch.int8), out)
    assert torch.equal(out.float(), codes.view(torch.int8).float())


def test_a_group_may_be_larger_than_a_tile() -> None:
    request = Request(3, (70, 1, 16), torch.float32, seed=1)
    kv, tables = stored([request], 16, "auto")
    out = attend(request.q, kv, on_device([(0, 3)], tables, 16), None)
    exact = paged_attention(request.q, kv, batch_of([(0, 3)], tables, 16), LAYER, 0.25, None)
    torch.testing.assert_close(out, exact.flatten(1), atol=2e-6, rtol=2e-6)


@pytest.mark.quick("fp8")
@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(how: KVCacheDtype) -> None:
    for name, at in (("k", 3), ("v", 200)):
        request = Request(210, (2, 1, 16), torch.float32, seed=1)
        getattr(request, name)[at, 0, 5] = float("nan")
        kv, tables = stored([request], 16, how)
        out = attend(request.q[at:], kv, on_device([(at, 210 - at)], tables, 16), None)
        assert not out.isfinite().all(1).any(), f"{name} at {at}"


def test_a_window_does_not_read_the_blocks_it_has_passed() -> None:
    request = Request(300, (2, 1, 16), torch.float32, seed=1)
    kv, tables = stored([request], 16, "auto")
    want = attend(request.q[296:], kv, on_device([(296, 4)], tables, 16), 50)
    passed = (296 - 50 + 1) // 16
    kv.data[tables[0][:passed]] = float("nan")
    tables[0][:passed] = 0
    assert torch.equal(attend(request.q[296:], kv, on_device([(296, 4)], tables, 16), 50), want)
    assert want.isfinite().all()


def test_queries_may_lie_beside_keys_and_values() -> None:
    request = Request(70, (4, 2, 16), torch.float32, seed=1)
    kv, tables = stored([request], 16, "auto")
    batch = on_device([(0, 70)], tables, 16)
    beside = torch.cat([request.q, request.k, request.v], dim=1)[:, :4]
    assert not beside.is_contiguous()
    assert torch.equal(attend(beside, kv, batch, None), attend(request.q, kv, batch, None))


def test_more_spans_than_are_looked_at_at_once_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SPANS_AT_ONCE", tl.constexpr(2))
    request = Request(7, (1, 1, 16), torch.float32, seed=1)
    kv, tables = stored([request], 16, "auto")
    spans = [(position, 1) for position in range(7)]
    out = attend(request.q, kv, on_device(spans, tables * 7, 16), None)
    exact = attend(request.q, kv, on_device([(0, 7)], tables, 16), None)
    assert torch.equal(out, exact)


def test_a_batch_whose_spans_are_on_the_host_is_refused() -> None:
    request = Request(7, (1, 1, 16), torch.float32, seed=1)
    kv, tables = stored([request], 16, "auto")
    with pytest.raises(ValueError, match="not on the device"):
        attention.attend(request.q, kv, batch_of([(0, 7)], tables, 16), LAYER, 1.0, None)


def launch_all() -> None:
    """Decoding of Qwen3-0.6B, prompts of Qwen3-14B and of what sees both ways; called where kernels are compiled."""
    launch(16, 4, 4)
    launch(40, 2048, 1)
    launch(16, 4, 4, "fp8")
    launch(16, 512, 2, causal=False)


def launch_few() -> None:
    """Two of these: of many rows, and of few with codes, which are widened."""
    launch(40, 2048, 1)
    launch(16, 4, 4, "fp8")


def launch(heads: int, rows: int, spans: int, how: KVCacheDtype = "auto", causal: bool = True) -> None:
    kv = KVCache(2, 28, 8, 128, 16, torch.bfloat16, how)
    q = torch.empty(rows, heads + 16, 128, dtype=torch.bfloat16)[:, :heads]
    tables = [torch.zeros(2560, dtype=torch.int64)] * spans
    batch = on_device([(0, rows // spans)] * spans, tables, 16)
    attention.attend(q, kv, batch, LAYER, 0.1, None, None, causal)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus(arch: int) -> None:
    found = compile_all("tests.test_triton_attention", arch)
    instruction = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[arch]
    kernels = [use for use in found if use["kernel"] == "_attend"]
    decode, prompt, fp8, both_ways = kernels
    assert decode["matrix"] == ["mma.sync"]
    assert all(instruction in use["matrix"] for use in (prompt, fp8, both_ways))
    assert all("mma.sync" in use["matrix"] for use in (prompt, both_ways)), "for tiles of few rows"
    assert all(3 * use["waits"] <= use["wgmma"] for use in kernels), "each product is awaited by itself"
    # Where a row's totals and its split's outputs do not fit beside each other, totals are spilled: loads and
    # stores once a split, none in the loop over its tiles (so says the disassembly).
    assert max(use["stack"] for use in kernels) <= 480, kernels
    assert all(use["asynchronous"] for use in kernels)
    # What two programs share: 99 KiB on consumer cards, which have the instructions of 80; 227 on the others.
    most = 99 if arch == 80 else 113
    assert max(use["shared"] for use in (decode, fp8)) <= most * 1024, kernels
    assert prompt["shared"] <= (99 if arch == 80 else 160) * 1024
    merge = [use for use in found if use["kernel"] == "_merge_splits"]
    assert merge and all(use["stack"] == 0 for use in merge)
