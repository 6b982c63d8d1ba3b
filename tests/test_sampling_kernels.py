"""The sampling kernels against a naive full computation, bit by bit, and their noise against statistics."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from quire.ops import sampling as ops

MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def make_filters(
    rows: int, vocab: int, draw: random.Random, temperatures: tuple[float, ...] = (1e-4, 0.1, 0.8, 1.0, 3.0, 100.0)
) -> ops.Filters:
    def each(*choices: float) -> list[float]:
        return [draw.choice(choices) for _ in range(rows)]

    return ops.Filters(
        temperature=torch.tensor(each(*temperatures)),
        log_min_p=torch.tensor(each(-math.inf, -math.inf, math.log(0.05), math.log(1e-6), 0.0)),
        top_k=torch.tensor([min(int(k), vocab) for k in each(1, 5, 40, 128, 129, 3000, vocab, vocab, vocab)]),
        top_p=torch.tensor(each(math.inf, 0.01, 0.5, 0.95, 0.999), dtype=torch.float64),
        keys=torch.tensor([ops.noise_key(draw.randrange(99), 0, ops.Purpose.SAMPLE, i) for i in range(rows)]),
    )


def make_logits(rows: int, vocab: int, draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    logits = torch.randn(rows, vocab, generator=generator) * draw.choice([0.0, 0.1, 1.0, 2.5, 6.0])
    kind = draw.randrange(4)
    if kind == 0:
        logits = logits.bfloat16().float()  # ties everywhere
    if kind == 1:
        logits = logits.round()  # and signed zeros
    if kind == 2:
        logits[torch.rand(rows, vocab, generator=generator) < draw.choice([0.1, 0.99])] = -math.inf
        logits[:, vocab // 2] = 1.0
    return logits


def naive(row: Tensor, filters: ops.Filters, i: int) -> int:
    """Sorts everything and draws noise for everything: the definition of what a row samples."""
    vocab = len(row)
    order = torch.sort(row, stable=True, descending=True).indices
    scaled = ((row - row.max()) / filters.temperature[i])[order]
    kept = (scaled >= filters.log_min_p[i]) & (torch.arange(vocab) < filters.top_k[i]) & (scaled > -math.inf)
    mass = torch.where(kept, scaled.double().exp(), 0.0).cumsum(0)
    if filters.log_min_p[i] == -math.inf and filters.top_k[i] >= vocab:
        temperature = filters.temperature[i].view(1)
        total = ops.exp_sums(row[None], ops.chunk_maxima(row[None]), torch.tensor([0]), temperature)[0]
    else:
        total = mass[-1]
    before = torch.cat([torch.zeros(1, dtype=torch.float64), mass[:-1]])
    kept &= before < filters.top_p[i] * total
    scores = scaled.double() + ops.gumbel(ops.noise_bits(filters.keys[i], order))
    scores[~kept] = -math.inf
    return int(order[scores == scores.max()].min())


@pytest.mark.parametrize("vocab", [1, 3, 16, 17, 1000, 4096, 20001])
def test_short_cuts_sample_what_the_naive_computation_samples(vocab: int) -> None:
    draw = random.Random(vocab)
    for _ in range(12 if vocab < 5000 else 4):
        rows = draw.choice([1, 2, 3, 8])
        logits, filters = make_logits(rows, vocab, draw), make_filters(rows, vocab, draw)
        maxima, index = ops.chunk_maxima(logits), torch.arange(rows)
        expected = [naive(logits[i], filters, i) for i in range(rows)]
        assert ops.sample_filtered(logits, maxima, index, filters).tolist() == expected
        is_open = (filters.top_k >= vocab) & (filters.top_p == math.inf)
        if is_open.any():
            sampled = ops.sample_open(logits, maxima, index[is_open], filters.of(is_open)).tolist()
            assert sampled == [expected[i] for i in index[is_open].tolist()]


def test_a_nucleus_longer_than_every_prefix_is_found_by_the_full_sort() -> None:
    draw = random.Random(5)
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1)) * 0.1
    filters = make_filters(2, 50_000, draw, temperatures=(1.0,))
    filters.top_k[:], filters.log_min_p[:], filters.top_p[:] = 50_000, -math.inf, 0.9
    sampled = ops.sample_filtered(logits, ops.chunk_maxima(logits), torch.arange(2), filters).tolist()
    assert sampled == [naive(logits[i], filters, i) for i in range(2)]


@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 4096, 10_007])
def test_argmax_takes_the_lowest_id_of_equal_logits(vocab: int) -> None:
    logits = torch.randint(0, 3, (6, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    rows = torch.tensor([5, 0, 3])
    expected = [int((logits[i] == logits[i].max()).nonzero()[0]) for i in rows.tolist()]
    assert ops.argmax(logits, ops.chunk_maxima(logits), rows).tolist() == expected


@pytest.mark.parametrize("count", [1, 5, 20])
def test_top_tokens_and_ranks_order_ties_by_id(count: int) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(count)).mul(2).round()
    rows = torch.arange(4)
    values, ids = ops.top(logits, ops.chunk_maxima(logits), rows, count)
    order = torch.sort(logits, stable=True, descending=True)
    assert ids.tolist() == order.indices[:, :count].tolist()
    assert values.tolist() == order.values[:, :count].tolist()
    assert ops.ranks(logits, ops.chunk_maxima(logits), rows, ids[:, -1]).tolist() == [count] * 4


def test_the_ranks_of_all_tokens_are_their_places_in_the_order() -> None:
    logits = torch.randint(0, 9, (1, 200), generator=torch.Generator().manual_seed(1)).float()
    logits[0, 150:] = -math.inf
    order = torch.sort(logits[0], stable=True, descending=True).indices
    rows = torch.zeros(200, dtype=torch.int64)
    assert ops.ranks(logits, ops.chunk_maxima(logits), rows, order).tolist() == list(range(1, 201))


def test_exp_sums_are_the_sums_of_exponentials() -> None:
    logits = torch.randn(3, 4099, generator=torch.Generator().manual_seed(3)) * 3
    temperature = torch.tensor([0.5, 1.0, 2.0])
    sums = ops.exp_sums(logits, ops.chunk_maxima(logits), torch.arange(3), temperature)
    scaled = logits.double() / temperature[:, None]
    expected = (scaled - scaled.amax(-1, keepdim=True)).exp().sum(-1)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=0)


def test_chunk_maxima_show_a_nan_anywhere() -> None:
    for place in (0, 500, 999):
        logits = torch.zeros(2, 1000)
        logits[1, place] = math.nan
        assert ops.chunk_maxima(logits).amax(-1).isnan().tolist() == [False, True]


# --- noise ------------------------------------------------------------------------------------------------


def test_noise_is_splitmix64_at_the_token_s_place() -> None:
    ids = [0, 1, 7, 151_935]
    for seed, choice, position in ((0, 0, 0), (5, 1, 77), (-1, 2, 10**6), (2**63 - 1, 127, 5)):
        key = ops.noise_key(seed, choice, ops.Purpose.SAMPLE, position)
        expected = [splitmix64((key + i * 0x9E3779B97F4A7C15) & MASK) >> 12 for i in ids]
        assert ops.noise_bits(torch.tensor(key), torch.tensor(ids)).tolist() == expected


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = (5, 1, ops.Purpose.SAMPLE, 9)
    keys = {
        ops.noise_key(*base),
        ops.noise_key(6, *base[1:]),
        ops.noise_key(5, 2, *base[2:]),
        ops.noise_key(5, 1, ops.Purpose.ACCEPT, 9),
        ops.noise_key(5, 1, ops.Purpose.SAMPLE, 10),
        ops.noise_key(9, 1, ops.Purpose.SAMPLE, 5),
    }
    assert len(keys) == 6


def uniforms(keys: list[int], ids: int) -> Tensor:
    return ops.noise_bits(torch.tensor(keys)[:, None], torch.arange(ids)).double() * 2.0**-ops.NOISE_BITS


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The statistic's distance from its mean in standard deviations; below 5 for all but 1 case in 10^5."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def test_noise_is_uniform() -> None:
    keys = [ops.noise_key(3, 0, ops.Purpose.SAMPLE, position) for position in range(200)]
    drawn = uniforms(keys, 1000).flatten()
    counts = torch.histc(drawn.float(), bins=100, min=0, max=1).double()
    assert abs(chi_square(counts, torch.full((100,), len(drawn) / 100))) < 5


@pytest.mark.parametrize("part", ["seed", "choice", "position", "token"])
def test_noise_is_independent_between_neighbours(part: str) -> None:
    keys = []
    for shift in (0, 1):
        seed, choice, position = (shift if part == name else 0 for name in ("seed", "choice", "position"))
        keys.append(
            [ops.noise_key(11 + seed, choice, ops.Purpose.SAMPLE, 2 * place + position) for place in range(100)]
        )
    first, second = uniforms(keys[0], 1001), uniforms(keys[1], 1001)
    if part == "token":
        first, second = first[:, :-1], first[:, 1:]
    joint = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(float(joint)) < 5 / math.sqrt(100_000)


def test_gumbel_noise_is_finite_and_bounded_at_both_ends() -> None:
    ends = ops.gumbel(torch.tensor([0, (1 << ops.NOISE_BITS) - 1]))
    assert torch.isfinite(ends).all()
    assert float(ends[1]) <= ops.LARGEST_NOISE
    assert float(ends[1]) > 36


@pytest.mark.parametrize("axis", ["position", "seed"])
def test_sampled_frequencies_are_the_softmax(axis: str) -> None:
    vocab, draws = 12, 20_000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(4))
    keys = [
        ops.noise_key(*((7, 0, ops.Purpose.SAMPLE, i) if axis == "position" else (i, 0, ops.Purpose.SAMPLE, 7)))
        for i in range(draws)
    ]
    full = torch.full
    filters = ops.Filters(
        full((draws,), 0.8), full((draws,), -math.inf), full((draws,), vocab),
        full((draws,), math.inf, dtype=torch.float64), torch.tensor(keys),
    )  # fmt: skip
    logits = row.expand(draws, vocab).contiguous()
    sampled = ops.sample_open(logits, ops.chunk_maxima(logits), torch.arange(draws), filters)
    counts = torch.bincount(sampled, minlength=vocab).double()
    assert abs(chi_square(counts, (row.double() / 0.8).softmax(0) * draws)) < 5
