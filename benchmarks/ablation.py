"""What each mechanism of the self-tuning (core/draft_length.py) is worth: the engine without it, against the whole.

1. **Real runs**: the demo model with n-grams, its EAGLE head, its draft model and trees; greedy and at temperature 1;
   one request after the other and eight at once; and a head whose drafts are made useless always, at first, later, or
   for every other request. Each run begins with nothing learned, and what is compared runs in turns in one engine.
   Decisions are made as they are, by times that others on the machine disturb. What came of them is told apart from
   that: a run's time is the number of its steps of each kind (requests, those followed, drafts, the most of one) by
   the median time of such a step among all runs of the sitting.
2. **Simulated machines**: which of tests/core/test_draft_length.py fail.

A mechanism is switched off by replacing a constant or a method while a run lasts. `--only` names some of them,
`--cases` some of the cases; `--turns` says how often each is run. Times are the CPU time of one thread, or with
`--wall` what goes by with all threads.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace

from benchmarks.common import Options, Result, options_from, tell
from benchmarks.speculation import PROMPTS
from quire.config import EngineConfig
from quire.core import draft_length
from quire.core.draft_length import Average, DraftLengths, DraftState
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import DRAFT, StepPlan, StepResult
from quire.engine.engine import Engine
from quire.models.checkpoint import resolve
from quire.runner.proposer import Drafts
from quire.text.tokenizer import Tokenizer

TURNS = 3
WHOLE, AGAIN = "nothing", "nothing, again"
GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True).resolved()
SAMPLED = SamplingParams(seed=1, ignore_eos=True).resolved()

# --- mechanisms -------------------------------------------------------------------------------------------

Patch = tuple[Any, str, Any]


def after(owner: Any, name: str, then: Callable[..., None]) -> Patch:
    """A method that does something more when it has run."""
    whole = getattr(owner, name)

    def method(self: Any, *given: Any, **named: Any) -> Any:
        made = whole(self, *given, **named)
        then(self, *given, **named)
        return made

    return owner, name, method


def before(owner: Any, name: str, first: Callable[..., None]) -> Patch:
    """A method that does something else before it runs."""
    whole = getattr(owner, name)

    def method(self: Any, *given: Any, **named: Any) -> Any:
        first(self, *given, **named)
        return whole(self, *given, **named)

    return owner, name, method


def constant(name: str, value: Any) -> Patch:
    return draft_length, name, value


def _setting(name: str, value: Any) -> Callable[..., None]:
    return lambda self, *_, **__: setattr(self, name, value)


def _learn_one(self: DraftState, accepted: int, proposed: int, tree_mode: bool) -> None:
    trials, successes = (1, accepted) if tree_mode else (min(proposed, accepted + 1), accepted)
    self.first.learn(trials, successes, draft_length._FORGET)
    self.pool.first.learn(trials, successes, draft_length._POOL_FORGET)
    self.pool.later = self.pool.first


def _explore_only_where_drafts_pay(whole: Any) -> Callable[..., list[int]]:
    return lambda self, best, *rest: whole(self, best, *rest) if any(best) else best


def _start_apart(self: DraftLengths, *_: Any) -> None:
    self._pools.clear()


WITHOUT: dict[str, Sequence[Patch]] = {
    "the margin of 3 %": [constant("_MARGIN", 1.0)],
    "what other requests have shown": [before(DraftLengths, "start", _start_apart)],
    "greedy and sampled apart": [
        (DraftLengths, "start", lambda self, state, greedy, n, w=DraftLengths.start: w(self, state, True, n))
    ],
    "what a request has shown itself": [
        after(DraftState, "learn", lambda self, *_: setattr(self, "first", Average(weight=0.0)))
    ],
    "later drafts apart from first ones": [(DraftState, "learn", _learn_one)],
    "how often there are drafts": [
        after(DraftState, "learn", lambda self, *_: setattr(self.pool, "there", (Average(1.0), Average(1.0))))
    ],
    "forgetting": [constant("_FORGET", 1.0), constant("_POOL_FORGET", 1.0)],
    "unseen rows may be free": [
        constant("_FREE_ROWS", 1.0),
        before(DraftLengths, "observe", lambda self, *_: setattr(self._verifying, "_once", 0)),
    ],
    "several times of a size kept": [constant("_RECENT", 2)],
    "measured looked at every 8 steps only": [constant("_TURN", 1)],
    "the gap before a step": [before(DraftLengths, "observe_step", _setting("_ended", math.inf))],
    "exploring where drafts pay": [constant("_EXPLORE", 10**9)],
    "exploring where they do not": [(DraftLengths, "_explore", _explore_only_where_drafts_pay(DraftLengths._explore))],
    "the benefit of the doubt": [constant("_hoped", lambda chances: (0, 0, 0))],
    "the account": [(DraftLengths, "account", lambda self, seconds, lost: None)],
    "what has been gained": [constant("_MOST_CREDIT", 3.0)],
    "gains below 6 % are none": [constant("_WORTH", 1.0)],
    "following that is cheap goes on": [(DraftLengths, "_overdrawn", property(lambda self: self._credit < 0))],
    "drop_drafting": [(DraftLengths, "drop_drafting", lambda self, states: None)],
    "drafting_enabled, of new requests": [
        after(DraftLengths, "start", lambda self, state, *_: setattr(state, "drafting_enabled", True))
    ],
}


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """While this lasts, a mechanism is switched off; one that is not in the table is none."""
    with ExitStack() as stack:
        for owner, name, value in WITHOUT.get(mechanism, ()):
            stack.enter_context(patch.object(owner, name, value))
        yield


# --- real runs --------------------------------------------------------------------------------------------


class Always:
    """In place of `DraftLengths`: always so many drafts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def choose(self, states: Sequence[DraftState], room: Sequence[int], *_: int) -> list[int]:
        return [min(self._count, most) for most in room]

    def drop_drafting(self, states: Sequence[DraftState]) -> None:
        return None

    def start(self, *_: Any) -> None: ...
    def accepted(self, *_: Any) -> None: ...
    def observe_step(self, *_: Any) -> None: ...


