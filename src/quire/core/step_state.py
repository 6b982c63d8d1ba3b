"""A step's state while the scheduler builds it, and while it is in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quire.core.external import Pace
from quire.core.latency import LatencyTarget
from quire.core.request import Request

LOOKUP_TOKENS = 2**17
"""After looking up this many prompt tokens in the prefix cache, a step looks up no further prompt, so that its time
does not grow with the queue. Hashing this many takes about ten milliseconds."""

HASHED = 8
"""So many tokens that were hashed before count as one: their blocks are only found and held."""


@dataclass(slots=True)
class PendingStep:
    """The step being built: tokens chosen for each request, and what is left of the budget.

    Attributes:
        now: when it is scheduled, on the caller's clock.
        budget: tokens that may still be chosen. withheld: the part of it that prompts may not use.
        pace: limits the time that prompts may take; None if that is not limited.
        work: what prompts may still have of the latency target's work; `least` tokens they may have in any case.
        target: None if there is none, or nothing decodes.
        lookup: prompt tokens that may still be looked up in the prefix cache.
        partial_before, partial: partial prefills before this step, and those that remain after it.
        tuned: no request has more than one token besides drafts, and some may be drafted.
    """

    now: float
    budget: int
    withheld: int = 0
    pace: Pace | None = None
    work: float = math.inf
    least: int = 0
    target: LatencyTarget | None = None
    lookup: int = LOOKUP_TOKENS
    chosen: dict[Request, int] = field(default_factory=dict)
    num_decodes: int = 0
    partial_before: list[Request] = field(default_factory=list)
    partial: list[Request] = field(default_factory=list)
    tuned: bool = False

    def choose(self, request: Request, count: int) -> None:
        chosen = self.chosen.get(request, 0)
        if self.pace is not None:
            self.pace.take(count, request.num_computed + chosen)
        if self.target is not None:
            self.work -= self.target.work(count, request.num_computed + chosen)
            self.least -= count
        self.chosen[request] = chosen + count
        self.budget -= count

    def looks_up(self, tokens: int, hashed: int) -> None:
        """Account for looking up a prompt, of which the first `hashed` tokens have been hashed."""
        self.lookup -= tokens - hashed + hashed // HASHED

    def room(self, context: int, *, last: bool = False) -> int:
        """Tokens that a prompt may take after this many earlier ones.

        If there is a `pace`, tokens are counted as if at the prompt's beginning, except in its
        `last` block, so that even a long prompt that is computed here makes progress.
        """
        room = self.budget
        if self.target is not None:
            room = min(room, max(self.least, self.target.tokens(max(0.0, self.work), context)))
        if self.pace is not None:
            room = min(room, self.pace.room(context if last else 0))
        return room

    def aim(self, target: LatencyTarget, least: int) -> None:
        """Limit the work of prompts so that the step meets a latency target; `least` tokens are allowed in any case."""
        self.target, self.work, self.least = target, target.room(self.num_decodes), least

    def keep_pace(self, pace: Pace) -> None:
        """Limit the time that prompts may take, of which prompts' last tokens chosen so far have some."""
        self.pace = pace
        for request, count in self.chosen.items():
            if request.num_computed < request.num_prompt:
                pace.take(count, request.num_computed)

    def partial_ahead(self, request: Request) -> int:
        """How many remaining partial prefills come before a request in order."""
        return sum(other.order < request.order for other in self.partial)

    def withhold(self, most: int) -> None:
        """Limit the tokens left for prompts."""
        self.withheld += max(0, self.budget - most)
        self.budget = min(self.budget, most)

    def withdraw(self, request: Request) -> None:
        self.budget += self.chosen.pop(request, 0)


@dataclass(slots=True)
class StepInFlight:
    """A step in flight: its requests, each with its number of preemptions at planning time.

    Attributes:
        num_decodes, work: requests that decode in it, and the work of its prompts; 0 without a latency target.
        tuned: see `PendingStep`.
    """

    number: int
    tuned: bool
    requests: list[tuple[Request, int]] = field(default_factory=list)
    num_decodes: int = 0
    work: float = 0.0
