"""Runs the scheduler with recorded tokens instead of a model, for `quire trace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import SpanResult, StepPlan, StepResult


@dataclass(frozen=True)
class Traced:
    """A recorded request.

    Attributes:
        letter: its name.
        texts: the text of each of its tokens.
        finish_reason: why it ended.
    """

    letter: str
    prompt: list[int]
    output: list[int]
    texts: dict[int, str]
    finish_reason: str


class Replay:
    """Schedules recorded requests, step by step.

    Args:
        config: budgets and policy. block_size: tokens per block.
    """

    def __init__(self, config: EngineConfig, block_size: int, traced: Sequence[Traced]) -> None:
        self.traced = traced
        num_blocks = (config.num_kv_blocks or 0) + 1  # block 0 is null
        self.kv = KVManager([KVGroup(num_blocks)], block_size, config.prefix_cache, BlockHasher(bytes(32), "trace"))
        longest = max(len(one.prompt) + len(one.output) for one in traced)
        self.scheduler = Scheduler(config, self.kv, longest + 1)
        self.clock = 0.0

    def add(self, number: int) -> Request:
        """Queue the request with this number.

        Raises:
            RequestTooLargeError: it does not fit into the pool, even alone.
        """
        one = self.traced[number]
        request = Request(number, list(one.prompt), SamplingParams(seed=0), max_tokens=max(1, len(one.output)))
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do."""
        self.clock += 1.0
        return self.scheduler.schedule(self.clock)

    def commit(self, plan: StepPlan) -> list[int]:
        """Commit a step; returns the requests that ended with it."""
        spans = []
        for span in plan.spans:
            request, one = self.scheduler.requests[span.request], self.traced[span.request]
            known = len(request.tokens) - request.num_prompt
            spans.append(SpanResult(one.output[known : known + 1] if span.num_sampled else []))
        updates = self.scheduler.commit(plan, StepResult(plan.number, spans, seconds=0.001), self.clock)
        return [update.request for update in updates if update.finish_reason]
