"""A prefix that several requests share is computed once: by the first of them, while the others wait for its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.core.prefix_cache import longest_run
from quire.core.request import Event, Request

BLOCK = "block"
"""Kind of the events that blocks are there, by their hashes."""


class Leader(Protocol):
    """Who brings blocks: a request that computes them, or a fetch that loads them."""

    @property
    def order(self) -> tuple[float, int, int]: ...
    @property
    def hashes(self) -> Sequence[bytes]: ...
    @property
    def num_published(self) -> int: ...


class PrefixLeaders:
    """Who computes which blocks. A running request claims those of its prompt that are not in the cache yet."""

    def __init__(self) -> None:
        self._computing: dict[bytes, Leader] = {}  # by a block's hash, who computes it: the first in order

    def claim(self, leader: Leader) -> None:
        """A request that begins to run will compute the blocks that it has not published; a fetch will load them."""
        for block_hash in leader.hashes[leader.num_published :]:
            other = self._computing.get(block_hash)
            if other is None or leader.order < other.order:
                self._computing[block_hash] = leader

    def awaited(self, request: Request, first: int, last: int) -> Event | None:
        """What a request waits for, if another one computes some of its next blocks, `first` to `last - 1`.

        No request waits for one that comes after it in the order of service.
        """
        missing = request.hashes[first:last]
        count = longest_run(missing, len(missing), lambda each: self._computed_before(each, request))
        return Event(BLOCK, missing[count - 1]) if count else None

    def published(self, hashes: list[bytes]) -> list[Event]:
        """These blocks are there. Returns the events."""
        for block_hash in hashes:
            self._computing.pop(block_hash, None)
        return [Event(BLOCK, block_hash) for block_hash in hashes]

    def abandoned(self, leader: Leader) -> list[Event]:
        """It brings no further blocks. Returns the events that it will not bring."""
        lost = [each for each in leader.hashes[leader.num_published :] if self._computing.get(each) is leader]
        for block_hash in lost:
            del self._computing[block_hash]
        return [Event(BLOCK, block_hash) for block_hash in lost]

    def _computed_before(self, block_hash: bytes, request: Request) -> bool:
        leader = self._computing.get(block_hash)
        return leader is not None and leader.order < request.order
