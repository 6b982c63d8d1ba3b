"""One engine of a server, and those that come after it: started, watched, and started again when they die.

A server has one, or with `data_parallel_size` so many; none knows of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire import log
from quire.config import EngineConfig
from quire.errors import ServerError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.engine_process import EngineStart
from quire.server.processes import Child, RestartBudget

if TYPE_CHECKING:
    from quire.server.supervisor import ServeOptions

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long a dead engine's last message may be under way."""

STOP_SECONDS = 5.0
"""How long an engine may take to leave: a step may be in the way."""


class Server(Protocol):
    """What a replica needs of its supervisor."""

    options: ServeOptions
    directory: Path
    is_closing: bool
    """Nothing is started again."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Do this beside the rest. If it fails, so does the server."""

    def tell_workers(self, message: wire.FromSupervisor) -> None:
        """Tell every HTTP process."""

    def post(self, to: str, message: wire.FromSupervisor) -> None:
        """Tell one process."""

    async def watch(self, process: Child, board: Board) -> None:
        """Kill it when it shows no sign of life."""

    def replica_ready(self, replica: Replica, info: wire.EngineInfo) -> None:
        """An engine is ready for the first time."""

    def replica_failed(self, replica: Replica, fate: str, cause: str) -> None:
        """It is not started again; `fate` is for the operator, `cause` for clients."""

    def cannot_start(self, error: str) -> None:
        """It has never been ready, and will not be."""


class Replica:
    """One place for an engine.

    Args:
        index: which one of the server's, from 0 on.

    Attributes:
        state: of its engine, as HTTP processes know it.
        child: its process; None before the first one, and while the next one waits for its time.
        board: its board, once there is one.
        found: options as the first engine of the server has resolved them, which all others are to have too.
    """

    def __init__(self, index: int, server: Server) -> None:
        self.index, self._server = index, server
        self.state = wire.EngineState(replica=index, boot=0, state="loading")
        self.child: Child | None = None
        self.board: Board | None = None
        self.found: Mapping[str, Any] = {}
        self._budget = RestartBudget(server.options.server.restart_limit)
        self._was_ready = False
        self._died = 0.0  # when the last one did

    @property
    def name(self) -> str:
        """The engine's, on the wire."""
        return wire.engine_name(self.index, self.state.boot)

    @property
    def title(self) -> str:
        """The engine, for people."""
        of_which = f" of replica {self.index}" if self._server.options.engine.replicas > 1 else ""
        return f"engine {self.state.boot}{of_which}"

    def begin(self) -> None:
        """Start the first engine."""
        self._begin_boot()
        self._server.spawn(self._start())

    def hear(self, message: wire.ToSupervisor) -> None:
        """What the present engine says."""
        if isinstance(message, wire.Located):
            self._set_state(path=message.path)
        elif isinstance(message, wire.EngineReady):
            self._ready(message.info)
        elif isinstance(message, wire.EngineFailed) and self.child is not None and not self._last_words.done():
            self._last_words.set_result(message.message)
            self._server.spawn(self.child.leave(STOP_SECONDS))

    async def stop(self) -> None:
        """End it in order."""
        if self.child is not None and self.state.state == "ready":
            self._server.post(self.name, wire.Stop())
            await self.child.leave(STOP_SECONDS)

    # -- its life ------------------------------------------------------------------------------------------

    def _set_state(self, **changes: Any) -> None:
        """Change the engine's state and tell every HTTP process. Suspects are told once."""
        state = msgspec.structs.replace(self.state, **changes)
        self._server.tell_workers(state)
        self.state = msgspec.structs.replace(state, suspects=[], culprit=None, killed=False)

    def _begin_boot(self, **changes: Any) -> None:
        """There will be another engine."""
        boot, directory = self.state.boot + 1, self._server.directory
        spent = wire.board_path(directory, self.index, boot - 1) if boot > 1 else None
        self.board = make_board(wire.board_path(directory, self.index, boot), spent)
        self._set_state(boot=boot, **changes)

    async def _start(self) -> None:
        """Start the engine of this boot."""
        options, board = self._server.options, self.board
        start = EngineStart(
            directory=str(self._server.directory),
            replica=self.index,
            boot=self.state.boot,
            config=self._config(),
            sharers=options.engine.replicas,
            neighbours=0 if self.found else options.engine.replicas - 1,
            log_format=options.server.log_format,
            debug=options.server.debug,
            fault=options.fault,
        )
        self._last_words: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        engine = self.child = await Child.start(
            self.title, options.engine_command, start, environment=device_of(self.index, options.engine)
        )
        self._server.spawn(self._replace(engine))
        if board is not None:
            self._server.spawn(self._server.watch(engine, board))

    def _config(self) -> dict[str, Any]:
        """The options of the engine: as they were given, and where there are several, of one of them."""
        options = self._server.options.engine
        config = dataclasses.asdict(options)
        if options.replicas > 1:
            config |= {"data_parallel_size": 1, **self.found}
            if options.disk_kv_path is not None:  # a folder of blocks has one writer
                config["disk_kv_path"] = str(Path(options.disk_kv_path).expanduser() / f"replica-{self.index}")
        if self.state.path is not None:  # the files that open requests have begun with
            config |= {"model": self.state.path, "revision": None}
        return config

    def _ready(self, info: wire.EngineInfo) -> None:
        again = self._was_ready
        self._was_ready = True
        self._set_state(state="ready", info=info)
        if again:
            seconds = time.monotonic() - self._died
            text = f"{self.title} is ready, {seconds:.1f} s after the death of the last one"
            log.event(logger, "engine_ready", text, replica=self.index, boot=info.boot, seconds=seconds)
        else:
            self._server.replica_ready(self, info)

    async def _replace(self, engine: Child) -> None:
        """When the engine has died, start the next one, or give up."""
        await engine.ended.wait()
        if self._server.is_closing:
            return
        self._died = time.monotonic()
        words = await self._hear_last_words()
        if not self._was_ready and (words or not self.found):
            self._server.cannot_start(words or f"the engine ended while it was loading ({_described(engine)})")
            return
        suspects, culprit = self.board.suspects() if self.board is not None else ([], None)
        cause = engine.fate() if words is None else "it could not be started again"
        delay = self._budget.spend()
        log.event(
            logger,
            "engine_died",
            f"{engine.name} died ({words or _described(engine)}); requests in its step: {len(suspects)}" + again(delay),
            level=logging.ERROR,
            replica=self.index,
            boot=self.state.boot,
            cause=cause,
            suspects=suspects,
        )
        of_step = {"suspects": suspects, "culprit": culprit, "killed": _was_killed(engine)}
        if delay is None:
            self._set_state(state="failed", info=None, cause=cause, **of_step)
            self._server.replica_failed(self, words or engine.fate(), cause)
            return
        self._begin_boot(state="restarting", info=None, cause=cause, **of_step)
        await asyncio.sleep(delay)
        if not self._server.is_closing:
            await self._start()

    async def _hear_last_words(self) -> str | None:
        """Why it could not start, if it said so: the message may arrive after its end."""
        if self.state.state != "ready":
            await asyncio.wait([self._last_words], timeout=LAST_WORDS_SECONDS)
        return self._last_words.result() if self._last_words.done() else None


