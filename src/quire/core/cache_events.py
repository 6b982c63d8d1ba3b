"""Events of the prefix cache, for a router or a directory: which blocks were stored and removed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

KEPT_EVENTS = 2**16
"""Most events that are kept until they are taken; beyond that the oldest are dropped, leaving a gap in the numbers."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A full block of one KV group was stored or removed, or all of them were.

    Attributes:
        number: counts up by one. After a gap, a reader must assume that it knows nothing about the cache.
        kind: "stored", "removed", or "cleared" if nothing is cached any more.
        hash: the block's; empty for "cleared".
        parent: hash of the block before it, or of its scope's root; only for "stored".
        group: number of the KV group; the groups' parts of a block come and go independently.
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    hash: bytes = b""
    parent: bytes = b""
    group: int = 0


class CacheEvents:
    """The events that have not been taken yet, in order."""

    def __init__(self) -> None:
        self._next = 0
        self._events: deque[CacheEvent] = deque(maxlen=KEPT_EVENTS)

    def add(
        self, kind: Literal["stored", "removed", "cleared"], hash: bytes = b"", parent: bytes = b"", group: int = 0
    ) -> None:
        self._events.append(CacheEvent(self._next, kind, hash, parent, group))
        self._next += 1

    @property
    def next(self) -> int:
        """The next event's number."""
        return self._next

    def since(self, number: int) -> list[CacheEvent] | None:
        """The events from a number on, without taking them; None if some were dropped, or the number is invalid."""
        count = self._next - number
        if number < 0 or not 0 <= count <= len(self._events):
            return None
        return list(islice(reversed(self._events), count))[::-1]

    def take(self) -> list[CacheEvent]:
        """Take the events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events
