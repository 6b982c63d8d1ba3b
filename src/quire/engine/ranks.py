"""Several ranks: the first one is the engine's process; it starts the others, sends them its plans and watches them.

On one machine nothing has a name or a port, so nothing is left when all are gone. For other machines see `hosts.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire import log
from quire.config import EngineConfig
from quire.core.lockstep import LockstepPlan, joined
from quire.core.step import StepPlan, StepResult
from quire.engine.executor import Executor, PendingResult, RunnerThread, T, attempt, now
from quire.engine.link import Begin, Computed, Failed, FromRank, Link, Loaded, Measure, Timed
from quire.engine.loading import contents, join
from quire.engine.machine import Machine, RemoteRank, how_it_ended, out_of_memory_kills
from quire.engine.rank import RankStart
from quire.engine.thread_guard import unless_forked
from quire.errors import ConfigError, QuireError, RankLostError, StepFailedError
from quire.models.hub import EMBEDDED_MODELS, HUB_NAME
from quire.parallel.group import Group
from quire.runner.device import Device
from quire.runner.expert_mover import Prepared
from quire.runner.memory_plan import Measured, MemoryPlan
from quire.runner.pipeline_runner import PipelinedStep, PipelineRunner
from quire.runner.start import OnLoad

if TYPE_CHECKING:
    from quire.engine.hosts import Hosts

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long a rank may take to exit before it is killed."""


Answers = Sequence[queue.SimpleQueue[Computed | None]]
"""Results of plans, for each replica but the first; None: a rank is lost."""


