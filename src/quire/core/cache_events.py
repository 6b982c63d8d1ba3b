"""What comes into the prefix cache and goes out of it, as data for others: a router, a directory of who has what."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

KEPT_EVENTS = 2**16
"""Events that are kept until somebody takes them; the oldest go first, and leave a gap in the numbers."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A full block of one KV group was stored or removed, or all of them were.

    Attributes:
        number: counts up by one. Who sees a gap knows nothing of the cache any more.
        kind: "cleared": nothing is cached.
        hash: the block's; empty where all were cleared.
        parent: hash of the block before it, or of its scope's root; empty unless it was stored.
        group: number of the KV group; of each, a block comes and goes by itself.
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    hash: bytes = b""
    parent: bytes = b""
    group: int = 0


class CacheEvents:
    """Events in their order, until they are taken."""

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
        """Number of the next event."""
        return self._next

    def since(self, number: int) -> list[CacheEvent] | None:
        """Those from a number on, which stay; None: some of them are not kept any more, or there is no such number."""
        count = self._next - number
        if number < 0 or not 0 <= count <= len(self._events):
            return None
        return list(islice(reversed(self._events), count))[::-1]

    def take(self) -> list[CacheEvent]:
        """Those since the last call."""
        events = list(self._events)
        self._events.clear()
        return events
