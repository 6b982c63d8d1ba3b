"""What each mechanism of the self-tuning (core/draft_length.py) is worth: the scheduler without it, against the whole.

1. **Recorded drafts** of the embedded model, replayed by the scheduler (tests/core/recorded_speculation.py): no clock
   is read, so that the figures are the same everywhere. For each drafter, over greedy and sampled requests, one and
   eight at once: the mean change in tokens per second, and the lowest rate as a share of the better of plain decoding
   and always as many drafts.
2. **Simulated machines**: how many of tests/core/test_draft_length.py fail.

A mechanism is switched off by replacing a constant or a method while a run lasts. `--only` names some of them.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
from tests.core.recorded_speculation import SPECS, table

from benchmarks.common import Options, Result, options_from, tell
from quire.core import draft_length
from quire.core.draft_length import Average, DraftLengths, DraftState

SEEDS = 3
"""Of the noise in the replayed steps' times."""

WHOLE = "nothing"

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
    "choosing in every twelfth step only": [constant("_TURN", 1)],
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


# --- replay -----------------------------------------------------------------------------------------------


def replayed(drafter: str, seeds: int) -> list[list[float]]:
    """A list a seed: of each row of the table, self-tuned's rate as a share of the better of plain and always."""
    return [
        [tuned / max(plain, always) for plain, always, tuned in table(drafter, seed).values()] for seed in range(seeds)
    ]


def change(part: list[list[float]], whole: list[list[float]]) -> tuple[float, float]:
    """How many per cent more than the whole, on average; and the lowest row's share of the better."""
    ratios = [one / other for line, of in zip(part, whole, strict=True) for one, other in zip(line, of, strict=True)]
    return 100 * (statistics.mean(ratios) - 1), min(statistics.mean(row) for row in zip(*part, strict=True))


# --- simulated machines -----------------------------------------------------------------------------------


def failing() -> list[str]:
    """The tests that fail."""

    class Failed:
        def __init__(self) -> None:
            self.names: list[str] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.names.append(report.nodeid.partition("::")[2])

    failed = Failed()
    with redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "tests/core/test_draft_length.py"], plugins=[failed])
    return failed.names


# --- all --------------------------------------------------------------------------------------------------


def run(options: Options, only: Sequence[str] = tuple(WITHOUT), simulate: bool = True) -> Result:
    """Both parts."""
    seeds, drafters = (1, list(SPECS)[:1]) if options.quick else (SEEDS, list(SPECS))
    result = Result(("without", *drafters, "simulated tests that fail"))
    whole = {drafter: replayed(drafter, seeds) for drafter in drafters}
    for mechanism in (WHOLE, *only):
        with without(mechanism):
            part = whole if mechanism == WHOLE else {drafter: replayed(drafter, seeds) for drafter in drafters}
            tests = failing() if simulate else None
        changes = {drafter: change(part[drafter], whole[drafter]) for drafter in drafters}
        cells = [f"{more:+.1f} ({lowest:.2f})" for more, lowest in changes.values()]
        tell(f"without {mechanism}: {', '.join(cells)}; {tests}")
        count = "-" if tests is None else str(len(tests))
        result.add((mechanism, *cells, count), what=mechanism, changes=changes, failing=tests)
    return result


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="mechanisms, by a part of the name; several with commas")
    parser.add_argument("--no-simulated", action="store_true")
    with options_from(parser) as (options, args):
        parts = args.only.split(",") if args.only else [""]
        only = [name for name in WITHOUT if any(part in name for part in parts)]
        print(run(options, only, not args.no_simulated).table())


if __name__ == "__main__":
    _main()
