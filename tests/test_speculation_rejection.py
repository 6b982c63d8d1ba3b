"""`speculative_acceptance="rejection"`: the tokens may be others, their distribution is the target's."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError
from tests.oracle import save_checkpoint

PROMPT = [5, 17, 90, 33, 8, 64]
TOP_K, LENGTH = 3, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A target and a draft model that agrees with it now and then."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    save_checkpoint(target, "qwen3", num_hidden_layers=2)
    save_checkpoint(draft, "qwen3", num_hidden_layers=1)
    return str(target), str(draft)


def engine_of(folders: tuple[str, str], rejection: bool, **spec: Any) -> Engine:
    config = {"method": "draft_model", "model": folders[1], "num_speculative_tokens": 2, "adaptive": False, **spec}
    return Engine(
        EngineConfig(
            model=folders[0],
            threads=1,
            max_model_len=64,
            speculative_config=config,
            speculative_acceptance="rejection" if rejection else "exact",
        )
    )


def outputs(engine: Engine, count: int, **params: Any) -> list[tuple[int, ...]]:
    """What so many seeds give."""
    made: dict[int, list[int]] = {seed: [] for seed in range(count)}
    for seed in range(count):
        given = SamplingParams(**{"temperature": 1.0, "top_k": TOP_K, "seed": seed} | params, ignore_eos=True)
        engine.add(Request(seed, PROMPT, given.resolved(), max_tokens=LENGTH))
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            made[update.request] += update.tokens
    return [tuple(tokens) for tokens in made.values()]


def expected(folders: tuple[str, str]) -> dict[tuple[int, ...], float]:
    """The probability of each output, from the target's own log-probabilities of its three best tokens."""
    engine = Engine(EngineConfig(model=folders[0], threads=1, max_model_len=64))

    def best(tokens: list[int]) -> dict[int, float]:
        params = SamplingParams(temperature=0.0, logprobs=TOP_K, seed=0).resolved()
        engine.add(Request(len(shares), [*PROMPT, *tokens], params, max_tokens=1))
        [entry] = [entry for _ in range(9) if not engine.idle for u in engine.step() for entry in u.logprobs or ()]
        weights = {token: math.exp(value) for token, value in zip(entry.ids[1:], entry.values[1:], strict=True)}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    shares: dict[tuple[int, ...], float] = {(): 1.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(LENGTH):
        longer = []
        for text in frontier:
            for token, share in best(list(text)).items():
                shares[*text, token] = shares[text] * share
                longer.append((*text, token))
        frontier = longer
    return {text: shares[text] for text in frontier}


def chi_square(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    total = sum(counts.values())
    return sum((counts[text] - share * total) ** 2 / (share * total) for text, share in shares.items())


@pytest.mark.parametrize("rejection", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_distribution_is_the_targets(folders, rejection):
    engine, shares = engine_of(folders, rejection), expected(folders)
    made = Counter(outputs(engine, 1500))
    assert set(made) <= set(shares)
    degrees = len(shares) - 1
    assert chi_square(made, shares) < degrees + 4 * math.sqrt(2 * degrees)
    assert 0 < engine.stats.accepted < engine.stats.drafted


def test_it_accepts_oftener_than_equal_tokens_do_and_says_what_it_gives_up(folders):
    classic, exact = engine_of(folders, True), engine_of(folders, False)
    outputs(classic, 300)
    outputs(exact, 300)
    assert classic.stats.accepted / classic.stats.drafted > exact.stats.accepted / exact.stats.drafted
    assert any(
        "the distribution of sampled tokens is kept, but the tokens themselves" in note for note in classic.notes
    )


def test_greedy_requests_get_the_very_tokens(folders):
    plain = Engine(EngineConfig(model=folders[0], threads=1, max_model_len=64))
    assert outputs(engine_of(folders, True), 3, temperature=0.0) == outputs(plain, 3, temperature=0.0)


def test_drafts_that_are_certain_keep_the_distribution_too(folders):
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2, "adaptive": False}
    engine = Engine(
        EngineConfig(
            model=folders[0],
            threads=1,
            max_model_len=64,
            speculative_config=config,
            speculative_acceptance="rejection",
        )
    )
    assert set(outputs(engine, 50)) <= set(expected(folders))


def test_what_it_cannot_do_is_refused(folders):
    with pytest.raises(ConfigError, match="cannot verify trees of drafts; leave tree_width out"):
        engine_of(folders, True, tree_width=2)
    with pytest.raises(ConfigError, match="needs speculative decoding; set speculative_config"):
        EngineConfig(model="m", speculative_acceptance="rejection")
