"""Fairness among owners: whose request is served next, if several owners compete.

Each owner's requests are numbered with turns, and service goes by turn, so that owners alternate however many requests
one of them sends. A new owner starts at the turn of those that are running, neither behind a queue that another owner
has filled nor far ahead of it. This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with a request as the
unit. With a single owner, turns are the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request

MOST_OWNERS = 1024
"""Beyond so many, owners that have nothing in line are forgotten."""


class Turns:
    """Deals turns."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # the last turn dealt, by owner
        self._newest = -1  # the latest turn of a request that has been admitted
        self._most = MOST_OWNERS

    def deal(self, owner: str, num_running: int) -> int:
        """The turn of an owner's next request, given the number of running ones."""
        first = self._newest - num_running + 1
        turn = max(self._last.get(owner, -1) + 1, first)
        self._last[owner] = turn
        if len(self._last) > self._most:  # forget those that are not ahead of a new one
            self._last = {one: last for one, last in self._last.items() if last > first}
            self._most = max(MOST_OWNERS, 2 * len(self._last))
        return turn

    def admitted(self, turn: int) -> None:
        """A request with this turn began to run."""
        self._newest = max(self._newest, turn)

    def reset(self) -> None:
        """No requests are left: start over."""
        self._last.clear()
        self._newest = -1


def outranked(running: Sequence[Request], request: Request) -> list[Request]:
    """The running requests (given in order) that a waiting one may preempt, last one first.

    These have lower priority, or the same priority, another owner and a later turn.
    """
    later = []
    priority, turn, _ = request.order
    for other in reversed(running):
        if other.order < request.order:
            break
        if other.order[0] > priority or (other.owner != request.owner and other.order[1] > turn):
            later.append(other)
    return later


def first_to_yield(running: Sequence[Request], requester: Request) -> Request | None:
    """The running request (given in order) to preempt for one that needs blocks: the last one after it, preferably one
    that is not recomputing."""
    last = None
    for request in reversed(running):
        if request.order <= requester.order:
            break
        if request.num_computed > request.high_water or not request.stats.preemptions:
            return request
        last = last or request
    return last
