"""The sampler: every parameter acts, rows fail alone, and company changes nothing."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.ops import Kernels, choose_kernels
from quire.ops.sampling import TokenScores
from quire.runner.device import Device
from quire.runner.drafts import Row
from quire.runner.sampler import SampledRow, Sampler
from tests.devices import DelayedDevice, SpanKernels

VOCAB = 50


def info(request: int = 0, prompt: list[int] | None = None, **fields: Any) -> RequestInfo:
    extra = {name: fields.pop(name) for name in ("output_token_ids", "stop_token_ids", "bad_words") if name in fields}
    params = SamplingParams(**{"seed": 1, **fields})
    return RequestInfo(request, params, 0, prompt or [1, 2, 3], **extra)


def logits_of(*rows: dict[int, float], vocab: int = VOCAB) -> Tensor:
    """Rows of zeros but for the given logits."""
    made = torch.zeros(len(rows), vocab)
    for row, values in zip(made, rows, strict=True):
        for token, value in values.items():
            row[token] = value
    return made


def noise(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(sampler: Sampler, logits: Tensor, position: int = 3, request: int = 0) -> SampledRow:
    return sampler.sample(logits, [(request, position)])[0]


def greedy_after(about: RequestInfo, logits: Tensor) -> int:
    sampler = Sampler(logits.shape[1])
    sampler.start(about)
    return one(sampler, logits, len(about.prompt_token_ids) + len(about.output_token_ids)).token


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert greedy_after(info(temperature=0), logits_of({30: 2.0, 20: 2.0, 40: 1.0})) == 20


def test_presence_penalty_is_subtracted_once_and_only_for_output() -> None:
    about = info(temperature=0, presence_penalty=1.0, prompt=[5], output_token_ids=[7, 7, 7])
    assert greedy_after(about, logits_of({7: 2.0, 9: 1.5})) == 9
    assert greedy_after(about, logits_of({7: 2.0, 9: 0.9})) == 7
    assert greedy_after(about, logits_of({5: 2.0, 9: 1.5})) == 5


def test_frequency_penalty_is_subtracted_for_each_occurrence() -> None:
    about = info(temperature=0, frequency_penalty=0.5, output_token_ids=[7, 7, 7])
    assert greedy_after(about, logits_of({7: 3.0, 9: 1.6})) == 9
    assert greedy_after(about, logits_of({7: 3.0, 9: 1.4})) == 7


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = noise(1)
    prompt, output = [3, 9, 9, 20], [7, 3, 31]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    sampler = Sampler(VOCAB)
    # The log-probabilities of the raw distribution are no help here, so compare the best of each subset.
    for number, allowed in enumerate(([3, 9, 20, 7, 31], list(range(VOCAB)), [3, 4], [31, 30])):
        about = info(number, prompt, temperature=0, repetition_penalty=1.7, allowed_token_ids=allowed,
                     output_token_ids=output)  # fmt: skip
        sampler.start(about)
        best = max(allowed, key=lambda token: float(expected[0, token]))
        assert one(sampler, logits.clone(), 7, number).token == best


def test_penalties_count_the_tokens_that_the_sampler_made_itself() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0, frequency_penalty=1.0))
    logits = logits_of({7: 2.5, 8: 1.8})
    tokens = [one(sampler, logits.clone(), 3 + i).token for i in range(5)]
    assert tokens == [7, 8, 7, 8, 7]  # 2.5, 1.8, 1.5, 0.8, 0.5


def test_logit_bias_is_added() -> None:
    assert greedy_after(info(temperature=0, logit_bias={4: 3.0}), logits_of({9: 2.0})) == 4
    assert greedy_after(info(temperature=0, logit_bias={9: -3.0, 0: -1.0}), logits_of({9: 2.0})) == 1


def test_only_allowed_tokens_are_sampled() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=100.0, allowed_token_ids=[4, 17, 4]))
    sampled = {one(sampler, noise(1, seed=i), 3 + i).token for i in range(40)}
    assert sampled == {4, 17}


@pytest.mark.parametrize("kind", [Device, DelayedDevice])
def test_allowed_ids_are_sent_once_a_request_and_not_in_each_step(kind: type[Device]) -> None:
    device, kernels = kind(), SpanKernels() if kind is DelayedDevice else None
    sent: list[int] = []
    upload = device.upload

    def counted(*arrays: Any) -> list[Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return upload(*arrays)

    device.upload = counted  # type: ignore[method-assign]
    found = []
    for allowed in (range(10, 12), range(10, 900)):
        sampler = Sampler(1000, kernels, device)
        for request in range(3):
            sampler.start(info(request, temperature=1.0, allowed_token_ids=list(allowed)))
        assert sum(sent) == 3 * 8 * len(allowed)
        sent.clear()
        for step in range(4):
            rows = sampler.sample(noise(3, 1000, seed=step), [(request, 3 + step) for request in range(3)])
            assert all(row.token in allowed for row in rows)
        found.append(sum(sent))
        sent.clear()
    assert found[0] == found[1]


def test_a_mask_ends_with_its_request() -> None:
    sampler = Sampler(VOCAB)
    for request in range(20):
        sampler.start(info(request, allowed_token_ids=[7 + request]))
        assert one(sampler, noise(1), 3, request).token == 7 + request
        sampler.end(request)
    assert len(sampler._allowed.matrix) < 20, "rows are used again"
    sampler.start(info(30, temperature=0))
    assert one(sampler, logits_of({49: 5.0}), 3, 30).token == 49


def test_stop_tokens_are_masked_before_min_tokens() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0, min_tokens=2, stop_token_ids=frozenset({9})))
    logits = logits_of({9: 5.0, 4: 1.0})
    assert [one(sampler, logits.clone(), 3 + i).token for i in range(3)] == [4, 4, 9]


def test_the_end_of_a_bad_word_is_masked_behind_its_beginning_only() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0, bad_words=[[6, 7], [40], [5, 6, 8]]))
    steps = [{40: 9.0, 6: 1.0}, {7: 9.0, 2: 1.0}, {7: 9.0}, {6: 9.0}, {8: 9.0}]
    tokens = [one(sampler, logits_of(step), 3 + i).token for i, step in enumerate(steps)]
    assert tokens == [6, 2, 7, 6, 8]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = noise(3)
    sampler, healthy = Sampler(VOCAB), Sampler(VOCAB)
    for request in range(3):
        sampler.start(info(request, logprobs=2))
        healthy.start(info(request, logprobs=2))
    rows = [(request, 3) for request in range(3)]
    expected = healthy.sample(logits.clone(), rows)
    logits[1, 17] = bad
    result = sampler.sample(logits, rows)
    assert (result[0], result[2]) == (expected[0], expected[2])
    assert result[1].error is not None
    assert "not finite" in result[1].error
    assert (result[1].token, result[1].logprobs) == (-1, None)


def test_a_masked_nan_is_still_an_error() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(allowed_token_ids=[3]))
    logits = noise(1)
    logits[0, 5] = math.nan
    assert "not finite" in str(one(sampler, logits).error)


def test_a_row_of_minus_infinity_is_an_error() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info())
    assert "not finite" in str(one(sampler, torch.full((1, VOCAB), -math.inf)).error)


def test_a_row_masked_to_nothing_fails_alone_and_says_why() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(0, temperature=0, logprobs=1))
    sampler.start(info(1, allowed_token_ids=[9], min_tokens=1, stop_token_ids=frozenset({9}), logprobs=1))
    first, second = sampler.sample(logits_of({8: 1.0}, {}), [(0, 3), (1, 3)])
    assert (first.token, first.error) == (8, None)
    assert first.logprobs is not None
    assert "no token is left" in str(second.error)


def test_a_wrong_position_is_refused() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info())
    with pytest.raises(ValueError, match="position 4, but its next is 3"):
        one(sampler, noise(1), 4)


def test_a_request_without_a_seed_is_refused_unless_greedy() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0, seed=None))
    with pytest.raises(ValueError, match="no seed"):
        sampler.start(info(temperature=1.0, seed=None))


def test_an_ended_request_is_forgotten() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info())
    sampler.end(0)
    sampler.end(0)
    with pytest.raises(KeyError):
        one(sampler, noise(1))


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = noise(1)
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0.5, logprobs=3, repetition_penalty=2.0, logit_bias={5: 100.0}))
    row = one(sampler, logits.clone())
    expected = torch.log_softmax(logits[0].double(), -1)
    order = torch.sort(expected, descending=True).indices.tolist()
    assert row.token == 5
    assert row.logprobs is not None
    assert row.logprobs.ids == [5, *order[:3]]
    assert row.logprobs.ranks == [1 + order.index(5), 1, 2, 3]
    assert row.logprobs.values == pytest.approx([float(expected[i]) for i in row.logprobs.ids], abs=1e-5)


def test_logprobs_zero_returns_the_sampled_token_alone() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(temperature=0, logprobs=0))
    row = one(sampler, logits_of({8: 4.0}))
    assert row.logprobs is not None
    assert (row.logprobs.ids, row.logprobs.ranks) == ([8], [1])


def test_scoring_a_prompt_gives_log_softmax_and_leaves_the_logits() -> None:
    logits = noise(6)
    copy = logits.clone()
    targets = [0, 49, 7, 7, 13, 2]
    scored = Sampler(VOCAB).score(logits, targets, 2)
    expected = torch.log_softmax(logits.double(), -1)
    assert [entry.values[0] for entry in scored] == pytest.approx(
        [float(expected[i, target]) for i, target in enumerate(targets)], abs=1e-5
    )
    assert [entry.ids[1:] for entry in scored] == expected.topk(2).indices.tolist()
    assert [entry.values[1:] for entry in scored] == [
        pytest.approx(values, abs=1e-5) for values in expected.topk(2).values.tolist()
    ]
    assert torch.equal(logits, copy)


def test_scoring_a_row_that_is_not_finite_gives_nan_there_alone() -> None:
    logits = noise(3)
    expected = Sampler(VOCAB).score(logits, [1, 2, 3], 1)
    logits[1, 0] = math.nan
    scored = Sampler(VOCAB).score(logits, [1, 2, 3], 1)
    assert (scored[0], scored[2]) == (expected[0], expected[2])
    assert math.isnan(scored[1].values[0])


def test_choices_and_seeds_differ_and_repeat() -> None:
    def tokens(seed: int, choice: int) -> list[int]:
        sampler = Sampler(VOCAB)
        about = info(seed=seed)
        about.choice = choice
        sampler.start(about)
        return [one(sampler, noise(1, seed=i) / 3, 3 + i).token for i in range(20)]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(seed, choice)) for seed in (1, 2) for choice in (0, 1)}) == 4


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped() -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "seed": 3}
    whole, resumed = Sampler(VOCAB), Sampler(VOCAB)
    whole.start(info(**fields))
    tokens = [one(whole, noise(1, seed=i), 3 + i).token for i in range(12)]
    resumed.start(info(output_token_ids=tokens[:5], **fields))
    assert [one(resumed, noise(1, seed=i), 3 + i).token for i in range(5, 12)] == tokens[5:]


def mixed(request: int, vocab: int) -> RequestInfo:
    """A request whose parameters are drawn from its number."""
    draw = random.Random(request)
    return info(
        request,
        [request, 5],
        seed=request,
        temperature=draw.choice([0, 0.5, 0.8, 1.0, 1.3]),
        top_p=draw.choice([1.0, 0.9, 0.95]),
        top_k=draw.choice([0, 0, 20]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        presence_penalty=draw.choice([0.0, 0.5]),
        logprobs=draw.choice([None, 0, 5]),
        logit_bias=draw.choice([None, {5: 3.0}]),
        allowed_token_ids=draw.choice([None, None, list(range(10, vocab // 2))]),
        output_token_ids=[7, 7],
    )


@pytest.mark.quick("4099-32")
@pytest.mark.parametrize(("vocab", "rows"), [(151_936, 12), (4099, 32)])
def test_a_row_is_bit_equal_in_any_company(vocab: int, rows: int) -> None:
    logits = noise(rows, vocab)
    logits[::2] = logits[::2].bfloat16().float()
    draw = random.Random(0)

    def sample(requests: list[int]) -> dict[int, SampledRow]:
        sampler = Sampler(vocab)
        for request in requests:
            sampler.start(mixed(request, vocab))
        result = sampler.sample(logits[requests], [(request, 4) for request in requests])
        return dict(zip(requests, result, strict=True))

    together = sample(list(range(rows)))
    groups = [[request] for request in range(rows)]
    groups += [draw.sample(range(rows), size) for size in (2, 3, 5, 8, rows)]
    for group in groups:
        assert sample(group) == {request: together[request] for request in group}


# -- two halves ------------------------------------------------------------------------------------------------------


def penalized(request: int) -> RequestInfo:
    return info(
        request,
        [request, 5, 5],
        seed=request,
        temperature=1.5 * (request % 2),
        output_token_ids=[7] * (request % 3),
        repetition_penalty=(1.0, 1.5, 0.8)[request % 3],
        frequency_penalty=(0.7, 0.0)[request % 2],
        presence_penalty=(0.0, 0.4, -0.3)[request % 3],
        min_tokens=2,
        stop_token_ids=frozenset({9}),
        logprobs=request % 3,
    )


def places(sampled: dict[int, int]) -> list[tuple[int, int]]:
    return [(request, 3 + request % 3 + number) for request, number in sampled.items()]


def test_steps_launched_before_others_are_finished_give_what_steps_one_by_one_give() -> None:
    device = DelayedDevice()
    ahead, expected = Sampler(VOCAB, SpanKernels(), device), Sampler(VOCAB, Kernels(), Device())
    sampled: dict[int, int] = {}
    waiting = []
    for step in range(9):
        for request in range(3 * step, 3 * step + 3):  # so that the device's table of tokens grows
            ahead.start(penalized(request))
            expected.start(penalized(request))
            sampled[request] = 0
        if step % 2:  # so that its rows are used again
            for request in (step, step + 1):
                ahead.end(request)
                expected.end(request)
                sampled.pop(request, None)
        logits, rows = noise(len(sampled), seed=step), places(sampled)
        launched = ahead.launch(logits.clone(), rows)
        waiting.append((launched, device.mark(), expected.sample(logits, rows)))
        sampled = {request: number + 1 for request, number in sampled.items()}
        if len(waiting) == 2:
            launched, mark, result = waiting.pop(0)
            mark.wait()
            assert launched.finish() == result


def test_a_row_that_fails_ends_nothing_but_its_request() -> None:
    device = DelayedDevice()
    sampler = Sampler(VOCAB, SpanKernels(), device)
    for request in range(3):
        sampler.start(penalized(request))
    logits = noise(3)
    logits[1, 4] = math.nan
    first = sampler.launch(logits, places(dict.fromkeys(range(3), 0)))
    second = sampler.launch(noise(3, seed=1), places(dict.fromkeys(range(3), 1)))
    device.mark().wait()
    assert [row.error is None for row in first.finish()] == [True, False, True]
    assert first.tokens.tolist()[1] == -1
    assert [row.error for row in second.finish()] == [None] * 3


class ShortOfMemory(SpanKernels):
    """Fails once, when everything else of a step has been queued."""

    failed = False

    def token_scores(self, logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> TokenScores:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError
        return super().token_scores(logits, rows, ids, count)


def test_a_step_that_ran_out_of_memory_can_be_tried_again() -> None:
    samplers = Sampler(VOCAB, ShortOfMemory()), Sampler(VOCAB, Kernels())
    for sampler in samplers:
        sampler.start(info(temperature=0, frequency_penalty=1.0, logprobs=1))
    logits = logits_of({7: 2.5, 8: 1.0})
    with pytest.raises(torch.OutOfMemoryError):
        one(samplers[0], logits.clone())
    found, expected = ([one(sampler, logits.clone(), 3 + i) for i in range(3)] for sampler in samplers)
    assert found == expected
    assert [row.token for row in found] == [7, 7, 8]


def test_a_request_with_bad_words_may_be_launched_again_before_it_is_finished() -> None:
    device = DelayedDevice()
    sampler = Sampler(VOCAB, SpanKernels(), device)
    sampler.start(info(temperature=0, bad_words=[[6, 7]]))
    sampler.start(info(request=1, temperature=0))
    first = sampler.launch(logits_of({6: 9.0}), [(0, 3)])
    other = sampler.launch(logits_of({7: 9.0}), [(1, 3)])  # nothing is waited for on its account
    assert first.tokens.tolist() == [6] and first.is_to_tell
    second = sampler.launch(logits_of({7: 9.0, 2: 1.0}), [(0, 4)])
    device.mark().wait()
    assert [launched.finish()[0].token for launched in (first, other, second)] == [6, 7, 2]


def test_prompt_scores_come_late_too() -> None:
    device, logits = DelayedDevice(), noise(3)
    scored = Sampler(VOCAB, SpanKernels(), device).launch_score(logits, [1, 2, 3], 2)
    device.mark().wait()
    assert scored.finish() == Sampler(VOCAB, Kernels()).score(logits, [1, 2, 3], 2)


def test_scores_are_bit_equal_in_any_slice() -> None:
    logits = noise(8, 40_001)
    targets = list(range(8))
    sampler = Sampler(40_001)
    whole = sampler.score(logits, targets, 3)
    for size in (1, 2, 3, 5):
        parts = [sampler.score(logits[i : i + size], targets[i : i + size], 3) for i in range(0, 8, size)]
        assert [entry for part in parts for entry in part] == whole


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.7)])
def test_filters_made_ahead_draw_what_is_drawn_place_by_place(temperatures: tuple[float, ...]) -> None:
    sampler = Sampler(VOCAB)
    for request, temperature in enumerate(temperatures):
        sampler.start(info(request, temperature=temperature, seed=request, top_p=0.9, top_k=20, min_p=0.01))
    counts, kernels = [3, 3, 2, 1], choose_kernels()
    made = sampler.filters_ahead([2, 0, 1], [3, 3, 3], counts)
    assert made is not None and len(made) == len(counts)
    for depth, (count, filters) in enumerate(zip(counts, made, strict=True)):
        logits = noise(count, seed=depth)
        places = [Row(request, 3 + depth, [1] * depth) for request in (2, 0, 1)[:count]]
        assert kernels.sample(logits.clone(), filters).tolist() == sampler.draw(logits, places).tolist()


def test_there_are_no_filters_ahead_where_tokens_decide_and_none_for_a_wrong_position() -> None:
    sampler = Sampler(VOCAB)
    sampler.start(info(0, temperature=0.0))
    sampler.start(info(1, temperature=0.0, presence_penalty=1.0))
    assert sampler.filters_ahead([0], [3], [1]) is not None
    assert sampler.filters_ahead([0, 1], [3, 3], [2]) is None
    with pytest.raises(ValueError, match="request 0 samples position 4, but its next is 3"):
        sampler.filters_ahead([0], [4], [1])
