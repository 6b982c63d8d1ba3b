"""Several ranks on one machine: the first one is the engine's process, and starts the others, tells them its plans and
watches them. Nothing of it has a name or a port, so nothing is left when all are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec

from quire import child
from quire.config import EngineConfig
from quire.core.step import StepPlan, StepResult
from quire.engine.executor import Executor, PendingResult
from quire.engine.link import Begin, Failed, FromRank, Link
from quire.engine.rank import RankStart
from quire.errors import ConfigError, QuireError, RankLostError
from quire.ops.cpu.group import SharedGroup, new_memory
from quire.runner.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""A rank that has not left after so long is killed."""


class Ranks:
    """The other ranks, as the first one sees them. They load while the first one does.

    Args:
        config: the engine's options.
        path: the checkpoint's folder.
        threads: of each rank.
        matrix_bytes: see `SharedGroup`.

    Attributes:
        group: the first rank's place among them.

    Raises:
        ConfigError: see `SharedGroup`.
        OSError: the system does not start them.
    """

    def __init__(self, config: EngineConfig, path: Path, threads: int, matrix_bytes: int) -> None:
        self._timeout, size = config.collective_timeout_s, config.tensor_parallel_size
        memory = new_memory(matrix_bytes)
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._watcher: threading.Thread | None = None
        start = RankStart(
            config=dataclasses.asdict(config),
            path=str(path),
            threads=threads,
            rank=0,
            size=size,
            link=-1,
            memory=memory,
            matrix_bytes=matrix_bytes,
        )
        try:
            self.group = SharedGroup(memory, matrix_bytes, 0, size, self._timeout)
            for rank in range(1, size):
                self._start(msgspec.structs.replace(start, rank=rank))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def _start(self, start: RankStart) -> None:
        own, other = socket.socketpair()
        with other:
            start.link = other.fileno()
            process = child.spawn_beside(child.python("quire.engine.rank"), start, fds=(start.link, start.memory))
        own.settimeout(None)
        self._links.append(Link(own))
        self._processes.append(process)

    def wait_loaded(self) -> None:
        """Until all have loaded.

        Raises:
            ConfigError: a rank cannot start; the message is the rank's.
            RankLostError: it died.
        """
        for rank in range(1, self.group.size):
            self._hear(rank)

    def begin(self, plan: MemoryPlan) -> None:
        """They make their blocks as this one has planned them, and take steps from now on. Raises as `wait_loaded`."""
        for link in self._links:
            link.send(msgspec.msgpack.encode(Begin(plan)))
        for rank in range(1, self.group.size):
            self._hear(rank)
        for link in self._links:
            link.socket.settimeout(self._timeout)
        self._watcher = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)
        self._watcher.start()

    def _hear(self, rank: int) -> None:
        """The next message of a rank that starts."""
        message = self._links[rank - 1].receive()
        if message is None:
            how, outside = self._ended(rank)
            raise RankLostError(f"rank {rank} {how} while it started", rank, outside)
        answer = msgspec.msgpack.decode(message, type=FromRank)
        if isinstance(answer, Failed):
            raise (ConfigError if answer.known else QuireError)(answer.message)

    def send(self, payload: bytes) -> None:
        """A message to every rank.

        Raises:
            RankLostError: one does not take it.
        """
        for rank, link in enumerate(self._links, start=1):
            try:
                link.send(payload)
            except OSError:
                self.group.lose(rank)
                raise self.explained(RankLostError("", rank)) from None

    def explained(self, error: RankLostError) -> RankLostError:
        """The same error with what is known of the rank's end."""
        how, outside = self._ended(error.rank) if error.rank else ("", False)
        return RankLostError(f"rank {error.rank} {how}", error.rank, outside)

    def _ended(self, rank: int) -> tuple[str, bool]:
        """How a rank ended, in words, and whether from outside."""
        try:
            code = self._processes[rank - 1].wait(0.5)
        except subprocess.TimeoutExpired:
            return f"has not answered for {self._timeout:g} seconds (collective_timeout_s)", True
        if code >= 0:
            return f"ended with exit code {code}; its log says why", False
        return f"died (killed by {signal.Signals(-code).name})", -code in (signal.SIGKILL, signal.SIGTERM)

    def _watch(self) -> None:
        """Until all are gone: one that ends is lost to the others at once."""
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._links, start=1):
                selector.register(link.socket, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closing:
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)  # after its start a rank says nothing: this is its end
                    if not self._closing:
                        self.group.lose(key.data)

    def close(self) -> None:
        """Let them leave, or end them."""
        self._closing = True
        for link in self._links:
            with contextlib.suppress(OSError):  # it has ended by itself
                link.socket.shutdown(socket.SHUT_RDWR)  # wakes the watcher, too
        end = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for link in self._links:
            link.socket.close()


class RankExecutor:
    """Has all ranks run the steps that another executor runs on the first one."""

    def __init__(self, own: Executor, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._encoder = msgspec.msgpack.Encoder()

    def submit(self, plan: StepPlan) -> PendingResult:
        self._ranks.send(self._encoder.encode(plan))
        try:
            return _Pending(self._own.submit(plan), self._ranks)
        except RankLostError as error:
            raise self._ranks.explained(error) from None

    def close(self) -> None:
        try:
            self._own.close()  # steps in flight need the others
        finally:
            self._ranks.close()


class _Pending:
    def __init__(self, own: PendingResult, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def wait(self) -> StepResult:
        try:
            return self._own.wait()
        except RankLostError as error:
            raise self._ranks.explained(error) from None