def _was_killed(engine: Child) -> bool:
    """Whether it was ended from outside, as far as its exit tells: it heeds no other signal (`quire.child`)."""
    return engine.blame is None and engine.exit_code == -signal.SIGKILL


def _described(engine: Child) -> str:
    """An engine's fate, for the log and the operator."""
    by = ": by a user, or by the kernel because memory ran out; dmesg tells" if _was_killed(engine) else ""
    return engine.fate() + by


def device_of(index: int, engine: EngineConfig) -> dict[str, str]:
    """The environment that shows a replica its own GPUs of those that the server sees, one a rank; of one engine it
    stays as it is.

    See the CUDA C++ programming guide, CUDA_VISIBLE_DEVICES.
    """
    if engine.replicas == 1 or engine.device == "cpu":
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    ranks = engine.num_ranks
    devices = [str(each) for each in range(engine.replicas * ranks)] if seen is None else seen.split(",")
    own = devices[index * ranks : (index + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if len(own) == ranks else {}


def make_board(path: Path, spent: Path | None) -> Board:
    """A board; that of a dead process, if there is one, serves again."""
    try:
        if spent is not None:
            with contextlib.suppress(OSError):  # not every file system has hard links
                return Board.take_over(spent, path)
        return Board.create(path)
    except OSError as error:
        text = f"cannot make {path}: {error.strerror or error}; make room there, or set TMPDIR to another folder"
        raise ServerError(text) from error


def again(delay: float | None) -> str:
    """What follows a death, for its line in the log."""
    if delay is None:
        return ""
    return f"; it is started again in {delay:g} s" if delay else "; it is started again"
