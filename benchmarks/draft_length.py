"""What each part of the self-tuned draft length is worth: all of it, and all but one part at a time.

Nothing is computed: the real scheduler decides, on simulated machines whose steps take what a stated model says
(tests/core/simulated_speculation.py). A part is switched off by replacing a piece here, by no option of the
engine.

A situation's *share* is its tokens a second over the most that plain decoding, or always 1, 2 or 4 drafts, make of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.core.simulated_speculation import MOST, Costs, Work, always, scheduled

from benchmarks.common import Options, Result, main, tell
from quire.core import draft_length
from quire.core.draft_length import DraftLengths, DraftState
from quire.core.step_times import StepTimes

MACHINES = {  # what rows cost beside the first
    "memory": {"row": 0.002},
    "knee at 24 rows": {"row": 1 / 24, "free": 24},
    "arithmetic": {"row": 1 / 4},
}
PRICES = {  # a draft, and to follow all requests, as parts of a step
    "60 ms, n-grams": {"draft": 0.0, "follow": 0.0005},
    "60 ms, a head": {"draft": 0.05, "follow": 0.002},
    "6 ms, a draft model": {"draft": 0.25, "follow": 0.02},
    "0.3 ms, a head": {"draft": 0.6, "follow": 0.1},
}
CHANCES: dict[str, tuple[Sequence[float], Sequence[float] | None]] = {
    "0": ([0.0], None),
    "0.3": ([0.3], None),
    "0.6": ([0.6], None),
    "0.8": ([0.8], None),
    "0.95": ([0.95], None),
    "falling by position": ([0.85, 0.75, 0.6, 0.5], None),
    "0, then 0.9": ([0.0], [0.9]),
    "0.9, then 0": ([0.9], [0.0]),
}
WORK = {  # at once, tokens of each, one after the other
    "1, short": (1, 24, 80),
    "1, long": (1, 900, 3),
    "8, short": (8, 32, 30),
    "32, long": (32, 250, 3),
}


KINDS = ("drafts pay", "plain is best", "changes")


@dataclass(frozen=True)
class Situation:
    """One of the grid, by the names of its parts."""

    machine: str
    price: str
    chances: str
    work: str

    @property
    def costs(self) -> Costs:
        return Costs(**MACHINES[self.machine], **PRICES[self.price])  # type: ignore[arg-type]

    @property
    def requests(self) -> Work:
        return Work(*WORK[self.work], *CHANCES[self.chances])

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if "then" in self.chances:
            return "changes"
        return "plain is best" if best(self)[1] == 0 else "drafts pay"


@cache
def best(situation: Situation) -> tuple[float, int]:
    """The most tokens a second that a fixed number of drafts makes, and that number."""
    return max((always(situation.costs, situation.requests, count).rate, count) for count in (0, 1, 2, MOST))


def share(situation: Situation) -> float:
    """Of the best of plain and fixed drafts, what self-tuned ones make."""
    return scheduled(situation.costs, situation.requests, tuned=True).rate / best(situation)[0]


@contextmanager
def replaced(owner: object, **pieces: Any) -> Iterator[None]:
    """Some attributes are others for a while."""
    before = {name: vars(owner)[name] for name in pieces}
    for name, piece in pieces.items():
        setattr(owner, name, piece)
    try:
        yield
    finally:
        for name, piece in before.items():
            setattr(owner, name, piece)


# --- what is switched off ---------------------------------------------------------------------------------


def _as_one(lengths: DraftLengths, state: DraftState, proposed: int, accepted: int) -> None:
    """`DraftLengths.accepted` with a pool that does not tell first drafts from later ones."""
    if proposed:
        trials, pool = min(accepted + 1, proposed), state.pool
        state.first.learn(trials, accepted, draft_length._WINDOW)
        pool.first.learn(trials, accepted, 2 * draft_length._WINDOW)
        pool.later = pool.first


def _without_others(lengths: DraftLengths, state: DraftState, greedy: bool, running: int) -> None:
    """`DraftLengths.start` of a request that knows nothing of those before it."""
    lengths._pools.clear()
    _start(lengths, state, greedy, running)


def _anyone(lengths: DraftLengths, state: DraftState, greedy: bool, running: int) -> None:
    """`DraftLengths.start` that enables drafting, whatever it costs."""
    state.pool = lengths._pools.setdefault(greedy, draft_length.Pool())


def _no_more(curve: Any, size: int) -> float:
    """`StepTimes.at` where beyond the largest size seen nothing costs more, whatever the size."""
    return float(curve._seconds[-1] if curve._sizes and size > curve._sizes[-1] else _at(curve, size))


def _at_first_sight(curve: Any, size: int, seconds: float) -> None:
    """`StepTimes.observe` that believes a first time."""
    if draft_length._cell_of(size) not in curve._cells:
        _observe(curve, size, seconds)
    _observe(curve, size, seconds)


def _without_account(lengths: DraftLengths, seconds: float, lost: float) -> None:
    """`DraftLengths.account` by which anything may be lost."""
    lengths._credit = math.inf


_start, _at, _observe = DraftLengths.start, StepTimes.at, StepTimes.observe

PARTS: dict[str, tuple[object, dict[str, Any]]] = {
    "nothing: all of it": (draft_length, {}),
    "a pool's own average of later drafts": (DraftLengths, {"accepted": _as_one}),
    "what other requests have shown": (DraftLengths, {"start": _without_others}),
    "the margin": (draft_length, {"_MARGIN": 1.0}),
    "steps without drafts where drafts pay": (draft_length, {"_EXPLORE": math.inf}),
    "proportion beyond twice the largest size seen": (StepTimes, {"at": _no_more}),
    "doubt of a first time": (StepTimes, {"observe": _at_first_sight}),
    "the account": (DraftLengths, {"account": _without_account}),
    "dropping": (DraftLengths, {"drop_drafting": lambda *_: None}),
    "asking whether a new request may be drafted": (DraftLengths, {"start": _anyone}),
    "both: all can be drafted to their end": (DraftLengths, {"start": _anyone, "drop_drafting": lambda *_: None}),
}
"""What is left out, and where which pieces are replaced for it."""


# --- the table --------------------------------------------------------------------------------------------


def grid(every: int) -> list[Situation]:
    """All situations, or every so-many-th."""
    return [Situation(m, p, c, w) for m in MACHINES for p in PRICES for c in CHANCES for w in WORK][::every]


def run(options: Options) -> Result:
    """A row for each part that is left out."""
    result = Result(("without", "mean share", "drafts pay", "plain is best", "changes", "worst", "below 0.95"))
    situations = grid(97 if options.quick else 13)
    for name, (owner, pieces) in PARTS.items():
        with replaced(owner, **pieces):
            shares = {each: share(each) for each in situations}
        kinds = [[s for each, s in shares.items() if each.kind == kind] for kind in KINDS]
        means = [statistics.mean(some) if some else math.nan for some in (list(shares.values()), *kinds)]
        worst, low = min(shares.values()), sum(s < 0.95 for s in shares.values())
        result.add(
            (name, *(f"{mean:.3f}" for mean in means), f"{worst:.2f}", f"{low} of {len(shares)}"),
            what=name,
            means=means,
            worst=worst,
            low=low,
            situations=len(shares),
        )
        tell(" | ".join(result.rows[-1]))
    return result


if __name__ == "__main__":
    main(run)
