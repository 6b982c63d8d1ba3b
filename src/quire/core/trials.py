"""Finds the request that makes a step fail, by bisection: the failed step's requests are retried in halves.

A failed step does not say which request caused it. A request is cleared once it has got past the point where the step
failed; one that fails alone is to blame. All others get the tokens that they would have had, only later.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request, Status


class Trials:
    """Groups of requests still to be tried, the next one last; while there is one, no other request runs.

    Attributes:
        num_halvings: how often a group was halved since the first failure.
    """

    def __init__(self) -> None:
        self._groups: list[list[Request]] = []
        self.num_halvings = 0

    @property
    def on(self) -> bool:
        """Whether there is a group to be tried. Steps do not overlap then, so each failure belongs to one group."""
        return bool(self._groups)

    def admits(self, request: Request) -> bool:
        """Whether a request may run now."""
        return not self._groups or request in self._groups[-1]

    def failed(self, lost: Sequence[Request]) -> Request | None:
        """Steps with spans of these requests have failed. Returns the request to blame, if it was alone."""
        if self._groups:
            untried = [request for request in self._groups.pop() if request not in lost]
            self._groups += [untried] if untried else []
        else:
            self.num_halvings = 0
        if len(lost) < 2:
            return lost[0] if lost else None
        half = (len(lost) + 1) // 2
        self._groups += [list(lost[half:]), list(lost[:half])]
        self.num_halvings += 1
        return None

    def advance(self) -> bool:
        """Clear requests that have passed; True if it is the next group's turn, or the rest of this one must restart.

        A cleared request continues to run with its group, but not for long if it takes blocks that the rest needs.
        """
        moved = False
        while self._groups:
            group = self._groups[-1]
            left = [request for request in group if not _has_passed(request)]
            if len(left) == len(group) or any(request.status is Status.RUNNING for request in left):
                break
            self._groups[-1:] = [left] if left else []  # the next one may have been aborted meanwhile
            moved = True
        return moved


def _has_passed(request: Request) -> bool:
    return request.status is Status.FINISHED or request.num_committed >= request.high_water
