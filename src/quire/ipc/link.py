"""An HTTP process's connection to one replica of the engine, across restarts: socket, board and state."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import zmq

from quire.errors import EngineClosedError
from quire.ipc import wire
from quire.ipc.board import NUM_OPEN, Board
from quire.ipc.channel import Channel

STALL_SECONDS = 8.0
"""An engine whose pulse has not changed for this long is not healthy."""

LOOK_SECONDS = 0.25
"""How often the pulse is checked."""

ANSWER_SECONDS = 30.0
"""Timeout of a question to the engine, which answers between steps."""

State = Literal["loading", "ready", "restarting", "failed"]


class EngineLink:
    """To be used on one event loop.

    Args:
        directory: the server's private folder.
        identity: this process's name for the engines.
        hear: called with the updates of requests.

    Attributes:
        replica: the replica's number, from 0 on.
        state: the current engine's state. boot: that engine's number.
        info: description of the engine that is ready, or was last.
        board: the current engine's status board; None before the first engine.
        requests: numbers of the requests that the engine has.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        identity: str,
        replica: int,
        hear: Callable[[EngineLink, wire.Updates], None],
    ) -> None:
        self.replica = replica
        self.state: State = "loading"
        self.boot = 0
        self.info: wire.EngineInfo | None = None
        self.board: Board | None = None
        self.requests: set[int] = set()
        self._context, self._directory, self._identity, self._hear_updates = context, directory, identity, hear
        self._channel: Channel | None = None
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._pulse = (-1, time.monotonic())
        self._quiet = 0.0  # seconds of checks without a change, since this process may have been stopped, too

    @property
    def name(self) -> str:
        """The replica's number, for metrics and people."""
        return str(self.replica)

    @property
    def is_open(self) -> bool:
        """Whether an engine is connected."""
        return self._channel is not None

    @property
    def healthy(self) -> bool:
        """Whether the engine is ready and shows signs of life."""
        return self.state == "ready" and time.monotonic() - self._pulse[1] < STALL_SECONDS

    @property
    def stalled(self) -> bool:
        """Whether the engine is ready but hangs: its pulse has stopped for longer than a slow step may take."""
        patience = 0 if self.board is None else self.board.patience
        return self.state == "ready" and self._quiet >= max(STALL_SECONDS, patience)

    @property
    def num_open(self) -> int:
        """Number of requests that the engine has from all HTTP processes, as it reported last."""
        return 0 if self.board is None else self.board.fields[NUM_OPEN]

    def look(self) -> None:
        """Check the pulse; to be called every `LOOK_SECONDS`."""
        pulse = -1 if self.board is None else self.board.pulse
        self._quiet += LOOK_SECONDS
        if pulse != self._pulse[0]:
            self._pulse, self._quiet = (pulse, time.monotonic()), 0.0

    def begin(self, boot: int) -> None:
        """An engine with this number is there, or will be. Raises OSError if its board cannot be opened now."""
        if boot != self.boot:
            self.board = Board(wire.board_path(self._directory, self.replica, boot))
            self.boot, self._pulse, self._quiet = boot, (-1, time.monotonic()), 0.0

    def open(self, info: wire.EngineInfo) -> None:
        """The engine is ready. Raises ZMQError if no socket can be made now."""
        address = wire.engine_address(self._directory, self.replica, info.boot)
        self._channel = Channel(self._context, address, self._identity, self._hear)
        self.info, self.state = info, "ready"

    def lose(self) -> set[int]:
        """The engine died: open questions fail. Returns the numbers of its requests."""
        self.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineClosedError("the engine died before it answered"))
        lost, self.requests = self.requests, set()
        return lost

    def close(self) -> None:
        """Disconnect."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, message: wire.ToEngine) -> None:
        """Send a message to the engine; it is dropped if there is none."""
        if self._channel is not None:
            self._channel.send(wire.encode(message))

    async def ask(self, question: Callable[[int], wire.ToEngine], seconds: float = ANSWER_SECONDS) -> bytes:
        """The engine's answer, within this many seconds.

        Raises:
            EngineClosedError: there is no engine, it did not answer, or it hangs. A hanging engine is not asked, so
                that questions do not pile up.
        """
        if self.state != "ready":
            raise EngineClosedError("the engine is not ready")
        if not self.healthy:
            raise EngineClosedError(f"the engine has shown no sign of life for {STALL_SECONDS:g} s")
        ticket = next(self._tickets)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        self.send(question(ticket))
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise EngineClosedError(f"the engine did not answer within {seconds:g} s") from None
        finally:
            del self._answers[ticket]

    def _hear(self, payload: bytes) -> None:
        message = wire.decode_from_engine(payload)
        if isinstance(message, wire.Updates):
            self._hear_updates(self, message)
            return
        answer = self._answers.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message.value)