class Clock:
    """A point that was reached, in the thread's CPU time: see `quire.runner.device.Reached`."""

    def __init__(self) -> None:
        self._time = time.thread_time()

    def wait(self) -> None:
        return

    def time(self) -> float:
        return self._time


class Spoiler:
    """Stands before a proposer and makes drafts useless: those for which `when(request, position)` is true."""

    def __init__(self, proposer: Any, vocab_size: int, when: Callable[[int, int], bool]) -> None:
        self._proposer, self._vocab_size, self._when = proposer, vocab_size, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, wanted: Sequence[Any], context: Any) -> list[Drafts]:
        made: list[Drafts] = self._proposer.propose(wanted, context)
        for want, drafts in zip(wanted, made, strict=True):
            if self._when(want.request, want.position):
                drafts.tokens = [(token + 2048) % self._vocab_size for token in drafts.tokens]
        return made


@dataclass(frozen=True)
class Case:
    """Some requests of the demo model.

    Attributes:
        spec: how they are drafted.
        together: so many at once.
        prompts: in all.
        length: tokens of each.
        spoiled: see `Spoiler`.
    """

    spec: dict[str, Any]
    params: SamplingParams = GREEDY
    together: int = 1
    prompts: int = 3
    length: int = 90
    spoiled: Callable[[int, int], bool] | None = None


NGRAM, EAGLE, MODEL = {"method": "ngram"}, {"method": "eagle"}, {"method": "draft_model"}
TREES = {"method": "eagle", "tree_width": 4}
CASES = {
    "n-grams": Case(NGRAM, length=120),
    "n-grams, sampled": Case(NGRAM, SAMPLED),
    "eagle": Case(EAGLE),
    "eagle, sampled": Case(EAGLE, SAMPLED),
    "draft model": Case(MODEL),
    "draft model, sampled": Case(MODEL, SAMPLED),
    "trees": Case(TREES),
    "8: n-grams": Case(NGRAM, together=8, prompts=8, length=90),
    "8: eagle": Case(EAGLE, together=8, prompts=8, length=90),
    "8: eagle, sampled": Case(EAGLE, SAMPLED, together=8, prompts=8, length=90),
    "never": Case(EAGLE, spoiled=lambda request, position: True),
    "never, then": Case(EAGLE, prompts=1, length=400, spoiled=lambda request, position: position < 180),
    "then never": Case(EAGLE, prompts=1, length=400, spoiled=lambda request, position: position >= 180),
    "4: every other": Case(EAGLE, together=4, length=160, spoiled=lambda request, position: request % 2 == 0),
}


Kind = tuple[int, int, int, int]
"""Of a step: its requests, those that are followed, all drafts, and the most of one request."""


