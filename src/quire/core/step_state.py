"""A step while the scheduler makes it, and while it is in flight."""

from __future__ import annotations

from quire.core.request import Request

LOOKUP_TOKENS = 2**17
"""Prompt tokens that one step looks up in the prefix cache before it looks up no further prompt, so that its time does
not grow with the queue. Hashing so many takes some tens of milliseconds."""


class PendingStep:
    """The step being made: tokens chosen for each request, and what is left of the budget."""

    __slots__ = ("budget", "chosen", "lookup", "num_decodes", "partial", "partial_before", "tuned", "withheld")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.withheld = 0  # of the budget, from prompts
        self.lookup = LOOKUP_TOKENS  # prompt tokens that may still be looked up
        self.chosen: dict[Request, int] = {}
        self.num_decodes = 0
        self.partial: list[Request] = []  # partial prefills that remain after this step
        self.partial_before: list[Request] = []  # partial prefills before it
        self.tuned = False  # no request has more than one token beside drafts, and some may be drafted

    def choose(self, request: Request, count: int) -> None:
        self.chosen[request] = self.chosen.get(request, 0) + count
        self.budget -= count

    def withhold(self, most: int) -> None:
        """Leave prompts at most so many tokens."""
        self.withheld += max(0, self.budget - most)
        self.budget = min(self.budget, most)

    def withdraw(self, request: Request) -> None:
        self.budget += self.chosen.pop(request, 0)


class StepInFlight:
    """A step in flight: its requests, each with its count of preemptions when the step was planned.

    `num_decodes` counts the tokens of those that decode, drafts included; for `tuned` see `PendingStep`.
    """

    __slots__ = ("num_decodes", "number", "requests", "tuned")

    def __init__(self, number: int, requests: list[tuple[Request, int]], num_decodes: int, tuned: bool) -> None:
        self.number = number
        self.requests = requests
        self.num_decodes = num_decodes
        self.tuned = tuned
