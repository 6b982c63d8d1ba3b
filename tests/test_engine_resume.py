"""A request that goes on behind the tokens it has, on a fresh engine, gets the tokens it would have had."""

from __future__ import annotations

import pytest

from quire import SamplingParams
from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine

PROMPT = [10, 20, 30, 40, 50, 60, 70]
MIXED = SamplingParams(
    max_tokens=40,
    temperature=1.1,
    top_p=0.9,
    seed=3,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    min_p=0.01,
    top_k=0,
    min_tokens=30,
    logprobs=2,
)


@pytest.fixture(scope="module")
def engine():
    engine = Engine(EngineConfig(model="demo", threads=1))
    yield engine
    engine.close()


def run(engine, number, params, output=(), scored=0):
    request = Request(
        number,
        PROMPT,
        params.resolved(engine.sampling_defaults),
        max_tokens=params.max_tokens,
        stop_token_ids=frozenset(engine.model.eos_token_ids),
        bad_words=[[97], [100, 101]],
        output_token_ids=output,
        num_scored=scored,
    )
    engine.add(request)
    tokens, logprobs, prompt_logprobs = list(output), [], []
    while not engine.idle:
        for update in engine.step():
            tokens += update.tokens
            logprobs += update.logprobs or []
            prompt_logprobs += update.prompt_logprobs or []
            reason = update.finish_reason
    return tokens, logprobs, prompt_logprobs, reason


@pytest.mark.quick("17", "38", "39")
@pytest.mark.parametrize("cut", [1, 2, 15, 16, 17, 38, 39])
def test_the_rest_is_the_same_behind_every_cut(engine, cut):
    tokens, logprobs, _, reason = run(engine, 2 * cut, MIXED)
    engine.scheduler.kv.cache.clear()
    again = run(engine, 2 * cut + 1, MIXED, output=tokens[:cut])
    assert again == (tokens, logprobs[cut:], [], reason)


@pytest.mark.parametrize("scored", [0, 3, 6])
def test_prompt_logprobs_go_on_behind_those_that_were_delivered(engine, scored):
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    _, _, whole, _ = run(engine, 1000 + 2 * scored, params)
    assert len(whole) == len(PROMPT) - 1
    _, _, rest, _ = run(engine, 1001 + 2 * scored, params, scored=scored)
    assert rest == whole[scored:]
