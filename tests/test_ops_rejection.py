"""The classic rule for drafts: the distribution of what it yields, and the probabilities it works with."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops import rejection, sampling
from quire.ops.sampling import Filters, Purpose, noise_key

INF = math.inf
TRIALS = [1500, pytest.param(6000, marks=pytest.mark.slow)]


def filters_of(
    rows: int, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 1 << 40, top_p: float = INF, start: int = 0
) -> Filters:
    """Equal filters for so many rows, each with noise of its own."""
    return Filters(
        temperature=torch.full((rows,), temperature),
        log_min_p=torch.full((rows,), math.log(min_p) if min_p else -INF),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
        keys=torch.tensor([noise_key(5, 0, Purpose.SAMPLE, start + i) for i in range(rows)]),
    )


def chi_square(counts: Counter[Hashable], expected: dict[Hashable, float]) -> tuple[float, int]:
    """Of observed counts, against probabilities that sum to 1; and the degrees of freedom."""
    total = sum(counts.values())
    assert set(counts) <= {key for key, share in expected.items() if share > 0}
    cells = [(counts[key], total * share) for key, share in expected.items() if share > 0]
    return sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1


def assert_drawn_from(counts: Counter[Hashable], expected: dict[Hashable, float]) -> None:
    statistic, degrees = chi_square(counts, expected)
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 4  # one in some ten thousand would be above


# --- the rule ---------------------------------------------------------------------------------------------


def softmax(values: Sequence[float]) -> list[float]:
    weights = np.exp(np.array(values))
    return list(map(float, weights / weights.sum()))


def random_rows(seed: int, spread: float = 1.5) -> list[list[float]]:
    """A first distribution over five tokens, and one behind each of them."""
    draw = random.Random(seed)
    return [softmax([draw.gauss(0, spread) for _ in range(5)]) for _ in range(6)]


EVEN = [[0.2] * 5] * 6
LOW = [[0.5, 0.5, 0, 0, 0]] * 6
HIGH = [[0, 0, 0.2, 0.3, 0.5]] * 6


def emitted(
    target: list[list[float]], drafted: list[list[float]], certain: bool, trial: int, draw: random.Random
) -> tuple[int, int]:
    """The first two tokens of a request with two drafts; rows 1 + t are the distributions behind token t."""

    def pick(row: list[float]) -> int:
        return draw.choices(range(5), row)[0]

    first = 1 if certain else pick(drafted[0])
    second = first if certain else pick(drafted[1 + first])
    drafts = [first, second]
    accepted, token = rejection.verify(
        torch.tensor([target[0], target[1 + first], target[1 + second]]),
        drafts,
        None if certain else torch.tensor([drafted[0], drafted[1 + first]]),
        *([noise_key(trial, 0, purpose, i) for i in range(2)] for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE)),
    )
    tokens = drafts[:accepted] + ([] if token is None else [token])
    if len(tokens) == 1:
        tokens.append(pick(target[1 + tokens[0]]))
    return tokens[0], tokens[1]


@pytest.mark.quick("1500-equal", "1500-wider", "1500-certain-impossible")
@pytest.mark.parametrize(
    ("target", "drafted", "certain"),
    [
        (random_rows(1), random_rows(2), False),
        (random_rows(3), random_rows(4, spread=4.0), False),
        (random_rows(5), random_rows(5), False),
        (EVEN, LOW, False),
        (LOW, HIGH, False),
        (HIGH, EVEN, False),
        (random_rows(6), EVEN, True),
        (EVEN, EVEN, True),
        (HIGH, EVEN, True),
    ],
    ids=["near", "far", "equal", "narrower", "disjoint", "wider", "certain", "certain-even", "certain-impossible"],
)
@pytest.mark.parametrize("trials", TRIALS)
def test_two_tokens_in_a_row_are_distributed_as_without_drafts(
    target: list[list[float]], drafted: list[list[float]], certain: bool, trials: int
) -> None:
    draw = random.Random(0)
    counts: Counter[Hashable] = Counter(emitted(target, drafted, certain, trial, draw) for trial in range(trials))
    assert_drawn_from(counts, {(a, b): target[0][a] * target[1 + a][b] for a in range(5) for b in range(5)})


def verify_one(p: list[float], q: list[float] | None, draft: int, trial: int) -> tuple[int, int | None]:
    keys = [[noise_key(trial, 0, purpose, 0)] for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE)]
    return rejection.verify(torch.tensor([p]), [draft], None if q is None else torch.tensor([q]), *keys)


@pytest.mark.slow
def test_drafts_are_accepted_as_often_as_the_rule_says() -> None:
    p, q = [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]
    for draft, chance in enumerate([0.2, 1.0, 1.0]):
        share = sum(verify_one(p, q, draft, trial)[0] for trial in range(3000)) / 3000
        assert abs(share - chance) < 0.03
    assert abs(sum(verify_one(p, None, 2, trial)[0] for trial in range(3000)) / 3000 - 0.3) < 0.03


def test_equal_distributions_accept_every_draft() -> None:
    p = softmax([0.3, 1.0, -2.0, 0.0])
    assert all(verify_one(p, p, draft, trial) == (1, None) for draft in range(4) for trial in range(100))


def test_the_most_likely_token_alone_is_accepted_where_there_is_no_temperature() -> None:
    assert verify_one([0, 1, 0], None, 1, 0) == (1, None)
    assert verify_one([0, 1, 0], None, 2, 0) == (0, 1)
    assert verify_one([0, 1, 0], [0, 0, 1], 2, 0) == (0, 1)


def test_nothing_behind_a_rejected_draft_counts() -> None:
    target = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert rejection.verify(target, [1, 1, 1], None, [1, 2, 3], [4, 5, 6]) == (1, 0)
    assert rejection.verify(target, [1, 0, 1], None, [1, 2, 3], [4, 5, 6]) == (3, None)
    assert rejection.verify(target, [], None, [], []) == (0, None)


def test_equal_noise_gives_equal_tokens_and_each_purpose_has_its_own() -> None:
    p = torch.tensor([softmax([0.1 * i for i in range(20)])])
    drawn = [rejection.verify(p, [0], None, [trial], [trial]) for trial in range(50)]
    assert drawn == [rejection.verify(p, [0], None, [trial], [trial]) for trial in range(50)]
    assert len({token for _, token in drawn}) > 5


def test_a_row_that_is_not_finite_yields_no_token() -> None:
    assert verify_one([math.nan] * 3, None, 1, 0) == (0, -1)
    assert verify_one([math.nan] * 3, [0.2, 0.4, 0.4], 1, 0) == (0, -1)


# --- probabilities ----------------------------------------------------------------------------------------


def by_definition(row: NDArray[np.float32], filters: Filters, i: int) -> NDArray[np.float64]:
    """Python's sort by (logit descending, id ascending), and the filters one after the other."""
    result = np.zeros(len(row))
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    temperature = filters.temperature[i].item()
    if temperature == 0:
        result[order[0]] = 1
        return result
    scaled = (row[order] - row.max()) / np.float32(temperature)
    kept = (scaled >= filters.log_min_p[i].item()) & (np.arange(len(row)) < filters.top_k[i].item())
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    before = np.concatenate([[0], weights.cumsum()[:-1]])
    weights[before >= filters.top_p[i].item() * weights.sum()] = 0
    result[order] = weights / weights.sum()
    return result


