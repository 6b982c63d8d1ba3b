"""Paged attention: right against a dense oracle, and bit-equal however a sequence is cut and batched."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.ops import KVCache, RaggedBatch, attention, attention_plan, paged_attention, store_kv
from quire.ops.kv_cache import KVCacheDtype, quantize

LAYERS, LAYER = 2, 1


@dataclass(eq=False)
class Sequence:
    """One request: its projections [tokens, heads, head_dim], its blocks, and its output so far."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: list[int]
    done: int = 0


class Pool:
    """A cache whose every byte is NaN at first, with blocks handed out in a shuffled order."""

    def __init__(self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, seed: int) -> None:
        self.kv = KVCache(400 * 16 // block_size, LAYERS, kv_heads, dim, block_size, dtype)
        self.kv.data.fill_(float("nan"))
        self.free = list(range(1, self.kv.num_blocks))
        random.Random(seed).shuffle(self.free)

    def sequence(self, tokens: int, heads: int, seed: int) -> Sequence:
        generator = torch.Generator().manual_seed(seed)
        kv = self.kv

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, kv.head_dim, generator=generator).to(kv.dtype)

        blocks = -(-tokens // kv.block_size)
        table, self.free = self.free[:blocks], self.free[blocks:]
        return Sequence(draw(heads), draw(kv.kv_heads), draw(kv.kv_heads), table)

    def release(self, s: Sequence) -> None:
        """Give a sequence's blocks back, poisoned."""
        self.kv.data[s.table] = float("nan")
        self.free += s.table

    def step(self, parts: list[tuple[Sequence, int]], window: int | None = None) -> list[torch.Tensor]:
        """Run the next `count` tokens of each sequence together; each one's rows of the output."""
        size = self.kv.block_size
        spans = [range(s.done, s.done + count) for s, count in parts]
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + len(span))
        slots = [s.table[p // size] * size + p % size for (s, _), span in zip(parts, spans, strict=True) for p in span]
        tables = [
            torch.tensor([0 if passed(i, size, span.start, window) else block for i, block in enumerate(s.table)])
            for (s, _), span in zip(parts, spans, strict=True)
        ]
        batch = RaggedBatch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.tensor([p for span in spans for p in span]),
            slots=torch.tensor(slots),
            row_starts=starts,
            context_lens=[span.stop for span in spans],
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            block_size=size,
        )
        q, k, v = (
            torch.cat([getattr(s, name)[span.start : span.stop] for (s, _), span in zip(parts, spans, strict=True)])
            for name in "qkv"
        )
        store_kv(k, v, self.kv, batch, LAYER)
        out = paged_attention(q, self.kv, batch, LAYER, self.kv.head_dim**-0.5, window)
        for (s, _), span in zip(parts, spans, strict=True):
            s.done = span.stop
        return [out[a:b] for a, b in itertools.pairwise(starts)]


def passed(block: int, size: int, start: int, window: int | None) -> bool:
    """Whether no row from position `start` on sees the block."""
    return window is not None and (block + 1) * size <= start - window + 1


def dense(s: Sequence, scale: float, window: int | None) -> torch.Tensor:
    """Attention of a whole sequence in float64, by the definition."""
    q, k, v = (t.double().transpose(0, 1) for t in (s.q, s.k, s.v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    near = torch.arange(q.shape[1])
    distance = near[:, None] - near
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (6, 2), (4, 1), (7, 1)])
def test_attention_equals_the_dense_definition(heads: int, kv_heads: int, window: int | None) -> None:
    pool = Pool(kv_heads, 32, 16, torch.float32, seed=1)
    sequences = [pool.sequence(n, heads, seed=n) for n in (1, 15, 129, 400)]
    outs = pool.step([(s, len(s.q)) for s in sequences], window)
    for s, out in zip(sequences, outs, strict=True):
        torch.testing.assert_close(out.double(), dense(s, 32**-0.5, window), atol=2e-6, rtol=1e-5)


def test_bf16_attention_is_rounded_only_at_the_end() -> None:
    pool = Pool(2, 64, 16, torch.bfloat16, seed=1)
    s = pool.sequence(300, 4, seed=3)
    (out,) = pool.step([(s, 300)])
    exact = dense(s, 64**-0.5, None)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=2**-8)


LENGTH = 720


def cut(total: int, largest: int, rng: random.Random) -> list[int]:
    lengths = []
    while total:
        lengths.append(rng.randint(1, min(total, largest)))
        total -= lengths[-1]
    return lengths


