"""Speculation cannot be seen in the output: whatever is drafted, tokens and log-probabilities are those without it."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from quire.config import EngineConfig
from quire.core import draft_length
from quire.core.draft_length import Average, DraftState
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.llm import LLM
from quire.runner.drafts import Drafts, Wanted
from quire.speculative_config import SpeculativeConfig
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import VOCAB, save_checkpoint

MAX_TOKENS = 20
KINDS: dict[str, tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ("qwen3", torch.bfloat16, {}, {}),
    "float32": ("llama", torch.float32, {}, {}),
    "sliding window": ("mistral", torch.bfloat16, {"sliding_window": 40}, {}),
    "windows in some layers": (
        "qwen2",
        torch.bfloat16,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        {},
    ),
    "int8 cache": ("qwen3", torch.bfloat16, {}, {"kv_cache_dtype": "int8"}),
    "int4 weights": ("qwen3", torch.bfloat16, {}, {"quantization": "int4"}),
    "torch": ("qwen3", torch.bfloat16, {}, {"cpu_kernels": "torch"}),
    "experts": ("qwen3_moe", torch.bfloat16, {}, {}),
    "latent attention": ("deepseek_v3", torch.bfloat16, {}, {}),
}


def prompts() -> list[list[int]]:
    rnd = random.Random(5)
    head = [rnd.randrange(3, VOCAB) for _ in range(50)]
    own = [[rnd.randrange(3, VOCAB) for _ in range(n)] for n in (1, 3, 15, 16, 17, 31, 33, 90, 127, 128, 129)]
    return [*own, [*head, 5, 6, 7], [*head, 9], [*head[:33], 11, 12], head, [7] * 20]


def request(index: int, id: int, max_tokens: int = MAX_TOKENS, **changes: Any) -> Request:
    """Sixteen requests, no two of which are sampled in the same way."""
    filters = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.2},
        {"temperature": 0.7, "min_p": 0.05, "logit_bias": {5: 2.0, 9: -3.0}},
        {"temperature": 1.0, "allowed_token_ids": list(range(40, 60))},
    ]
    more: dict[str, Any] = {"logprobs": index % 3, "seed": index, "speculate": index != 13} | changes
    given = SamplingParams(**filters[index % 8], **more, min_tokens=12 if index == 10 else 0).resolved()
    return Request(
        id,
        prompts()[index],
        given,
        max_tokens=max_tokens,
        choice=index % 2,
        stop_token_ids=frozenset(range(3, 40)) if index in (6, 10) else frozenset(),
        bad_words=[[41], [42, 43]] if index in (7, 9) else [],
    )


Outcome = tuple[tuple[int, ...], tuple[tuple[float, ...], ...], str | None]


def run(engine: Engine, indices: Sequence[int], first_id: int = 0, stagger: int = 0, **changes: Any) -> list[Outcome]:
    """Tokens, log-probabilities and end of each request; with `stagger`, one joins every so many steps."""
    todo, step = list(indices), 0
    tokens: dict[int, list[int]] = {index: [] for index in indices}
    values: dict[int, list[tuple[float, ...]]] = {index: [] for index in indices}
    reasons: dict[int, str | None] = {}
    while todo or not engine.idle:
        if todo and (not stagger or step % stagger == 0):
            now, todo = (todo[:1], todo[1:]) if stagger else (todo, [])
            for index in now:
                engine.add(request(index, first_id + index, **changes))
        for update in engine.step():
            index = update.request - first_id
            assert update.error is None
            tokens[index] += update.tokens
            values[index] += [(*entry.ids, *entry.values) for entry in update.logprobs or ()]
            reasons[index] = update.finish_reason
        step += 1
    if engine.speculation is not None and isinstance(engine.speculation.proposer, Recorded):
        assert not engine.speculation.proposer.surprises
    return [(tuple(tokens[index]), tuple(values[index]), reasons[index]) for index in sorted(indices)]


class Recorded:
    """Proposes as `choose` says, which is given what comes next, and how many tokens are wanted."""

    def __init__(self, outcomes: Sequence[Outcome], choose: Callable[[list[int], int], Drafts]) -> None:
        self._texts = [[*prompt, *out[0]] for prompt, out in zip(prompts(), outcomes, strict=True)]
        self._choose = choose
        self.num_drafts = 0
        self.surprises: list[Any] = []  # an engine goes on without a proposer that raises

    def start(self, info: Any) -> None: ...

    def end(self, request: int) -> None: ...

    def propose(self, wanted: Sequence[Wanted], context: Any) -> list[Drafts]:
        made = []
        for want in wanted:
            text = self._texts[want.request % 100]
            if text[want.position - 1 : want.position] not in ([want.token], []):
                self.surprises.append(want)
            made.append(self._choose(text[want.position :], want.count))
            self.num_drafts += len(made[-1].tokens)
        return made

    def follow(self, computed: Sequence[Any], features: torch.Tensor, context: Any) -> None:
        for each in computed:
            text = self._texts[each.request % 100]
            tokens = each.tokens if each.next_token is None else [*each.tokens, each.next_token]
            coming = text[each.start : each.start + len(tokens)]  # shorter where it ended at a stop token
            if tokens[: len(coming)] != coming or len(each.rows) != len(each.tokens) or max(each.rows) >= len(features):
                self.surprises.append(each)


def branching(coming: list[int], count: int) -> Drafts:
    """A tree of random shape, in which the right tokens are, as far as they reach, among wrong ones."""
    draw = random.Random(len(coming) * 100 + count)
    tokens, parents, tip, depth = [], [], 0, 0
    for row in range(1, count + 1):
        if depth < len(coming) and draw.random() < 0.5:
            tokens.append(coming[depth])
            parents.append(tip)
            tip, depth = row, depth + 1
        else:
            parents.append(draw.randrange(row))
            tokens.append(draw.randrange(VOCAB))
    return Drafts(tokens, parents)


def fail(coming: list[int], count: int) -> Drafts:
    raise RuntimeError("this proposer always fails")


def nonsense(coming: list[int], count: int) -> Drafts:
    """The right tokens, which only a reader who takes anything at its word would verify."""
    tokens = coming[:count]
    rows = range(len(tokens))
    return RND.choice(
        [
            Drafts([str(token) for token in tokens]),  # type: ignore[misc]
            Drafts(tokens, [0] * (len(tokens) + 1)),
            Drafts(tokens, [0] * (len(tokens) - 1)),
            Drafts(tokens, [row + 1 for row in rows]),
            Drafts(tokens, [-1 for _ in rows]),
            Drafts(tokens, [0.0 for _ in rows]),  # type: ignore[misc]
            Drafts(tokens, distributions=torch.zeros(len(tokens), 3)),
            Drafts(tokens, distributions=torch.zeros(len(tokens) + 1, VOCAB)),
        ]
    )


RND = random.Random(3)
CHOICES: dict[str, Callable[[list[int], int], Drafts]] = {
    "right": lambda coming, count: Drafts(coming[:count]),
    "wrong": lambda coming, count: Drafts([(token + 1) % VOCAB for token in [*coming, *[0] * count][:count]]),
    "right, then wrong": lambda coming, count: Drafts([*coming[: RND.randrange(count + 1)], *[3] * count][:count]),
    "random": lambda coming, count: Drafts([RND.randrange(VOCAB) for _ in range(RND.randrange(count + 1))]),
    "out of vocabulary": lambda coming, count: Drafts([*coming[:1], RND.choice([-1, -2, VOCAB, 2**40]), *coming[2:]]),
    "too many": lambda coming, count: Drafts([*coming, *[0] * 100]),
    "failing": fail,
    "nonsense": nonsense,
    "trees": branching,
}
MODELS = ("right", "wrong", "right, then wrong", "random", "trees")
"""What a model might draft; the others are what none does."""


def config(folder: str, options: dict[str, Any], drafts: int, adaptive: bool = False, **more: Any) -> EngineConfig:
    spec = {"method": "ngram", "num_speculative_tokens": drafts, "adaptive": adaptive}
    defaults = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "check_invariants": True}
    return EngineConfig(model=folder, **(defaults | options | more), speculative_config=spec if drafts else None)


Plain = tuple[str, dict[str, Any], list[Outcome]]
"""A checkpoint, options, and what each request gives alone, without drafts."""


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory) -> Callable[[str], Plain]:
    """By kind, each made once: pytest sets a fixture with parameters up again where tests name them in other orders."""

    @functools.cache
    def made(kind: str) -> Plain:
        architecture, dtype, sizes, options = KINDS[kind]
        folder = str(tmp_path_factory.mktemp("model"))
        save_checkpoint(folder, architecture, dtype=dtype, num_hidden_layers=2, **sizes)
        engine = Engine(config(folder, options, 0, prefix_cache="off"))
        outcomes = [run(engine, [index])[0] for index in range(16)]
        assert {outcome[2] for outcome in outcomes} == {"length", "stop"}
        return folder, options, outcomes

    return made


@pytest.fixture(params=KINDS)
def plain(request, plain_of) -> Plain:
    return plain_of(request.param)


@pytest.mark.quick(
    "lengths0-bfloat16-right, then wrong",
    "lengths0-bfloat16-out of vocabulary",
    "lengths0-bfloat16-too many",
    "lengths0-bfloat16-failing",
    "lengths0-bfloat16-nonsense",
)
@pytest.mark.parametrize(
    ("plain", "choice"),
    list(itertools.product(("bfloat16", "float32"), CHOICES)),
    indirect=["plain"],
)
@pytest.mark.parametrize("lengths", [(1, 8), pytest.param((3,), marks=pytest.mark.slow)])
def test_whatever_is_drafted_the_output_is_the_same(plain, choice, lengths):
    folder, options, outcomes = plain
    for drafts in lengths if choice in MODELS else lengths[-1:]:
        proposer = Recorded(outcomes, CHOICES[choice])
        engine = Engine(config(folder, options, drafts, max_num_batched_tokens=64), proposer=proposer)
        assert run(engine, range(16)) == outcomes, f"{drafts} drafts"
        assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == outcomes, f"{drafts} drafts, warm"
        assert proposer.num_drafts > 0 or choice == "failing"
        if choice == "right":
            assert engine.stats.accepted > 150


@pytest.mark.quick(
    "bfloat16-right, then wrong", "windows in some layers-trees", "experts-trees", "latent attention-right, then wrong"
)
@pytest.mark.parametrize(
    ("plain", "choice"),
    list(itertools.product(KINDS, ("right, then wrong", "trees"))),
    indirect=["plain"],
)
def test_drafts_change_nothing_in_any_kernels_and_formats(plain, choice):
    folder, options, outcomes = plain
    for drafts, overlap, cache in ((2, True, "hash"), (7, False, "radix")):
        proposer = Recorded(outcomes, CHOICES[choice])
        engine = Engine(
            config(folder, options, drafts, async_scheduling=overlap, prefix_cache=cache, max_num_batched_tokens=48),
            proposer=proposer,
        )
        assert run(engine, range(16)) == outcomes
        assert proposer.num_drafts > 50


@pytest.mark.quick("sliding window-right, then wrong-1")
@pytest.mark.parametrize(
    ("plain", "choice", "depth"),
    list(itertools.product(("bfloat16", "sliding window"), ("trees", "right, then wrong"), (0, 1, 2))),
    indirect=["plain"],
)
def test_drafts_change_nothing_while_requests_preempt_each_other(plain, choice, depth):
    folder, options, outcomes = plain
    proposer = Recorded(outcomes, CHOICES[choice])
    engine = Engine(config(folder, options, 5, num_kv_blocks=16, max_num_batched_tokens=40), proposer=proposer)
    engine._depth = depth
    assert run(engine, range(16)) == outcomes
    assert engine.stats.preemptions > 0 and proposer.num_drafts > 0


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_requests_that_ask_for_prompt_logprobs_are_drafted_for_as_well(plain):
    folder, options, outcomes = plain
    engine = Engine(config(folder, options, 4), proposer=Recorded(outcomes, CHOICES["right"]))
    assert run(engine, range(16), prompt_logprobs=1) == outcomes


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_request_may_switch_it_off(plain):
    folder, options, outcomes = plain
    proposer = Recorded(outcomes, CHOICES["right"])
    engine = Engine(config(folder, options, 4), proposer=proposer)
    assert run(engine, range(16), speculate=False) == outcomes
    assert proposer.num_drafts == engine.stats.drafted == 0


@pytest.mark.quick("sliding window-1")
@pytest.mark.parametrize(
    ("plain", "depth"),
    list(itertools.product(("bfloat16", "sliding window"), (0, 1, 2))),
    indirect=["plain"],
)
def test_requests_that_are_let_go_give_the_same_tokens_beside_those_that_are_drafted(plain, depth, monkeypatch):
    folder, options, outcomes = plain
    gone, draw, luck = [], random.Random(depth), random.Random(depth)  # one for each thread: always the same
    proposer = Recorded(outcomes, lambda coming, count: Drafts([*coming[: luck.randrange(count + 1)], 3][:count]))

    def choose(lengths: Any, states: list[DraftState], room: list[int], *_: Any) -> list[int]:
        for state in states:  # pauses of some steps
            state.idle = (state.idle + 1) % 8 if state.idle or draw.random() < 0.3 else 0
        return [0 if state.idle else min(most, draw.randrange(5)) for state, most in zip(states, room, strict=True)]

    def drop_drafting(lengths: Any, states: list[DraftState]) -> int | None:
        idle = [i for i, state in enumerate(states) if state.idle >= 4]
        if not idle or draw.random() < 0.6:
            return None
        states[idle[0]].drafting_enabled = False
        gone.append(idle[0])
        return idle[0]

    monkeypatch.setattr(draft_length.DraftLengths, "start", lambda *_: None)  # all are followed, however fast this is
    monkeypatch.setattr(draft_length.DraftLengths, "choose", choose)
    monkeypatch.setattr(draft_length.DraftLengths, "drop_drafting", drop_drafting)
    engine = Engine(config(folder, options, 4, adaptive=True), proposer=proposer)
    engine._depth = depth
    assert run(engine, range(16)) == outcomes
    assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == outcomes
    assert len(gone) > 5 and engine.stats.accepted > 50


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_verification_yields_the_accepted_drafts_and_one_token_more(plain):
    folder, options, outcomes = plain
    engine = Engine(config(folder, options, 5), proposer=Recorded(outcomes, CHOICES["right"]))
    engine.add(request(8, 8))
    made = []
    while not engine.idle:
        made += [len(update.tokens) for update in engine.step() if update.tokens]
    assert made == [1, 6, 6, 6, 1]
    stats = engine.stats
    assert (stats.verifications, stats.drafted, stats.accepted) == (3, 15, 15)
    assert stats.accepted_by_position == [3, 3, 3, 3, 3]


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_self_tuning_drafts_what_pays_and_changes_nothing(plain):
    folder, options, outcomes = plain
    for choice in ("right", "wrong"):
        proposer = Recorded(outcomes, CHOICES[choice])
        engine = Engine(config(folder, options, 6, adaptive=True), proposer=proposer)
        assert run(engine, range(16)) == outcomes
        assert proposer.num_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
@pytest.mark.parametrize(
    ("choice", "overlap"),
    [
        pytest.param(choice, overlap, marks=() if overlap and choice == "trees" else pytest.mark.slow)
        for choice in ("right, then wrong", "trees")
        for overlap in (False, True)
    ],
)
def test_a_device_that_works_by_itself_verifies_drafts_too(plain, choice, overlap):
    folder, _, _ = plain
    with on_device(DelayedDevice(), SpanKernels()):
        options = {"device": "cuda", "deterministic": True, "gpu_memory_utilization": 1.0, "num_kv_blocks": 60}
        outcomes = run(Engine(config(folder, options, 0, prefix_cache="off")), range(16))
        proposer = Recorded(outcomes, CHOICES[choice])
        engine = Engine(
            config(folder, options, 4, async_scheduling=overlap, max_num_batched_tokens=64), proposer=proposer
        )
        assert run(engine, range(16)) == outcomes
        assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == outcomes
        assert engine.stats.accepted > 50


@pytest.mark.quick("5-bfloat16", "8-bfloat16")
@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("drafts", range(1, 9))
def test_drafts_of_any_length_change_nothing_alone_and_in_company(plain, drafts):
    folder, options, outcomes = plain
    for choice in ("right, then wrong", "trees"):
        proposer = Recorded(outcomes, CHOICES[choice])
        engine = Engine(config(folder, options, drafts, max_num_batched_tokens=80), proposer=proposer)
        alone = [run(engine, [index])[0] for index in (1, 2, 5)]
        assert alone == [outcomes[index] for index in (1, 2, 5)]
        assert run(engine, range(16), first_id=100) == outcomes


def test_choices_and_stop_strings_are_those_without_drafts():
    """Through the whole front: `n` choices share their prompt, and text is cut at stop strings."""
    prompts = ["def read(self, size=-1):\n", "import os\nimport sys\n\nclass Parser:\n"]
    asked = [
        SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=40),
        SamplingParams(temperature=0.0, max_tokens=60, stop=["self.", "\n\n"], min_tokens=5, logprobs=1),
    ]
    seen = []
    for spec in (
        None,
        {"method": "eagle", "adaptive": False},
        {"method": "draft_model", "tree_width": 2, "adaptive": False},
    ):
        with LLM("demo", threads=1, speculative_config=spec) as llm:
            outputs = llm.generate(prompts, asked)
            texts = [(c.text, tuple(c.token_ids), c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs]
            seen.append(texts)
            if spec is not None:
                assert sum(output.metrics.drafted for output in outputs) > 50
                assert sum(output.metrics.accepted for output in outputs) > 20
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_request_whose_logits_are_not_finite_ends_alone(plain):
    """A row that fails behind drafts counts for nothing; when it is the request's own turn, the request fails."""
    folder, options, outcomes = plain
    engine = Engine(config(folder, options, 4), proposer=Recorded(outcomes, CHOICES["right"]))
    logits = engine.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        made = logits(hidden)
        made[made.argmax(-1) == outcomes[0][0][5]] = torch.nan  # what request 0 samples sixth
        return made

    engine.model.logits = broken  # type: ignore[method-assign]
    engine.add(request(0, 0, logprobs=None))
    tokens, error = [], None
    while not engine.idle:
        for update in engine.step():
            tokens += update.tokens
            error = error or update.error
    assert error is not None and "not finite" in error
    assert tokens == list(outcomes[0][0][: len(tokens)]) and len(tokens) <= 5


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_proposer_that_answers_for_others_is_not_listened_to_and_complained_of_once(plain, caplog):
    folder, options, outcomes = plain
    for answer in (lambda made: made[:-1], lambda made: [*made, Drafts([1])]):
        proposer = Recorded(outcomes, CHOICES["right"])
        proposer.propose = lambda *args, ask=proposer.propose, answer=answer: answer(ask(*args))
        engine = Engine(config(folder, options, 4), proposer=proposer)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert run(engine, range(16)) == outcomes
        assert engine.stats.drafted == 0
        assert len(caplog.records) == 1 and "the proposer failed to propose drafts" in caplog.text


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_trees_are_sampled_exactly_even_where_other_drafts_are_accepted_by_the_classic_rule(plain):
    folder, options, outcomes = plain
    proposer = Recorded(outcomes, CHOICES["trees"])
    engine = Engine(config(folder, options, 6, speculative_acceptance="rejection"), proposer=proposer)
    assert run(engine, range(16)) == outcomes
    assert engine.stats.accepted > 50


