"""Numbered events: which prefixes an engine's cache has gained and lost."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

KEPT_EVENTS = 2**16
"""Most events that are kept; beyond that the oldest are dropped, so that a reader who is late needs a snapshot."""


class CacheEvent(NamedTuple):
    """A prefix was cached, or is no longer cached.

    Attributes:
        number: counts up by one. After a gap, a reader must assume that it knows nothing about the cache.
        stored: whether it is cached from now on.
        name: the prefix's, see `prompt.py`.
    """

    number: int
    stored: bool
    name: bytes


class CacheEvents:
    """The latest events.

    Attributes:
        next: the next event's number.
        kept: those that can still be read, in order.
    """

    def __init__(self) -> None:
        self.next = 0
        self.kept: deque[CacheEvent] = deque(maxlen=KEPT_EVENTS)

    def add(self, stored: bool, name: bytes) -> None:
        """A prefix was cached, or is no longer cached."""
        self.kept.append(CacheEvent(self.next, stored, name))
        self.next += 1

    def since(self, number: int) -> list[CacheEvent] | None:
        """The events from a number on; None if some were dropped, or the number is invalid."""
        count = self.next - number
        if number < 0 or not 0 <= count <= len(self.kept):
            return None
        return list(islice(reversed(self.kept), count))[::-1]