def mixed_filters(rows: int, vocab: int, draw: random.Random) -> Filters:
    def each(*choices: float) -> list[float]:
        return [draw.choice(choices) for _ in range(rows)]

    return Filters(
        temperature=torch.tensor(each(0.0, 0.1, 0.7, 1.0, 3.0)),
        log_min_p=torch.tensor(each(-INF, -INF, math.log(0.05), math.log(1e-4), 0.0)),
        top_k=torch.tensor([int(k) for k in each(1, 4, 40, vocab, vocab, vocab)]),
        top_p=torch.tensor(each(INF, INF, 0.1, 0.5, 0.95), dtype=torch.float64),
        keys=torch.arange(rows),
    )


@pytest.mark.parametrize("vocab", [1, 5, 17, 1000, 5003])
@pytest.mark.parametrize("kind", ["spread", "ties", "masked"])
def test_probabilities_are_those_of_the_definition(vocab: int, kind: str) -> None:
    draw = random.Random(vocab)
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if kind == "ties":
        logits = logits.round()  # with signed zeros
    if kind == "masked":
        logits[:, torch.arange(vocab) % 3 > 0] = -INF
    filters = mixed_filters(24, vocab, draw)
    given = logits.clone()
    found = rejection.probabilities(logits, filters)
    assert found.dtype == torch.float32 and torch.equal(logits, given)
    for i in range(24):
        expected = by_definition(logits[i].numpy(), filters, i)
        assert (found[i].numpy()[expected == 0] == 0).all()  # and what is next to nothing may be
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=3e-5, atol=1e-30)


