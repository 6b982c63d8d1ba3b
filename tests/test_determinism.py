"""The contract: a request's tokens and log-probabilities, bit for bit, whatever else the engine is doing.

A product of switches: batch composition, chunk sizes, prefix cache (cold, warm, radix, hash, off), preemption
forced by a small pool, block size, threads, and overlap with the step before, with greedy and seeded requests side by
side. In full over the kernels that this machine chooses, in bf16 and fp32 and with a sliding window in all layers or
in some; and a part of it over every other implementation and instruction set, quantized weights and quantized caches,
experts and latent attention. Over all of these, a token's log-probability is the same when it is sampled and as a part
of a prompt.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.ops.cpu import library
from tests.oracle import VOCAB, save_checkpoint

MAX_TOKENS = 12


class Setting(NamedTuple):
    """A model and how it is computed: only within one of them must bits agree."""

    options: Mapping[str, Any] = MappingProxyType({})
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    architecture: str | None = None
    first_windowed: int | None = None


SETTINGS = {
    "bfloat16": Setting(),
    "float32": Setting(dtype=torch.float32),
    "sliding window": Setting(window=100),
    "windows in some layers": Setting(window=100, architecture="qwen2", first_windowed=1),
    "int8 weights": Setting({"quantization": "int8"}),
    "int4 weights": Setting({"quantization": "int4"}),
    "int8 cache": Setting({"kv_cache_dtype": "int8"}),
    "fp8 cache": Setting({"kv_cache_dtype": "fp8"}, window=100),
    "torch": Setting({"cpu_kernels": "torch"}),
    "torch, int4 weights, int8 cache": Setting(
        {"cpu_kernels": "torch", "quantization": "int4", "kv_cache_dtype": "int8"}
    ),
    **{isa: Setting({"cpu_kernels": isa}) for isa in library.usable()[1:]},
    **{
        f"{isa}, int4 weights, fp8 cache": Setting(
            {"cpu_kernels": isa, "quantization": "int4", "kv_cache_dtype": "fp8"}
        )
        for isa in library.usable()[1:]
    },
    "experts": Setting(architecture="qwen3_moe"),
    "latent attention": Setting(architecture="deepseek_v3"),
}
IN_FULL = ["bfloat16", "float32", "sliding window", "windows in some layers"]
IN_PART = [name for name in SETTINGS if name not in IN_FULL]


class Switches(NamedTuple):
    """What must not change a bit. A small pool holds the longest request and little more: requests preempt others."""

    block_size: int
    prefix_cache: str
    chunk: int
    small_pool: bool
    threads: int = 1
    overlap: bool = False


PART = [
    Switches(16, "radix", 40, True, threads=4, overlap=True),
    Switches(32, "hash", 2048, False, threads=2),
    Switches(64, "off", 173, True, threads=3),
]


def prompts() -> list[list[int]]:
    """Lengths around the borders of blocks and of attention's key tiles; three share a head of 150 tokens."""
    rnd = random.Random(5)
    head = [rnd.randrange(3, VOCAB) for _ in range(150)]
    own = [[rnd.randrange(3, VOCAB) for _ in range(n)] for n in (1, 16, 31, 250, 300)]
    return [*own, [*head, 5, 6, 7], [*head, 9], [*head[:133], 11, 12]]


def params(index: int) -> SamplingParams:
    """Every other request is greedy; the others differ in their filters. All report log-probabilities.

    Earlier ones are more urgent, so that they preempt others where they come after them.
    """
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, seed=0, logprobs=2, ignore_eos=True, priority=index).resolved()
    top_p = 0.95 if index % 4 == 1 else 1.0
    return SamplingParams(
        temperature=0.9, top_p=top_p, seed=index, logprobs=2, repetition_penalty=1.1, priority=index
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


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request, tmp_path_factory) -> dict[str, Any]:
    """The engine's options: a checkpoint, and how it is computed."""
    return dict(made_once(request.param, tmp_path_factory.getbasetemp()))


@functools.cache
def made_once(name: str, temporary: Path) -> tuple[tuple[str, Any], ...]:
    """Pytest sets a fixture with parameters up again wherever tests name these in another order."""
    chosen = SETTINGS[name]
    architecture, more = ("mistral", {"sliding_window": chosen.window}) if chosen.window else ("qwen3", {})
    architecture = chosen.architecture or architecture
    if chosen.first_windowed is not None:
        more = {**more, "use_sliding_window": True, "max_window_layers": chosen.first_windowed}
    folder = Path(tempfile.mkdtemp(dir=temporary))
    save_checkpoint(folder, architecture, dtype=chosen.dtype, num_hidden_layers=2, **more)
    return ("model", str(folder)), ("threads", 1), *chosen.options.items()


