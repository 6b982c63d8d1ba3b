"""Sampling in C++ against its torch reference, on every instruction set that this machine has."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.ops import Kernels
from quire.ops import sampling as ops
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.logit_edits import BitMasks, Edits, Lists, Masks
from quire.runner.sampler import Sampler

pytestmark = pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")

VOCABS = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 4096, 20_001)


@pytest.fixture(params=library.usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return CpuKernels(request.param)


def noise(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def make_logits(rows: int, vocab: int, draw: random.Random) -> Tensor:
    """Smooth, full of ties, flat, far apart, or mostly masked."""
    logits = noise(rows, vocab, draw.randrange(1 << 30)) * draw.choice([0.0, 0.6, 2.0, 6.0, 300.0])
    kind = draw.randrange(4)
    if kind == 0:
        logits = logits.round()  # signed zeros too
    if kind == 1:
        logits[noise(rows, vocab, draw.randrange(1 << 30)) < draw.choice([-1.0, 2.5])] = -math.inf
        logits[:, vocab // 2] = 1.0
    return logits


def make_filters(rows: int, vocab: int, draw: random.Random) -> ops.Filters:
    def each(*choices: float) -> list[float]:
        return [draw.choice(choices) for _ in range(rows)]

    return ops.Filters(
        temperature=torch.tensor(each(0.0, 1e-5, 0.1, 0.8, 0.8, 1.0, 3.0, 100.0)),
        log_min_p=torch.tensor(each(-math.inf, -math.inf, math.log(0.05), math.log(1e-6), 0.0)),
        top_k=torch.tensor([min(int(k), vocab) for k in each(1, 5, 40, 129, 3000, vocab, vocab, vocab, vocab)]),
        top_p=torch.tensor(each(math.inf, 0.01, 0.5, 0.95, 0.95, 0.999), dtype=torch.float64),
        keys=torch.tensor([ops.noise_key(draw.randrange(99), 0, ops.Purpose.SAMPLE, i) for i in range(rows)]),
    )


def filters_of(rows: int, vocab: int, temperature: float = 1.0, top_p: float = math.inf) -> ops.Filters:
    keys = [ops.noise_key(7, 0, ops.Purpose.SAMPLE, i) for i in range(rows)]
    full = torch.full
    return ops.Filters(
        full((rows,), temperature), full((rows,), -math.inf), full((rows,), vocab),
        full((rows,), top_p, dtype=torch.float64), torch.tensor(keys),
    )  # fmt: skip


def test_tokens_are_those_of_the_reference(kernels: Kernels) -> None:
    draw, rows, different, reference = random.Random(1), 0, 0, Kernels()
    for vocab in VOCABS:
        for _ in range(4):
            logits = make_logits(16, vocab, draw)
            filters = make_filters(16, vocab, draw)
            rows += 16
            different += int((kernels.sample(logits, filters) != reference.sample(logits, filters)).sum())
    assert different <= rows / 200  # where a sum's last digits decide what top-p keeps


def test_greedy_tokens_are_always_the_lowest_of_the_best(kernels: Kernels) -> None:
    for vocab in VOCABS:
        logits = torch.randint(0, 3, (6, vocab), generator=torch.Generator().manual_seed(vocab)).float()
        expected = [int((row == row.max()).nonzero()[0]) for row in logits]
        assert kernels.sample(logits, filters_of(6, vocab, temperature=0.0)).tolist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_wherever_it_is_not(kernels: Kernels, value: float) -> None:
    for vocab in (1, 17, 300, 5000):
        logits, filters = noise(3, vocab), filters_of(3, vocab)
        expected = kernels.sample(logits, filters).tolist()
        for place in {0, vocab // 2, vocab - 1}:
            broken = logits.clone()
            broken[1, place] = value
            assert kernels.sample(broken, filters).tolist() == [expected[0], -1, expected[2]]
        logits[1] = -math.inf
        assert kernels.sample(logits, filters).tolist() == [expected[0], -1, expected[2]]


def test_extreme_numbers_sample_some_token(kernels: Kernels) -> None:
    top = torch.finfo(torch.float32).max
    logits = torch.stack([noise(1, 700)[0] * scale for scale in (1e-40, 1.0, 1e30)])
    logits[0, :5] = torch.tensor([top, -top, 0.0, -math.inf, 1e-45])
    for temperature in (1e-44, 1e-6, 1.0, 1e30):
        for top_p in (1e-300, 0.5, math.inf):
            filters = filters_of(3, 700, temperature, top_p)
            tokens = kernels.sample(logits, filters)
            assert ((tokens >= 0) & (tokens < 700)).all()
            filters.top_k[:] = 699
            assert (kernels.sample(logits, filters) >= 0).all()


@pytest.mark.parametrize("top_p", [math.inf, 0.6])
def test_sampled_frequencies_are_the_softmax_of_what_is_kept(kernels: Kernels, top_p: float) -> None:
    vocab, draws = 12, 20_000
    row = noise(1, vocab, 4)[0]
    sampled = kernels.sample(row.expand(draws, vocab).contiguous(), filters_of(draws, vocab, 0.8, top_p))
    shares, order = (row.double() / 0.8).softmax(0).sort(descending=True)
    kept = shares.cumsum(0) - shares < top_p
    counts = torch.bincount(sampled, minlength=vocab).double()[order]
    assert counts[~kept].sum() == 0
    expected = shares[kept] / shares[kept].sum() * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert abs(statistic - degrees) / math.sqrt(2 * degrees) < 5


def test_a_large_vocabulary_samples_what_the_reference_samples(kernels: Kernels) -> None:
    for scale in (0.6, 3.0):
        logits = noise(2, 300_000, 3) * scale
        for top_p in (math.inf, 0.95):
            filters = filters_of(2, 300_000, 0.8, top_p)
            assert torch.equal(kernels.sample(logits, filters), Kernels().sample(logits, filters))


def test_a_row_is_the_same_in_any_company_and_with_any_number_of_threads(kernels: Kernels) -> None:
    draw, rows, vocab = random.Random(2), 24, 10_007
    logits, filters = make_logits(rows, vocab, draw), make_filters(rows, vocab, draw)
    ids = torch.arange(rows)
    tokens, scores = kernels.sample(logits, filters), kernels.token_scores(logits, ids, ids, 5)
    for number in (1, 2):
        with kernels.threads(number):
            for size in (1, 2, 5, rows):
                index = torch.tensor(draw.sample(range(rows), size))
                assert torch.equal(kernels.sample(logits[index], filters.of(index)), tokens[index])
                part = kernels.token_scores(logits, index, index, 5)
                assert all(torch.equal(one, whole[index]) for one, whole in zip(part, scores, strict=True))


def test_log_probabilities_are_those_of_the_reference(kernels: Kernels) -> None:
    draw = random.Random(3)
    for vocab in VOCABS:
        logits = make_logits(6, vocab, draw)
        logits[4, vocab // 3] = math.nan
        rows = torch.tensor([5, 0, 4, 2, 2])
        ids = torch.tensor([draw.randrange(vocab) for _ in rows])
        for count in (0, 1, 20):
            found, expected = (k.token_scores(logits, rows, ids, count) for k in (kernels, Kernels()))
            torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-5, equal_nan=True)
            assert torch.equal(found.ids, expected.ids)
            assert torch.equal(found.ranks, expected.ranks)


def make_edits(rows: list[int], vocab: int, draw: random.Random) -> Edits:
    def ids(most: int) -> list[Any]:
        return [np.array(draw.sample(range(vocab), draw.randrange(min(most, vocab) + 1)), np.int64) for _ in rows]

    def numbers(*choices: float) -> Tensor:
        return torch.tensor([draw.choice(choices) for _ in rows])

    seen, bias = ids(50), ids(9)
    masks = torch.cat([torch.ones(1, vocab), noise(3, vocab)]) * math.inf
    return Edits(
        torch.tensor(rows), numbers(1.0, 0.5, 1.7), numbers(0.0, -0.5, 2.0), numbers(0.0, 1.5),
        Lists.of(seen, [np.array([draw.choice([0, 1, 7]) for _ in part], np.float32) for part in seen]),
        Lists.of(bias, [np.array([draw.uniform(-100, 100) for _ in part], np.float32) for part in bias]),
        Masks(masks, torch.tensor([draw.randrange(4) for _ in rows])),
        Lists.of(ids(5)),
        bits(rows, vocab, draw),
    )  # fmt: skip


def bits(rows: list[int], vocab: int, draw: random.Random) -> BitMasks:
    """Of some of the rows, with a word more than the vocabulary needs: some words allow all tokens, some none."""
    masked = draw.sample(rows, draw.randrange(len(rows) + 1))
    words = torch.zeros(len(masked), vocab // 32 + 2, dtype=torch.int32)
    words.apply_(lambda _: draw.choice([0, -1, draw.randrange(-(1 << 31), 1 << 31)]))
    return BitMasks(torch.tensor(masked, dtype=torch.int64), words)


def test_edits_are_bit_equal_to_the_reference(kernels: Kernels) -> None:
    draw = random.Random(4)
    for vocab in VOCABS:
        logits = make_logits(6, vocab, draw)
        logits[3, vocab // 2] = draw.choice([math.nan, math.inf, 1.0])
        edits = make_edits([4, 0, 3], vocab, draw)
        found, expected = logits.clone(), logits.clone()
        assert torch.equal(kernels.edit_logits(found, edits), Kernels().edit_logits(expected, edits))
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_finite_rows_are_those_of_torch(kernels: Kernels) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (1, 16, 33, 1024):
            x = (noise(7, size) * 1e4).to(dtype)
            for row, value in ((1, math.nan), (3, math.inf), (5, -math.inf)):
                x[row, size * row // 6] = value
            assert kernels.finite_rows(x).tolist() == [True, False] * 3 + [True]


def test_bad_input_is_refused_before_c_reads_it(kernels: Kernels) -> None:
    logits, filters = noise(4, 50), filters_of(4, 50)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.sample(logits.double(), filters)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.sample(logits.t().contiguous().t(), filters)
    with pytest.raises(ValueError, match="4 entries"):
        kernels.sample(logits, filters.of(torch.arange(3)))
    with pytest.raises(ValueError, match="token id is 50"):
        kernels.token_scores(logits, torch.tensor([0]), torch.tensor([50]), 1)
    with pytest.raises(ValueError, match="row is -1"):
        kernels.token_scores(logits, torch.tensor([-1]), torch.tensor([5]), 1)
    edits = make_edits([0, 1], 50, random.Random(1))
    edits.banned = Lists.of([np.array([3]), np.array([99])])
    with pytest.raises(ValueError, match="token id is 99"):
        kernels.edit_logits(logits, edits)
    edits.banned = Lists(torch.tensor([0, 5, 1]), torch.tensor([3]), torch.zeros(0))
    with pytest.raises(ValueError, match="must rise from 0"):
        kernels.edit_logits(logits, edits)
    edits = make_edits([0, 1], 50, random.Random(1))
    edits.masks.requests[1] = 4
    with pytest.raises(ValueError, match="mask is 4"):
        kernels.edit_logits(logits, edits)
    edits = make_edits([0, 1], 50, random.Random(1))
    edits.bits = BitMasks(torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="1 rows of 50 bits"):
        kernels.edit_logits(logits, edits)
    edits.bits = BitMasks(torch.tensor([9]), torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="row is 9"):
        kernels.edit_logits(logits, edits)
    edits = make_edits([0, 1], 49, random.Random(1))
    with pytest.raises(ValueError, match="49 columns; they must be float32 of 50"):
        kernels.edit_logits(logits, edits)


def test_the_sampler_gives_the_same_rows_on_torch(kernels: Kernels) -> None:
    vocab, rows = 3000, 24
    logits, draw = noise(rows, vocab) * 3, random.Random(5)
    samplers = Sampler(vocab, kernels), Sampler(vocab, Kernels())
    for request in range(rows):
        params = SamplingParams(
            seed=request,
            temperature=draw.choice([0, 0.8, 1.3]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 20]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            logprobs=draw.choice([None, 0, 5]),
            allowed_token_ids=draw.choice([None, list(range(10, 900))]),
        )
        for sampler in samplers:
            sampler.start(RequestInfo(request, params, 0, [request, 5], bad_words=[[7, 8], [9]]))
    for step in range(3):
        places = [(request, 2 + step) for request in range(rows)]
        found, expected = (sampler.sample(logits.clone(), places) for sampler in samplers)
        assert [row.token for row in found] == [row.token for row in expected]
        for one, other in zip(found, expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs and other.logprobs:
                assert one.logprobs.ids == other.logprobs.ids
                assert one.logprobs.values == pytest.approx(other.logprobs.values, abs=1e-5)


def test_a_bit_says_whether_a_token_may_come(kernels: Kernels) -> None:
    allowed, bits = [0, 31, 32, 63, 64], [0] * 3
    for token in allowed:
        bits[token // 32] |= 1 << token % 32
    words = np.array([bits], np.uint32).view(np.int32)
    none, numbers = Lists.of([np.zeros(0, np.int64)], [np.zeros(0, np.float32)]), torch.tensor([1.0])
    masks = Masks(torch.full((1, 70), math.inf), torch.tensor([0]))
    mask = BitMasks(torch.tensor([0]), torch.from_numpy(words))
    for kind in (Kernels(), kernels):
        logits, before = noise(2, 70), noise(2, 70)
        kind.edit_logits(
            logits, Edits(torch.tensor([0]), numbers, numbers * 0, numbers * 0, none, none, masks, none, mask)
        )
        assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == allowed
        assert torch.equal(logits[0, allowed], before[0, allowed]) and torch.equal(logits[1], before[1])
