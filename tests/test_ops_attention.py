"""Paged attention: right against a dense oracle, and bit-equal however a sequence is cut and batched."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from quire.ops import KVCache, RaggedBatch, paged_attention, store_kv

LAYERS, LAYER = 2, 1


@dataclass
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
            block_tables=tables,
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


def cuts(total: int, largest: int, rng: random.Random) -> list[int]:
    lengths = []
    while total:
        lengths.append(rng.randint(1, min(total, largest)))
        total -= lengths[-1]
    return lengths


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 64), (3, 1, 32)])
def test_bits_do_not_depend_on_chunks_neighbours_or_block_size(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None
) -> None:
    length = 720

    def run(block_size: int, largest: int, neighbours: int, seed: int) -> torch.Tensor:
        rng = random.Random(seed)
        pool = Pool(kv_heads, dim, block_size, dtype, seed)
        s = pool.sequence(length, heads, seed=7)
        others: list[Sequence] = []
        rows = []
        for count in [length] if largest >= length else cuts(length, largest, rng):
            others = [o for o in others if o.done < len(o.q)]
            while len(others) < neighbours:
                others.append(pool.sequence(rng.randint(1, 60), heads, seed=rng.randint(0, 99)))
            parts = [(o, rng.randint(1, len(o.q) - o.done)) for o in others]
            place = rng.randint(0, len(parts))
            parts.insert(place, (s, count))
            rows.append(pool.step(parts, window)[place])
            if len(pool.free) < 60 * 16 // block_size:
                neighbours = 0
        return torch.cat(rows)

    whole = run(16, length, 0, seed=1)
    assert whole.isfinite().all()
    for block_size, largest, neighbours in [
        (16, 300, 2),
        (32, length, 5),
        (64, 37, 1),
        (16, 9, 3),
        (128, 100, 0),
        (256, 200, 2),
        (32, 1, 0),
    ]:
        assert torch.equal(run(block_size, largest, neighbours, seed=block_size + largest), whole)
