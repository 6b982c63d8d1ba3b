"""Several ranks on one machine: the first one is the engine's process, and starts the others, tells them its plans and
watches them. Nothing of it has a name or a port, so nothing is left when all are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import selectors
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire import child, log
from quire.config import EngineConfig
from quire.core.lockstep import LockstepPlan, joined
from quire.core.step import StepPlan, StepResult
from quire.engine.executor import Executor, PendingResult, T, attempt
from quire.engine.link import Begin, Computed, Failed, FromRank, Link
from quire.engine.loading import join
from quire.engine.rank import RankStart
from quire.errors import ConfigError, QuireError, RankLostError, StepFailedError
from quire.ops.cpu.group import new_memory
from quire.runner.expert_mover import Prepared
from quire.runner.memory_plan import MemoryPlan
from quire.runner.pipeline_runner import PipelinedStep, PipelineRunner

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""A rank that has not left after so long is killed."""


class Ranks:
    """The other ranks, as the first one sees them. They load while the first one does, and end with this object.

    Args:
        config: the engine's options.
        path: the checkpoint's folder.
        threads: of each rank.
        matrix_bytes: see `SharedGroup`.

    Attributes:
        group: the first rank's place among them. stage: among those that share its layers, see `Model`.
        prepared: what each rank has said last of experts that move.
        computed: by replica but the first, what came of its plans; None: a rank is lost.

    Raises:
        ConfigError: see `SharedGroup`.
        OSError: the system does not start them.
    """

    def __init__(self, config: EngineConfig, path: Path, threads: int, matrix_bytes: int) -> None:
        self._timeout, size, width = config.collective_timeout_s, config.num_ranks, config.tensor_parallel_size
        self._width = width
        memories = [new_memory(matrix_bytes)]
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.prepared: list[Prepared | None] = [None] * size
        self.computed = [queue.SimpleQueue[Computed | None]() for _ in range(1, config.data_parallel_size)]
        self._out_of_memory = _out_of_memory_kills()
        self._closing = threading.Event()
        self.close = weakref.finalize(self, _close, self._links, self._processes, self._closing)
        log_format, debug = log.in_use()
        start = RankStart(
            config=dataclasses.asdict(config),
            path=str(path),
            threads=threads,
            rank=0,
            link=-1,
            memory=memories[0],
            stage_memory=-1,
            matrix_bytes=matrix_bytes,
            log_format=log_format,
            debug=debug,
        )
        try:
            if 1 < width < size:
                memories += [new_memory(matrix_bytes) for _ in range(size // width)]
            of_stages = memories[1:] or [-1] * (size // width)
            self.group, self.stage = join(config, 0, memories[0], of_stages[0], matrix_bytes)
            for rank in range(1, size):
                self._start(msgspec.structs.replace(start, rank=rank, stage_memory=of_stages[rank // width]))
        except BaseException:
            self.close()
            raise
        finally:
            for memory in memories:
                os.close(memory)

    def _start(self, start: RankStart) -> None:
        own, other = socket.socketpair()
        with other:
            start.link = other.fileno()
            fds = [fd for fd in (start.link, start.memory, start.stage_memory) if fd >= 0]
            process = child.spawn_beside(child.python("quire.engine.rank"), start, fds=fds)
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
        watching = self._links, self._lose, self._told, self._closing
        threading.Thread(target=_watch, args=watching, name="quire-ranks", daemon=True).start()

    def _lose(self, rank: int) -> None:
        self.group.lose(rank)
        if self.stage is not None and rank < self.stage.size:
            self.stage.lose(rank)
        for computed in self.computed:
            computed.put(None)

    def _told(self, rank: int, message: bytes) -> None:
        """What a rank says while steps are computed."""
        match msgspec.msgpack.decode(message, type=Prepared | Computed):
            case Prepared() as prepared:
                self.prepared[rank] = prepared
            case Computed() as computed:
                self.computed[rank // self._width - 1].put(computed)

    def give_up(self, number: int) -> None:
        """See `Group.give_up`."""
        self.group.give_up(number)
        if self.stage is not None:
            self.stage.give_up(number)

    def results(self, number: int) -> list[StepResult]:
        """What the replicas but the first got from the plan of this number, once all have computed it.

        Raises:
            StepFailedError: one could not.
            RankLostError: one is lost.
        """
        results = []
        for computed in self.computed:
            while (answer := computed.get()) is not None and answer.number < number:
                pass  # of a step that was given up
            if answer is None:
                raise self.explained(self.group.lost or 0)
            if answer.result is None:
                raise StepFailedError(answer.error)
            results.append(answer.result)
        return results

    def _hear(self, rank: int) -> None:
        """The next message of a rank that starts."""
        message = self._links[rank - 1].receive()
        if message is None:
            how, outside = self._ended(rank)
            raise RankLostError(f"rank {rank} {how} while it started", rank, outside)
        answer = msgspec.msgpack.decode(message, type=FromRank)
        if isinstance(answer, Failed):
            raise (ConfigError if answer.known else QuireError)(answer.message)

    def send(self, *payloads: bytes) -> None:
        """A message to every rank: one for all, or one for each replica.

        Raises:
            RankLostError: one does not take it.
        """
        for rank, link in enumerate(self._links, start=1):
            try:
                link.send(payloads[rank // self._width if len(payloads) > 1 else 0])
            except OSError:
                self._lose(rank)
                raise self.explained(rank) from None

    def check(self) -> None:
        """Whether all are there: it may be that nothing is computed, and none would be missed.

        Raises:
            RankLostError: one is not.
        """
        if self.group.lost is not None:
            raise self.explained(self.group.lost)

    def explained(self, rank: int) -> RankLostError:
        """What is known of the end of a rank that was lost."""
        how, outside = self._ended(rank) if rank else (f"did not answer the others for {self._timeout:g} seconds", True)
        return RankLostError(f"rank {rank} {how}", rank, outside)

    def _ended(self, rank: int) -> tuple[str, bool]:
        """How a rank ended, in words, and whether it was ended from outside, so that no request is to blame."""
        try:
            code = self._processes[rank - 1].wait(0.5)
        except subprocess.TimeoutExpired:
            return f"has not answered for {self._timeout:g} seconds (collective_timeout_s)", False
        if code >= 0:
            return f"ended with exit code {code}; its log says why", False
        for_memory = -code == signal.SIGKILL and _out_of_memory_kills() > self._out_of_memory
        name = f"{signal.Signals(-code).name}{': the system is out of memory' if for_memory else ''}"
        return f"died (killed by {name})", -code in (signal.SIGKILL, signal.SIGTERM) and not for_memory


def _out_of_memory_kills() -> int:
    """How many processes of this machine the system has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


def _watch(
    links: Sequence[Link], lose: Callable[[int], None], told: Callable[[int, bytes], None], closing: threading.Event
) -> None:
    """Until all are gone: what they say, and that one which ends is lost to the others at once."""
    with selectors.DefaultSelector() as selector:
        for rank, link in enumerate(links, start=1):
            selector.register(link.socket, selectors.EVENT_READ, rank)
        while selector.get_map() and not closing.is_set():
            for key, _ in selector.select():
                message = links[key.data - 1].receive()
                if message is not None:
                    told(key.data, message)
                    continue
                selector.unregister(key.fileobj)
                if not closing.is_set():
                    lose(key.data)


def _close(links: Sequence[Link], processes: Sequence[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    """Let ranks leave, or end them."""
    closing.set()
    for link in links:
        with contextlib.suppress(OSError):  # it has ended by itself
            link.socket.shutdown(socket.SHUT_RDWR)  # wakes who watches, too
    end = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class RankExecutor:
    """Has all ranks run the steps that another executor runs on the first one."""

    def __init__(self, own: Executor, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._encoder = msgspec.msgpack.Encoder()

    def submit(self, plan: StepPlan) -> PendingResult:
        plans = plan.of_replicas() if isinstance(plan, LockstepPlan) else [plan]
        try:
            self._ranks.send(*map(self._encoder.encode, plans))
            return _Pending(self._own.submit(plans[0]), self._ranks, plan.number)
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
        except BaseException:  # Ctrl-C may come when the others have the plan already
            self._ranks.give_up(plan.number)
            raise

    def close(self) -> None:
        try:
            self._own.close()  # steps in flight need the others
        finally:
            self._ranks.close()


class PipelineExecutor:
    """Has all stages of a pipeline go on by one, each time that a plan comes, or that one's result is waited for."""

    def __init__(self, runner: PipelineRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._newest = -1  # plan

    def submit(self, plan: StepPlan) -> PendingResult:
        self._newest = plan.number
        return _Pipelined(self._on_all(self._encoder.encode(plan), lambda: self._runner.launch(plan)), self)

    @property
    def busy(self) -> list[float]:
        """Of each stage, the share of the time of all slots that it has computed its layers."""
        return [seconds / self._runner.seconds for seconds in self._runner.busy] if self._runner.seconds else []

    def drain(self) -> None:
        """A slot without a plan."""
        self._on_all(b"", self._runner.drain)

    def _on_all(self, message: bytes, call: Callable[[], T]) -> T:
        try:
            self._ranks.send(message)
            return attempt(call)
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
        except BaseException:
            self._ranks.give_up(self._newest)
            raise

    def close(self) -> None:
        del self._runner
        self._ranks.close()


class _Pipelined:
    def __init__(self, step: PipelinedStep, executor: PipelineExecutor) -> None:
        self._step, self._executor = step, executor

    def wait(self) -> StepResult:
        while not self._step.is_through:
            self._executor.drain()
        return attempt(self._step.wait)


class _Pending:
    def __init__(self, own: PendingResult, ranks: Ranks, number: int) -> None:
        self._own, self._ranks, self._number = own, ranks, number

    def wait(self) -> StepResult:
        try:
            own = self._own.wait()
            return joined([own, *self._ranks.results(self._number)]) if self._ranks.computed else own
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
