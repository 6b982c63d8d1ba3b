"""Sampling in Triton against its torch reference, in the interpreter; and what its kernels become on real GPUs."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.triton_launches  # noqa: F401  # for every test
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.ops import Kernels
from quire.ops import sampling as ops
from quire.ops.logit_edits import BitMasks, Edits, History, Lists, Masks
from quire.ops.triton import sampling
from quire.runner.device import Device
from quire.runner.sampler import Sampler
from tests.devices import DelayedDevice
from tests.triton_compile import EACH_ARCHITECTURE, compile_all

MASK = (1 << 64) - 1
PART = sampling.PART


class SamplingKernels(Kernels):
    """The reference but for what is tested here."""

    reads_spans = True

    def edit_logits(self, logits: Tensor, edits: Edits) -> Tensor:
        return sampling.edit_logits(logits, edits)

    def sample(self, logits: Tensor, filters: ops.Filters) -> Tensor:
        return sampling.sample(logits, filters)

    def token_scores(self, logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> ops.TokenScores:
        return sampling.token_scores(logits, rows, ids, count)


def noise(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def make_logits(rows: int, vocab: int, draw: random.Random) -> Tensor:
    """Rows that are smooth, full of ties, flat, far apart, or mostly masked, one after the other."""
    logits = noise(rows, vocab, draw.randrange(1 << 30))
    logits *= torch.tensor([[draw.choice([0.0, 0.6, 2.0, 6.0, 300.0])] for _ in range(rows)])
    logits[::3] = logits[::3].round()  # signed zeros too
    logits[1::4].masked_fill_(noise(len(logits[1::4]), vocab, 7) < draw.choice([-1.0, 2.5]), -math.inf)
    logits[:, vocab // 2] = 1.0
    return logits


def make_filters(rows: int, vocab: int, draw: random.Random) -> ops.Filters:
    def each(*choices: float) -> list[float]:
        return [draw.choice(choices) for _ in range(rows)]

    return ops.Filters(
        temperature=torch.tensor(each(0.0, 1e-3, 0.1, 0.8, 0.8, 1.0, 3.0, 100.0)),
        log_min_p=torch.tensor(each(-math.inf, -math.inf, math.log(0.05), math.log(1e-6), 0.0)),
        top_k=torch.tensor([min(int(k), vocab) for k in each(1, 5, 40, 3000, vocab, vocab, vocab, vocab)]),
        top_p=torch.tensor(each(math.inf, 0.01, 0.5, 0.95, 1 - 1e-9), dtype=torch.float64),
        keys=torch.tensor([ops.noise_key(draw.randrange(99), 0, ops.Purpose.SAMPLE, i) for i in range(rows)]),
    )


def filters_of(rows: int, vocab: int, temperature: float = 1.0, top_p: float = math.inf) -> ops.Filters:
    keys = [ops.noise_key(7, 0, ops.Purpose.SAMPLE, i) for i in range(rows)]
    return ops.Filters(
        torch.full((rows,), temperature), torch.full((rows,), -math.inf), torch.full((rows,), vocab),
        torch.full((rows,), top_p, dtype=torch.float64), torch.tensor(keys), False, top_p < 1,
    )  # fmt: skip


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick("1", "17", "4096")
@pytest.mark.parametrize("vocab", [1, 17, 65, PART, PART + 1, 3 * PART - 5])
def test_tokens_are_those_of_the_reference(vocab: int) -> None:
    draw = random.Random(vocab)
    logits, filters = make_logits(12, vocab, draw), make_filters(12, vocab, draw)
    assert sampling.sample(logits, filters).tolist() == ops.sample(logits, filters).tolist()


def test_what_no_row_has_is_not_looked_for_and_changes_nothing() -> None:
    vocab = PART + 9
    logits, filters = noise(3, vocab), filters_of(3, vocab)
    expected = sampling.sample(logits, filters).tolist()
    filters.some_top_k = filters.some_top_p = True
    assert sampling.sample(logits, filters).tolist() == expected == ops.sample(logits, filters).tolist()


def test_greedy_tokens_are_always_the_lowest_of_the_best() -> None:
    for vocab in (1, 70, 2 * PART + 3):
        logits = torch.randint(0, 3, (4, vocab), generator=torch.Generator().manual_seed(vocab)).float()
        logits[1, : vocab - 1] = -math.inf
        expected = [int((row == row.max()).nonzero()[0]) for row in logits]
        assert sampling.sample(logits, filters_of(4, vocab, temperature=0.0)).tolist() == expected


@pytest.mark.quick("nan")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_wherever_it_is_not(value: float) -> None:
    vocab = PART + 100
    logits, filters = noise(3, vocab), filters_of(3, vocab, top_p=0.9)
    filters.top_k[:] = 50
    filters.some_top_k = True
    expected = sampling.sample(logits, filters).tolist()
    for place in (0, PART - 1, vocab - 1):
        broken = logits.clone()
        broken[1, place] = value
        assert sampling.sample(broken, filters).tolist() == [expected[0], -1, expected[2]]
    logits[1] = -math.inf
    assert sampling.sample(logits, filters).tolist() == [expected[0], -1, expected[2]]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
def test_extreme_numbers_sample_some_token() -> None:
    top = torch.finfo(torch.float32).max
    logits = torch.stack([noise(1, 700)[0] * scale for scale in (1e-40, 1e30)])
    logits[0, :5] = torch.tensor([top, -top, 0.0, -math.inf, 1e-45])
    for temperature in (1e-44, 1e30):
        for top_p in (1e-300, math.inf):
            filters = filters_of(2, 700, temperature, top_p)
            tokens = sampling.sample(logits, filters)
            assert ((tokens >= 0) & (tokens < 700)).all()


def test_the_token_after_many_draws_outside_top_p_is_that_of_the_reference() -> None:
    vocab = 2 * PART
    logits, filters = noise(6, vocab) * 0.1, filters_of(6, vocab, top_p=0.002)
    logits[3:] = logits[3:].mul(20).round()  # the last few are ties
    expected = ops.sample(logits, filters).tolist()
    assert sampling.sample(logits, filters).tolist() == expected
    assert sampling.sample(logits, filters_of(6, vocab)).tolist() != expected  # so the first draw was outside


def test_tokens_are_found_that_win_by_the_rarest_noise() -> None:
    vocab, best, rare = 2 * PART, 5, PART + 7
    highest = _unmixed(MASK)
    logits, filters = torch.full((1, vocab), -80.0), filters_of(1, vocab)
    logits[0, best], logits[0, rare] = 0.0, -35.0
    filters.keys[0] = ops._signed((highest - rare * 0x9E3779B97F4A7C15) & MASK)
    assert ops.noise_bits(filters.keys, torch.tensor(rare)).tolist() == [(1 << ops.NOISE_BITS) - 1]
    assert sampling.sample(logits, filters).tolist() == ops.sample(logits, filters).tolist() == [rare]
    logits[0, rare] = -37.0
    assert sampling.sample(logits, filters).tolist() == ops.sample(logits, filters).tolist() != [rare]


def _unmixed(value: int) -> int:
    """The state that SplitMix64 turns into `value`."""
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        value = (value * pow(factor, -1, 1 << 64)) & MASK
        shifted = value
        while shifted:
            shifted >>= shift
            value ^= shifted
    return value


def test_a_row_is_the_same_in_any_company() -> None:
    draw, rows, vocab = random.Random(2), 6, PART + 77
    logits, filters = make_logits(rows, vocab, draw), make_filters(rows, vocab, draw)
    ids = torch.arange(rows)
    tokens, scores = sampling.sample(logits, filters), sampling.token_scores(logits, ids, ids, 2)
    for size in (1, 2):
        index = torch.tensor(draw.sample(range(rows), size))
        assert torch.equal(sampling.sample(logits[index], filters.of(index)), tokens[index])
        part = sampling.token_scores(logits, index, index, 2)
        assert all(torch.equal(one, whole[index]) for one, whole in zip(part, scores, strict=True))


# -- log-probabilities and edits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 17, 65, PART + 1])
def test_log_probabilities_are_those_of_the_reference(vocab: int) -> None:
    draw = random.Random(vocab)
    logits = make_logits(6, vocab, draw)
    logits[4, vocab // 3] = math.nan
    rows = torch.tensor([5, 0, 4, 2])
    ids = torch.tensor([draw.randrange(vocab) for _ in rows])
    for count in (0, 1, 20):
        found, expected = (k.token_scores(logits, rows, ids, count) for k in (SamplingKernels(), Kernels()))
        torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-5, equal_nan=True)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.ranks, expected.ranks)


def make_edits(rows: list[int], vocab: int, draw: random.Random) -> Edits:
    def ids(most: int) -> list[Any]:
        return [np.array(draw.sample(range(vocab), draw.randrange(min(most, vocab) + 1)), np.int64) for _ in rows]

    def numbers(*choices: float) -> Tensor:
        return torch.tensor([draw.choice(choices) for _ in rows])

    bias, masks = ids(9), torch.cat([torch.ones(1, vocab), noise(3, vocab, seed=1)]) * math.inf
    counts = torch.randint(0, 9, (5, vocab), dtype=torch.int32, generator=torch.Generator().manual_seed(vocab))
    counts *= noise(5, vocab) > 0
    counts[0] = 0
    history = History(counts, torch.tensor(draw.sample(range(4), len(rows))))
    return Edits(
        torch.tensor(rows), numbers(1.0, 0.5, 1.7), numbers(0.0, -0.5, 2.0), numbers(0.0, 1.5), history,
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


@pytest.mark.parametrize("vocab", [1, 17, 1000, PART + 1])
def test_edits_are_bit_equal_to_the_reference(vocab: int) -> None:
    draw = random.Random(vocab)
    for _ in range(2):
        logits = make_logits(6, vocab, draw)
        logits[3, vocab // 2] = draw.choice([math.nan, math.inf, 1.0])
        edits = make_edits([4, 0, 3], vocab, draw)
        found, expected = logits.clone(), logits.clone()
        assert torch.equal(sampling.edit_logits(found, edits), Kernels().edit_logits(expected, edits))
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_penalties_from_lists_are_refused() -> None:
    edits = make_edits([0], 10, random.Random(1))
    edits.seen = Lists.of([np.array([3])], [np.array([1.0], np.float32)])
    with pytest.raises(TypeError, match="History"):
        sampling.edit_logits(noise(1, 10), edits)


# -- the sampler -----------------------------------------------------------------------------------------------------


def test_steps_launched_before_others_are_finished_give_what_steps_one_by_one_give() -> None:
    vocab, steps = 90, 4
    logits = [noise(3, vocab, seed) * 3 for seed in range(steps)]
    logits[2][1, 5] = math.nan

    def started(kernels: Kernels, device: Device) -> Sampler:
        sampler = Sampler(vocab, kernels, device)
        for request in range(3):
            params = SamplingParams(
                seed=request,
                temperature=(0.0, 1.0, 1.5)[request],
                repetition_penalty=1.5,
                frequency_penalty=0.7,
                presence_penalty=0.3,
                logprobs=2,
                top_p=0.9,
            )
            sampler.start(RequestInfo(request, params, 0, [request, 5], output_token_ids=[7, 7]))
        return sampler

    def places(step: int) -> list[tuple[int, int]]:
        return [(request, 4 + step) for request in range(3)]

    device, expected = DelayedDevice(), started(Kernels(), Device())
    with device.active():
        sampler = started(SamplingKernels(), device)
        launched = [sampler.launch(logits[step].clone(), places(step)) for step in range(steps)]
        device.mark().wait()
    for step in range(steps):
        found, rows = launched[step].finish(), expected.sample(logits[step].clone(), places(step))
        assert [(row.token, row.error) for row in found] == [(row.token, row.error) for row in rows]
        for one, other in zip(found, rows, strict=True):
            assert (one.logprobs and one.logprobs.ids) == (other.logprobs and other.logprobs.ids)
    assert found[1].error is None
    assert launched[2].tokens[1] == -1


# -- on real GPUs ----------------------------------------------------------------------------------------------------


def launch_all() -> None:
    sampling.warm_up(151_936, "cpu")


@EACH_ARCHITECTURE
def test_every_kernel_compiles_for_real_gpus_within_its_registers(arch: int) -> None:
    compiled = compile_all("tests.test_triton_sampling", arch)
    assert {kernel["kernel"] for kernel in compiled} == {
        "maxima", "select", "draw", "weigh", "settle", "score_parts", "score_rows", "penalize", "mask",
    }  # fmt: skip
    for kernel in compiled:
        assert kernel["stack"] <= (16 if kernel["kernel"] == "select" else 0), kernel  # two numbers, not in its loops
        assert kernel["shared"] <= 16 * 1024, kernel