class Ranks:
    """The other ranks. They load at the same time as the first one, and end with this object.

    Args:
        config: the engine's options.
        path: the checkpoint's folder.
        device: the first rank's.
        matrix_bytes: see `SharedGroup`.
        report: called with what is being waited for.

    Attributes:
        threads: the first rank's. num_here: ranks of this machine. host_memory: see `Machine`.
        group: the first rank's group. stage: its group of ranks that share its layers, see `Sharing`.
        prepared: each rank's last message about moving experts.
        computed: results of the other replicas' plans.

    Raises:
        ConfigError: see `SharedGroup` and `Hosts`.
        OSError: they cannot be started.
    """

    def __init__(self, config: EngineConfig, path: Path, device: Device, matrix_bytes: int, report: OnLoad) -> None:
        self._timeout, size, width = config.collective_timeout_s, config.num_ranks, config.tensor_parallel_size
        self._width = width
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes] | RemoteRank] = []
        self.prepared: list[Prepared | None] = [None] * size
        self.computed: Answers = [queue.SimpleQueue() for _ in range(1, config.data_parallel_size)]
        self._timed: queue.SimpleQueue[tuple[int, Timed]] = queue.SimpleQueue()
        self._out_of_memory = out_of_memory_kills()
        self._closing = threading.Event()
        hosts = _hosts(config)
        self.close = weakref.finalize(self, unless_forked(_close), self._links, self._processes, self._closing, hosts)
        try:
            self._start(config, path, device, matrix_bytes, report, hosts)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        config: EngineConfig,
        path: Path,
        device: Device,
        matrix_bytes: int,
        report: OnLoad,
        hosts: Hosts | None,
    ) -> None:
        if hosts:
            hosts.wait_joined(report)
        here = hosts.here if hosts else range(config.num_ranks)
        machine = Machine(config, here, matrix_bytes)
        self.threads, self.num_here = machine.threads, len(here)
        self.host_memory = machine.host_memory
        if self.host_memory >= 0:
            weakref.finalize(self, os.close, self.host_memory)
        if machine.bell >= 0:
            weakref.finalize(self, os.close, machine.bell)
        starts = _starts(config, path, matrix_bytes, len(here))
        try:
            self.group, self.stage = join(config, 0, device, *machine.memories(0), matrix_bytes, machine.bell)
            for start in starts[: len(here) - 1]:
                self._add(*machine.start(start))
            for link, process in hosts.start(starts, machine) if hosts else ():
                self._add(link, process)
        finally:
            machine.all_started()

    def _add(self, link: socket.socket, process: subprocess.Popen[bytes] | RemoteRank) -> None:
        self._links.append(Link(link))
        self._processes.append(process)

    def wait_loaded(self, kernels: str) -> None:
        """Wait until all have loaded, and then have them measure their memory.

        Args:
            kernels: the first rank's, see `Kernels.describe`.

        Raises:
            ConfigError: a rank cannot start, or uses other kernels; the message is the rank's.
            RankLostError: it died.
        """
        for rank in range(1, self.group.size):
            loaded = self._hear(rank)
            if isinstance(loaded, Loaded) and loaded.kernels != kernels:
                raise ConfigError(
                    f"rank {rank}{self._place(rank)} has other kernels ({loaded.kernels}) than the first rank "
                    f"({kernels}), whose results differ; install the same version on all machines, and set "
                    "cpu_kernels to an instruction set that all of them have"
                )
        self.send(msgspec.msgpack.encode(Measure()))

    def measured(self) -> list[Measured]:
        """The other ranks' free memory. Raises as `wait_loaded`."""
        answers = [self._hear(rank) for rank in range(1, self.group.size)]
        return [answer for answer in answers if isinstance(answer, Measured)]

    def begin(self, plan: MemoryPlan, kv_key: bytes) -> None:
        """Have them allocate the planned KV blocks. Raises as `wait_loaded`."""
        self.send(msgspec.msgpack.encode(Begin(plan, kv_key)))

    def wait_ready(self) -> None:
        """Wait until they accept plans. Raises as `wait_loaded`."""
        for rank in range(1, self.group.size):
            self._hear(rank)
        for link in self._links:
            link.socket.settimeout(self._timeout)
        # Not a bound method: the thread must not keep this object alive.
        lose = functools.partial(_lose, self.group, self.stage, self.computed)
        told = functools.partial(_told, self.prepared, self.computed, self._timed, self._width)
        watching = self._links, lose, told, self._closing
        threading.Thread(target=_watch, args=watching, name="quire-ranks", daemon=True).start()

    def give_up(self, number: int) -> None:
        """See `Group.give_up`."""
        self.group.give_up(number)
        if self.stage is not None:
            self.stage.give_up(number)

    def results(self, number: int) -> list[StepResult]:
        """The other replicas' results of the plan with this number, once all have run it.

        Raises:
            StepFailedError: one failed.
            RankLostError: one is lost, or does not report in time.
        """
        results = []
        for replica, computed in enumerate(self.computed, start=1):
            try:
                while (answer := computed.get(timeout=self._timeout)) is not None and answer.number < number:
                    pass  # results of a step that was given up
            except queue.Empty:  # its ranks have reached the others, and hung since then
                self.group.lose(replica * self._width)
                answer = None
            if answer is None:
                raise self.explained(self.group.lost or 0)
            if answer.result is None:
                raise StepFailedError(answer.error)
            results.append(answer.result)
        return results

    def timed(self) -> Iterator[tuple[int, Timed]]:
        """Times of steps on this machine's ranks since the last call; other machines have other clocks."""
        while not self._timed.empty():
            rank, timed = self._timed.get()
            if not self._place(rank):
                yield rank, timed

    def _hear(self, rank: int) -> FromRank:
        """The next message of a rank that is starting."""
        message = self._links[rank - 1].receive()
        if message is None:
            how, outside = self._ended(rank)
            raise RankLostError(f"rank {rank} {how} while it started", rank, outside)
        answer: FromRank = msgspec.msgpack.decode(message, type=FromRank)
        if isinstance(answer, Failed):
            place = f"rank {rank}{self._place(rank)}: " if self._place(rank) else ""
            raise (ConfigError if answer.known else QuireError)(place + answer.message)
        return answer

    def _place(self, rank: int) -> str:
        """The machine of a rank, if it is another one."""
        process = self._processes[rank - 1]
        return f" on {process.where}" if isinstance(process, RemoteRank) else ""

    def send(self, *payloads: bytes) -> None:
        """Send a message to every rank: one for all, or one for each replica.

        Raises:
            RankLostError: one does not read it.
        """
        for rank, link in enumerate(self._links, start=1):
            try:
                link.send(payloads[rank // self._width if len(payloads) > 1 else 0])
            except OSError:
                _lose(self.group, self.stage, self.computed, rank)
                raise self.explained(rank) from None

    def check(self) -> None:
        """Check that all are alive: if nothing is being computed, a dead one would not be noticed.

        Raises:
            RankLostError: one is not.
        """
        if self.group.lost is not None:
            raise self.explained(self.group.lost)

    def explained(self, rank: int) -> RankLostError:
        """The error for a lost rank, with what is known of its end."""
        how, outside = self._ended(rank) if rank else (f"did not answer the others for {self._timeout:g} seconds", True)
        return RankLostError(f"rank {rank} {how}", rank, outside)

    def _ended(self, rank: int) -> tuple[str, bool]:
        """How a rank ended, in words, and whether it was killed from outside, so that no request is at fault."""
        process = self._processes[rank - 1]
        silent = f"has not answered for {self._timeout:g} seconds (collective_timeout_s)"
        if isinstance(process, RemoteRank):
            how, outside = process.how_it_ended(0.5) or (silent, False)
            return f"on {process.where} {how}", outside
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            return silent, False
        return how_it_ended(code, out_of_memory_kills() > self._out_of_memory)


def _hosts(config: EngineConfig) -> Hosts | None:
    """The connection to other machines. If there are none, the module is not loaded."""
    if config.nnodes == 1:
        return None
    from quire.engine.hosts import Hosts

    return Hosts(config)


def _starts(config: EngineConfig, path: Path, matrix_bytes: int, here: int) -> list[RankStart]:
    """The messages to the ranks after the first. Those on other machines find the checkpoint themselves."""
    log_format, debug = log.in_use()
    start = RankStart(
        config=dataclasses.asdict(config),
        path=str(path),
        checkpoints={},
        rank=0,
        matrix_bytes=matrix_bytes,
        log_format=log_format,
        debug=debug,
    )
    elsewhere = start
    if here < config.num_ranks:
        model = (
            config.model
            if config.model in EMBEDDED_MODELS or HUB_NAME.fullmatch(config.model)
            else str(path.absolute())
        )
        told = dataclasses.asdict(dataclasses.replace(config, model=model))
        elsewhere = msgspec.structs.replace(start, config=told, path="", checkpoints=contents(config, path))
    replace = msgspec.structs.replace
    return [replace(start if rank < here else elsewhere, rank=rank) for rank in range(1, config.num_ranks)]


def _told(
    prepared: list[Prepared | None],
    computed: Answers,
    timed: queue.SimpleQueue[tuple[int, Timed]],
    width: int,
    rank: int,
    message: bytes,
) -> None:
    """Handle a rank's messages while steps run."""
    match msgspec.msgpack.decode(message, type=Prepared | Computed | Timed):
        case Timed() as answer:
            timed.put((rank, answer))
        case Prepared() as answer:
            prepared[rank] = answer
        case Computed() as answer:
            computed[rank // width - 1].put(answer)


def _lose(group: Group, stage: Group | None, computed: Answers, rank: int) -> None:
    """A rank is gone; `stage`: the first rank's."""
    group.lose(rank)
    if stage is not None and rank < stage.size:
        stage.lose(rank)
    for each in computed:
        each.put(None)


def _watch(
    links: Sequence[Link], lose: Callable[[int], None], told: Callable[[int, bytes], None], closing: threading.Event
) -> None:
    """Handle messages until all ranks are gone; the others are told at once if one dies."""
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


def _close(
    links: Sequence[Link],
    processes: Sequence[subprocess.Popen[bytes] | RemoteRank],
    closing: threading.Event,
    hosts: Hosts | None,
) -> None:
    """Stop ranks, or kill them."""
    closing.set()
    for link in links:
        with contextlib.suppress(OSError):  # it has ended by itself
            link.socket.shutdown(socket.SHUT_RDWR)  # also wakes the watching thread
    end = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if hosts:
        hosts.close()


class RankExecutor:
    """Runs steps on all ranks; another executor runs them on the first one."""

    def __init__(self, own: Executor, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._encoder = msgspec.msgpack.Encoder()

    def submit(self, plan: StepPlan) -> PendingResult:
        plans = plan.of_replicas() if isinstance(plan, LockstepPlan) else [plan]
        try:
            self._ranks.send(*map(self._encoder.encode, plans))
            own = self._own.submit(plans[0])
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
        except BaseException:  # Ctrl-C may come after the others got the plan
            self._ranks.give_up(plan.number)
            raise
        return lambda: self._wait(own, plan.number)

    def _wait(self, own: PendingResult, number: int) -> StepResult:
        """The result of all replicas."""
        try:
            result = own()
            result = joined([result, *self._ranks.results(number)]) if self._ranks.computed else result
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
        if (lost := self._ranks.group.lost) is not None:  # what a GPU waited for was ended, whatever it had
            raise self._ranks.explained(lost)
        return result

    def close(self) -> None:
        try:
            self._own.close()  # steps in flight need the others
        finally:
            self._ranks.close()


class PipelineExecutor:
    """Advances all stages of a pipeline by one slot, whenever a plan is submitted or a result is waited for.

    Args:
        overlap: the first rank runs in a thread, see `ThreadExecutor`, and the others have a plan before they need it.
    """

    def __init__(self, runner: PipelineRunner, ranks: Ranks, overlap: bool) -> None:
        self._runner, self._ranks = runner, ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._newest = -1  # plan
        self._thread = RunnerThread() if overlap else None
        self._later_slots = runner.model.stages - 1
        # For each step in the pipeline, the slots after the one in which it entered; a newer step's slot is not theirs.
        self._flow: deque[list[Callable[[], object]]] = deque(maxlen=self._later_slots)

    def submit(self, plan: StepPlan) -> PendingResult:
        self._newest, runner = plan.number, self._runner
        entered = self._slot(self._encoder.encode(plan), lambda: runner.launch(plan))
        later: list[Callable[[], object]] = []
        self._flow.append(later)
        return lambda: self._wait(entered, later)

    def _wait(self, entered: Callable[[], PipelinedStep], later: list[Callable[[], object]]) -> StepResult:
        """The result of a step that has passed through all stages: the slot in which it `entered`, and `later` ones."""
        step = self._done(entered)
        while len(later) < self._later_slots:
            self._slot(b"", self._runner.drain)
        for slot in later[: self._later_slots]:  # with overlap, those after them go on meanwhile
            self._done(slot)
        return attempt(step.wait)

    @property
    def busy(self) -> list[float]:
        """For each stage, the share of all slots' time in which it computed, instead of waiting for others."""
        return [seconds / self._runner.seconds for seconds in self._runner.busy] if self._runner.seconds else []

    def _slot(self, message: bytes, call: Callable[[], T]) -> Callable[[], T]:
        """Advance all ranks; returns what waits for the first one's `call`."""
        try:
            self._ranks.send(message)
            slot = now(call) if self._thread is None else self._thread.submit(call)
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None
        except BaseException:
            self._ranks.give_up(self._newest)
            raise
        for later in self._flow:
            later.append(slot)
        return slot

    def _done(self, slot: Callable[[], T]) -> T:
        """A slot's result, once it has ended."""
        try:
            return slot()
        except RankLostError as error:
            raise self._ranks.explained(error.rank) from None

    def close(self) -> None:
        try:
            if self._thread is not None:
                self._thread.close()
            del self._runner
        finally:
            self._ranks.close()
