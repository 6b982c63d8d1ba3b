"""The engine: a model, its KV blocks and a scheduler, driven step by step."""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from quire.config import EngineConfig
from quire.core import invariants
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import Handle, KVManager
from quire.core.lockstep import Lockstep
from quire.core.request import Event, Request, RequestUpdate
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.devices import count_gpus, find_device
from quire.engine import fingerprint
from quire.engine.compiling import Compiling
from quire.engine.elsewhere import WAIT_SECONDS, Elsewhere
from quire.engine.executor import Executor, InlineExecutor, PendingResult, ThreadExecutor
from quire.engine.expert_balancer import ExpertBalancer
from quire.engine.loading import for_whole_prompts, left_out, load, open_grammars, sampling_defaults, with_method
from quire.engine.machine import MESSAGE_BYTES, check_gpus
from quire.engine.notes import notes_of
from quire.engine.ranks import PipelineExecutor, RankExecutor, Ranks
from quire.engine.stats import EngineStats
from quire.errors import (
    ConfigError,
    EngineClosedError,
    StepFailedError,
)
from quire.kv.layout import KVLayout, layout_id
from quire.models.checkpoint import Checkpoint, resolve
from quire.models.hub import tokenizer_folder
from quire.models.registry import check_ranks
from quire.observe.timeline import KernelProfile, Timeline, TraceFile
from quire.ops.threads import usable_threads
from quire.parallel.group import OneRank
from quire.runner.device import open_device
from quire.runner.kv_pools import retentions
from quire.runner.memory_plan import MemoryPlan
from quire.runner.model_runner import STEP_FAILED, ModelRunner
from quire.runner.pipeline_runner import PipelineRunner
from quire.runner.proposer import Proposer
from quire.runner.start import OnLoad, Started, measure, planned, start_runner
from quire.system import require_linux, system_notes

if TYPE_CHECKING:
    from quire.kv.host import HostTier

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRAMMAR_SECONDS = 0.005
"""How long a step waits for one if there is nothing else to do."""