@pytest.fixture(scope="module")
def alone(setting) -> dict[int, Outcome]:
    """Each prompt on its own, in one chunk, without a cache."""
    return alone_with(tuple(setting.items()))


@functools.cache
def alone_with(setting: tuple[tuple[str, Any], ...]) -> dict[int, Outcome]:
    engine = Engine(EngineConfig(**dict(setting), prefix_cache="off"))
    outcomes: dict[int, Outcome] = {}
    for index in range(len(prompts())):
        outcomes |= run(engine, [index])
    assert all(len(outcome) == MAX_TOKENS for outcome in outcomes.values())
    assert len({tuple(token for token, _, _ in outcome) for outcome in outcomes.values()}) == len(outcomes)
    return outcomes


def engine_of(setting: dict[str, Any], switches: Switches, **more: Any) -> Engine:
    return Engine(
        EngineConfig(
            **{**setting, "threads": switches.threads, "async_scheduling": switches.overlap, **more},
            block_size=switches.block_size,
            prefix_cache=switches.prefix_cache,
            num_kv_blocks=320 // switches.block_size + 2 if switches.small_pool else 400,
            max_model_len=320,
            max_num_batched_tokens=switches.chunk,
            max_num_seqs=8,
            scheduling_policy="priority",
            check_invariants=True,
        )
    )


def assert_switches_change_nothing(
    setting: dict[str, Any], alone: dict[int, Outcome], product: Iterable[Switches]
) -> None:
    """Every prompt beside the others, at once and then one by one with a warm cache, gives what it gives alone."""
    order = list(range(len(prompts())))
    preemptions = 0
    for switches in product:
        engine = engine_of(setting, switches)
        cold = run(engine, order)
        warm = run(engine, order[::-1], first_id=100, stagger=2)
        assert cold == alone, f"cold, {switches}"
        assert warm == alone, f"warm, {switches}"
        assert (engine.stats.cached_tokens > 0) == (switches.prefix_cache != "off")
        preemptions += engine.stats.preemptions
    assert preemptions > 0


CACHES, BLOCK_SIZES, CHUNKS = ("radix", "hash", "off"), (16, 32, 64), (40, 173, 2048)


@pytest.mark.quick(
    "bfloat16-64-hash-0", "float32-32-hash-1", "sliding window-64-off-0", "windows in some layers-16-radix-1"
)
@pytest.mark.parametrize(
    ("setting", "block_size", "cache", "half"),
    list(itertools.product(IN_FULL, BLOCK_SIZES, CACHES, (0, 1))),
    indirect=["setting"],
)
def test_nothing_around_a_request_changes_its_tokens(setting, alone, block_size, cache, half):
    small = [bool((half + BLOCK_SIZES.index(block_size) + place) % 2) for place in range(len(CHUNKS))]
    pairs = zip(CHUNKS, small, strict=True)
    product = [Switches(block_size, cache, chunk, crowded, overlap=chunk != 173) for chunk, crowded in pairs]
    assert_switches_change_nothing(setting, alone, product)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        pytest.param(
            name, PART, marks=() if name in ("fp8 cache", "int4 weights", "latent attention") else pytest.mark.slow
        )
        for name in IN_PART
    ],
    indirect=["setting"],
)
def test_nothing_around_a_request_changes_its_tokens_in_any_kernels_and_formats(setting, alone, part):
    assert_switches_change_nothing(setting, alone, part)


@pytest.mark.quick("bfloat16-2", "float32-1")
@pytest.mark.parametrize(
    ("setting", "depth"),
    list(itertools.product(IN_FULL, (1, 2))),
    indirect=["setting"],
)
def test_steps_in_flight_do_not_change_tokens(setting, alone, depth):
    for blocks in (22, 400):
        config = EngineConfig(
            **setting, num_kv_blocks=blocks, max_model_len=320, max_num_batched_tokens=64, max_num_seqs=8
        )
        engine = Engine(config)
        engine._depth = depth
        order = list(range(len(prompts())))
        assert run(engine, order) == alone
        assert run(engine, order[::-1], first_id=100, stagger=2) == alone