def test_rows_that_are_not_finite_are_nan() -> None:
    logits = torch.zeros(5, 40)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, INF, -INF
    filters = mixed_filters(5, 40, random.Random(0))
    for temperature in (0.0, 1.0):
        filters.temperature.fill_(temperature)
        found = rejection.probabilities(logits, filters)
        assert found[:3].isnan().all()
        torch.testing.assert_close(found[3:].sum(-1), torch.ones(2))


def test_a_row_has_the_same_probabilities_in_any_company() -> None:
    logits = torch.randn(24, 700, generator=torch.Generator().manual_seed(1))
    filters = mixed_filters(24, 700, random.Random(1))
    together = rejection.probabilities(logits, filters)
    for i in range(24):
        assert torch.equal(rejection.probabilities(logits[i : i + 1], filters.of(torch.tensor([i])))[0], together[i])


FILTERS: list[Callable[[int, int], Filters]] = [
    lambda rows, start: filters_of(rows, 0.7, start=start),
    lambda rows, start: filters_of(rows, 1.5, top_k=5, start=start),
    lambda rows, start: filters_of(rows, 1.0, top_p=0.8, start=start),
    lambda rows, start: filters_of(rows, 1.2, min_p=0.1, start=start),
    lambda rows, start: filters_of(rows, 2.0, min_p=0.02, top_k=9, top_p=0.9, start=start),
    lambda rows, start: filters_of(rows, 0.0, start=start),
]
LOGITS = torch.tensor([0.5, 2.0, 2.0, -1.0, 0.0, 3.0, 1.0, 2.5, 0.5, -3.0, 2.5, 1.5])


@pytest.mark.quick("1500-<lambda>0", "1500-<lambda>1", "1500-<lambda>3", "1500-<lambda>5")
@pytest.mark.parametrize("make", FILTERS)
@pytest.mark.parametrize("rows", TRIALS)
def test_sampling_draws_from_these_probabilities(make: Callable[[int, int], Filters], rows: int) -> None:
    tokens = sampling.sample(LOGITS.repeat(rows, 1), make(rows, 0))
    shares = rejection.probabilities(LOGITS[None], make(1, 0))[0].double()
    assert_drawn_from(Counter(tokens.tolist()), dict(enumerate(shares.tolist())))


@pytest.mark.quick("1500-<lambda>0", "1500-<lambda>3")
@pytest.mark.parametrize("make", FILTERS)
@pytest.mark.parametrize("rows", TRIALS)
def test_verified_drafts_are_distributed_as_samples_under_filters(
    make: Callable[[int, int], Filters], rows: int
) -> None:
    """The draft's logits are others; it goes through the same filters, and is drawn with the noise of samples."""
    near = LOGITS.roll(1) * 0.5 + LOGITS * 0.5
    p, q = (rejection.probabilities(row[None], make(1, 0)) for row in (LOGITS, near))
    drafts = sampling.sample(near.repeat(rows, 1), make(rows, 0)).tolist()
    counts: Counter[Hashable] = Counter(kept_or_drawn(p, q, draft, i) for i, draft in enumerate(drafts))
    assert_drawn_from(counts, dict(enumerate(p[0].double().tolist())))


def kept_or_drawn(p: Tensor, q: Tensor, draft: int, position: int) -> int:
    keys = [[noise_key(5, 0, purpose, position)] for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE)]
    _, token = rejection.verify(p, [draft], q, *keys)
    return draft if token is None else token
