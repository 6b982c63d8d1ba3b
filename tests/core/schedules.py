"""Seeded schedules of events; one that fails is told with as few of its events as fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

Schedule = Callable[[int, int], Counter[str]]
"""Runs the schedule of a seed with its first events, so many, and to its end; what is counted of it."""


def run_seeds(run: Schedule, seeds: range, events: int) -> Counter[str]:
    """Run schedules of so many events each.

    Raises:
        AssertionError: one fails; with its seed, and with how many of its first events it does.
    """
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += run(seed, events)
        except Exception as error:
            least, cause = _least(run, seed, events, error)
            raise AssertionError(f"schedule {seed} fails with its first {least} of {events} events: {cause}") from cause
    return total


def _least(run: Schedule, seed: int, events: int, error: Exception) -> tuple[int, Exception]:
    for count in range(events):
        try:
            run(seed, count)
        except Exception as found:
            return count, found
    return events, error
