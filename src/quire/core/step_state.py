"""A step's state while the scheduler builds it, and while it is in flight."""

from __future__ import annotations

import math

from quire.core.cost import Costs
from quire.core.request import Request

LOOKUP_TOKENS = 2**17
"""After looking up this many prompt tokens in the prefix cache, a step looks up no further prompt, so that its time
does not grow with the queue. Hashing this many takes a few tens of milliseconds."""


class PendingStep:
    """The step being built: tokens chosen for each request, and what is left of the budget.

    Attributes:
        spare: the time that prompts and loads may still take, counted in tokens at a prompt's beginning.
        costs: estimates for that; None if their time is not limited.
    """

    __slots__ = (
        *("budget", "chosen", "costs", "lookup", "num_decodes", "partial", "partial_before", "spare", "tuned"),
        "withheld",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.spare = math.inf
        self.costs: Costs | None = None
        self.withheld = 0  # part of the budget that prompts may not use
        self.lookup = LOOKUP_TOKENS  # prompt tokens that may still be looked up
        self.chosen: dict[Request, int] = {}
        self.num_decodes = 0
        self.partial: list[Request] = []  # partial prefills that remain after this step
        self.partial_before: list[Request] = []  # partial prefills before it
        self.tuned = False  # no request has more than one token beside drafts, and some may be drafted

    def choose(self, request: Request, count: int) -> None:
        chosen = self.chosen.get(request, 0)
        if self.costs is not None:
            self.spare -= self.costs.in_tokens(count, request.num_computed + chosen)
        self.chosen[request] = chosen + count
        self.budget -= count

    def room(self, context: int) -> int:
        """Tokens that a prompt may take after this many earlier ones."""
        if self.costs is None:
            return self.budget
        return min(self.budget, self.costs.most_tokens(self.spare, context))

    def slow(self, costs: Costs, spare: float) -> None:
        """Limit the time that prompts and loads may take, of which prompts' last tokens chosen so far have some."""
        self.costs, self.spare = costs, spare
        for request, count in self.chosen.items():
            if request.num_computed < request.num_prompt:
                self.spare -= costs.in_tokens(count, request.num_computed)

    def load(self, blocks: float, source: str) -> None:
        """Account for blocks that the step loads."""
        if self.costs is not None:
            self.spare -= blocks * self.costs.tokens_per_load(source)

    def partial_ahead(self, request: Request) -> int:
        """How many remaining partial prefills come before a request in order."""
        return sum(other.order < request.order for other in self.partial)

    def withhold(self, most: int) -> None:
        """Limit the tokens left for prompts."""
        self.withheld += max(0, self.budget - most)
        self.budget = min(self.budget, most)

    def withdraw(self, request: Request) -> None:
        self.budget += self.chosen.pop(request, 0)


class StepInFlight:
    """A step in flight: its requests, each with its number of preemptions at planning time.

    `num_decodes` counts the tokens of those that decode, drafts included; for `tuned` see `PendingStep`.
    """

    __slots__ = ("num_decodes", "number", "requests", "tuned")

    def __init__(self, number: int, requests: list[tuple[Request, int]], num_decodes: int, tuned: bool) -> None:
        self.number = number
        self.requests = requests
        self.num_decodes = num_decodes
        self.tuned = tuned
