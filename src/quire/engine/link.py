"""Messages between the ranks of one machine, over a pair of sockets: a length, and so many bytes."""

from __future__ import annotations

import socket

import msgspec

from quire.runner.memory_plan import MemoryPlan

LENGTH_BYTES = 4


class Loaded(msgspec.Struct, tag=True):
    """This rank's part of the model is there."""


class Begin(msgspec.Struct, tag=True):
    """Make the KV blocks that the first rank has planned, and take plans of steps."""

    plan: MemoryPlan


class Ready(msgspec.Struct, tag=True):
    """This rank takes plans."""


class Failed(msgspec.Struct, tag=True):
    """This rank cannot start. `known`: the message is for users."""

    message: str
    known: bool


FromRank = Loaded | Ready | Failed


class Link:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, payload: bytes) -> None:
        """Raises OSError where the other end is gone, or does not read for as long as the socket waits."""
        self.socket.sendall(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)

    def receive(self) -> bytes | None:
        """The next message; None: the other end was closed."""
        head = self._read(LENGTH_BYTES)
        return None if head is None else self._read(int.from_bytes(head, "little"))

    def _read(self, size: int) -> bytes | None:
        parts, missing = [], size
        while missing:
            try:
                part = self.socket.recv(min(missing, 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
