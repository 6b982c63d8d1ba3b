"""Latent attention: right against a written-out definition, and bit-equal however a sequence is cut and batched."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

import quire.layers.latent
from quire.layers.latent import RESTORED_BYTES, LatentAttention, LatentConfig, expanded_is_cheaper, heads_at_once
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RopeConfig, RotaryEmbedding
from quire.ops import Kernels, KVCache, RaggedBatch, latent
from quire.ops.kv_cache import KVCacheDtype, KVShape, quantize
from quire.parallel.group import Group, OneRank, Split

LAYERS, LAYER, EPS = 2, 1, 1e-6
SMALL = (4, 32, 8)
"""Heads, latent and rope numbers."""
V2_LITE = (16, 512, 64)


@dataclass(eq=False)
class Sequence:
    """One request: its queries, its compressed vectors, its blocks, and how much of it is computed."""

    q: torch.Tensor  # [tokens, heads, latent + rope]
    compressed: torch.Tensor  # [tokens, latent + rope]
    table: list[int]
    done: int = 0


class Pool:
    """A cache whose every byte is NaN at first, with blocks handed out in a shuffled order."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        stored: KVCacheDtype = "auto",
    ) -> None:
        self.heads, self.latent, self.rope = shape
        self.row, self.dtype = self.latent + self.rope, dtype
        self.kv = KVCache(3200 // block_size, LAYERS, 1, self.row, block_size, dtype, stored, sides=1)
        self.kv.data.view(torch.uint8).fill_(255)
        self.norm = 1 + torch.randn(self.latent, generator=torch.Generator().manual_seed(1)).mul_(0.2).to(dtype)
        self.rotary = RotaryEmbedding(RopeConfig(self.rope, 100.0))
        self.free = list(range(1, self.kv.num_blocks))
        random.Random(block_size).shuffle(self.free)

    def sequence(self, tokens: int, seed: int) -> Sequence:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(tokens, self.heads, self.row, generator=generator).to(self.dtype)
        compressed = (2 * torch.randn(tokens, self.row, generator=generator)).to(self.dtype)
        blocks = -(-tokens // self.kv.block_size)
        table, self.free = self.free[:blocks], self.free[blocks:]
        return Sequence(q, compressed, table)

    def batch(self, parts: list[tuple[Sequence, int]]) -> RaggedBatch:
        """The next `count` tokens of each sequence."""
        size = self.kv.block_size
        spans = [range(s.done, s.done + count) for s, count in parts]
        slots = [s.table[p // size] * size + p % size for (s, _), span in zip(parts, spans, strict=True) for p in span]
        tables = [torch.tensor(s.table) for s, _ in parts]
        return RaggedBatch(
            token_ids=torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.tensor([p for span in spans for p in span]),
            slots=torch.tensor(slots),
            row_starts=[0, *itertools.accumulate(len(span) for span in spans)],
            context_lens=[span.stop for span in spans],
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            block_size=size,
        )

    def step(self, parts: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Run the next `count` tokens of each sequence together; each one's rows of the output."""
        batch = self.batch(parts)
        compressed, q = (
            torch.cat([getattr(s, name)[s.done : s.done + count] for s, count in parts]) for name in ("compressed", "q")
        )
        tables = self.rotary.tables(batch.positions)
        latent.store_latent(compressed, self.norm, EPS, tables, self.kv, batch, LAYER)
        out = latent.latent_attention(q, self.kv, batch, LAYER, self.row**-0.5, self.latent)
        for s, count in parts:
            s.done += count
        return list(out.split([count for _, count in parts]))

    def rows(self, s: Sequence) -> torch.Tensor:
        """What the cache should hold of a sequence, by the definition: [tokens, latent + rope] fp64."""
        vector, key = s.compressed.double().split([self.latent, self.rope], dim=1)
        vector = vector / (vector.square().mean(1, keepdim=True) + EPS).sqrt() * self.norm.double()
        return torch.cat([vector, turned(key, 100.0)], dim=1)

    def dense(self, s: Sequence, rows: torch.Tensor) -> torch.Tensor:
        """Attention of a whole sequence over rows of the cache in fp64: [tokens, heads, latent]."""
        scores = torch.einsum("qhd,kd->hqk", s.q.double(), rows) * self.row**-0.5
        hidden = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, rows[:, : self.latent])


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rows of x [tokens, rope] at positions 0, 1, .. with neighbours as complex numbers, turned; fp64."""
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(0, x.shape[1], 2) / x.shape[1]).double()
    pairs = torch.view_as_complex(x.double().reshape(len(x), -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)


def test_neighbours_turn_together_and_stay_where_they_are() -> None:
    x = torch.randn(50, 3, 20)[..., 4:12]  # strided
    tables = RotaryEmbedding(RopeConfig(8, 100.0)).tables(torch.arange(50))
    out = latent.rotate_interleaved(x, tables)
    assert out.is_contiguous()
    for head in range(3):
        torch.testing.assert_close(out[:, head].double(), turned(x[:, head], 100.0), atol=2e-5, rtol=0)
    assert torch.equal(latent.rotate_interleaved(x[7:8], (tables[0][7:8], tables[1][7:8])), out[7:8])


def test_the_step_writes_its_own_rows_of_its_own_layer_and_nothing_else() -> None:
    pool = Pool(SMALL)
    s = pool.sequence(37, seed=2)
    pool.step([(s, 20)])
    pool.step([(s, 17)])
    place = torch.tensor([s.table[p // 16] for p in range(37)]), LAYER, 0, 0, torch.arange(37) % 16
    torch.testing.assert_close(pool.kv.numbers[place].double(), pool.rows(s), atol=2e-5, rtol=1e-5)
    pool.kv.numbers[place] = float("nan")
    assert pool.kv.numbers.isnan().all()


@pytest.mark.parametrize("shape", [SMALL, (7, 16, 4), V2_LITE])
def test_attention_equals_the_definition_for_any_mixture_of_spans(shape: tuple[int, int, int]) -> None:
    pool = Pool(shape)
    sequences = [pool.sequence(n, seed=n) for n in (1, 15, 129, 300)]
    for s, done in zip(sequences, (0, 3, 128, 0), strict=True):
        if done:
            pool.step([(s, done)])
    starts = [s.done for s in sequences]
    outs = pool.step([(s, len(s.q) - s.done) for s in sequences])
    for s, start, out in zip(sequences, starts, outs, strict=True):
        torch.testing.assert_close(out.double(), pool.dense(s, pool.rows(s))[start:], atol=1e-5, rtol=1e-5)


def test_bf16_attention_is_rounded_only_at_the_end() -> None:
    pool = Pool(V2_LITE, dtype=torch.bfloat16)
    s = pool.sequence(200, seed=3)
    (out,) = pool.step([(s, 200)])
    rows = pool.kv.numbers[s.table, LAYER, 0, 0].flatten(0, 1)[:200].double()
    torch.testing.assert_close(out.double(), pool.dense(s, rows), atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_quantized_cache_has_one_scale_for_a_whole_row(stored: KVCacheDtype) -> None:
    pool = Pool(SMALL, stored=stored)
    s = pool.sequence(150, seed=4)
    (out,) = pool.step([(s, 150)])
    codes, scales = quantize(pool.rows(s).float(), pool.kv.stored_dtype)
    assert pool.kv.scales is not None
    torch.testing.assert_close(pool.kv.scales[s.table, LAYER, 0, 0].flatten()[:150], scales, atol=0, rtol=1e-5)
    stored_codes = pool.kv.numbers[s.table, LAYER, 0, 0].flatten(0, 1)[:150]
    assert (stored_codes.float() != codes.float()).float().mean() < 0.01  # a rounding of the norm may tip a code
    rows = stored_codes.double() * pool.kv.scales[s.table, LAYER, 0, 0].flatten()[:150, None]
    torch.testing.assert_close(out.double(), pool.dense(s, rows), atol=1e-5, rtol=1e-5)


def run(dtype: torch.dtype, stored: KVCacheDtype, block_size: int, lengths: list[int], company: int) -> torch.Tensor:
    """One sequence of V2-Lite's sizes in chunks of these lengths, beside others; its output."""
    pool = Pool(V2_LITE, block_size, dtype, stored)
    s = pool.sequence(sum(lengths), seed=5)
    others = [pool.sequence(300, seed=10 + i) for i in range(company)]
    outs = []
    for index, count in enumerate(lengths):
        neighbours = [(other, min(1 + (index * 7 + i) % 30, 300 - other.done)) for i, other in enumerate(others)]
        parts = [part for part in neighbours if part[1]]
        outs.append(pool.step([*parts[:1], (s, count), *parts[1:]])[len(parts[:1])])
    return torch.cat(outs)


@pytest.mark.quick("dtype0-auto")
@pytest.mark.parametrize("dtype, stored", [(torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.bfloat16, "int8")])
def test_chunks_neighbours_and_block_sizes_do_not_change_a_bit(dtype: torch.dtype, stored: KVCacheDtype) -> None:
    whole = run(dtype, stored, 16, [290], 0)
    for block_size, lengths, company in (
        (16, [1] * 3 + [125, 1, 1, 30, 100, 30], 2),
        (32, [128, 128, 34], 0),
        (64, [255, 1, 1, 1, 1, 31], 1),
        (128, [7] * 41 + [3], 2),
    ):
        assert torch.equal(run(dtype, stored, block_size, lengths, company), whole), (block_size, lengths)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_cache_with_one_side_has_half_the_planes(block_size: int) -> None:
    kv = KVCache(4, 3, 1, 576, block_size, torch.bfloat16, sides=1)
    assert kv.bytes_per_block == block_size * 3 * 576 * 2
    assert KVShape(3, 1, 576, torch.bfloat16, sides=1).bytes_per_token == 3 * 576 * 2
    assert KVShape(3, 1, 576, torch.bfloat16, "int8", sides=1).bytes_per_token == 3 * (576 + 4)


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_copying_takes_a_blocks_head_and_leaves_the_rest(stored: KVCacheDtype) -> None:
    pool = Pool(SMALL, stored=stored)
    s = pool.sequence(32, seed=6)
    pool.step([(s, 32)])
    kv, source, other = pool.kv, s.table[0], pool.free[0]
    before = kv.numbers.view(torch.uint8)[other].clone()
    kv.copy([(source, other, 5)])
    bits = kv.numbers.view(torch.uint8)
    assert torch.equal(bits[other, ..., :5, :], bits[source, ..., :5, :])
    assert torch.equal(bits[other, ..., 5:, :], before[..., 5:, :])
    assert kv.scales is None or torch.equal(kv.scales[other, LAYER, 0, 0, :5], kv.scales[source, LAYER, 0, 0, :5])


class RandomWeights:
    """Gives a layer's parts with random numbers, by name."""

    kernels = Kernels()
    group: Group = OneRank()

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensors[name].to(dtype or torch.float32)

    def linear(self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: object = None) -> Linear:
        (name,) = names
        return Linear(
            self.kernels.pack([self.tensors[f"{name}.weight"]], self.tensors[f"{name}.bias"] if bias else None)
        )

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(1 + self.tensors[f"{name}.weight"], eps, self.kernels)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("value", [12, 40])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_absorbed_form_is_the_expanded_one_but_for_rounding(
    q_lora_rank: int | None, value: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, heads, tokens = 48, 4, 300
    config = LatentConfig(q_lora_rank, 32, 16, 8, value, bias=q_lora_rank is not None, scale=0.2)
    weights = RandomWeights(config.tensor_shapes(hidden, heads))
    x = torch.randn(tokens + 40, hidden, generator=torch.Generator().manual_seed(8))
    pool = Pool((heads, 32, 8))
    batch = pool.batch([(pool.sequence(tokens, seed=1), tokens), (pool.sequence(40, seed=2), 40)])
    tables = pool.rotary.tables(batch.positions)
    absorbed = LatentAttention(config, heads, weights, LAYER)(x, tables, pool.kv, batch)
    monkeypatch.setattr(quire.layers.latent, "expanded_is_cheaper", lambda *_: True)
    monkeypatch.setattr(quire.layers.latent, "heads_at_once", lambda *_: at_once)
    weights.kernels = Kernels(deterministic=False)
    expanded = LatentAttention(config, heads, weights, LAYER)(x, tables, pool.kv, batch)
    assert absorbed.std() > 0.1 and not torch.equal(absorbed, expanded)
    torch.testing.assert_close(absorbed, expanded, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "tokens, stored, heads",
    [(1024, "auto", 128), (4096, "auto", 32), (32768, "auto", 1), (16384, "int8", 1), (32768, "int8", 0)],
)
def test_heads_are_restored_as_memory_allows(tokens: int, stored: KVCacheDtype, heads: int) -> None:
    config = LatentConfig(None, 512, 128, 64, 128, bias=False, scale=0.1)
    kv = KVCache(2, 1, 1, 576, 16, torch.bfloat16, stored, sides=1)
    found = heads_at_once(config, 128, tokens, kv)
    assert found == heads
    assert found * tokens * 2 * 192 * 2 < RESTORED_BYTES


@pytest.mark.parametrize("promised", [True, False])
def test_long_spans_are_expanded_only_where_equal_bits_are_not_promised(promised: bool) -> None:
    config = LatentConfig(None, 32, 8, 8, 8, bias=False, scale=0.2)
    weights = RandomWeights(config.tensor_shapes(48, 4))
    absorbing = LatentAttention(config, 4, weights, LAYER)
    weights.kernels = Kernels(deterministic=promised)
    attention = LatentAttention(config, 4, weights, LAYER)
    x = torch.randn(400, 48, generator=torch.Generator().manual_seed(8))
    pool = Pool((4, 32, 8))
    s = pool.sequence(401, seed=1)
    for start, count, expands in ((0, 400, not promised), (400, 1, False)):
        s.done = start
        batch = pool.batch([(s, count)])
        assert expanded_is_cheaper(config, 4, batch) == (count > 1)
        tables = pool.rotary.tables(batch.positions)
        absorbed = absorbing(x[:count], tables, pool.kv, batch)
        assert torch.equal(attention(x[:count], tables, pool.kv, batch), absorbed) != expands
