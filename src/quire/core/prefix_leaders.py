"""A prefix shared by several requests is computed once, by the first of them; the others wait for its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.core.prefix_cache import longest_run
from quire.core.request import Event, Request

BLOCK = "block"
"""Kind of the events for blocks becoming available, by hash."""

ELSEWHERE = "elsewhere"
"""Kind of the same events where another engine computes the blocks, which may take long."""


class Leader(Protocol):
    """A provider of blocks: a request that computes them, or a fetch that loads them. `kind` is that of its events."""

    @property
    def order(self) -> tuple[float, int, int]: ...
    @property
    def hashes(self) -> Sequence[bytes]: ...
    @property
    def num_published(self) -> int: ...
    @property
    def kind(self) -> str: ...


class PrefixLeaders:
    """Who computes which blocks. A running request claims the blocks of its prompt that are not cached yet."""

    def __init__(self) -> None:
        self._computing: dict[bytes, Leader] = {}  # by block hash, the first one in order that computes it

    def claim(self, leader: Leader) -> None:
        """Claim the blocks that a starting request will compute, or that a fetch will load."""
        for block_hash in leader.hashes[leader.num_published :]:
            other = self._computing.get(block_hash)
            if other is None or leader.order < other.order:
                self._computing[block_hash] = leader

    def awaited(self, request: Request, first: int, last: int) -> Event | None:
        """The event that a request should wait for, if some of its next blocks, `first` to `last - 1`, are claimed.

        No request waits for one that comes after it in the order of service.
        """
        missing = request.hashes[first:last]
        count = longest_run(missing, len(missing), lambda each: self._computed_before(each, request))
        return Event(self._computing[missing[count - 1]].kind, missing[count - 1]) if count else None

    def published(self, hashes: list[bytes]) -> list[Event]:
        """These blocks are available now. Returns the events."""
        for block_hash in hashes:
            self._computing.pop(block_hash, None)
        return _events(hashes)

    def abandoned(self, leader: Leader) -> list[Event]:
        """A provider will bring no further blocks. Returns the events that will not happen."""
        lost = [each for each in leader.hashes[leader.num_published :] if self._computing.get(each) is leader]
        for block_hash in lost:
            del self._computing[block_hash]
        return _events(lost)

    def _computed_before(self, block_hash: bytes, request: Request) -> bool:
        leader = self._computing.get(block_hash)
        return leader is not None and leader.order < request.order


def _events(hashes: Iterable[bytes]) -> list[Event]:
    """Of both kinds, since a fetch may have taken the place of a request for which others wait already."""
    return [Event(kind, block_hash) for block_hash in hashes for kind in (BLOCK, ELSEWHERE)]
