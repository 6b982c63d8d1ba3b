"""One HTTP process's wire to one replica of the server's engine, across restarts: its socket, its board, its state."""

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
"""An engine whose pulse stands still for so long is not healthy."""

ANSWER_SECONDS = 30.0
"""A question to the engine waits at most so long: a step may be in the way."""

State = Literal["loading", "ready", "restarting", "failed"]


class EngineLink:
    """To be used on one event loop.

    Args:
        directory: the server's private folder.
        identity: what engines know this process by.
        hear: is given what an engine tells of requests.

    Attributes:
        replica: which one, from 0 on.
        state: of its engine. boot: which one that is.
        info: of the engine that is ready, or was last.
        board: the present engine's, once it has one.
        requests: numbers of the requests that it has.
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

    @property
    def name(self) -> str:
        """For metrics and people: the replica's number."""
        return str(self.replica)

    @property
    def is_open(self) -> bool:
        """There is an engine to talk to."""
        return self._channel is not None

    @property
    def healthy(self) -> bool:
        """The engine is ready and shows signs of life."""
        return self.state == "ready" and time.monotonic() - self._pulse[1] < STALL_SECONDS

    @property
    def num_open(self) -> int:
        """Requests that the engine has, of all HTTP processes, as it counted last."""
        return 0 if self.board is None else self.board.fields[NUM_OPEN]

    def look(self) -> None:
        """Look at the pulse; to be called every second or so."""
        pulse = -1 if self.board is None else self.board.pulse
        if pulse != self._pulse[0]:
            self._pulse = (pulse, time.monotonic())

    def begin(self, boot: int) -> None:
        """There is an engine of this number, or will be."""
        if boot != self.boot:
            self.boot = boot
            self.board = Board(wire.board_path(self._directory, self.replica, boot))
            self._pulse = (-1, time.monotonic())

    def open(self, info: wire.EngineInfo) -> None:
        """The engine is ready."""
        self.info, self.state = info, "ready"
        address = wire.engine_address(self._directory, self.replica, info.boot)
        self._channel = Channel(self._context, address, self._identity, self._hear)

    def lose(self) -> set[int]:
        """The engine died: what it was asked is void. Numbers of the requests that it had."""
        self.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineClosedError("the engine died before it answered"))
        lost, self.requests = self.requests, set()
        return lost

    def close(self) -> None:
        """Leave."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, message: wire.ToEngine) -> None:
        """Tell the engine; a message to one that is gone is void."""
        if self._channel is not None:
            self._channel.send(wire.encode(message))

    async def ask(self, question: Callable[[int], wire.ToEngine], seconds: float = ANSWER_SECONDS) -> bytes:
        """The engine's answer, within so many seconds.

        Raises:
            EngineClosedError: there is no engine, or it did not answer, or it is stuck: then nothing is asked, or
                questions would pile up.
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
