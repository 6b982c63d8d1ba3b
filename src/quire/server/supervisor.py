"""The supervisor of a server: starts its processes, restarts those that die, and stops all of them in order.

It computes nothing and serves no requests, so there is little in it that could fail. Engine processes (`replica.py`)
and HTTP processes are its children; they exchange messages over `control.sock` (see `quire.ipc.wire`). The listening
socket is bound first, and inherited by the HTTP processes.

With several replicas the first one loads alone. It serves as soon as it is ready, and the others are started with the
options that it resolved, such as the longest context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from quire import log
from quire.errors import QuireError, ServerError
from quire.ipc import wire
from quire.ipc.board import Board
from quire.server.config import HttpStart
from quire.server.processes import Child, RestartBudget, RuntimeFolder
from quire.server.replica import Replica, again, make_board
from quire.server.serve_options import ServeOptions

logger = logging.getLogger(__name__)

FRAME_SECONDS = 0.1
"""Interval between reports of loading progress."""

DRAIN_GRACE = 10.0
"""Seconds after the drain timeout that HTTP processes have to send last events, and exit."""

FAILED_SECONDS = 2.0
"""How long HTTP processes have to tell clients that the engine has failed."""

LOOK_SECONDS = 1.0
"""Interval between checks of a child's pulse."""


class Screen(Protocol):
    """Shows how the start goes."""

    def listening(self) -> None:
        """The port is open, and signals are handled. Called once, first."""

    def loading(self, phase: str, percent: int) -> None:
        """The engine is loading; called repeatedly."""

    def ready(self, info: wire.EngineInfo, seconds: float) -> None:
        """Requests are served, this many seconds after the start. Called once."""

    def close(self) -> None:
        """The start is over. May be called more than once, and without `ready`."""


