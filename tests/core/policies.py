"""What the scheduler promises beside right tokens: who is served when, who gives way, and how much anybody holds.

`Policies` watches a scheduler's doors. It knows only what comes out: the plans' spans, which requests run, how often
each was preempted, and their block tables.
"""

from __future__ import annotations

from quire.core.request import Request, Status
from quire.core.scheduler import Scheduler
from quire.core.step import DRAFT, StepPlan


class Policies:
    """Call `before` and `after` around every `schedule`; broken promises are assertions.

    Args:
        scheduler: whose requests' ids count up.
        depth: steps in flight while the next one is made.
    """

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.by_priority = scheduler.config.scheduling_policy == "priority"
        self.requests: dict[int, Request] = {}
        self.started: set[int] = set()
        self.reached: dict[int, int] = {}  # furthest position that a span of it ended at
        self.position: dict[int, int] = {}  # where its last span ended, since it last began
        self._running: list[Request] = []
        self._decoding: list[Request] = []
        self._preemptions: dict[int, int] = {}

    def goes_first(self, one: Request, other: Request) -> bool:
        """Whether the order of service is certain: by priority, then, of one owner's, by arrival."""
        priorities = [each.params.priority if self.by_priority else 0 for each in (one, other)]
        if priorities[0] != priorities[1]:
            return priorities[0] < priorities[1]
        return getattr(one, "owner", "") == getattr(other, "owner", "") and one.id < other.id

    def before(self) -> None:
        self.requests.update(self.scheduler.requests)
        self._running = list(self.scheduler.running)
        self._preemptions = {request.id: request.stats.preemptions for request in self._running}
        alone = [] if self.scheduler.in_flight else self._running
        self._decoding = [each for each in alone if each.num_remaining == 1]

    def after(self, plan: StepPlan | None) -> None:
        if self.scheduler.trials.on:  # it is being found out who makes steps fail: others wait for that
            return
        victims = [each for each in self._running if each.stats.preemptions > self._preemptions[each.id]]
        for victim in victims:
            self.position[victim.id] = 0
        self._only_later_ones_give_way(victims)
        self._nobody_overtakes(plan)
        self._every_decode_goes_on(plan, victims)
        self._windows_bound_what_is_held()
        for span in plan.spans if plan else ():
            self.started.add(span.request)
            end = span.start + sum(token != DRAFT for token in span.tokens)
            self.position[span.request] = end
            self.reached[span.request] = max(end, self.reached.get(span.request, 0))
        if plan is None and self.depth == 0:
            excused = self.scheduler.idle or self.scheduler.expects_others
            assert excused, "nothing is in flight, somebody waits for nobody, and nothing runs"

    def recomputing(self, request: Request) -> bool:
        """It was preempted, and has not got back to where it was."""
        return request.stats.preemptions > 0 and self.position.get(request.id, 0) < self.reached.get(request.id, 0)

    def _only_later_ones_give_way(self, victims: list[Request]) -> None:
        """Whoever is preempted was behind all others that went on, but for those that had given way before."""
        for victim in victims:
            for other in self.scheduler.running:
                spared = other.stats.preemptions > 0 or other not in self._running
                assert spared or not self.goes_first(victim, other), (
                    f"request {victim.id} gave way, and {other.id} behind it went on"
                )

    def _nobody_overtakes(self, plan: StepPlan | None) -> None:
        """Requests begin in order, but for those that wait for another's prefix, or for a token that is in flight."""
        spans = plan.spans if plan else ()
        first = [self.requests[span.request] for span in spans if span.request not in self.started]
        for request in self.scheduler.requests.values():
            if request.status is Status.WAITING and not request.num_pending:
                before = [each.id for each in first if self.goes_first(request, each)]
                assert not before, f"request {request.id} waits, and {before} behind it have begun"

    def _every_decode_goes_on(self, plan: StepPlan | None, victims: list[Request]) -> None:
        """With nothing in flight, whoever lacks its next token alone gets it; for want of blocks the last ones wait."""
        planned = {span.request for span in plan.spans} if plan else set()
        for request in self._decoding:
            if request.id not in planned and request not in victims:
                behind = [each for each in planned if self.goes_first(request, self.requests[each])]
                assert not behind, f"request {request.id} decodes and was left out, and {behind} behind it were not"
                left = min(group.num_available for group in self.scheduler.kv.groups)
                assert left == 0, f"request {request.id} was left out, and blocks of all groups are free"

    def _windows_bound_what_is_held(self) -> None:
        """Beyond its window, a request holds no more than what its steps in flight, and this one, may write.

        A step of it is a chunk of its prompt, or a token and its drafts.
        """
        kv, config = self.scheduler.kv, self.scheduler.config
        drafts = config.speculation.num_speculative_tokens if config.speculation else 0
        chunk = max(config.long_prefill_token_threshold or 2**30, 1 + drafts)
        rows = min(chunk, config.max_num_batched_tokens)
        for number, group in enumerate(kv.groups):
            if group.keeps_all:
                continue
            most = -(-(group.retention.window + (self.depth + 1) * rows) // kv.block_size) + 2
            for request in self.scheduler.running:
                held = sum(block != 0 for block in request.tables[number])
                assert held <= most, f"request {request.id} holds {held} blocks; its window and steps need {most}"


def sizes(books: object) -> int:
    """Entries of all lists and dicts that an object keeps: what must not grow without bound."""
    return sum(len(value) for value in vars(books).values() if isinstance(value, list | dict | set))


def drafts(plan: StepPlan) -> dict[int, int]:
    """How many drafts each request's span has room for."""
    return {span.request: sum(token == DRAFT for token in span.tokens) for span in plan.spans}


def decodes(plan: StepPlan) -> list[int]:
    """The requests whose span is one known token, drafts aside."""
    return [span.request for span in plan.spans if sum(token != DRAFT for token in span.tokens) == 1]
