"""What threads beside the engine's have to tell it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from select import select
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from quire.kv import wire


STORE_NUMBERS = 2**32
"""From here on, numbers of blocks that are wanted for a store; other engines' are lower."""


class Progressed(NamedTuple):
    """A read from another engine goes on."""

    number: int


class Wanted(NamedTuple):
    """An importer waits for blocks; `number` is the exporter's own."""

    number: int
    want: wire.Want


class Released(NamedTuple):
    """An importer has read so many blocks, the first ones."""

    number: int
    blocks: int


class Dropped(NamedTuple):
    """An importer reads nothing more of this."""

    number: int


class Located(NamedTuple):
    """By a directory, which nodes hold each of the first blocks that were asked about; None: it does not answer."""

    number: int
    holders: list[list[str]] | None


class Nodes(NamedTuple):
    """By a directory, the other nodes that are there, by name."""

    names: frozenset[str]


class Mailbox:
    """News for the engine, from any thread. `fileno` can be polled: it is readable while there is something."""

    def __init__(self) -> None:
        self._news: deque[Any] = deque()
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)

    def fileno(self) -> int:
        """What to poll."""
        return self._rung.fileno()

    def leave(self, news: object) -> None:
        """Tell something that has time: it is found with what is posted next, or by who looks for it."""
        self._news.append(news)

    def post(self, news: object) -> None:
        """Tell something."""
        self._news.append(news)
        with contextlib.suppress(OSError):  # it rings already, or nobody listens any more
            self._bell.send(b"!")

    def take(self, wait_seconds: float = 0.0) -> list[Any]:
        """All that was told since the last call, in its order; waits so long where nothing was."""
        if wait_seconds and not self._news:
            select([self._rung], [], [], wait_seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._rung.fileno(), 4096):
                pass
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Nobody listens any more."""
        self._bell.close()
        self._rung.close()
