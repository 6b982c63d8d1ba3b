"""A replica: an engine of a server, and its successors. It starts them, watches them, and restarts them when they die.

A server has one, or `data_parallel_size` of them, which do not know of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire import log
from quire.config import EngineConfig
from quire.engine.kv_events import of_replica
from quire.errors import ConfigError, QuireError, ServerError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.engine_process import EngineStart
from quire.server.processes import Child, RestartBudget
from quire.server.serve_options import ServeOptions

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long to wait for a dead engine's last message."""

STOP_SECONDS = 5.0
"""How long an engine may take to exit, as it finishes its step first."""


class Server(Protocol):
    """What a replica needs from its supervisor."""

    options: ServeOptions
    directory: Path
    is_closing: bool
    """Set when nothing is to be restarted."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run this as a task. If it fails, so does the server."""

    def tell_workers(self, message: wire.FromSupervisor) -> None:
        """Send a message to every HTTP process."""

    def post(self, to: str, message: wire.FromSupervisor) -> None:
        """Send a message to one process."""

    async def watch(self, process: Child, board: Board) -> None:
        """Kill the process if its pulse stops."""

    def replica_ready(self, replica: Replica, info: wire.EngineInfo) -> None:
        """An engine is ready for the first time."""

    def replica_failed(self, replica: Replica, fate: str, cause: str) -> None:
        """The replica is not restarted; `fate` is for the operator, `cause` for clients."""

    def cannot_start(self, error: QuireError) -> None:
        """The first engine cannot be started."""


class Replica:
    """One place for an engine.

    Args:
        index: counted from 0.

    Attributes:
        state: the engine's state, as HTTP processes know it.
        child: its process; None before the first one, and until the next one is started.
        board: its status board, once there is one.
        found: options as the server's first engine has resolved them; all others get the same.
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
        """The engine's name in messages between processes."""
        return wire.engine_name(self.index, self.state.boot)

    @property
    def title(self) -> str:
        """The engine's name in the log."""
        of_which = f" of replica {self.index}" if self._server.options.engine.replicas > 1 else ""
        return f"engine {self.state.boot}{of_which}"

    def begin(self) -> None:
        """Start the first engine."""
        self._begin_boot()
        self._server.spawn(self._start())

    def hear(self, message: wire.ToSupervisor) -> None:
        """Handle a message of the current engine."""
        if isinstance(message, wire.Located):
            self._set_state(path=message.path, tokenizer=message.tokenizer)
        elif isinstance(message, wire.EngineReady):
            self._ready(message.info)
        elif isinstance(message, wire.EngineFailed) and self.child is not None and not self._last_words.done():
            self._last_words.set_result(message)
            self._server.spawn(self.child.leave(STOP_SECONDS))

    async def stop(self) -> None:
        """Stop the engine."""
        if self.child is not None and self.state.state == "ready":
            self._server.post(self.name, wire.Stop())
            await self.child.leave(STOP_SECONDS)

    # -- its life ------------------------------------------------------------------------------------------

    def _set_state(self, **changes: Any) -> None:
        """Change the engine's state and tell every HTTP process. Suspects are reported once."""
        state = msgspec.structs.replace(self.state, **changes)
        self._server.tell_workers(state)
        self.state = msgspec.structs.replace(state, suspects=[], culprit=None, killed=False)

    def _begin_boot(self, **changes: Any) -> None:
        """Prepare the next engine's number and board."""
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
        self._last_words: asyncio.Future[wire.EngineFailed] = asyncio.get_running_loop().create_future()
        environment = device_of(self.index, options.engine)

        def launch() -> Awaitable[Child]:
            return Child.start(self.title, options.engine_command, start, environment=environment)

        is_first = self.state.boot == 1 and not self.found  # it says whether the server can start at all
        engine = await (launch() if is_first else Child.start_again(launch, lambda: not self._server.is_closing))
        if engine is None:
            return
        self.child = engine
        self._server.spawn(self._replace(engine))
        if board is not None:
            self._server.spawn(self._server.watch(engine, board))

    def _config(self) -> dict[str, Any]:
        """The engine's options: as given, or with several replicas, those of one of them."""
        options = self._server.options.engine
        config = dataclasses.asdict(options)
        if options.replicas > 1:
            config |= {"data_parallel_size": 1, **self.found}
            if options.kv_events_config is not None:
                config["kv_events_config"] = of_replica(options.kv_events_config, self.index)
            if options.disk_kv_path is not None:  # a folder of blocks has one writer
                config["disk_kv_path"] = str(Path(options.disk_kv_path).expanduser() / f"replica-{self.index}")
        return config | self.located

    @property
    def located(self) -> dict[str, Any]:
        """The options that name files, with those with which open requests have begun; empty if none are known."""
        if self.state.path is None:
            return {}
        own = {"tokenizer": self.state.tokenizer, "tokenizer_revision": None}
        return {"model": self.state.path, "revision": None, **own}

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
        failed = await self._hear_last_words()
        if not self._was_ready and (failed or not self.found):
            self._server.cannot_start(_start_error(failed, engine))
            return
        words = failed.message if failed else None
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

    async def _hear_last_words(self) -> wire.EngineFailed | None:
        """Why it could not start, if it said so; the message may arrive after it has exited."""
        if self.state.state != "ready":
            await asyncio.wait([self._last_words], timeout=LAST_WORDS_SECONDS)
        return self._last_words.result() if self._last_words.done() else None


def _start_error(failed: wire.EngineFailed | None, engine: Child) -> QuireError:
    """Why the first engine cannot be started, as an error of the server."""
    if failed is None:
        return ServerError(f"the engine ended while it was loading ({_described(engine)})")
    return ConfigError(failed.message) if failed.invalid else ServerError(failed.message)


def _was_killed(engine: Child) -> bool:
    """Whether it was killed from outside, as far as its exit code shows; it ignores other signals (`quire.child`)."""
    return engine.blame is None and engine.exit_code == -signal.SIGKILL


def _described(engine: Child) -> str:
    """An engine's fate, for the log and the operator."""
    by = ": by a user, or by the kernel because memory ran out; dmesg tells" if _was_killed(engine) else ""
    return engine.fate() + by


def device_of(index: int, engine: EngineConfig) -> dict[str, str]:
    """Environment variables that limit a replica to its own GPUs, one per rank; none with a single replica.

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
    """A status board; that of a dead process is used again, if there is one."""
    try:
        if spent is not None:
            with contextlib.suppress(OSError):  # not every file system has hard links
                return Board.take_over(spent, path)
        return Board.create(path)
    except OSError as error:
        text = f"cannot make {path}: {error.strerror or error}; make room there, or set TMPDIR to another folder"
        raise ServerError(text) from error


def again(delay: float | None) -> str:
    """What follows a process's death, for the log."""
    if delay is None:
        return ""
    return f"; it is started again in {delay:g} s" if delay else "; it is started again"