def run(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    block_size: int,
    lengths: list[int],
    neighbours: int = 0,
) -> torch.Tensor:
    """The output of one sequence of `LENGTH` tokens in chunks of `lengths`, among random other requests."""
    heads, kv_heads, dim = shape
    rng = random.Random(block_size + len(lengths))
    pool = Pool(kv_heads, dim, block_size, dtype, seed=len(lengths))
    s = pool.sequence(LENGTH, heads, seed=7)
    others: list[Sequence] = []
    rows = []
    for count in lengths:
        while len(others) < neighbours:
            others.append(pool.sequence(rng.randint(1, 300), heads, seed=rng.randint(0, 99)))
        parts = [(o, rng.randint(1, len(o.q) - o.done)) for o in others]
        place = rng.randint(0, len(parts))
        parts.insert(place, (s, count))
        rows.append(pool.step(parts, window)[place])
        for o in [o for o in others if o.done == len(o.q)]:
            pool.release(o)
            others.remove(o)
    return torch.cat(rows)


@pytest.mark.quick("shape0-dtype0-None", "shape5-dtype5-150", "shape6-dtype6-None")
@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    list(itertools.product(((4, 2, 64), (3, 1, 32), (5, 5, 16)), (torch.bfloat16, torch.float32), (None, 150))),
)
def test_bits_do_not_depend_on_chunks_neighbours_or_block_size(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    rng = random.Random(0)
    whole = run(shape, dtype, window, 16, [LENGTH])
    assert whole.isfinite().all()
    for block_size, lengths, neighbours in [
        (32, [LENGTH], 4),
        (16, cut(LENGTH, 300, rng), 2),
        (64, cut(LENGTH, 60, rng), 1),
        (256, cut(LENGTH, 200, rng), 2),
        (128, [500, *cut(LENGTH - 500, 9, rng)], 3),
        (32, [LENGTH - 50] + [1] * 50, 0),
        (16, [1] * 20 + [LENGTH - 40] + [1] * 20, 2),
    ]:
        out = run(shape, dtype, window, block_size, lengths, neighbours)
        assert torch.equal(out, whole), f"blocks of {block_size}, chunks {lengths}, {neighbours} neighbours"


def test_bits_do_not_depend_on_computing_short_tiles_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs() -> list[torch.Tensor]:
        pool = Pool(2, 64, 16, torch.bfloat16, seed=2)
        return pool.step([(s, len(s.q)) for s in (pool.sequence(n, 4, seed=n) for n in range(1, 300, 13))])

    narrow = outputs()
    monkeypatch.setattr(attention_plan, "narrow_widths", lambda: (attention_plan.KEY_TILE,))
    assert all(torch.equal(a, b) for a, b in zip(narrow, outputs(), strict=True))


def test_attention_takes_queries_keys_and_values_that_lie_side_by_side() -> None:
    fused, apart = (Pool(2, 16, 16, torch.bfloat16, seed=1) for _ in range(2))
    s = apart.sequence(100, 4, seed=5)
    side_by_side = torch.cat([s.q, s.k, s.v], dim=1)
    t = fused.sequence(100, 4, seed=5)
    t.q, t.k, t.v = torch.split(side_by_side, [4, 2, 2], dim=1)
    assert torch.equal(fused.step([(t, 100)])[0], apart.step([(s, 100)])[0])


def keys_computed(window: int | None, start: int, stop: int, spans: int = 1) -> list[int]:
    """Keys of each chunk of a plan for equal spans of positions start .. stop, for all row tiles together."""
    layout = attention_plan.Layout(1, 4, head_dim=8, block_size=16, block_stride=256, window=window)
    starts = [span * (stop - start) for span in range(spans + 1)]
    tables = [torch.arange(1, 1 + -(-stop // 16))] * spans
    plan = attention_plan.make_plan(layout, starts, [stop] * spans, torch.stack(tables))
    return [(chunk.last - chunk.first) * chunk.width for bucket in plan.buckets for chunk in bucket.chunks]


def test_work_is_in_proportion_to_the_keys_that_are_seen() -> None:
    assert sum(keys_computed(None, 4095, 4096)) == 4096
    assert sum(keys_computed(200, 4095, 4096)) <= 200 + 2 * 128
    assert sum(keys_computed(None, 20, 21)) <= 128
    # A whole prompt: half of the square, and at most a key tile more for each tile of 32 rows.
    assert sum(keys_computed(None, 0, 2048)) * 32 <= 2048 * 2048 // 2 + 2048 * 128


def test_decoding_requests_share_their_products() -> None:
    assert len(keys_computed(None, 100, 101, spans=16)) == 1


def test_a_step_is_planned_once_for_all_layers_with_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int | None] = []
    make_plan = attention.make_plan

    def counted(layout: attention_plan.Layout, *rest: Any) -> attention_plan.AttentionPlan:
        planned.append(layout.window)
        return make_plan(layout, *rest)

    monkeypatch.setattr(attention, "make_plan", counted)
    kv = KVCache(4, 4, 1, 8, 16, torch.float32)
    batch = RaggedBatch(
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([16]),
        [0, 1],
        [1],
        torch.tensor([[1]]),
        16,
    )
    for layer, window in enumerate([None, 8, None, 8]):
        q = torch.randn(1, 1, 8)
        store_kv(q, q, kv, batch, layer)
        torch.testing.assert_close(paged_attention(q, kv, batch, layer, 1.0, window), q)
    assert planned == [None, 8]


@pytest.mark.parametrize("code_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_rows_come_back_within_their_format(code_dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 50).view(50, 1, 1)
    x[0] = 0
    codes, scales = quantize(x, code_dtype)
    back = codes.double() * scales.double().unsqueeze(-1)
    # int8: half a step of 1 / 127 of the largest; e4m3: 3 bits behind the first, and half a step of 2^-9 below.
    step = scales.double().unsqueeze(-1) * 0.5
    allowed = step if code_dtype == torch.int8 else torch.maximum(step * 2**-9, x.double().abs() * 2**-4)
    assert ((back - x.double()).abs() <= allowed * 1.001).all()
    assert torch.equal(scales[0], torch.zeros(3))


@pytest.mark.parametrize("code_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_quantized_row_that_is_not_finite_has_scale_nan(code_dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    codes, scales = quantize(x, code_dtype)
    assert scales[0].isfinite()
    assert scales[1].isnan()
    assert torch.equal(codes[1].float(), torch.zeros(8))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_quantized_cache_attends_to_the_numbers_it_stands_for(kv_cache_dtype: KVCacheDtype, block_size: int) -> None:
    pool, plain = Pool(2, 24, block_size, torch.bfloat16, seed=1), Pool(2, 24, block_size, torch.float32, seed=1)
    pool.kv = KVCache(pool.kv.num_blocks, LAYERS, 2, 24, block_size, torch.bfloat16, kv_cache_dtype)
    pool.kv.data.fill_(255)  # every scale is NaN
    s, t = pool.sequence(150, 4, seed=3), plain.sequence(150, 4, seed=3)
    t.q = s.q.float()
    for name in "kv":
        codes, scales = quantize(getattr(s, name), pool.kv.stored_dtype)
        setattr(t, name, codes.float() * scales.unsqueeze(-1))
    outs = [pool.step([(s, count)])[0] for count in (100, 1, 49)]
    torch.testing.assert_close(torch.cat(outs), plain.step([(t, 150)])[0].bfloat16(), atol=0, rtol=2**-7)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantized_block_is_copied_with_its_scales(kv_cache_dtype: KVCacheDtype) -> None:
    kv = KVCache(4, 3, 2, 8, 16, torch.bfloat16, kv_cache_dtype)
    assert kv.bytes_per_block == 3 * 2 * 2 * 16 * (8 + 4)
    assert kv.scales is not None
    kv.data.random_(0, 100, generator=torch.Generator().manual_seed(0))
    before = kv.data.clone()
    kv.copy([(1, 2, 5)])
    assert torch.equal(kv.numbers[2, ..., :5, :].float(), kv.numbers[1, ..., :5, :].float())
    assert torch.equal(kv.scales[2, ..., :5], kv.scales[1, ..., :5])
    assert torch.equal(kv.data[[0, 1, 3]], before[[0, 1, 3]])
    kv.numbers.view(torch.uint8)[2, ..., :5, :] = before[2, ..., : 16 * 8].view(3, 2, 2, 16, 8)[..., :5, :]
    kv.scales[2, ..., :5] = before[2, ..., 16 * 8 :].view(torch.float32)[..., :5]
    assert torch.equal(kv.data, before)


@pytest.mark.quick("32-1", "64-2", "96-4", "128-2", "192-2", "256-1", "576-4")
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256, 576])
def test_heads_of_any_width_give_the_same_bits_in_any_chunks(dim: int, heads: int) -> None:
    """Libraries have products of their own for a few rows; how many these are depends on the width, and the machine."""
    length, rng = 150, random.Random(dim)
    whole_pool = Pool(1, dim, 16, torch.float32, seed=1)
    s = whole_pool.sequence(length, heads, seed=dim)
    (whole,) = whole_pool.step([(s, length)])
    for largest in (1, 3, 7, 40):
        pool = Pool(1, dim, 16, torch.float32, seed=2)
        t, rows = pool.sequence(length, heads, seed=dim), []
        for count in cut(length, largest, rng):
            rows += pool.step([(t, count)])
        assert torch.equal(torch.cat(rows), whole), f"chunks of at most {largest} rows"