class Supervisor:
    """One server's processes.

    Args:
        listener: the listening socket. It is closed when the server stops.
        began: when the command started, on the monotonic clock.
    """

    def __init__(self, options: ServeOptions, listener: socket.socket, screen: Screen, began: float) -> None:
        self.options, self._listener, self._screen, self._began = options, listener, screen, began
        self.is_closing = False  # nothing is restarted
        self.replicas = [Replica(index, self) for index in range(options.engine.replicas)]
        self._budget = RestartBudget(options.server.restart_limit)  # of HTTP processes
        self._was_ready = False  # an engine has been ready once
        self._workers: dict[int, Child] = {}
        self._greeted: set[int] = set()
        self._was_greeted = False
        self._next_worker = 0
        self._leaving = False  # draining: no new requests, and HTTP processes are not restarted
        self._drain_end = 0.0
        self._hurried = False  # the drain was cut short
        self._exit: int | BaseException = 0  # the result of `run` when all processes have exited
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit code. No process or file is left.

        Raises:
            ServerError: it cannot start or continue. ConfigError: it cannot start, since an option or the checkpoint is
                not valid.
        """
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._on_signal, number)
        self._screen.listening()
        with RuntimeFolder() as self.directory:
            context = zmq.asyncio.Context()
            try:
                self._control = context.socket(zmq.ROUTER)
                self._control.bind(wire.control_address(self.directory))
                self._start()
                return await self._outcome
            finally:
                await self._clean_up()
                context.destroy(linger=0)

    def _start(self) -> None:
        self.spawn(self._listen())
        self.replicas[0].begin()  # first: it has the most to do
        for _ in range(self.options.server.api_workers):
            self.spawn(self._start_worker())
        self.spawn(self._show_loading())
        if self.options.server.join is not None:
            self.spawn(self._join(self.options.server.join))

    async def _join(self, router: str) -> None:
        """Keep this server registered with a router until it stops."""
        from quire.server.joining import keep_joined, url_for

        role = "prefill" if self.options.engine.kv_role == "prefill" else "serve"
        leaving = lambda: self._leaving  # noqa: E731
        server = self.options.server
        url = url_for(router, self._listener, server)
        await keep_joined(router, server.api_key[0], url, role, leaving, server.cacert)

    async def _clean_up(self) -> None:
        """Stop whatever is still running."""
        self.is_closing = self._leaving = True
        self._screen.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [*self._workers.values(), *(each.child for each in self.replicas if each.child)]
        for one in children:
            one.kill()
        for one in children:
            await one.ended.wait()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run this as a task. If it fails, so does the server."""
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
            seconds = self.options.server.drain_timeout
            text = f"{number.name}: no new requests; running ones have {seconds:g} s to finish (Ctrl-C ends them now)"
            log.event(logger, "draining", text, seconds=seconds, signal=number.name)
            self._leave(seconds, 0)
        elif number == signal.SIGHUP:  # some send it right after SIGTERM: it does not count as a second signal
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
        self._listener.close()  # connections are refused from now on
        self.tell_workers(wire.Drain(seconds))
        self.spawn(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        await asyncio.gather(*[worker.leave(seconds + DRAIN_GRACE) for worker in list(self._workers.values())])
        if self.is_closing:
            return  # an earlier drain, or a later one, has come here
        self.is_closing = True
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
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
        elif replica := next((each for each in self.replicas if each.name == sender), None):
            replica.hear(message)  # otherwise it is from an engine that has died since

    def _greet(self, worker: int) -> None:
        """An HTTP process is up: send it the current state."""
        self._greeted.add(worker)
        self._was_greeted = True
        for replica in self.replicas:
            self.post(f"http-{worker}", replica.state)
        if self._leaving:
            self.post(f"http-{worker}", wire.Drain(max(0.0, self._drain_end - time.monotonic())))

    def tell_workers(self, message: wire.FromSupervisor) -> None:
        for worker in self._greeted:
            self.post(f"http-{worker}", message)

    def post(self, to: str, message: wire.FromSupervisor) -> None:
        """Send without waiting; messages to a process that is gone are lost."""
        sent = asyncio.ensure_future(self._control.send_multipart((to.encode(), wire.encode(message))))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    # -- replicas ------------------------------------------------------------------------------------------

    def replica_ready(self, replica: Replica, info: wire.EngineInfo) -> None:
        """A replica is ready for the first time. The first one serves, and says how the others are to be."""
        seconds, first = time.monotonic() - self._began, not self._was_ready
        self._was_ready = True
        if not first:
            text = f"{replica.title} is ready, {seconds:.1f} s after the start"
            log.event(logger, "engine_ready", text, replica=replica.index, boot=info.boot, seconds=seconds)
            return
        self._screen.close()
        self._screen.ready(info, seconds)
        if len(self.replicas) > 1:
            found = {**replica.located, "model": info.path, "revision": None}
            found |= {name: info.config[name] for name in ("max_model_len", "num_kv_blocks")}
            for each in self.replicas:
                each.found = found
            for other in self.replicas[1:]:
                other.begin()

    def replica_failed(self, replica: Replica, fate: str, cause: str) -> None:
        """A replica is not restarted any more. The others serve on, as long as there are any."""
        left = sum(each.state.state != "failed" for each in self.replicas)
        if not left:
            self._give_up("the engine", fate)
            return
        text = f"{replica.title} died ({fate}) and is not started again: {self._limit()}; {left} of "
        text += f"{len(self.replicas)} replicas serve on"
        log.event(logger, "replica_failed", text, level=logging.ERROR, replica=replica.index, cause=cause)

    def cannot_start(self, error: QuireError) -> None:
        """A replica's first engine cannot be started: the server ends, though another replica may serve already."""
        if not self._was_ready:
            self._finish(error)
        elif not self._leaving:
            self._leave(FAILED_SECONDS, error)

    def _give_up(self, what: str, fate: str) -> None:
        """The restart limit is reached: tell clients, and end with an error."""
        if not self._leaving:
            error = ServerError(f"{what} died ({fate}) and is not started again: {self._limit()}")
            self._leave(FAILED_SECONDS, error)

    def _limit(self) -> str:
        return f"restart_limit={self.options.server.restart_limit} restarts within an hour were used"

    # -- watching ------------------------------------------------------------------------------------------

    async def _show_loading(self) -> None:
        first = self.replicas[0]
        while first.state.state == "loading":
            if first.board is not None:
                self._screen.loading(*first.board.phase)
            await asyncio.sleep(FRAME_SECONDS)

    async def watch(self, process: Child, board: Board) -> None:
        """Kill a process whose pulse stops for longer than the option allows, and than its board allows.

        Checks are counted, not seconds, since this process, or the whole machine, may have been stopped, too.
        """
        limit, seen, quiet = self.options.server.stall_restart_s, -1, 0
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
            directory=str(self.directory),
            worker=worker,
            fd=self._listener.fileno(),
            server=self.options.server,
            model_names=self.options.model_names,
            engine_options=dataclasses.asdict(self.options.engine),
            replicas=len(self.replicas),
            origins=dict(self.options.origins),
        )
        spent = None if instead_of is None else wire.http_board_path(self.directory, instead_of)
        board = make_board(wire.http_board_path(self.directory, worker), spent)

        def launch() -> Awaitable[Child]:
            fds = [self._listener.fileno()]
            return Child.start(f"HTTP process {worker}", self.options.http_command, start, fds=fds)

        is_first = instead_of is None
        process = await (launch() if is_first else Child.start_again(launch, lambda: not self._leaving))
        if process is None:
            return
        self._workers[worker] = process
        self.spawn(self._replace_worker(worker, process))
        self.spawn(self.watch(process, board))

    async def _replace_worker(self, worker: int, process: Child) -> None:
        """When an HTTP process has died, start another one, unless the server is stopping."""
        await process.ended.wait()
        greeted = worker in self._greeted
        self._workers.pop(worker, None)
        self._greeted.discard(worker)
        if self.is_closing:
            return
        for replica in self.replicas:
            self.post(replica.name, wire.ClientGone(worker))
        if self._leaving and process.exit_code == 0:
            return
        is_up = self._was_ready and self._was_greeted
        is_fatal = not self._leaving and not is_up and (not greeted or process.exit_code == 1)
        delay = None if self._leaving or is_fatal else self._budget.spend()
        text = f"{process.name} died ({process.fate()})" + again(delay)
        log.event(logger, "http_process_died", text, level=logging.ERROR, worker=worker, cause=process.fate())
        if self._leaving:
            return
        if is_fatal:
            raise ServerError(f"the {process.name} cannot start ({process.fate()}); see the log above")
        if delay is None:
            self._give_up(f"the {process.name}", process.fate())
            return
        await asyncio.sleep(delay)
        if not self._leaving:
            await self._start_worker(instead_of=worker)