class Runs:
    """A case's engine, and what its steps took."""

    def __init__(self, case: Case, quick: bool, wall: bool) -> None:
        self.case, self._now = case, time.perf_counter if wall else time.thread_time
        config = EngineConfig(
            model="demo",
            device="cpu",
            async_scheduling=False,
            threads=None if wall else 1,
            prefix_cache="off",
            speculative_config=case.spec,
            max_model_len=1024,
            max_num_seqs=8,
        )
        self.engine = Engine(config)
        if not wall:
            self.engine.device.mark = Clock  # type: ignore[assignment, method-assign]
        self._drafter = self.engine.executor._runner._drafter  # type: ignore[attr-defined]
        if case.spoiled:
            self._drafter._proposer = Spoiler(self._drafter._proposer, 4096, case.spoiled)
        self._commit = self.engine.scheduler.commit
        self.engine.scheduler.commit = self.commit  # type: ignore[method-assign]
        tokenizer = Tokenizer.load(resolve("demo"))
        assert tokenizer is not None
        self._prompts = [tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(case.prompts)]
        self._length = 16 if quick else case.length
        self._expected: list[list[int]] | None = None
        self._kind: Kind | None = None
        self.seconds: dict[Kind, list[float]] = {}

    @property
    def most(self) -> int:
        spec = self.engine.scheduler._speculation
        assert spec is not None
        return spec.num_speculative_tokens

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> Any:
        """As the scheduler's; notes what kind of step it was, if it was one of decodes alone."""
        drafts = [span.num_drafted for span in result.spans]
        followed = sum(span.request in self._drafter._texts for span in plan.spans)
        decodes = plan.num_tokens - sum(token == DRAFT for span in plan.spans for token in span.tokens)
        self._kind = (len(drafts), followed, sum(drafts), max(drafts)) if decodes == len(drafts) else None
        return self._commit(plan, result, now)

    def run(self, lengths: Any, params: SamplingParams) -> Counter[Kind]:
        """All requests: how many steps of each kind there were. They must always make the same tokens."""
        self.engine.scheduler._lengths = lengths
        made: list[list[int]] = []
        kinds: Counter[Kind] = Counter()
        for first in range(0, len(self._prompts), self.case.together):
            made += self._generate(self._prompts[first : first + self.case.together], params, kinds)
        self._expected = self._expected or made
        if made != self._expected:
            raise RuntimeError("the tokens differ")
        return kinds

    def _generate(self, prompts: Sequence[list[int]], params: SamplingParams, kinds: Counter[Kind]) -> list[list[int]]:
        first = 2 * self.engine.stats.prompt_tokens  # ids must be new, and even numbers stay even
        made: list[list[int]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            self.engine.add(Request(first + i, list(prompt), params, max_tokens=self._length))
        while not self.engine.idle:
            begin, self._kind = self._now(), None
            updates = self.engine.step()
            if self._kind is not None:
                self.seconds.setdefault(self._kind, []).append(self._now() - begin)
                kinds[self._kind] += 1
            for update in updates:
                made[update.request - first] += update.tokens
        return made

    def tuned(self, mechanism: str) -> Counter[Kind]:
        trees = self.case.spec.get("tree_width", 1) > 1
        with without(mechanism):
            return self.run(DraftLengths(self.most, tree_mode=trees), self.case.params)

    def turn(self, mechanisms: Sequence[str]) -> dict[str, Counter[Kind]]:
        """Steps of each, and of what they are compared with."""
        made = {"plain": self.run(None, replace(self.case.params, speculate=False))}
        counts = (1, 2, self.most) if self.case.spec is not TREES else (self.most,)
        made |= {f"always {count}": self.run(Always(count), self.case.params) for count in counts}
        return made | {mechanism: self.tuned(mechanism) for mechanism in mechanisms}


@dataclass
class Measured:
    """A case's seconds by turn: what its steps take if each takes the median of its kind, among all of the case."""

    turns: list[dict[str, float]]

    @classmethod
    def of(cls, turns: Sequence[dict[str, Counter[Kind]]], seconds: dict[Kind, list[float]]) -> Measured:
        usual = {kind: statistics.median(times) for kind, times in seconds.items()}
        return cls(
            [
                {what: sum(usual[kind] * count for kind, count in kinds.items()) for what, kinds in turn.items()}
                for turn in turns
            ]
        )

    def gain(self, what: str) -> float:
        """How many times plain's tokens a second."""
        return statistics.median(turn["plain"] / turn[what] for turn in self.turns)

    @property
    def best_fixed(self) -> float:
        return max(self.gain(what) for what in self.turns[0] if what.startswith("always"))

    def change(self, mechanism: str) -> tuple[float, float]:
        """What it is faster without a mechanism, as a share; and half of the width of the middle half of all runs."""
        whole = statistics.median(turn[what] for turn in self.turns for what in (WHOLE, AGAIN))
        ratios = [whole / turn[mechanism] - 1 for turn in self.turns]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (0.0, 0.0, 0.0)
        return statistics.median(ratios), (high - low) / 2


def real(name: str, mechanisms: Sequence[str], turns: int, quick: bool, wall: bool) -> Measured:
    """One case."""
    runs, order = Runs(CASES[name], quick, wall), [WHOLE, AGAIN, *mechanisms]
    gc.collect()
    gc.freeze()
    runs.turn(())  # warm
    runs.seconds.clear()
    draw, made = random.Random(0), []
    for _ in range(turns):
        draw.shuffle(order)
        made.append(runs.turn(order))
    runs.engine.close()
    measured = Measured.of(made, runs.seconds)
    tell(f"{name}: {measured.gain(WHOLE):.2f} of plain, always {measured.best_fixed:.2f}")
    for kind, times in sorted(runs.seconds.items()):
        if len(times) > 50:
            tell(f"    {kind}: {1000 * statistics.median(times):.2f} ms, {len(times)} times")
    for mechanism in (AGAIN, *mechanisms):
        change, noise = measured.change(mechanism)
        tell(f"    without {mechanism}: {change:+.1%} ± {noise:.1%}")
    return measured


# --- simulated machines -----------------------------------------------------------------------------------


def _failing(mechanism: str) -> list[str]:
    """In a process of its own: the tests that fail."""
    import pytest

    class Failed:
        def __init__(self) -> None:
            self.names: list[str] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.names.append(report.nodeid.partition("::")[2])

    files = ["tests/core/test_draft_length.py"]
    failed = Failed()
    with without(mechanism), redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[failed])
    return failed.names


