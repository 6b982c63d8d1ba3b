"""The scheduler: which tokens of which requests the next step computes.

Everything follows one order: (priority, turn among owners, arrival), kept through preemption. A step has first one
token for every decoding request, then chunks of partial prefills, then waiting requests, and drafts last. The interface
is `add`, `abort`, `schedule`, `commit`, and `arrived` or `failed` for events that requests wait for. Several plans may
be in flight; they commit in order, or are all given up (`restart`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from quire.config import EngineConfig
from quire.core.draft_length import DraftLengths
from quire.core.external import Loadable
from quire.core.kv_manager import STEP, KVManager
from quire.core.latency import LatencyTarget
from quire.core.prefix_cache import Match
from quire.core.prefix_leaders import BLOCK, ELSEWHERE, Leader, PrefixLeaders
from quire.core.request import Event, Request, RequestUpdate, Status
from quire.core.spans import next_span, unverified
from quire.core.stages import dealt_out, share_of_prompts
from quire.core.step import Span, SpanResult, StepPlan, StepResult
from quire.core.step_state import PendingStep, StepInFlight
from quire.core.trials import Trials
from quire.core.turns import Turns, first_to_yield, outranked
from quire.core.waiting_queue import WaitingQueue
from quire.errors import RequestError

MOST_WAITS = 64
"""After waiting this often for blocks from elsewhere before its admission, a request is computed, whatever a connector
says."""


class Scheduler:
    """Plans the steps of one engine.

    Args:
        config: limits and policy.
        kv: block tables and prefix cache.
        max_model_len: longest context; without chunked prefill, the largest chunk.
        pair_share: see `Model.pair_share`.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, max_model_len: int, pair_share: float = 0.0) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []  # in order
        self.in_flight: deque[StepInFlight] = deque()
        # What a request has to wait for before it can be admitted; asked again when its turn has come.
        self.lacking: Callable[[Request], Event | None] = lambda request: None
        self.num_preemptions = self.num_cached_tokens = 0  # the latter at first admissions
        self._waiting, self._leaders = WaitingQueue(), PrefixLeaders()
        self._ended: list[int] = []  # ended requests that the runner does not know of yet
        self._drop_drafting: list[int] = []  # requests that the runner should no longer follow
        self._updates: list[RequestUpdate] = []  # not taken yet
        self._next_number = 0
        self.trials, self._turns = Trials(), Turns()
        self._chunked, self._max_model_len = config.enable_chunked_prefill, max_model_len
        limit = config.long_prefill_token_threshold or max_model_len
        self._max_chunk = min(limit, config.max_num_batched_tokens)
        target = config.target_itl_ms
        self._latency = LatencyTarget(target / 1000, pair_share) if target else None
        self._ended_at = 0.0  # when the last step did, on the runner's clock
        self._speculation = spec = config.speculation
        own = spec if spec is not None and spec.adaptive else None
        self._lengths = DraftLengths(own.num_speculative_tokens, tree_mode=own.tree_width > 1) if own else None

    # -- interface ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; one that `awaits` an event is not in line until the event has arrived.

        Raises:
            RequestTooLargeError: it is longer than a context may be, or would not fit into the pool even alone.
        """
        if request.id in self.requests:
            raise RequestError(f"request id {request.id} is in use; ids must be unique")
        self.kv.check_fits(request, self._max_chunk, self._max_model_len)
        priority = request.params.priority if self.config.scheduling_policy == "priority" else 0
        if not self.requests:
            self._turns.reset()
        request.order = (priority, self._turns.deal(request.owner, len(self.running)), request.id)
        self.requests[request.id] = request
        request.awaits = request.awaits or self.lacking(request)
        self._line_up(request)

    def arrived(self, event: Event) -> None:
        """An event has happened: requests that wait for it are put in line, at their places. There may be none."""
        for request in self._waiting.take(event):
            self._line_up(request)

    def failed(self, event: Event, now: float, error: str | None = None) -> None:
        """An event will never happen: requests that wait for it continue without it, or end if there is an `error`."""
        for request in self._waiting.take(event):
            if error is None:
                self._line_up(request)
            else:
                self.fail(request.id, error, now)

    def _line_up(self, request: Request) -> None:
        if request.awaits is not None or self.trials.admits(request):
            self._waiting.push(request)

    def abort(self, request_id: int, reason: str = "abort", now: float = 0.0) -> None:
        """End a request in whatever state it is; an unknown one is ignored.

        Args:
            reason: "abort", or "stop" if the frontend found a stop string.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, now, keep_partial=reason == "stop")
            self._updates.append(request.ended(reason))

    def fail(self, request_id: int, error: str, now: float) -> None:
        """End a request with an error that did not come from a step."""
        request = self.requests[request_id]
        self._end(request, now)
        self._updates.append(request.ended("error", error))

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        if self.trials.advance():
            self.restart()
        return self.next_step(now)

    def next_step(self, now: float) -> StepPlan | None:
        """The part of `schedule` after waiting requests have been put in line."""
        if self.kv.external is not None:
            for found in self.kv.external.poll(now):
                self._abandon(found)
        step = PendingStep(now, self.config.max_num_batched_tokens)
        self._choose_decodes(step)
        self._limit_prefill(step)
        head = self._waiting.head()
        self._choose_prefills(step, head)
        self._choose_waiting(step)
        if head is not None:
            self._choose_prefills(step, None)  # preemption may have left room
        if self._speculation is not None:
            self._choose_drafts(step, self._speculation.num_speculative_tokens)
        return self._plan(step) if step.chosen or self.kv.has_moves else None

    def empty_step(self) -> StepPlan:
        """A step that computes nothing, for a replica with nothing to do in lockstep."""
        return self._plan(PendingStep(0.0, 0))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """Take in a step's result; returns an update for each request that got something."""
        flight = self.in_flight.popleft()
        if not plan.number == result.number == flight.number:
            raise RuntimeError(f"step {flight.number} must commit next, not plan {plan.number} / {result.number}")
        for request, _ in flight.requests:
            request.num_in_flight -= 1
        for found in self.kv.loaded(plan, result):
            for event in self._leaders.published(found.hashes[: found.num_published]):
                self.arrived(event)
            found.prefix.request.num_waits -= found.num_published == len(found.hashes)
            self._abandon(found)
        self.kv.step_committed(plan.number)
        for span, outcome, (request, preemptions) in zip(plan.spans, result.spans, flight.requests, strict=True):
            if request.status is not Status.FINISHED:
                current = preemptions == request.stats.preemptions
                update = self._commit_span(request, span, outcome, current, now, result.seconds)
                if update is not None:
                    self._updates.append(update)
        if self._latency:
            gap = result.began - self._ended_at  # the host's; a longer one means that the engine was idle
            seconds = result.seconds + (gap if 0 < gap < result.seconds else 0.0) - result.loading
            self._latency.observe(flight.num_decodes, flight.work, seconds)
            self._ended_at = result.began + result.seconds
        if self._lengths:
            self._lengths.observe_step(result, flight.tuned)
        return self.take_updates()

    def restart(self, *, failed: bool = False, whole: bool = True) -> Request | None:
        """Give up all plans in flight: their results are lost, and how far they got is unknown.

        Requests go back to the queue like preempted ones. The next plan's number leaves a gap, at which the runner
        forgets what it knew, and everything is sent to it again. Whatever the given-up steps still write is written
        before anything is computed after the gap.

        Args:
            failed: a step in flight has failed: its requests are retried in halves, see `Trials`.
            whole: False if bookkeeping was interrupted halfway: it is rebuilt, with an empty prefix cache.

        Returns:
            The request that made the step fail, if it was alone in it; the caller ends it.
        """
        lost = self.in_steps()
        for request in lost:
            request.num_in_flight = 0  # its blocks need not be kept for them
        if whole:
            for request in self.running:
                self.kv.free(request)
            self.kv.given_up()
            for flight in self.in_flight:
                self.kv.step_committed(flight.number)
        else:
            self.kv.reset()
        culprit = self.trials.failed([r for r in lost if r.status is not Status.FINISHED]) if failed else None
        self.in_flight.clear()
        self.running, self._waiting, self._leaders = [], WaitingQueue(), PrefixLeaders()
        self._ended, self._drop_drafting = [], []
        self._next_number += 1
        for request in self.requests.values():
            request.restart()
            if request.awaits is not None and request.awaits.kind in (BLOCK, ELSEWHERE):
                request.awaits = None  # no request computes those blocks any more
            self._line_up(request)
        return culprit

    def take_updates(self) -> list[RequestUpdate]:
        """Take the updates that no `commit` has returned, usually ends."""
        updates, self._updates = self._updates, []
        return updates

    # -- state -------------------------------------------------------------------------

    @property
    def kvs(self) -> list[KVManager]:
        """All block tables (one for a single scheduler)."""
        return [self.kv]

    def in_steps(self) -> list[Request]:
        """Requests with spans in steps in flight."""
        return list(dict.fromkeys(request for flight in self.in_flight for request, _ in flight.requests))

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self.requests

    @property
    def expects_others(self) -> bool:
        """Whether events or releases of blocks are expected from elsewhere, which is why nothing may be able to run."""
        awaiting, held, external = self._waiting.num_awaiting, self.kv.num_held, self.kv.external
        waits = external is not None and external.waits
        return awaiting.total() > awaiting[BLOCK] or held.total() > held[STEP] or waits

    @property
    def has_updates(self) -> bool:
        """Whether there are updates that have not been taken."""
        return bool(self._updates)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, in line or for an event."""
        return len(self.requests) - len(self.running)

    # -- choosing ------------------------------------------------------------------------------------------

    def _choose_decodes(self, step: PendingStep) -> None:
        """Choose one token for every request that needs no more than that. Those with more to compute are partial
        prefills.
        """
        running, most = list(self.running), len(self.running)
        if (stages := self.config.pipeline_parallel_size) > 1:
            # With overlap, a token must be known when the step begins, this many steps after its own.
            known = self._next_number - stages if self.config.async_scheduling else -1
            running, most = dealt_out(running, stages, known)
        for request in running:
            remaining = request.num_remaining
            if request.status is not Status.RUNNING or not remaining:
                continue  # preempted by an earlier one, or waiting for its last commit
            if remaining > 1:
                step.partial_before.append(request)
            elif step.num_decodes < most and self._reserve(request, 1, step):
                step.choose(request, 1)
                step.num_decodes += 1

    def _limit_prefill(self, step: PendingStep) -> None:
        """Limit a step's prompt tokens: by the latency target; by a connector's pace; and in a pipeline, to an even
        share."""
        if self._latency and step.num_decodes:
            step.aim(self._latency, self.config.min_chunk)
        external = self.kv.external if self._chunked and step.num_decodes else None
        if external is not None and (pace := external.pace(self.config.min_chunk)) is not None:
            step.keep_pace(pace)
        if (stages := self.config.pipeline_parallel_size) > 1 and self._chunked:
            step.withhold(share_of_prompts(self.requests.values(), stages, step.budget))

    def _choose_prefills(self, step: PendingStep, head: Request | None) -> None:
        """Choose further chunks of partial prefills, oldest first.

        Those that come after the `head` of the queue (which has a higher priority) get `min_chunk`, and it the rest.
        """
        step.partial = []
        for request in step.partial_before:
            chosen = step.chosen.get(request, 0)
            remaining = request.num_remaining - chosen
            if request.status is not Status.RUNNING or not remaining:
                continue
            count = self._chunk(remaining, step, request.num_computed, chosen)
            if head is not None and head.order < request.order:
                count = min(count, self.config.min_chunk)
            if count and self._reserve(request, chosen + count, step):
                step.choose(request, count)
                remaining -= count
            if remaining:
                step.partial.append(request)

    def _choose_waiting(self, step: PendingStep) -> None:
        """Admit waiting requests in order; none overtakes the head of the queue because it needs fewer blocks.

        At most `max_num_seqs` wait for others' prefixes, since no more could run afterwards; any number for an engine.
        """
        aside: list[Request] = []
        awaiting = self._waiting.num_awaiting
        while step.room(0) > 0 and step.lookup > 0 and awaiting[BLOCK] < self.config.max_num_seqs:
            request = self._waiting.pop()
            if request is None:
                break
            if request.num_pending:  # preempted with a step in flight: its last token is not known yet
                aside.append(request)
            elif not self._admit(request, step) and request.awaits is None:
                aside.append(request)
                break
        for request in aside:
            self._waiting.push(request)

    def _choose_drafts(self, step: PendingStep, most: int) -> None:
        """Choose drafts for decoding requests, from what is left of the step's tokens and of the blocks.

        Self-tuning gives none in steps with prompts, which are usually compute-bound: there, a draft's row costs as
        much as the row of the token that it may save, and may be rejected.
        """
        step.budget += step.withheld
        decodes = [
            request
            for request, count in step.chosen.items()
            if count == request.num_remaining == 1 and request.draft_state.drafting_enabled
        ]
        if not decodes:
            return
        step.tuned = sum(step.chosen.values()) == len(step.chosen)
        room = [min(most, request.num_draftable) for request in decodes]
        if self._lengths and not step.tuned:
            return
        if self._lengths:
            states = [request.draft_state for request in decodes]
            room = self._lengths.choose(states, room, step.budget, len(step.chosen))
            settled = [request for request in decodes if not request.num_unverified_tokens]
            vain = self._lengths.drop_drafting([request.draft_state for request in settled])
            if vain is not None:
                self._drop_drafting.append(settled[vain].id)
        for request, count in zip(decodes, room, strict=True):
            if (count := min(count, step.budget)) > 0:
                step.choose(request, self._reserve_drafts(request, count))

    def _reserve_drafts(self, request: Request, count: int) -> int:
        """Reserve blocks for up to `count` drafts; returns for how many. No request is preempted for them."""
        known = request.num_computed + 1
        if self.kv.reserve(request, known + count):
            return count
        return min(count, len(request.tables[0]) * self.kv.block_size - known)

    def _chunk(self, remaining: int, step: PendingStep, computed: int, chosen: int = 0) -> int:
        """Tokens that a prompt with `remaining` ones may take now, besides those `chosen` in this step already. Its end
        leaves no single token, which would read all those before it once more, and in any step."""
        most = min(remaining, step.budget, self._max_chunk - chosen)
        count = min(most, step.room(computed + chosen, last=remaining <= self.kv.block_size))
        if 0 < count == remaining - 1 < most:
            count += 1
        return count if self._chunked or count == remaining else 0

    @property
    def _is_full(self) -> bool:
        """Whether as many requests run as may."""
        return len(self.running) >= self.config.max_num_seqs

    def _admit(self, request: Request, step: PendingStep) -> bool:
        """Give a waiting request its first chunk; False if it must keep waiting."""
        if self._is_full and not outranked(self.running, request):
            return False
        step.looks_up(len(request.tokens), len(request.hashes) * self.kv.block_size)
        match = self.kv.match(request)
        request.awaits = self._awaited(request, match, step)
        if request.awaits is not None:
            self._waiting.push(request)
            return False
        peak = self.kv.peak_blocks(len(request.tokens), self._max_chunk)
        if match.partial is not None and self.kv.lacks([blocks + 1 for blocks in peak]):
            match = self.kv.match(request, whole=True)  # a copy needs an extra block, which a full pool does not have
        return self._admit_match(request, match, step)

    def _awaited(self, request: Request, match: Match, step: PendingStep) -> Event | None:
        """The event that a request should wait for: it is `lacking` something, another one computes its next blocks, or
        they can be had from elsewhere."""
        if not request.known_to_runner and (lacked := self.lacking(request)) is not None:
            return lacked
        if request.computes_all:
            return None
        size, tokens = self.kv.block_size, len(request.tokens)
        # The token that is computed again for a drafting head is in a cached block.
        cached = (match.num_blocks * size + match.partial_tokens + self.kv.needs_next_token) // size
        last = (tokens - 1) // size
        event = self._leaders.awaited(request, cached, last)
        # While requests are tried in halves all others wait for them, so they wait for nothing that may be slow.
        if event is not None or self.kv.external is None or self.trials.on or self._is_full:
            return event
        if request.computed_here or request.num_waits >= MOST_WAITS:
            return None
        needed = self.kv.blocks_to_start(request, match, tokens, self._max_chunk, len(self.running))
        if self.kv.lacks(needed) or (found := self.kv.find(request, cached, last, step.num_decodes > 0)) is None:
            return None
        if isinstance(found, Loadable) and not self.kv.load(found, needed, self._next_number):
            return None
        request.num_waits += 1
        self._leaders.claim(found)
        return found.ready

    def _abandon(self, leader: Leader) -> None:
        """A request computes no further blocks: those that wait for one of them continue without it."""
        for event in self._leaders.abandoned(leader):
            self.arrived(event)

    def _admit_match(self, request: Request, match: Match, step: PendingStep) -> bool:
        cached = match.num_blocks * self.kv.block_size + match.partial_tokens
        remaining = len(request.tokens) - cached
        count = self._chunk(remaining, step, cached)
        if not count or (count < remaining and step.partial_ahead(request) >= self.config.max_num_partial_prefills):
            return False
        num_tokens = cached + count
        needed = self.kv.blocks_to_start(request, match, num_tokens, self._max_chunk, len(self.running))
        if self.kv.lacks(needed) and not outranked(self.running, request):
            return False  # after the lock, no more would be available
        self.kv.lock(match)
        if not self._make_room(request, match, num_tokens, step):
            self.kv.unlock(match)
            return False
        self.kv.admit(request, match)
        self.kv.reserve(request, num_tokens)
        self._start(request, step.now)
        step.choose(request, count)
        if count < remaining:
            step.partial.append(request)
        return True

    def _make_room(self, request: Request, match: Match, num_tokens: int, step: PendingStep) -> bool:
        """Whether the step has room for a request, and the pool for its locked match to grow to `num_tokens`.

        Preempts requests that it outranks if that suffices.
        """
        while True:
            needed = self.kv.blocks_to_start(request, match, num_tokens, self._max_chunk, len(self.running))
            if not self._is_full and not self.kv.lacks(needed):
                return True
            later = outranked(self.running, request)
            if not later or self.kv.num_deferred:
                return False
            if self.kv.lacks(needed, self.kv.blocks_of_these_alone(later)):
                return False
            self._preempt(later[0], step)

    def _start(self, request: Request, now: float) -> None:
        if request.stats.admitted is None:
            request.stats.admitted = now
            request.num_cached = request.num_computed
            self.num_cached_tokens += request.num_cached
        request.status = Status.RUNNING
        insort(self.running, request, key=attrgetter("order"))
        self._turns.admitted(request.order[1])
        if self._lengths and request.draft_state.drafting_enabled and not request.known_to_runner:
            self._lengths.start(request.draft_state, request.params.greedy, len(self.running))
        self._leaders.claim(request)

    # -- preemption ----------------------------------------------------------------------------------------

    def _reserve(self, request: Request, count: int, step: PendingStep) -> bool:
        """Reserve blocks for a running request's next `count` tokens; preempts later requests, or else this one."""
        while not self.kv.reserve(request, request.num_computed + count):
            victim = first_to_yield(self.running, request)
            if victim is None or self.kv.num_deferred:  # steps in flight will free blocks when they commit
                return False
            self._preempt(victim, step)
        return True

    def _preempt(self, victim: Request, step: PendingStep) -> None:
        """Free a request's blocks and requeue it; it will be recomputed, with the same tokens."""
        step.withdraw(victim)
        self.running.remove(victim)
        self._abandon(victim)
        self.kv.free(victim)
        victim.high_water = max(victim.high_water, victim.num_computed)
        victim.num_computed = victim.num_committed = 0
        victim.stats.preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(victim)

    # -- plans ---------------------------------------------------------------------------------------------

    def _plan(self, step: PendingStep) -> StepPlan:
        plan = StepPlan(self._next_number, [], ended=self._ended, drop_drafting=self._drop_drafting)
        plan.saves, plan.loads = self.kv.planned(plan.number)
        flight = StepInFlight(plan.number, step.tuned)
        self._next_number += 1
        self._ended, self._drop_drafting = [], []
        for request, count in step.chosen.items():
            if self._latency:
                if request.num_remaining > 1:
                    flight.work += self._latency.work(count, request.num_computed)
                else:
                    flight.num_decodes += 1
            if not request.known_to_runner:
                request.known_to_runner = True
                plan.started.append(request.info())
            plan.spans.append(next_span(request, count, plan.number, self.kv))
            plan.num_tokens += count
            flight.requests.append((request, request.stats.preemptions))
        self.in_flight.append(flight)
        return plan

    # -- commits -------------------------------------------------------------------------------------------

    def _commit_span(
        self, request: Request, span: Span, outcome: SpanResult, current: bool, now: float, seconds: float
    ) -> RequestUpdate | None:
        """Take in one span's result; `current` is False if the request was preempted after it was planned.

        In that case its blocks are gone, but its tokens are valid and kept.
        """
        stats = request.stats
        stats.steps += 1
        if span.start < request.num_prompt:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
        request.num_pending -= span.num_sampled
        request.num_unverified_tokens -= unverified(span)
        if outcome.error is not None:
            self._end(request, now)
            return request.ended("error", outcome.error)
        if span.num_sampled > 1:
            self._count_drafts(request, outcome)
        update = RequestUpdate(request.id, outcome.tokens, outcome.logprobs, cached_tokens=request.num_cached)
        if outcome.pooled is not None:
            request.pool(span.start, outcome.pooled)
        request.cut_at_end(update, span.start + len(span.tokens))
        request.append(update.tokens)
        if current:
            self._commit_rows(request, len(span.tokens), span.num_sampled - len(outcome.tokens))
        if not update.tokens and not outcome.prompt_logprobs and update.finish_reason is None:
            return None
        if update.tokens and stats.first_token is None:
            stats.first_token = now
        if outcome.prompt_logprobs:
            update.prompt_logprobs = outcome.prompt_logprobs[max(0, request.num_scored - span.start) :]
            request.num_scored += len(update.prompt_logprobs)
        if update.finish_reason is not None:
            update.stats = stats
            self._end(request, now, keep_partial=True)
        return update

    def _commit_rows(self, request: Request, rows: int, surplus: int) -> None:
        """Count a span's rows as computed, except the `surplus` of rejected drafts; publish the blocks they fill."""
        request.num_computed -= surplus
        request.num_committed = min(request.num_committed + rows - surplus, len(request.tokens))
        if surplus:
            self.kv.trim(request)
        if request.num_committed // self.kv.block_size > request.num_published:
            for event in self._leaders.published(self.kv.publish(request)):
                self.arrived(event)

    def _count_drafts(self, request: Request, outcome: SpanResult) -> None:
        accepted = max(0, len(outcome.tokens) - 1)
        request.stats.drafted += outcome.num_drafted
        request.stats.accepted += accepted
        if self._lengths:
            self._lengths.accepted(request.draft_state, outcome.num_drafted, accepted)

    def _end(self, request: Request, now: float, keep_partial: bool = False) -> None:
        """End a request and free its blocks. Blocks of steps in flight are kept until they commit."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._abandon(request)
            self.kv.free(request, keep_partial=keep_partial)
            request.status = Status.FINISHED
        else:
            self._waiting.remove(request)
        request.stats.finished = now
        del self.requests[request.id]
        if request.known_to_runner:
            self._ended.append(request.id)
