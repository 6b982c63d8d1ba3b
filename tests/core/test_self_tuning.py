"""Self-tuned speculation makes at least 0.95 of the tokens a second of the better of plain and always so many drafts.

On simulated machines, through the real scheduler: from drafts that cost nothing to drafts that cost more than half a
step, from steps that read the weights and little else to steps that compute, alone and in batches, requests short and
long, drafts that are accepted never to nearly always, and those that change in the middle.
"""

from __future__ import annotations

import pytest

from tests.core.simulated_speculation import MOST, Costs, Work, always, scheduled

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
CELLS = [(m, d, c, w) for m in MACHINES for d in DRAFTING for c in CHANCES for w in WORK]


def gains(machine: str, drafting: str, chances: str, work: str) -> tuple[float, float, float]:
    """Tokens a second of plain decoding, of the better of one and `MOST` drafts always, and self-tuned."""
    costs = Costs(**MACHINES[machine], **DRAFTING[drafting])  # type: ignore[arg-type]
    requests = Work(*WORK[work], *CHANCES[chances])
    fixed = max(always(costs, requests, count).rate for count in (1, 2, MOST))
    return always(costs, requests, 0).rate, fixed, scheduled(costs, requests, tuned=True).rate


def check(cell: tuple[str, str, str, str]) -> None:
    plain, fixed, tuned = gains(*cell)
    assert tuned >= 0.95 * max(plain, fixed)
    if fixed <= plain:
        assert tuned >= 0.97 * plain


@pytest.mark.parametrize("cell", CELLS[::13], ids=", ".join)  # each machine, price, chance and kind of work often
def test_self_tuned_is_nearly_the_better_of_plain_and_always(cell: tuple[str, str, str, str]) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_self_tuned_is_nearly_the_better_of_plain_and_always_everywhere(cell: tuple[str, str, str, str]) -> None:
    check(cell)


@pytest.mark.parametrize("drafts", [1, MOST])
def test_what_it_is_compared_with_is_what_the_scheduler_does_where_it_is_not_tuned(drafts: int) -> None:
    costs, work = Costs(row=1 / 24, free=24, draft=0.1, follow=0.01), Work(8, 60, 6, [0.7])
    real, short = scheduled(costs, work, tuned=False, most=drafts), always(costs, work, drafts)
    assert real.rate == pytest.approx(short.rate, rel=0.02)
