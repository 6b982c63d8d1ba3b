"""Fairness among owners: whose request comes next, when several owners want the same seats.

Each owner's requests are dealt turns that count up, and service goes by turn, so that owners take turns however many
requests one of them sends. An owner who comes later begins among those that run, neither behind a queue that another
one has filled nor far before it. This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with a request as the
unit. With a single owner, turns are the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request


class Turns:
    """Deals turns."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # the last turn dealt, by owner
        self._newest = -1  # the latest turn of a request that has been admitted

    def deal(self, owner: str, num_running: int) -> int:
        """The turn of an owner's next request, beside `num_running` ones that run."""
        turn = max(self._last.get(owner, -1) + 1, self._newest - num_running + 1)
        self._last[owner] = turn
        return turn

    def admitted(self, turn: int) -> None:
        """A request with this turn began to run."""
        self._newest = max(self._newest, turn)

    def reset(self) -> None:
        """No request is left: earlier turns give no precedence."""
        self._last.clear()
        self._newest = -1


def outranked(running: Sequence[Request], request: Request) -> list[Request]:
    """Running requests, which are in order, that give way to a waiting one, the last in order first.

    They are of lower priority, or of the same and another owner's with a later turn.
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
    """Of the running requests, which are in order, the last one that comes after another, which needs its blocks; one
    that is still recomputing only as the last resort."""
    last = None
    for request in reversed(running):
        if request.order <= requester.order:
            break
        if request.num_computed > request.high_water or not request.stats.preemptions:
            return request
        last = last or request
    return last
