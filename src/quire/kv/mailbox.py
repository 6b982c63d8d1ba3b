"""Messages to the engine from its background threads."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from quire.kv import wire


STORE_NUMBERS = 2**32
"""Exports with numbers from here on are for a store; those for other engines have lower ones."""


class Ended(NamedTuple):
    """The end of a transfer: the write of a slot, or the read of that `number`. "gone": the other engine does not have
    the rest of the blocks.

    Attributes:
        blocks: number of blocks that arrived.
        moving: seconds of the total that the transfer took; for another engine's blocks, the rest is its computation.
        engine: the other engine, for display.
    """

    kind: Literal["write", "read", "gone"]
    number: int
    blocks: int
    seconds: float
    moving: float = 0.0
    engine: str = ""


class Progressed(NamedTuple):
    """A read from another engine has made progress."""

    number: int


class Late(NamedTuple):
    """A read has failed, and something may still be written into its slots, until `Ended` follows."""

    number: int


class Wanted(NamedTuple):
    """An importer wants blocks; `number` is the exporter's."""

    number: int
    want: wire.Want


class Released(NamedTuple):
    """An importer has read the first `count` blocks."""

    number: int
    blocks: int


class Dropped(NamedTuple):
    """An importer no longer wants these blocks."""

    number: int


class Located(NamedTuple):
    """A directory's answer: the nodes that have each of the first blocks asked about; None if it does not answer."""

    number: int
    holders: list[list[str]] | None


class Nodes(NamedTuple):
    """A directory's answer: the other nodes, by name."""

    names: frozenset[str]


class Servers(NamedTuple):
    """The servers at the addresses of a DNS name: their URLs."""

    url: str
    servers: list[str]


class Mailbox:
    """Messages for the engine, from any thread. `fileno` can be polled: it is readable while there are messages."""

    def __init__(self) -> None:
        self._news: deque[Any] = deque()
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._waiting = select.poll()  # whatever the number of the descriptor is, unlike `select`
        self._waiting.register(self._rung, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._rung.fileno()

    def leave(self, news: object) -> None:
        """Add a message that is not urgent, without waking the engine."""
        self._news.append(news)

    def post(self, news: object) -> None:
        """Tell something."""
        self._news.append(news)
        with contextlib.suppress(OSError):  # already readable, or closed
            self._bell.send(b"!")

    def take(self, wait_seconds: float = 0.0) -> list[Any]:
        """All messages since the last call, in order; waits up to this many seconds for the first one."""
        if wait_seconds and not self._news:
            self._waiting.poll(1000 * wait_seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._rung.fileno(), 4096):
                pass
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Close the descriptor."""
        self._bell.close()
        self._rung.close()