@pytest.mark.quick("bfloat16", "windows in some layers", "int4 weights", "int8 cache", "latent attention")
@pytest.mark.parametrize("setting", SETTINGS, indirect=True)
def test_prompt_logprobs_do_not_depend_on_chunks_or_company(setting):
    prompt = prompts()[4]

    def score(chunk: int, company: bool) -> list[tuple[int, ...]]:
        engine = Engine(EngineConfig(**setting, max_num_batched_tokens=chunk, max_num_seqs=8))
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


TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.2)
SAMPLING_ENGINES: list[dict[str, Any]] = [
    {"prefix_cache": "off", "max_num_batched_tokens": 2048},
    {
        "prefix_cache": "radix",
        "max_num_batched_tokens": 40,
        "async_scheduling": True,
        "speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1},
    },
]
"""What samples: one step a prompt; and pieces of prompts beside cached heads and drafts that are verified."""

SCORING_ENGINES: list[dict[str, Any]] = [
    {"prefix_cache": "radix", "max_num_batched_tokens": 2048},
    {"prefix_cache": "off", "max_num_batched_tokens": 37, "block_size": 32},
]
"""What scores what they sampled: the first and the second round."""

Scores = list[tuple[int, float, int]]
"""Token, log-probability and rank."""


def sampled(engine: Engine) -> dict[int, Scores]:
    """Scores of each prompt's output, sampled beside the others, at all temperatures, and again with a warm cache."""
    made: dict[int, Scores] = {}
    for round in range(2):
        for index, prompt in enumerate(prompts()):
            temperature = TEMPERATURES[(index + round) % len(TEMPERATURES)]
            params = SamplingParams(temperature=temperature, seed=index, logprobs=0, ignore_eos=True).resolved()
            engine.add(Request(100 * round + index, prompt, params, max_tokens=MAX_TOKENS))
        while not engine.idle:
            for update in engine.step():
                scores = [(entry.ids[0], entry.values[0], entry.ranks[0]) for entry in update.logprobs or []]
                made.setdefault(update.request, []).extend(scores)
    return made


def scored(engine: Engine, texts: Mapping[int, list[int]]) -> dict[int, Scores]:
    """Scores of the last `MAX_TOKENS` tokens of these, as tokens of prompts."""
    params = SamplingParams(prompt_logprobs=0, seed=0).resolved()
    for id, text in texts.items():
        engine.add(Request(id, text, params, max_tokens=1))
    found: dict[int, Scores] = {id: [] for id in texts}
    while not engine.idle:
        for update in engine.step():
            entries = update.prompt_logprobs or []
            found[update.request] += [(entry.ids[0], entry.values[0], entry.ranks[0]) for entry in entries]
    return {id: scores[-MAX_TOKENS:] for id, scores in found.items()}


@pytest.mark.quick("bfloat16", "windows in some layers", "int4 weights", "int8 cache", "latent attention")
@pytest.mark.parametrize("setting", SETTINGS, indirect=True)
def test_the_logprob_of_a_sampled_token_is_the_one_of_scoring_it_as_a_prompt(setting):
    """Bit by bit: who trains on what was sampled computes the same numbers from the text."""
    common = {**setting, "max_model_len": 320, "max_num_seqs": 8}
    engines = [Engine(EngineConfig(**common | options)) for options in SAMPLING_ENGINES]
    made, again = (sampled(engine) for engine in engines)
    assert made == again and engines[1].stats.drafted > 0 and engines[1].stats.cached_tokens > 0
    assert {len(scores) for scores in made.values()} == {MAX_TOKENS}
    assert max(rank for scores in made.values() for *_, rank in scores) > 1
    texts = {id: [*prompts()[id % 100], *(token for token, *_ in scores)] for id, scores in made.items()}
    for round, options in enumerate(SCORING_ENGINES):
        mine = {id: text for id, text in texts.items() if id // 100 == round}
        assert scored(Engine(EngineConfig(**common | options)), mine) == {id: made[id] for id in mine}


@pytest.mark.quick("bfloat16", "sliding window")
@pytest.mark.parametrize("setting", IN_FULL, indirect=True)
def test_a_seed_gives_the_same_tokens_in_another_engine_and_another_seed_does_not(setting):
    def sample(seed: int) -> list[int]:
        engine = Engine(EngineConfig(**setting))
        engine.add(Request(0, prompts()[3], SamplingParams(seed=seed, temperature=1.0).resolved(), max_tokens=30))
        tokens: list[int] = []
        while not engine.idle:
            tokens += [token for update in engine.step() for token in update.tokens]
        return tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
