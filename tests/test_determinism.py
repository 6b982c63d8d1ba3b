"""The contract: a request's tokens and log-probabilities, bit for bit, whatever else the engine is doing.

A product of switches: batch composition, chunk sizes, prefix cache (cold, warm, radix, hash, off), preemption
forced by a small pool, and block size, in bf16 and fp32, with greedy and seeded requests side by side.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from tests.oracle import VOCAB, save_checkpoint

MAX_TOKENS = 12
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def prompts() -> list[list[int]]:
    """Lengths around the borders of blocks and of attention's key tiles; three share a head of 150 tokens."""
    rnd = random.Random(5)
    head = [rnd.randrange(3, VOCAB) for _ in range(150)]
    own = [[rnd.randrange(3, VOCAB) for _ in range(n)] for n in (1, 16, 31, 250, 300)]
    return [*own, [*head, 5, 6, 7], [*head, 9], [*head[:133], 11, 12]]


def params(index: int) -> SamplingParams:
    """Every other request is greedy; the others differ in their filters. All report log-probabilities."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, seed=0, logprobs=2, ignore_eos=True).resolved()
    return SamplingParams(
        temperature=0.9, top_p=0.95 if index % 4 == 1 else 1.0, seed=index, logprobs=2, repetition_penalty=1.1
    ).resolved()


Outcome = list[tuple[int, tuple[int, ...], tuple[float, ...]]]


def run(engine: Engine, indices: list[int], first_id: int = 0, stagger: int = 0) -> dict[int, Outcome]:
    """Token, reported ids and log-probabilities of each prompt; with `stagger`, one joins every so many steps."""
    todo = list(indices)
    outcomes: dict[int, Outcome] = {index: [] for index in indices}
    step = 0
    while todo or not engine.idle:
        if todo and (not stagger or step % stagger == 0):
            for index in todo if not stagger else todo[:1]:
                engine.add(Request(first_id + index, prompts()[index], params(index), max_tokens=MAX_TOKENS))
            todo = todo[1:] if stagger else []
        for update in engine.step():
            assert update.error is None
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcomes[update.request - first_id].append((token, tuple(entry.ids), tuple(entry.values)))
        step += 1
    return outcomes


@pytest.fixture(scope="module", params=["bfloat16", "float32", "bfloat16, sliding window"])
def checkpoint(request, tmp_path_factory) -> Path:
    dtype, _, windowed = request.param.partition(", ")
    folder = tmp_path_factory.mktemp(dtype)
    if windowed:
        return save_checkpoint(folder, "mistral", dtype=DTYPES[dtype], num_hidden_layers=2, sliding_window=100)
    return save_checkpoint(folder, "qwen3", dtype=DTYPES[dtype], num_hidden_layers=2)


@pytest.fixture(scope="module")
def alone(checkpoint) -> dict[int, Outcome]:
    """Each prompt on its own, in one chunk, without a cache."""
    engine = Engine(EngineConfig(model=str(checkpoint), prefix_cache="off"))
    outcomes: dict[int, Outcome] = {}
    for index in range(len(prompts())):
        outcomes |= run(engine, [index])
    assert all(len(outcome) == MAX_TOKENS for outcome in outcomes.values())
    assert len({tuple(token for token, _, _ in outcome) for outcome in outcomes.values()}) == len(outcomes)
    return outcomes


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
def test_nothing_around_a_request_changes_its_tokens(checkpoint, alone, block_size, cache):
    order = list(range(len(prompts())))
    preemptions = 0
    for chunk, small_pool in itertools.product([40, 173, 2048], [False, True]):
        # A small pool holds the longest request and little more, so requests preempt one another.
        blocks = 320 // block_size + 2 if small_pool else 400
        engine = Engine(
            EngineConfig(
                model=str(checkpoint),
                block_size=block_size,
                prefix_cache=cache,
                num_kv_blocks=blocks,
                max_model_len=320,
                max_num_batched_tokens=chunk,
                max_num_seqs=8,
                check_invariants=True,
            )
        )
        cold = run(engine, order)
        warm = run(engine, order[::-1], first_id=100, stagger=2)
        where = f"chunk {chunk}, small pool {small_pool}"
        assert cold == alone, f"cold, {where}"
        assert warm == alone, f"warm, {where}"
        assert (engine.stats.cached_tokens > 0) == (cache != "off")
        preemptions += engine.stats.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_do_not_change_tokens(checkpoint, alone, depth):
    for blocks in (22, 400):
        config = EngineConfig(
            model=str(checkpoint), num_kv_blocks=blocks, max_model_len=320, max_num_batched_tokens=64, max_num_seqs=8
        )
        engine = Engine(config)
        engine._depth = depth
        order = list(range(len(prompts())))
        assert run(engine, order) == alone
        assert run(engine, order[::-1], first_id=100, stagger=2) == alone


def test_prompt_logprobs_do_not_depend_on_chunks_or_company(checkpoint):
    prompt = prompts()[4]

    def score(chunk: int, company: bool) -> list[tuple[int, ...]]:
        engine = Engine(EngineConfig(model=str(checkpoint), max_num_batched_tokens=chunk, max_num_seqs=8))
        if company:
            engine.add(Request(1, prompts()[3], params(0), max_tokens=40))
        engine.add(Request(0, prompt, SamplingParams(prompt_logprobs=3, seed=0).resolved(), max_tokens=1))
        entries = []
        while not engine.idle:
            for update in engine.step():
                if update.request == 0:
                    entries += [(*entry.ids, *entry.values, *entry.ranks) for entry in update.prompt_logprobs or []]
        return entries

    base = score(2048, company=False)
    assert len(base) == len(prompt) - 1
    assert score(37, company=True) == base


def test_a_seed_gives_the_same_tokens_in_another_engine_and_another_seed_does_not(checkpoint):
    def sample(seed: int) -> list[int]:
        engine = Engine(EngineConfig(model=str(checkpoint)))
        engine.add(Request(0, prompts()[3], SamplingParams(seed=seed, temperature=1.0).resolved(), max_tokens=30))
        tokens: list[int] = []
        while not engine.idle:
            tokens += [token for update in engine.step() for token in update.tokens]
        return tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
