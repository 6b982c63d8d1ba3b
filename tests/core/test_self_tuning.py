"""Self-tuned speculation makes at least 0.95 of the tokens a second of the better of plain and always so many drafts.

On simulated machines, through the real scheduler: from drafts that cost nothing to drafts that cost more than half a
step, from steps that read the weights and little else to steps that compute, alone and in batches, requests short and
long, drafts that are accepted never to nearly always, and those that change in the middle.
"""

from __future__ import annotations

import pytest

from tests.core.simulated_speculation import MOST, Costs, Work, always, knowing, scheduled

MACHINES = {
    "memory": {"row": 0.002},
    "knee at 24 rows": {"row": 1 / 24, "free": 24},
    "arithmetic": {"row": 1 / 4},
}
DRAFTING = {
    "free": {"draft": 0.0, "follow": 0.0005},
    "cheap": {"draft": 0.05, "follow": 0.002},
    "middling": {"draft": 0.25, "follow": 0.01},
    "dear": {"draft": 0.6, "follow": 0.03},
}
CHANCES: dict[str, tuple[list[float], list[float] | None]] = {
    "0": ([0.0], None),
    "0.3": ([0.3], None),
    "0.6": ([0.6], None),
    "0.8": ([0.8], None),
    "0.95": ([0.95], None),
    "falling by position": ([0.85, 0.75, 0.6, 0.5], None),
    "0, then 0.9": ([0.0], [0.9]),
    "0.9, then 0": ([0.9], [0.0]),
}
WORK = {
    "alone, short": (1, 24, 100),
    "alone, long": (1, 900, 3),
    "8, short": (8, 32, 40),
    "8, long": (8, 400, 3),
    "64, short": (64, 32, 40),
    "64, long": (64, 250, 5),
}
Cell = tuple[str, str, str, str]
CELLS: list[Cell] = [(m, d, c, w) for m in MACHINES for d in DRAFTING for c in CHANCES for w in WORK]
NOT_DEEPER: list[Cell] = [
    ("memory", "dear", "0.95", "8, short"),
    ("memory", "dear", "0.8", "8, long"),
    ("knee at 24 rows", "free", "0.95", "8, short"),
    ("knee at 24 rows", "free", "0.9, then 0", "8, long"),
]
"""Where drafts that go deeper for a gain within the error of what was measured made 0.93 or 0.94."""
UNEVEN: dict[Cell, float] = {
    ("memory", "cheap", "0.3", "64, short"): 0.94,
    ("memory", "dear", "0.8", "64, short"): 0.92,
    ("memory", "dear", "falling by position", "64, short"): 0.925,
}
"""Where less is made, and how much of plain at least.

Plain decoding ends all requests of a wave in one step. With drafts some get ahead, and the last ones have steps to
themselves that take nearly as long as with all. Whether others come after them is not known, so that the most tokens a
second of each step are all that one can aim for: who knows all costs and chances makes less than plain there, too.
"""
BRIEF: dict[Cell, float] = {("knee at 24 rows", "cheap", "0.8", "64, short"): 0.96}
"""Where exploring takes more of short work: at 64 rows a draft costs at least what it is worth, and a third of all
steps has some tried, since some are always accepted."""


def world(machine: str, drafting: str, chances: str, work: str) -> tuple[Costs, Work]:
    return Costs(**MACHINES[machine], **DRAFTING[drafting]), Work(*WORK[work], *CHANCES[chances])  # type: ignore[arg-type]


def gains(cell: Cell) -> tuple[float, float, float]:
    """Tokens a second of plain decoding, of the better of one and `MOST` drafts always, and self-tuned."""
    costs, work = world(*cell)
    fixed = max(always(costs, work, count).rate for count in (1, 2, MOST))
    return always(costs, work, 0).rate, fixed, scheduled(costs, work, tuned=True).rate


def check(cell: Cell) -> None:
    plain, fixed, tuned = gains(cell)
    least = (UNEVEN | BRIEF).get(cell, 0.97 if fixed <= plain else 0.95)
    assert tuned >= least * max(plain, fixed)


# Each machine, price, chance and kind of work often.
@pytest.mark.scale
@pytest.mark.parametrize("cell", [*CELLS[::47], *NOT_DEEPER], ids=", ".join)
def test_self_tuned_is_nearly_the_better_of_plain_and_always(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_self_tuned_is_nearly_the_better_of_plain_and_always_everywhere(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", UNEVEN, ids=", ".join)
def test_where_waves_end_unevenly_who_knows_everything_makes_less_than_plain(cell: Cell) -> None:
    costs, work = world(*cell)
    assert knowing(costs, work).rate < 0.995 * always(costs, work, 0).rate


@pytest.mark.parametrize("drafts", [1, MOST])
def test_what_it_is_compared_with_is_what_the_scheduler_does_where_it_is_not_tuned(drafts: int) -> None:
    costs, work = Costs(row=1 / 24, free=24, draft=0.1, follow=0.01), Work(8, 60, 6, [0.7])
    real, short = scheduled(costs, work, tuned=False, most=drafts), always(costs, work, drafts)
    assert real.rate == pytest.approx(short.rate, rel=0.02)
