"""The supervisor of a server: starts its processes, starts again what dies, and ends all of them in order.

It computes nothing and serves no request, so there is little in it that could fail. One engine process and some HTTP
processes are its children; they hear from it, and it from them, over `control.sock` (see `quire.ipc.wire`). Its
listening socket is bound before anything else happens and is inherited by the HTTP processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from quire import child, log
from quire.config import EngineConfig
from quire.errors import ServerError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.ipc.engine_process import EngineStart
from quire.server.config import HttpStart, ServerConfig
from quire.server.processes import Child, RestartBudget, RuntimeFolder

logger = logging.getLogger(__name__)

FRAME_SECONDS = 0.1
"""Between two looks at how far loading is."""

LAST_WORDS_SECONDS = 0.5
"""How long a dead engine's last message may be under way."""

DRAIN_GRACE = 10.0
"""Seconds beyond a drain's own time that HTTP processes have to send last words, and leave."""

FAILED_SECONDS = 2.0
"""How long HTTP processes have to tell clients that there is no engine any more."""

STOP_SECONDS = 5.0
"""How long an engine may take to leave: a step may be in the way."""

LOOK_SECONDS = 1.0
"""Between two looks at a child's pulse."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is.

    Attributes:
        origins: where each option came from: "flag", "file" or "preset"; absent: "default".
        fault: for drills; see `quire.ipc.faults`.
        engine_command, http_command: what the children run.
    """

    server: ServerConfig
    engine: EngineConfig
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fault: str | None = None
    engine_command: Sequence[str] = tuple(child.python("quire.ipc.engine_process"))
    http_command: Sequence[str] = tuple(child.python("quire.server.http_process"))

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the model is called in requests."""
        return self.server.model_names(self.engine.model)


class Screen(Protocol):
    """Whom the supervisor tells how the start goes."""

    def listening(self) -> None:
        """The port is open, and signals are heeded. Once, first of all."""

    def loading(self, phase: str, percent: int) -> None:
        """The engine loads; called again and again."""

    def ready(self, info: wire.EngineInfo, seconds: float) -> None:
        """Requests are served, so many seconds after the start. Once."""

    def close(self) -> None:
        """There is nothing more to show of the start. May come more than once, and without `ready`."""


class Supervisor:
    """One server's processes.

    Args:
        listener: the listening socket. It is closed when the server leaves.
        began: when the command was given, on the monotonic clock.
    """

    def __init__(self, options: ServeOptions, listener: socket.socket, screen: Screen, began: float) -> None:
        self._options, self._listener, self._screen, self._began = options, listener, screen, began
        self._budget = RestartBudget(options.server.restart_limit)
        self._state = wire.EngineState(boot=0, state="loading")
        self._was_ready = False  # an engine has been ready once
        self._engine_died = 0.0  # when the last one did
        self._engine: Child | None = None
        self._workers: dict[int, Child] = {}
        self._greeted: set[int] = set()
        self._was_greeted = False
        self._next_worker = 0
        self._leaving = False  # no new requests; nothing that serves them is started again
        self._closing = False  # nothing at all is started again
        self._drain_end = 0.0
        self._hurried = False  # the drain's time was cut short
        self._exit: int | BaseException = 0  # how `run` ends when everybody has left
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal or a failure ends it; the exit code. Nothing is left behind.

        Raises:
            ServerError: it cannot start or go on.
        """
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._on_signal, number)
        self._screen.listening()
        with RuntimeFolder() as self._directory:
            context = zmq.asyncio.Context()
            try:
                self._control = context.socket(zmq.ROUTER)
                self._control.bind(wire.control_address(self._directory))
                self._start()
                return await self._outcome
            finally:
                await self._clean_up()
                context.destroy(linger=0)

    def _start(self) -> None:
        self._run(self._listen())
        self._begin_boot()
        self._run(self._start_engine())  # first: it has the most to do
        for _ in range(self._options.server.api_workers):
            self._run(self._start_worker())
        self._run(self._show_loading())
        if self._options.server.join is not None:
            self._run(self._join(self._options.server.join))

    async def _join(self, router: str) -> None:
        """Tell a router again and again that this server is there, until it leaves."""
        from quire.server.joining import keep_joined, url_for

        role = "prefill" if self._options.engine.kv_role == "prefill" else "serve"
        leaving = lambda: self._leaving  # noqa: E731
        await keep_joined(router, self._options.server.api_key[0], url_for(router, self._listener), role, leaving)

    async def _clean_up(self) -> None:
        """End whatever is left of it."""
        self._closing = self._leaving = True
        self._screen.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [*self._workers.values(), *([self._engine] if self._engine else [])]
        for one in children:
            one.kill()
        for one in children:
            await one.ended.wait()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Do this beside the rest. If it fails, so does the server."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._finish(error)

    def _finish(self, outcome: int | BaseException) -> None:
        """Let `run` end: with an exit code, or an error."""
        if self._outcome.done():
            return
        if isinstance(outcome, BaseException):
            self._outcome.set_exception(outcome)
        else:
            self._outcome.set_result(outcome)

    # -- leaving -------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        """The first one drains; the second ends the drain, and requests end with what they have; the third kills."""
        if not self._leaving and not self._was_ready:  # no request is served yet
            self._finish(0)
        elif not self._leaving:
            seconds = self._options.server.drain_timeout
            text = f"{number.name}: no new requests; running ones have {seconds:g} s to end (Ctrl-C ends them now)"
            log.event(logger, "draining", text, seconds=seconds, signal=number.name)
            self._leave(seconds, 0)
        elif number == signal.SIGHUP:  # some send it right behind SIGTERM: it is no second wish
            return
        elif not self._hurried:
            self._hurried = True
            text = f"{number.name} again: running requests end now with what they have (Ctrl-C leaves at once)"
            log.event(logger, "interrupted", text, signal=number.name)
            self._leave(0.0, 128 + number)
        else:
            self._finish(128 + number)

    def _leave(self, seconds: float, outcome: int | BaseException) -> None:
        """Take no new requests, let those that run end, and then let `run` end. Once more: with less time."""
        self._leaving = True
        self._exit = outcome
        self._drain_end = time.monotonic() + seconds
        self._listener.close()  # who connects now is refused at once
        self._tell_workers(wire.Drain(seconds))
        self._run(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        await asyncio.gather(*[worker.leave(seconds + DRAIN_GRACE) for worker in list(self._workers.values())])
        if self._closing:
            return  # an earlier drain, or a later one, has come here
        self._closing = True
        if self._engine is not None and self._state.state == "ready":
            self._post(f"engine-{self._state.boot}", wire.Stop())
            await self._engine.leave(STOP_SECONDS)
        log.event(logger, "stopped", "stopped")
        self._finish(self._exit)

    # -- messages ------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            frames = await self._control.recv_multipart()
            try:
                sender, payload = frames
                message = wire.decode_to_supervisor(payload)
            except (ValueError, msgspec.DecodeError):
                logger.exception("a message to the supervisor is not valid")
                continue
            self._hear(sender.decode(errors="replace"), message)

    def _hear(self, sender: str, message: wire.ToSupervisor) -> None:
        if isinstance(message, wire.Hello):
            if sender == f"http-{message.worker}" and message.worker < self._next_worker:
                self._greet(message.worker)
        elif sender != f"engine-{self._state.boot}":
            return  # from one that has died since
        elif isinstance(message, wire.Located):
            self._set_state(path=message.path)
        elif isinstance(message, wire.EngineReady):
            self._engine_ready(message.info)
        elif self._engine is not None and not self._last_words.done():
            self._last_words.set_result(message.message)
            self._run(self._engine.leave(STOP_SECONDS))

    def _greet(self, worker: int) -> None:
        """An HTTP process is up: tell it how things stand."""
        self._greeted.add(worker)
        self._was_greeted = True
        self._post(f"http-{worker}", self._state)
        if self._leaving:
            self._post(f"http-{worker}", wire.Drain(max(0.0, self._drain_end - time.monotonic())))

    def _set_state(self, **changes: Any) -> None:
        """Change the engine's state and tell every HTTP process. Suspects are told once."""
        state = msgspec.structs.replace(self._state, **changes)
        self._tell_workers(state)
        self._state = msgspec.structs.replace(state, suspects=[], culprit=None)

    def _tell_workers(self, message: wire.FromSupervisor) -> None:
        for worker in self._greeted:
            self._post(f"http-{worker}", message)

    def _post(self, to: str, message: wire.FromSupervisor) -> None:
        """Send without waiting; what goes to a process that is gone is void."""
        sent = asyncio.ensure_future(self._control.send_multipart((to.encode(), wire.encode(message))))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    # -- the engine ----------------------------------------------------------------------------------------

    def _begin_boot(self, **changes: Any) -> None:
        """There will be another engine."""
        boot = self._state.boot + 1
        spent = wire.board_path(self._directory, boot - 1) if boot > 1 else None
        self._board = _make_board(wire.board_path(self._directory, boot), spent)
        self._set_state(boot=boot, **changes)

    async def _start_engine(self) -> None:
        """Start the engine of this boot."""
        boot = self._state.boot
        config = dataclasses.asdict(self._options.engine)
        if self._state.path is not None:  # the files that open requests have begun with
            config |= {"model": self._state.path, "revision": None}
        start = EngineStart(
            directory=str(self._directory),
            boot=boot,
            config=config,
            log_format=self._options.server.log_format,
            debug=self._options.server.debug,
            fault=self._options.fault,
        )
        self._last_words = asyncio.get_running_loop().create_future()
        self._engine = await Child.start(f"engine {boot}", self._options.engine_command, start)
        self._run(self._replace_engine(self._engine))
        self._run(self._watch(self._engine, self._board))

    def _engine_ready(self, info: wire.EngineInfo) -> None:
        again = self._was_ready
        self._was_ready = True
        self._set_state(state="ready", info=info)
        if again:
            seconds = time.monotonic() - self._engine_died
            text = f"engine {info.boot} is ready, {seconds:.1f} s after the death of the last one"
            log.event(logger, "engine_ready", text, boot=info.boot, seconds=seconds)
        else:
            self._screen.close()
            self._screen.ready(info, time.monotonic() - self._began)

    async def _replace_engine(self, engine: Child) -> None:
        """When the engine has died, start the next one, or give up."""
        await engine.ended.wait()
        if self._closing:
            return
        self._engine_died = time.monotonic()
        words = await self._hear_last_words()
        if not self._was_ready:
            raise ServerError(words or f"the engine ended while it was loading ({self._described(engine)})")
        suspects, culprit = self._board.suspects()
        cause = engine.fate() if words is None else "it could not be started again"
        delay = self._budget.spend("engine")
        log.event(
            logger,
            "engine_died",
            f"{engine.name} died ({words or self._described(engine)}); requests in its step: {len(suspects)}"
            + _again(delay),
            level=logging.ERROR,
            boot=self._state.boot,
            cause=cause,
            suspects=suspects,
        )
        if delay is None:
            self._give_up("the engine", words or engine.fate(), cause)
            return
        self._begin_boot(state="restarting", info=None, cause=cause, suspects=suspects, culprit=culprit)
        await asyncio.sleep(delay)
        if not self._closing:
            await self._start_engine()

    async def _hear_last_words(self) -> str | None:
        """Why it could not start, if it said so: the message may arrive after its end."""
        if self._state.state != "ready":
            await asyncio.wait([self._last_words], timeout=LAST_WORDS_SECONDS)
        return self._last_words.result() if self._last_words.done() else None

    def _described(self, engine: Child) -> str:
        """An engine's fate, for the log and the operator."""
        fate = engine.fate()
        if engine.exit_code == -signal.SIGKILL and engine.blame is None:
            fate += ": by a user, or by the kernel because memory ran out; dmesg tells"
        return fate

    def _give_up(self, what: str, fate: str, cause: str) -> None:
        """Too many deaths: let clients know, and end with an error."""
        limit = self._options.server.restart_limit
        if what == "the engine":
            self._set_state(state="failed", info=None, cause=cause)
        text = f"{what} died ({fate}) and is not started again: restart_limit={limit} restarts within an hour were used"
        if not self._leaving:
            self._leave(FAILED_SECONDS, ServerError(text))

    # -- watching ------------------------------------------------------------------------------------------

    async def _show_loading(self) -> None:
        while self._state.state == "loading":
            self._screen.loading(*self._board.phase)
            await asyncio.sleep(FRAME_SECONDS)

    async def _watch(self, process: Child, board: Board) -> None:
        """Kill a process whose pulse stands still for longer than the option allows, and than it says that it may.

        Looks are counted, not seconds: this process, or the whole machine, may have been stopped too.
        """
        limit, seen, quiet = self._options.server.stall_restart_s, -1, 0
        while limit and not process.ended.is_set():
            await asyncio.sleep(LOOK_SECONDS)
            pulse = board.pulse
            quiet = quiet + 1 if pulse == seen else 0
            seen = pulse
            if quiet >= limit + board.patience:
                process.kill(f"it showed no sign of life for {quiet} s and was killed")

    # -- HTTP processes ------------------------------------------------------------------------------------

    async def _start_worker(self, instead_of: int | None = None) -> None:
        worker = self._next_worker
        self._next_worker += 1
        start = HttpStart(
            directory=str(self._directory),
            worker=worker,
            fd=self._listener.fileno(),
            server=self._options.server,
            model_names=self._options.model_names,
            engine_options=dataclasses.asdict(self._options.engine),
            origins=dict(self._options.origins),
        )
        spent = None if instead_of is None else wire.http_board_path(self._directory, instead_of)
        board = _make_board(wire.http_board_path(self._directory, worker), spent)
        process = self._workers[worker] = await Child.start(
            f"HTTP process {worker}", self._options.http_command, start, fds=[self._listener.fileno()]
        )
        self._run(self._replace_worker(worker, process))
        self._run(self._watch(process, board))

    async def _replace_worker(self, worker: int, process: Child) -> None:
        """When an HTTP process has died, start another one, unless the server is leaving anyway."""
        await process.ended.wait()
        greeted = worker in self._greeted
        self._workers.pop(worker, None)
        self._greeted.discard(worker)
        if self._closing:
            return
        self._post(f"engine-{self._state.boot}", wire.ClientGone(worker))
        if self._leaving and process.exit_code == 0:
            return
        is_up = self._was_ready and self._was_greeted
        is_fatal = not self._leaving and not is_up and (not greeted or process.exit_code == 1)
        delay = None if self._leaving or is_fatal else self._budget.spend("http")
        text = f"{process.name} died ({process.fate()})" + _again(delay)
        log.event(logger, "http_process_died", text, level=logging.ERROR, worker=worker, cause=process.fate())
        if self._leaving:
            return
        if is_fatal:
            raise ServerError(f"the {process.name} cannot start ({process.fate()}); the lines above may tell why")
        if delay is None:
            self._give_up(f"the {process.name}", process.fate(), "")
            return
        await asyncio.sleep(delay)
        if not self._leaving:
            await self._start_worker(instead_of=worker)


def _make_board(path: Path, spent: Path | None) -> Board:
    """A board; that of a dead process, if there is one, serves again."""
    try:
        if spent is not None:
            with contextlib.suppress(OSError):  # not every file system has hard links
                return Board.take_over(spent, path)
        return Board.create(path)
    except OSError as error:
        text = f"cannot make {path}: {error.strerror or error}; make room there, or set TMPDIR to another folder"
        raise ServerError(text) from error


def _again(delay: float | None) -> str:
    """What follows a death, for its line in the log."""
    if delay is None:
        return ""
    return f"; it is started again in {delay:g} s" if delay else "; it is started again"
