"""Requests without blocks: those in line for admission, and those that wait for an event before that."""

from __future__ import annotations

import heapq
from collections import Counter

from quire.core.request import Event, Request, Status


class WaitingQueue:
    """A heap in the order of service; and, by event, the requests that wait for an event and are not in line.

    Attributes:
        num_awaiting: number of requests that wait for an event, by its kind.
    """

    def __init__(self) -> None:
        self.num_awaiting: Counter[str] = Counter()
        self._heap: list[tuple[tuple[int, int, int], Request]] = []  # entries of ended requests are skipped
        self._num_dead = 0  # upper bound of their number
        self._awaiting: dict[Event, list[Request]] = {}

    def push(self, request: Request) -> None:
        """Put a request in line, at its place; one that `awaits` an event is not in line until it has happened."""
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
        """Remove the first request in line."""
        request = self.head()
        if request is not None:
            heapq.heappop(self._heap)
        return request

    def take(self, event: Event) -> list[Request]:
        """Remove the requests that wait for an event."""
        requests = self._awaiting.pop(event, [])
        self.num_awaiting[event.kind] -= len(requests)
        for request in requests:
            request.awaits, request.status = None, Status.WAITING
        return requests

    def remove(self, request: Request) -> None:
        """Remove a request that has ended.

        Its entry stays in the heap until such entries outnumber the others, so that this takes constant time.
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
