"""Data-parallel attention: several schedulers, each with its own KV blocks and requests, that step in lockstep.

Attention is computed by *replicas*, each of which has its own requests; experts are shared by all, so no replica can
compute an MoE layer alone. So every step has a plan for each replica, with the same number; a replica that has nothing
to do gets an empty plan, and its ranks take part with no rows. The plans commit together, and are given up together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import cast

from quire.core.kv_manager import KVManager
from quire.core.request import Event, Request, RequestUpdate, Status
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult
from quire.core.trials import Trials
from quire.errors import RequestError

DECODING = 256
"""The weight of a request's decode steps, in prompt tokens, when requests are balanced over replicas."""


@dataclass(slots=True)
class LockstepPlan(StepPlan):
    """A step of all replicas, with the spans of all their plans.

    Attributes:
        plans: one per replica.
    """

    plans: list[StepPlan] = field(default_factory=list)

    def of_replicas(self) -> list[StepPlan]:
        """The replicas' plans, with this plan's fields about experts and grammars."""
        for plan in self.plans:
            plan.expert_move, plan.expert_version = self.expert_move, self.expert_version
            plan.compiles = self.compiles
        return self.plans


def joined(results: Sequence[StepResult]) -> StepResult:
    """Join the replicas' results of a step."""
    spans = [span for result in results for span in result.spans]
    bad_loads = [slot for result in results for slot in result.bad_loads]
    seconds, drafting, loading, saving = (
        max(getattr(result, name) for result in results) for name in ("seconds", "drafting", "loading", "saving")
    )
    began = min(result.began for result in results)
    return StepResult(results[0].number, spans, seconds, began, drafting, bad_loads, loading, saving)


class Lockstep:
    """The schedulers of all replicas, with the interface of a single `Scheduler`.

    A request stays on the replica where it was placed: the one with the least work at that time, not counting the
    tokens of its prompt that are cached there.

    Args:
        schedulers: one per replica, without any requests. From now on they share `trials`.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.trials = Trials()
        for scheduler in schedulers:
            scheduler.trials = self.trials
        self._placed: dict[int, tuple[int, int]] = {}  # each request's replica, and its weight in the work there
        self._work = [0] * len(schedulers)

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        if request.id in self._placed:
            raise RequestError(f"request id {request.id} is in use; ids must be unique")
        costs = [len(request.tokens) - each.kv.cached_tokens(request) + DECODING for each in self.schedulers]
        replica = min(range(len(costs)), key=lambda index: self._work[index] + costs[index])
        self.schedulers[replica].add(request)
        self._placed[request.id] = replica, costs[replica]
        self._work[replica] += costs[replica]

    def _of(self, request: int) -> Scheduler:
        return self.schedulers[self._placed.get(request, (0, 0))[0]]

    def _told(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """Subtract ended requests from their replicas' work."""
        for update in updates:
            if update.finish_reason is not None and update.request in self._placed:
                replica, cost = self._placed.pop(update.request)
                self._work[replica] -= cost
        return updates

    def abort(self, request_id: int, reason: str = "abort", now: float = 0.0) -> None:
        """See `Scheduler.abort`."""
        self._of(request_id).abort(request_id, reason, now)

    def fail(self, request_id: int, error: str, now: float) -> None:
        """See `Scheduler.fail`."""
        self._of(request_id).fail(request_id, error, now)

    def arrived(self, event: Event) -> None:
        """See `Scheduler.arrived`."""
        for scheduler in self.schedulers:
            scheduler.arrived(event)

    def failed(self, event: Event, now: float, error: str | None = None) -> None:
        """See `Scheduler.failed`."""
        for scheduler in self.schedulers:
            scheduler.failed(event, now, error)

    # -- steps ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> LockstepPlan | None:
        """The next step, or None if no replica has anything that can run now."""
        if self.trials.advance():
            self.restart()
        plans = [scheduler.next_step(now) for scheduler in self.schedulers]
        if not any(plans):
            return None
        whole = [plan or each.empty_step() for plan, each in zip(plans, self.schedulers, strict=True)]
        spans = list(chain.from_iterable(plan.spans for plan in whole))
        started = list(chain.from_iterable(plan.started for plan in whole))
        return LockstepPlan(
            whole[0].number, spans, started, num_tokens=sum(plan.num_tokens for plan in whole), plans=whole
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """See `Scheduler.commit`."""
        updates, begin = [], 0
        for scheduler, part in zip(self.schedulers, cast(LockstepPlan, plan).plans, strict=True):
            end = begin + len(part.spans)
            loads = {move.slot for move in part.loads}
            bad_loads = [slot for slot in result.bad_loads if slot in loads]
            own = replace(result, spans=result.spans[begin:end], bad_loads=bad_loads)
            updates += scheduler.commit(part, own, now)
            begin = end
        return self._told(updates)

    def restart(self, *, failed: bool = False, whole: bool = True) -> Request | None:
        """See `Scheduler.restart`: every replica gives up all its plans in flight."""
        lost = [request for each in self.schedulers for request in each.in_steps()]
        culprit = self.trials.failed([r for r in lost if r.status is not Status.FINISHED]) if failed else None
        for scheduler in self.schedulers:
            scheduler.restart(whole=whole)
        return culprit

    def take_updates(self) -> list[RequestUpdate]:
        """See `Scheduler.take_updates`."""
        return self._told([update for scheduler in self.schedulers for update in scheduler.take_updates()])

    # -- state -------------------------------------------------------------------------

    @property
    def kvs(self) -> list[KVManager]:
        """The block tables of each replica."""
        return [scheduler.kv for scheduler in self.schedulers]

    @property
    def requests(self) -> dict[int, Request]:
        """The requests of all replicas."""
        return {number: request for scheduler in self.schedulers for number, request in scheduler.requests.items()}

    @property
    def running(self) -> list[Request]:
        """The running requests of all replicas, one replica after another."""
        return list(chain.from_iterable(scheduler.running for scheduler in self.schedulers))

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return all(scheduler.idle for scheduler in self.schedulers)

    @property
    def expects_others(self) -> bool:
        """See `Scheduler.expects_others`."""
        return any(scheduler.expects_others for scheduler in self.schedulers)

    @property
    def has_updates(self) -> bool:
        """Whether there are updates that have not been taken."""
        return any(scheduler.has_updates for scheduler in self.schedulers)

    @property
    def num_waiting(self) -> int:
        """See `Scheduler.num_waiting`."""
        return sum(scheduler.num_waiting for scheduler in self.schedulers)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return sum(scheduler.num_preemptions for scheduler in self.schedulers)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in a prefix cache, at first admissions."""
        return sum(scheduler.num_cached_tokens for scheduler in self.schedulers)
