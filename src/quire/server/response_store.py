"""Stored responses: they can be retrieved, continued, cancelled and deleted.

They are in the memory of one HTTP process, by tenant. Their number and their bytes are bounded; the least recently used
is dropped first, and one in progress never.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.server.errors import ApiError

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20


@dataclass(slots=True)
class Stored:
    """One response.

    Attributes:
        answer: its JSON so far.
        input: JSON of its request's items alone.
        items: JSON of all items up to its end, for a response that continues it.
        done: set when it has ended.
        making: the task that generates it in the background, if one does.
    """

    id: str
    owner: str
    answer: bytes
    input: bytes = b"[]"
    items: bytes = b"[]"
    done: asyncio.Event = field(default_factory=asyncio.Event)
    making: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return len(self.answer) + len(self.input) + len(self.items)


class ResponseStore:
    """The responses of one HTTP process."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._size = 0  # of all of them

    def __len__(self) -> int:
        return len(self._stored)

    def find(self, response_id: str, owner: str) -> Stored:
        """A response of this tenant.

        Raises:
            ApiError: 404: it does not exist, was dropped, or belongs to another tenant.
        """
        found = self._stored.get((owner, response_id))
        if found is None:
            message = "no response with this id is stored under this key; it was not stored, or deleted, or dropped"
            raise ApiError(404, message, code="response_not_found")
        self._stored.move_to_end((owner, response_id))
        return found

    def add(self, stored: Stored) -> None:
        """Store a response; one in progress is never dropped to make room."""
        self._stored[stored.owner, stored.id] = stored
        self._size += stored.size

    def end(self, stored: Stored, answer: bytes, items: bytes) -> None:
        """Store the final state of a response; if there is no room, others are dropped, or itself."""
        self._forget(stored)
        stored.answer, stored.items, stored.making = answer, items, None
        stored.done.set()
        self.add(stored)
        while self._size > self._max_bytes or len(self._stored) > self._max_responses:
            ended = next((one for one in self._stored.values() if one.done.is_set()), None)
            if ended is None:
                break
            self._forget(ended)

    def drop(self, stored: Stored) -> None:
        """Remove a response that was not begun."""
        self._forget(stored)
        stored.done.set()

    def delete(self, response_id: str, owner: str) -> Stored:
        """Remove a response, and return it. Raises as `find` does."""
        found = self.find(response_id, owner)
        self._forget(found)
        return found

    def _forget(self, stored: Stored) -> None:
        if (gone := self._stored.pop((stored.owner, stored.id), None)) is not None:
            self._size -= gone.size
