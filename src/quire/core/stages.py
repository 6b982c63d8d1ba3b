"""A pipeline's steps are to be alike: its stages compute at once, each another step, and wait for the slowest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from quire.core.request import Request

PARTS = 4
"""Steps over which prompts are dealt out, a stage: the first and the last of them leave other stages without work."""

LEAST = 64
"""Tokens of such a step at least: of fewer, reading the weights takes too much of its time."""

LOOKED_AT = 1024
"""Requests, so that a step's time does not grow with the queue."""


def dealt_out(running: Sequence[Request], stages: int, known: int) -> tuple[list[Request], int]:
    """Those of the running requests that may be in the next step, and how many of them may decode in it.

    Those whose last token is not known when it begins wait for it; of the others those come first that have waited
    longest.

    Args:
        known: what the steps up to this one have sampled is known by then.
    """
    most = -(-sum(request.num_remaining <= 1 for request in running) // stages)
    ready = [request for request in running if not request.num_pending or request.last_step <= known]
    return sorted(ready, key=lambda request: request.last_step if request.num_remaining == 1 else -1), most


def share_of_prompts(requests: Iterable[Request], stages: int, most: int) -> int:
    """Prompt tokens of the next step, `most` at most: a part of all prompts that are there and not computed yet."""
    prompts = sum(len(request.tokens) for request in islice(requests, LOOKED_AT) if request.num_remaining > 1)
    return min(most, max(LEAST, -(-prompts // (PARTS * stages)))) if prompts else most