def ends(engine: Engine) -> list[tuple[Any, ...]]:
    """Tokens, end and error of each request."""
    found: dict[int, tuple[Any, ...]] = dict.fromkeys(range(16), ())
    for index in range(16):
        engine.add(request(index, index))
    while not engine.idle:
        for update in engine.step():
            found[update.request] += (*update.tokens, *filter(None, (update.finish_reason, update.error)))
    return [found[index] for index in range(16)]


def save_with_bad_tokens(folder: Path) -> list[int]:
    """A model for which some tokens, which are returned, are not finite."""
    save_checkpoint(folder, "qwen3", dtype=torch.bfloat16, num_hidden_layers=2, tie_word_embeddings=False)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    bad = [20, 50, 77, 100, 130]
    weights["model.embed_tokens.weight"][bad] = torch.nan
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return bad


@pytest.mark.quick("wrong-True", "trees-False")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("choice", ["right", "wrong", "trees"])
def test_drafts_that_are_not_finite_spoil_nothing(tmp_path, choice, overlap):
    bad = save_with_bad_tokens(tmp_path)
    plain = ends(Engine(config(str(tmp_path), {}, 0)))
    whole = [out for out in plain if out[-1] in ("length", "stop")]
    assert 2 < len(whole) < 14

    def choose(coming: list[int], count: int) -> Drafts:
        drafts = CHOICES[choice](coming, count)
        drafts.tokens = [RND.choice(bad) if RND.random() < 0.05 else token for token in drafts.tokens]
        return drafts

    outcomes: list[Outcome] = [(tuple(t for t in out if isinstance(t, int)), (), None) for out in plain]
    engine = Engine(config(str(tmp_path), {}, 6, async_scheduling=overlap), proposer=Recorded(outcomes, choose))
    assert ends(engine) == plain
    stats = engine.stats
    assert stats.drafted > 0 and sum(stats.accepted_by_position) == stats.accepted >= 0


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_sums_of_log_probabilities_do_not_depend_on_how_many_tokens_come_at_once(plain):
    sums = []
    for drafts in (False, True):
        spec = {"method": "ngram", "adaptive": False} if drafts else None
        engine = LLM(plain[0], threads=1, max_model_len=200, speculative_config=spec)
        params = SamplingParams(max_tokens=60, temperature=0.0, logprobs=0, ignore_eos=True)
        outputs = engine.generate([[token] * 20 for token in range(10)], params)
        sums.append([output.outputs[0].cumulative_logprob for output in outputs])
        assert not drafts or sum(output.metrics.accepted for output in outputs) > 50
        engine.close()
    assert sums[0] == sums[1]


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_request_waits_for_the_whole_head_that_another_computes_where_heads_look_ahead(plain):
    engine = Engine(config(plain[0], {}, 0, max_num_batched_tokens=48))
    engine.scheduler.kv.needs_next_token = True
    first, second = request(10, 10), request(10, 110)  # 129 tokens, in three steps
    engine.add(first)
    engine.add(second)
    while not engine.idle:
        engine.step()
    assert (first.num_cached, second.num_cached) == (0, 127)
    assert first.tokens == second.tokens


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_request_of_which_nothing_was_proposed_is_tried_again(plain, monkeypatch):
    monkeypatch.setattr(draft_length, "_SHARE", 1e3)  # whatever that costs
    folder, options, outcomes = plain
    asked: list[int] = []
    proposer = Recorded(outcomes, lambda coming, count: asked.append(count) or Drafts([]))  # type: ignore[func-returns-value]
    engine = Engine(config(folder, options, 4, adaptive=True), proposer=proposer)
    one = request(8, 8, max_tokens=60)
    one.draft_state = DraftState(first=Average(value=0.0, weight=1e9))
    engine.add(one)
    while not engine.idle:
        engine.step()
    assert len(asked) >= 6  # in 60 steps: as often as something is tried out


@pytest.mark.parametrize("plain", ["bfloat16"], indirect=True)
def test_a_closed_engine_frees_what_drafted(plain):
    folder, options, outcomes = plain
    engine = Engine(config(folder, options, 4), proposer=Recorded(outcomes, CHOICES["right"]))
    assert engine.speculation is not None
    proposer = weakref.ref(engine.speculation.proposer)
    engine.close()
    gc.collect()
    assert proposer() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be an integer from 1"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max is for method ngram, but method is eagle"),
        ({"method": "eagle", "tree_depth": 3}, "tree_depth is for trees"),
    ],
)
def test_what_would_change_nothing_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.read(given, "demo")