def simulated(mechanisms: Sequence[str], quick: bool) -> dict[str, list[str]]:
    """By mechanism, the tests that fail without it."""
    names = [WHOLE, *mechanisms][: 2 if quick else None]
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        failing = dict(zip(names, pool.map(_failing, names, chunksize=1), strict=True))
    for mechanism, tests in failing.items():
        tell(f"without {mechanism}: {len(tests)} simulated tests fail")
        for test in tests:
            tell(f"    {test}")
    return failing


# --- all --------------------------------------------------------------------------------------------------


def run(
    options: Options,
    only: Sequence[str] = tuple(WITHOUT),
    cases: Sequence[str] = tuple(CASES),
    turns: int = TURNS,
    simulate: bool = True,
    wall: bool = False,
) -> Result:
    """Both parts."""
    measured = {name: real(name, only, 1 if options.quick else turns, options.quick, wall) for name in cases}
    failing = simulated(only, options.quick) if simulate else {}
    result = Result(("without", *cases, "simulated tests that fail"))
    for what in (WHOLE, "always"):
        gains = {name: each.best_fixed if what == "always" else each.gain(what) for name, each in measured.items()}
        heading = {WHOLE: "the whole, of plain", "always": "the best fixed length, of plain"}[what]
        fails = str(len(failing.get(what, ()))) if what == WHOLE else "-"
        result.add((heading, *(f"{gain:.2f}" for gain in gains.values()), fails), what=heading, gains=gains)
    for mechanism in (AGAIN, *only):
        changes = {name: each.change(mechanism) for name, each in measured.items()}
        cells = [f"{100 * change:+.0f} ± {100 * noise:.0f}" for change, noise in changes.values()]
        tests = failing.get(mechanism)
        result.add(
            (mechanism, *cells, "-" if tests is None else str(len(tests))),
            what=mechanism,
            changes=changes,
            failing=tests,
        )
    return result


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="mechanisms, by a part of the name; several with commas")
    parser.add_argument("--cases", help="cases; several with semicolons")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--no-simulated", action="store_true")
    parser.add_argument("--wall", action="store_true", help="all threads, and the time on the wall")
    with options_from(parser) as (options, args):
        parts = args.only.split(",") if args.only else [""]
        only = [name for name in WITHOUT if any(part in name for part in parts)]
        cases = args.cases.split(";") if args.cases else list(CASES)
        print(run(options, only, cases, args.turns, not args.no_simulated, args.wall).table())


if __name__ == "__main__":
    with torch.inference_mode():
        _main()