class StepObserver(Protocol):
    """Observes every step, before it runs and after it has committed."""

    def planned(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """A step is about to run; scheduling began at `begin` and took `seconds`."""
        ...

    def committed(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> None:
        """A step has run, with this result."""
        ...

    def given_up(self) -> None:
        """All steps that have not committed are given up; their requests are planned again."""
        ...


class Engine:
    """Runs requests to their end, one step per call.

    Args:
        config: its options.
        on_load: called with the progress of the start.
        observer: observes every step.
        open_checkpoint: opens the folder that `config.model` names; another function may make tensors up.
        proposer: drafts instead of what `config.speculative_config` names.
        hash_key: 32 secret bytes; engines with the same key give equal blocks equal hashes. None: a random one.
        neighbours: number of other engines with the same options that share this machine's memory.

    Attributes:
        blocked: nothing could run in the last step, nor can in the next, until others bring what requests wait for.
        computing: context entered around what may take long and changes no bookkeeping, so that it may be interrupted
            there: launching steps, and waiting for them.
        path: folder of the checkpoint.
        fingerprint: what tokens depend on, by name.
        grammars: compiles the required forms of replies.
        expert_balancer: moves experts between ranks; None if ranks share every expert, or there are none.
        kv_cache: the device's blocks, one cache per KV group.
        model_name: the model's name as given by the user.
        threads: number of threads of a step.
        tiers: the tiers below the pool, and other engines.
        awaits_tiers: nothing could run in the last step before blocks arrive from the tiers.
        wait_seconds: how long such a step waits for them.
        notes: messages for the user about what was decided at start.

    Raises:
        ConfigError, CheckpointError: and what derives from them, when the engine cannot start.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_load: OnLoad | None = None,
        observer: StepObserver | None = None,
        open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
        proposer: Proposer | None = None,
        hash_key: bytes | None = None,
        neighbours: int = 0,
    ) -> None:
        report = on_load or (lambda phase, share: None)
        self.config = config = _for_here(config)
        trace = None if config.profile is None else TraceFile(config.profile)  # fails before the model is loaded
        report("finding the checkpoint", 0.0)
        self.path: Path = resolve(config.model, config.revision)
        self.config = config = with_method(config)
        self.device = open_device(config.device)
        self._ranks = self._start_ranks(report, open_checkpoint, proposer) if config.num_ranks > 1 else None
        self.threads = self._ranks.threads if self._ranks else config.threads or usable_threads()
        self.tiers = _elsewhere(config, hash_key)
        try:
            started = self._start(report, open_checkpoint, proposer, self.tiers.key, neighbours)
        except BaseException:
            self.tiers.close()
            if self._ranks:
                self._ranks.close()
            raise
        self._timeline = None if trace is None else self._make_timeline(trace)
        self._observers: list[StepObserver] = [each for each in (observer, self._timeline) if each is not None]
        self._in_flight: deque[tuple[StepPlan, PendingResult]] = deque()
        # Steps in flight besides the one that is waited for.
        self._depth = config.pipeline_parallel_size - 1 + int(config.async_scheduling)
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._updates: list[RequestUpdate] = []  # not returned yet
        self._committing: list[int] = []  # requests of the step that is being committed
        self._computing = False  # otherwise it is being scheduled or committed, and bookkeeping changes
        self._closed = False
        self.blocked = self.awaits_tiers = False
        self.wait_seconds = WAIT_SECONDS
        self.notes = (
            *system_notes(),
            *self.model.notes,
            *self.memory_plan.notes,
            *started.notes,
            *self.tiers.notes,
            *notes_of(config, self.model, self.sampling_defaults, self._timeline),
            *(() if config.generation_config == "off" else left_out(self.path)),
        )
        for note in (*self.notes, *(f"{what}: {size}" for what, size in self.memory_plan.table())):
            logger.info("%s", note)
        try:
            report("ready", 1.0)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        report: OnLoad,
        open_checkpoint: Callable[[Path], Checkpoint],
        proposer: Proposer | None,
        hash_key: bytes,
        neighbours: int,
    ) -> Started:
        """Load the model, plan the memory, and create the scheduler and the executor."""
        config = self.config
        group, stage = (self._ranks.group, self._ranks.stage) if self._ranks else (OneRank(), None)
        self.model, self.speculation = load(
            config, self.path, self.device, group, stage, report, open_checkpoint, proposer
        )
        if not self.model.causal:
            self.config = config = for_whole_prompts(config)
        self.memory_plan = self._planned(report, neighbours)
        if self._ranks:
            self._ranks.begin(self.memory_plan, hash_key)
        self.fingerprint = fingerprint.parts(self.path, self.model, config.kv_cache_dtype)
        self.grammars = open_grammars(tokenizer_folder(config, self.path), self.model.vocab_size)
        self._compiling = Compiling(self.grammars)
        starting = config, self.model, self.device, self.memory_plan, self.threads, report, self.speculation
        host_fd = self._ranks.host_memory if self._ranks else -1
        started = start_runner(*starting, kv_key=hash_key, host_fd=host_fd, grammars=self.grammars)
        with self.device.active():  # trial steps have run, and others follow
            for counts in self.model.expert_loads.values():
                counts.zero_()
        if 0 < self.memory_plan.max_num_seqs < config.max_num_seqs:
            self.config = config = replace(config, max_num_seqs=self.memory_plan.max_num_seqs)
        self.kv_cache = started.kv
        self.sampling_defaults = {} if config.generation_config == "off" else sampling_defaults(self.path)
        self.max_model_len = self.memory_plan.max_model_len
        spec = config.speculation
        if spec is not None and spec.num_speculative_tokens >= self.max_model_len:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={spec.num_speculative_tokens} does not fit in a context "
                f"of {self.max_model_len} tokens; lower it"
            )
        self.expert_balancer: ExpertBalancer | None = None
        if (mover := started.runner.mover) is not None and self._ranks and not self.device.asynchronous:
            prepared = self._ranks.prepared
            mover.on_prepared = functools.partial(operator.setitem, prepared, 0)
            self.expert_balancer = ExpertBalancer(self.model, prepared, config.eplb_interval)
        replicas = config.data_parallel_size
        self._stats = EngineStats(
            num_blocks=self.memory_plan.num_usable * replicas,
            block_size=config.block_size,
            kv_block_bytes=KVLayout.of(self.kv_cache[0], self.model).block_bytes,
        )
        managers = self._kv_managers(hash_key, started.host)
        started.runner.host = self.tiers.mover() or started.host
        schedulers = [Scheduler(config, kv, self.max_model_len, self.model.pair_share) for kv in managers]
        for each in schedulers:
            each.lacking = self._compiling.lacking
        self.scheduler: Scheduler | Lockstep = schedulers[0] if replicas == 1 else Lockstep(schedulers)
        if self._ranks:
            self._ranks.wait_ready()
        self.executor = self._make_executor(started.runner)
        return started

    def _planned(self, report: OnLoad, neighbours: int) -> MemoryPlan:
        """The memory plan, for all ranks once they have loaded."""
        loaded = self.config, self.model, self.device
        if self._ranks:
            report("waiting for the other ranks", 0.0)
            self._ranks.wait_loaded(self.model.kernels.describe(self.model.dtype))
        report("planning memory", 0.0)
        here = self._ranks.num_here if self._ranks else 1
        measured = measure(*loaded, self.speculation, here, neighbours, report)
        if self._ranks:
            measured = measured.and_of(self._ranks.measured())
        return planned(*loaded, measured, self.speculation)

    def _make_executor(self, runner: ModelRunner) -> Executor:
        in_thread = self.config.async_scheduling and not self.device.asynchronous
        if self._ranks and isinstance(runner, PipelineRunner):
            return PipelineExecutor(runner, self._ranks, in_thread)
        own = (ThreadExecutor if in_thread else InlineExecutor)(runner)
        return RankExecutor(own, self._ranks) if self._ranks else own

    def _start_ranks(
        self, report: OnLoad, open_checkpoint: Callable[[Path], Checkpoint], proposer: Proposer | None
    ) -> Ranks:
        """The other ranks, which load at the same time.

        Raises:
            ConfigError: the model cannot be shared by this many, or they cannot be sent what they need.
        """
        config, stages = self.config, self.config.pipeline_parallel_size
        sizes = {
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": stages,
            "data_parallel_size": config.data_parallel_size,
        }
        name = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if self.device.asynchronous:
            check_gpus(config, count_gpus())
        if open_checkpoint is not Checkpoint or proposer is not None:
            raise ConfigError(
                f"{name}: other ranks read the checkpoint and create their drafters themselves; "
                "leave out open_checkpoint and proposer, or use one rank"
            )
        how = config.tensor_parallel_size, config.redundant_experts, stages, config.data_parallel_size
        widest, vocabulary = check_ranks(self.path, *how)
        matrix = max(widest * config.max_num_batched_tokens, vocabulary) * torch.float32.itemsize
        room = MESSAGE_BYTES if self.device.asynchronous else matrix  # there matrices stay on the devices
        return Ranks(config, self.path, self.device, room, report)

    def _make_timeline(self, trace: TraceFile) -> Timeline:
        kernels = KernelProfile(trace.path) if self.device.asynchronous else None
        return Timeline(trace, self.scheduler, kernels)

    def _kv_managers(self, hash_key: bytes, host: HostTier | None) -> list[KVManager]:
        """Per replica; the host tier is shared by all of them."""
        config, speculation = self.config, self.speculation
        # Everything that a block's bytes depend on besides its tokens.
        identity = self.fingerprint | {
            "block_size": str(config.block_size),
            "layout of the KV": "|".join(
                layout_id(cache, self.model, group) for group, cache in enumerate(self.kv_cache)
            ),
            "drafting model": "none" if speculation is None else speculation.fingerprint or "none",
        }
        if not config.deterministic:  # sums over ranks have other bits
            identity["tensor_parallel_size"] = str(config.tensor_parallel_size)
        hasher = BlockHasher(hash_key, "|".join(f"{name}={value}" for name, value in identity.items()))
        ahead = speculation is not None and speculation.needs_next_token
        kept = retentions(config, self.model, speculation)
        read = self._stats.kv_block_bytes / config.block_size / self.model.weight_bytes
        self.tiers.open(host, identity, self.model.pair_share, read)
        managers = []
        for _ in range(config.data_parallel_size):
            groups = [KVGroup(cache.num_blocks, each) for cache, each in zip(self.kv_cache, kept, strict=True)]
            pool = groups, config.block_size, config.prefix_cache
            managers.append(KVManager(*pool, hasher, ahead, self.tiers.connector()))
        self.tiers.attach(managers)
        return managers

    @property
    def stats(self) -> EngineStats:
        """Current counters."""
        if not self._closed:
            scheduler = self.scheduler
            self._stats.cached_tokens, self._stats.preemptions = scheduler.num_cached_tokens, scheduler.num_preemptions
            self._stats.running, self._stats.waiting = len(scheduler.running), scheduler.num_waiting
            self._stats.kv_tiers = self.tiers.counts()
            self._stats.kv_tier_bytes = self.tiers.sizes(self._stats.kv_block_bytes)
            self._stats.kv_slots = self.tiers.slots()
            self._stats.kv_transfer_unmet = {str(why): count for why, count in self.tiers.unmet.items()}
        return self._stats

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running, being moved, or left to report."""
        scheduler = self.scheduler
        moving = any(kv.has_moves for kv in scheduler.kvs)
        return scheduler.idle and not moving and not self._in_flight and not self._updates and not scheduler.has_updates

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add`. It waits until its grammar is compiled."""
        self._check_open()
        self.blocked = False
        self.tiers.check_asked(request)
        self.scheduler.add(request)
        self._stats.prompt_tokens += request.num_prompt

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """End a request wherever it is."""
        self.blocked = False
        self.scheduler.abort(request_id, reason, time.monotonic())

    def arrived(self, event: Event) -> None:
        """See `Scheduler.arrived`."""
        self.blocked = False
        self.scheduler.arrived(event)

    def failed(self, event: Event, error: str | None = None) -> None:
        """See `Scheduler.failed`."""
        self.blocked = False
        self.scheduler.failed(event, time.monotonic(), error)

    def release(self, handle: Handle) -> None:
        """See `KVManager.release`."""
        self.blocked = False
        for kv in self.scheduler.kvs:
            kv.release(handle)

    def check_ranks(self) -> None:
        """Check that all ranks are alive, even if no step is running.

        Raises:
            RankLostError: one is not.
        """
        if self._ranks:
            self._ranks.check()

    def rank_stats(self) -> dict[str, Any]:
        """Traffic between ranks, and the balance of their work; empty with one rank."""
        if not self._ranks:
            return {}
        counts = self._ranks.group.counts
        experts = self.expert_balancer.stats() if self.expert_balancer else {}
        stages = {"stage_busy": self.executor.busy} if isinstance(self.executor, PipelineExecutor) else {}
        stats: dict[str, Any] = {"ranks": self._ranks.group.size}
        if counts is not None:
            stats |= {"gathers": counts[0], "gathered_bytes": counts[1]}
        sums, summed = (self._ranks.stage or self._ranks.group).reduced
        reduced = {"all_reduces": sums, "all_reduced_bytes": summed} if sums else {}
        return stats | reduced | experts | stages

    def exchange(self) -> None:
        """Exchange messages with other engines, even if no step runs; see `Elsewhere`."""
        self.tiers.exchange()
        self.tiers.tell(self._stats.steps)

    def prefilled(self, numbers: Sequence[int]) -> None:
        """Requests that computed prompts for other engines have ended; see `Elsewhere.to_compute`."""
        self.tiers.prefilled(numbers)

    def take_updates(self) -> list[RequestUpdate]:
        """Updates from `abort` since the last step."""
        return self.scheduler.take_updates()

    def step(self) -> list[RequestUpdate]:
        """Run the next step; returns its updates. If there is nothing to run, these are only late aborts.

        After an exception, the next call continues as if this one had not happened: all steps in flight are given up,
        their requests are recomputed, and no request gets a token twice or misses one.
        """
        self._check_open()
        try:
            self._advance()
        except StepFailedError as error:
            self._give_up(error)
        except BaseException:
            self._give_up()
            raise
        updates, self._updates = self._updates, []
        return updates + self.scheduler.take_updates()

    def _advance(self) -> None:
        # 1. Decide what the next step computes.
        begin = time.monotonic()
        self.awaits_tiers = False
        self.tiers.exchange()
        self._compiling.take_ended(self.scheduler)
        plan = self.scheduler.schedule(begin)
        self.tiers.tell(self._stats.steps)
        # 2. Launch it. If nothing can run, others must bring what requests wait for, or there is a bug.
        if plan:
            scheduled = time.monotonic()
            if self.expert_balancer:
                self.expert_balancer.plan(plan, scheduled)
            plan.compiles = self._compiling.take_begun()
            for observer in self._observers:
                observer.planned(plan, begin, scheduled - begin)
            submitting = time.monotonic()
            self._in_flight.append((plan, self._compute(lambda: self.executor.submit(plan))))
            if self._timeline:
                self._timeline.submitted(plan, submitting, time.monotonic() - submitting)
        elif not self._in_flight and self.grammars.compiling:
            self._compiling.take_ended(self.scheduler, GRAMMAR_SECONDS)
        elif not self._in_flight and not self.scheduler.idle and not self._compiling.rested(self.scheduler):
            self.awaits_tiers = self.tiers.waits(self.wait_seconds)
            self.blocked = not self.awaits_tiers and self.scheduler.expects_others
            if not self.awaits_tiers and not self.blocked:
                self._end_stalled()
        # 3. Commit the oldest steps, until no more are in flight than may overlap.
        depth = 0 if self.scheduler.trials.on else self._depth
        # Once no request is left, steps in flight are surplus, and there is nothing to overlap them with.
        waits = plan is None  # for the oldest one, after which there may be something to plan
        while self._in_flight and (waits or len(self._in_flight) > depth or self.scheduler.idle):
            self._commit(*self._in_flight.popleft())
            waits = False

    def close(self) -> None:
        """Free the model and its blocks. Calls after this raise EngineClosedError; a second close does nothing."""
        if not self._closed:
            self._closed = True
            self._in_flight.clear()
            self.executor.close()
            self.grammars.close()
            self.tiers.tell(self._stats.steps)
            self.tiers.close()
            if self._timeline:
                self._timeline.close()
            del self.model, self.scheduler, self.executor, self.kv_cache, self.speculation, self._ranks
            self.device.release()

    def _commit(self, plan: StepPlan, pending: PendingResult) -> None:
        begin = time.monotonic()
        result = self._compute(pending)
        if self._timeline:
            self._timeline.waited(plan, begin, time.monotonic() - begin)
        stats, scheduler = self._stats, self.scheduler
        held = sum(kv.num_usable - kv.num_available for kv in scheduler.kvs)
        stats.peak_blocks = max(stats.peak_blocks, held)
        self._committing = [span.request for span in plan.spans if span.request in scheduler.requests]
        updates = scheduler.commit(plan, result, time.monotonic())
        self._updates += updates
        self._committing = []
        stats.count(plan, result, updates)
        self.tiers.tell(stats.steps)
        for observer in self._observers:
            observer.committed(plan, result, updates)
        if self._timeline and self._ranks:
            for rank, timed in self._ranks.timed():
                self._timeline.rank_computed(rank, timed.number, timed.begin, timed.seconds)
        if self.config.check_invariants:
            invariants.check(scheduler)

    def _compute(self, call: Callable[[], T]) -> T:
        """The result of the executor's `call`. Bookkeeping does not change meanwhile, so it is consistent if this
        raises.
        """
        self._computing = True
        with self.computing():
            result = call()
        self._computing = False
        return result

    def _give_up(self, failed: StepFailedError | None = None) -> None:
        """Give up all steps in flight, since the last one could not be planned, computed or committed.

        If it failed while it was computed, its requests are tried in halves, and the one at fault ends. If it failed
        while it was committed, it is unknown which tokens were returned, so all its requests end.
        """
        whole, self._computing = self._computing, False
        ended, self._committing = self._committing, []
        self._in_flight.clear()
        if not whole:
            self.tiers.reset()
        culprit = self.scheduler.restart(failed=failed is not None, whole=whole)
        if failed is not None:
            self._log_failure(failed, culprit)
        ended += [culprit.id] if culprit else []
        self._updates += self.scheduler.take_updates()
        told = {update.request for update in self._updates if update.finish_reason is not None}
        for request in ended:
            if request in self.scheduler.requests:
                self.scheduler.fail(request, STEP_FAILED, time.monotonic())
            elif request not in told:
                self._updates.append(RequestUpdate(request, finish_reason="error", error=STEP_FAILED))
        for observer in self._observers:
            observer.given_up()

    def _log_failure(self, error: StepFailedError, culprit: Request | None) -> None:
        """Log an error, with a traceback if it is new or ends a request."""
        halvings = self.scheduler.trials.num_halvings
        if culprit is None:
            cause = error if halvings == 1 else None
            logger.warning("a step failed (%s): its requests are computed again in halves", error, exc_info=cause)
            return
        logger.error(
            "request %d (%d prompt and %d output tokens) ends: a step of it alone failed (%s; halvings: %d)",
            *(culprit.id, culprit.num_prompt, len(culprit.tokens) - culprit.num_prompt, error, halvings),
            exc_info=error,
        )

    def _end_stalled(self) -> None:
        """There are requests and none can run: a bug. The first one ends with an error, so that the others can
        continue.
        """
        request = min(self.scheduler.requests.values(), key=lambda each: (each.awaits is not None, each.order))
        logger.error("no request can run; request %d (%s) is ended", request.id, request.status.value)
        self.scheduler.fail(request.id, "the scheduler could not run this request", time.monotonic())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this engine was closed; create a new one")


def _elsewhere(config: EngineConfig, hash_key: bytes | None) -> Elsewhere:
    """What there is besides the pool; nothing of it is imported if there is nothing."""
    if config.kv_connector is not None:
        from quire.engine.plugin import Plugin

        return Plugin(config, hash_key)
    if not config.host_kv_bytes:
        return Elsewhere(config, hash_key)
    from quire.engine.tiers import KVTiers

    return KVTiers(config, hash_key)


def _for_here(config: EngineConfig) -> EngineConfig:
    """The options of one engine on this machine, with the device that there is.

    Raises:
        ConfigError: they ask for several engines, or for what this system does not have.
    """
    if config.replicas > 1:
        raise ConfigError(
            f"data_parallel_size={config.replicas} needs a server, since LLM is a single engine; run 'quire "
            f"serve {config.model} --data-parallel-size {config.replicas}', or start {config.replicas} programs, "
            "each with a part of the prompts"
        )
    if config.num_ranks > 1:
        require_linux(f"an engine of {config.num_ranks} ranks")
    if config.kv_role is not None:
        require_linux(f"kv_role={config.kv_role}")
    if config.distributed_executor_backend != "mp":
        from quire.engine.external_launcher import placed

        config = placed(config)
    return replace(config, device=find_device()[0]) if config.device == "auto" else config
