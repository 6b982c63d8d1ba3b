"""Even steps for pipeline parallelism: stages compute different steps at the same time, and wait for the slowest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from quire.core.request import Request

PARTS = 4
"""Steps per stage over which prompts are spread; during the first and last of them other stages are idle."""

LEAST = 64
"""Least prompt tokens of such a step; with fewer, too much of its time goes into reading the weights."""

LOOKED_AT = 1024
"""Most requests that are counted, so that a step's time does not grow with the queue."""


def dealt_out(running: Sequence[Request], stages: int, known: int) -> tuple[list[Request], int]:
    """The running requests that may be in the next step, and how many of them may decode in it.

    Requests whose last token will not be known when the step begins are left out; of the others, those that have waited
    longest come first.

    Args:
        known: number of the latest step whose tokens will be known by then.
    """
    most = -(-sum(request.num_remaining <= 1 for request in running) // stages)
    ready = [request for request in running if not request.num_pending or request.last_step <= known]
    return sorted(ready, key=lambda request: request.last_step if request.num_remaining == 1 else -1), most


def share_of_prompts(requests: Iterable[Request], stages: int, most: int) -> int:
    """Prompt tokens for the next step, at most `most`: a share of all prompt tokens that are not computed yet."""
    prompts = sum(len(request.tokens) for request in islice(requests, LOOKED_AT) if request.num_remaining > 1)
    return min(most, max(LEAST, -(-prompts // (PARTS * stages)))) if prompts else most
