"""Requests without blocks: those in line for admission, and those that wait for an event before they are."""

from __future__ import annotations

import heapq
from collections import Counter

from quire.core.request import Event, Request, Status


class WaitingQueue:
    """A heap in the order of service, and beside it, by the events that they wait for, requests that are not in line.

    Attributes:
        num_awaiting: requests that wait for an event, by its kind.
    """

    def __init__(self) -> None:
        self.num_awaiting: Counter[str] = Counter()
        self._heap: list[tuple[tuple[int, int, int], Request]] = []  # entries of the dead are skipped
        self._num_dead = 0  # of them, at most
        self._awaiting: dict[Event, list[Request]] = {}

    def push(self, request: Request) -> None:
        """Put a request in line, at its place; one that `awaits` an event does not stand in it before that has come."""
        if request.awaits is not None:
            request.status = Status.AWAITING
            self._awaiting.setdefault(request.awaits, []).append(request)
            self.num_awaiting[request.awaits.kind] += 1
            return
        request.status = Status.WAITING
        heapq.heappush(self._heap, (request.order, request))

    def head(self) -> Request | None:
        """The first in line."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request | None:
        """Take the first one out of the line."""
        request = self.head()
        if request is not None:
            heapq.heappop(self._heap)
        return request

    def take(self, event: Event) -> list[Request]:
        """Take out those that wait for an event."""
        requests = self._awaiting.pop(event, [])
        self.num_awaiting[event.kind] -= len(requests)
        for request in requests:
            request.awaits, request.status = None, Status.WAITING
        return requests

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, wherever it is here.

        Entries of the dead stay in the heap until they are more than the living, so that this costs constant time.
        """
        if request.awaits is not None:
            fellows = self._awaiting[request.awaits]
            fellows.remove(request)
            if not fellows:
                del self._awaiting[request.awaits]
            self.num_awaiting[request.awaits.kind] -= 1
        else:
            self._num_dead += 1
        request.status = Status.FINISHED
        if 2 * self._num_dead > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0
