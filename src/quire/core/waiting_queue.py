"""Requests without blocks: those in line for admission, and those that wait for a block that another one computes.

A prefix that several requests share is computed once. The one that computes it claims its blocks by their hashes;
the others are held, and are back in line when the block that they wait for is there, or nobody computes it any more.
"""

from __future__ import annotations

import heapq

from quire.core.prefix_cache import longest_run
from quire.core.request import Request, Status


class WaitingQueue:
    """A heap in the order of service, and beside it, by the hash of the awaited block, the requests that are held.

    Attributes:
        num_held: requests that are held.
    """

    def __init__(self) -> None:
        self.num_held = 0
        self._heap: list[tuple[tuple[int, int, int], Request]] = []  # entries of the dead are skipped
        self._num_dead = 0  # of them, at most
        self._held: dict[bytes, list[Request]] = {}
        self._computing: dict[bytes, Request] = {}  # who computes the block of a hash: the first in order

    def push(self, request: Request) -> None:
        """Put a request in line, at its place."""
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

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, wherever it is here.

        Entries of the dead stay in the heap until they are more than the living, so that this costs constant time.
        """
        if request.status is Status.HELD:
            fellows = self._held[request.awaits]
            fellows.remove(request)
            if not fellows:
                del self._held[request.awaits]
            self.num_held -= 1
        else:
            self._num_dead += 1
        request.status = Status.FINISHED
        if 2 * self._num_dead > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0

    # -- waiting for another's prefix ----------------------------------------------------------------------

    def claim(self, leader: Request) -> None:
        """A request that begins to run will compute the blocks that it has not published."""
        for block_hash in leader.hashes[leader.num_published :]:
            other = self._computing.get(block_hash)
            if other is None or leader.order < other.order:
                self._computing[block_hash] = leader

    def hold(self, request: Request, first: int, last: int) -> bool:
        """Hold a request that was popped, if another one computes some of its next blocks, `first` to `last - 1`.

        Nobody waits for one that comes after him in the order of service.
        """
        ahead = request.hashes[first:last]
        count = longest_run(ahead, len(ahead), lambda each: self._computed_before(each, request))
        if not count:
            return False
        request.status, request.awaits = Status.HELD, ahead[count - 1]
        self.num_held += 1
        self._held.setdefault(request.awaits, []).append(request)
        return True

    def published(self, hashes: list[bytes]) -> None:
        """These blocks are there: whoever waits for one is in line again."""
        for block_hash in hashes:
            self._computing.pop(block_hash, None)
            self._wake(block_hash)

    def abandoned(self, leader: Request) -> None:
        """A request computes no further blocks: whoever waits for one of them is in line again."""
        for block_hash in leader.hashes[leader.num_published :]:
            if self._computing.get(block_hash) is leader:
                del self._computing[block_hash]
                self._wake(block_hash)

    def _computed_before(self, block_hash: bytes, request: Request) -> bool:
        leader = self._computing.get(block_hash)
        return leader is not None and leader.order < request.order

    def _wake(self, block_hash: bytes) -> None:
        for request in self._held.pop(block_hash, ()):
            self.num_held -= 1
            self.push(request)
