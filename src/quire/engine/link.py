"""Messages between the first rank and another one, over a socket pair: a length, and that many bytes."""

from __future__ import annotations

import socket
import threading

import msgspec

from quire.core.step import StepResult
from quire.runner.expert_mover import Prepared
from quire.runner.memory_plan import Measured, MemoryPlan

LENGTH_BYTES = 4


class Loaded(msgspec.Struct, tag=True):
    """This rank's part of the model is loaded. `kernels`: see `Kernels.describe`."""

    kernels: str


class Measure(msgspec.Struct, tag=True):
    """All ranks have loaded: report the free memory."""


class Begin(msgspec.Struct, tag=True):
    """Allocate the KV blocks that the first rank has planned, and accept plans; `kv_key`: see `start_runner`."""

    plan: MemoryPlan
    kv_key: bytes


class Ready(msgspec.Struct, tag=True):
    """This rank accepts plans."""


class Failed(msgspec.Struct, tag=True):
    """This rank cannot start. `known`: whether the message is for users."""

    message: str
    known: bool


class Computed(msgspec.Struct, tag=True):
    """A replica's result of the plan with this number; None if it was not computed, and `error` says why."""

    number: int
    result: StepResult | None
    error: str = ""


class Timed(msgspec.Struct, tag=True):
    """When this rank computed the plan with this number, on its machine's monotonic clock; -1: a slot without a
    plan.
    """

    number: int
    begin: float
    seconds: float


FromRank = Loaded | Measured | Ready | Failed | Prepared | Computed | Timed


class Link:
    """One end. Any thread may send: a rank's that computes, and the one that reads its new experts."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._message, self._sent = b"", [0]  # the last one, and how many bytes of it each call has sent

    def send(self, payload: bytes) -> None:
        """Send a message. One that was interrupted, as by Ctrl-C, is completed before the next one.

        Raises:
            OSError: the other end is gone, or does not read within the socket's timeout.
        """
        with self._sending:
            self._finish()
            self._message, self._sent = len(payload).to_bytes(LENGTH_BYTES, "little") + payload, [0]
            self._finish()

    def _finish(self) -> None:
        while (sent := sum(self._sent)) < len(self._message):
            # One call sends and records how much, so that an interrupt comes before both or after both.
            self._sent.extend(map(self.socket.send, [memoryview(self._message)[sent:]]))

    def receive(self) -> bytes | None:
        """The next message; None if the other end was closed, or stopped in the middle of one."""
        head = self._read(LENGTH_BYTES)
        return None if head is None else self._read(int.from_bytes(head, "little"))

    def _read(self, size: int) -> bytes | None:
        parts, missing = [], size
        while missing:
            try:
                part = self.socket.recv(min(missing, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
