"""Speculation by the real scheduler on a machine whose steps take the time that a stated model says.

Nothing is computed and no clock is read: acceptance, noise and hiccups come from seeded generators, so that a run is
the same everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import DRAFT, SpanResult, StepPlan, StepResult

PROMPT = [1, 2, 3, 4]
MOST = 4


@dataclass(frozen=True)
class Costs:
    """What a step takes, in units of a step of one row.

    Attributes:
        row: every row beyond `free` ones takes this.
        free: as many rows take no more than one (the weights' way through memory is all that counts).
        draft: making one more draft of each request that wants so many.
        follow: following all requests that may be drafted, drafts or none: a step's share for `together` of them.
        noise: a step takes up to this share longer.
        hiccups: so many of all steps take four times as long; so do the first one without drafts and the first with.
    """

    row: float = 0.0
    free: int = 1
    draft: float = 0.0
    follow: float = 0.0
    noise: float = 0.1
    hiccups: float = 0.02


@dataclass(frozen=True)
class Work:
    """Requests that come in waves of `together`; each makes `length` tokens.

    Attributes:
        chances: that a first, a second, ... draft is accepted if those before it are; the last stands for all others.
        later: those of the second half of all tokens.
    """

    together: int
    length: int
    waves: int
    chances: Sequence[float]
    later: Sequence[float] | None = None

    @property
    def tokens(self) -> int:
        return self.together * self.length * self.waves

    def chances_after(self, made: int) -> Sequence[float]:
        """When so many tokens have been made."""
        return self.later if self.later is not None and 2 * made >= self.tokens else self.chances


class Machine:
    """Takes time as `Costs` says, and accepts drafts by chance.

    Attributes:
        seconds: that its steps took.
        made: tokens.
        lengths: drafts of each request of each step.
    """

    def __init__(self, costs: Costs, work: Work, seed: int = 0) -> None:
        self.costs, self.work = costs, work
        self.seconds, self.made, self.lengths = 0.0, 0, list[list[int]]()
        self._luck, self._noise, self._hiccups = (random.Random(f"{seed} {what}") for what in ("luck", "noise", "slow"))
        self._seen = set[bool]()

    def accepted(self, drafts: int) -> int:
        """Of so many drafts of a request."""
        chances, count = self.work.chances_after(self.made), 0
        while count < drafts and self._luck.random() < chances[min(count, len(chances) - 1)]:
            count += 1
        return count

    def step(self, rows: int, drafts: list[int], followed: int) -> tuple[float, float]:
        """A step's seconds, and how many of them went into drafting."""
        costs, depth = self.costs, max(drafts)
        slow = 1 + costs.noise * self._noise.random()
        if self._hiccups.random() < costs.hiccups or (depth > 0) not in self._seen:
            slow *= 4
        self._seen.add(depth > 0)
        drafting = slow * (costs.follow * followed / self.work.together + costs.draft * depth)
        seconds = slow * (1 + costs.row * max(0, rows - costs.free)) + drafting
        self.seconds += seconds
        self.lengths.append(drafts)
        return seconds, drafting

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.made / self.seconds


def always(costs: Costs, work: Work, drafts: int, seed: int = 0) -> Machine:
    """So many drafts of each request in each step, 0 for plain decoding, without a scheduler: what it does is known."""
    return _decided(costs, work, lambda machine, left: drafts, drafts > 0, seed)


def knowing(costs: Costs, work: Work, seed: int = 0) -> Machine:
    """Each step has as many drafts of each request as make the most tokens a second, by the true costs and chances."""

    def rate(machine: Machine, left: list[int], drafts: int) -> float:
        chances = work.chances_after(machine.made)
        tokens, rows, depth = float(len(left)), len(left), 0
        for count in (min(drafts, each - 1) for each in left):
            tokens += sum(math.prod(chances[min(i, len(chances) - 1)] for i in range(n)) for n in range(1, count + 1))
            rows, depth = rows + count, max(depth, count)
        return tokens / (1 + costs.row * max(0, rows - costs.free) + costs.draft * depth)

    def best(machine: Machine, left: list[int]) -> int:
        return max(range(MOST + 1), key=lambda drafts: rate(machine, left, drafts))

    return _decided(costs, work, best, True, seed)


def _decided(
    costs: Costs, work: Work, drafts: Callable[[Machine, list[int]], int], followed: bool, seed: int
) -> Machine:
    """As many drafts of each request of a step as `drafts` says, given how many tokens each has left."""
    machine = Machine(costs, work, seed)
    for _ in range(work.waves):
        machine.step(work.together * len(PROMPT), [0] * work.together, work.together if followed else 0)
        machine.made += work.together
        left = [work.length - 1] * work.together
        while left:
            wanted = drafts(machine, left)
            counts = [min(wanted, each - 1) for each in left]
            machine.step(len(left) + sum(counts), counts, len(left) if followed else 0)
            made = [1 + machine.accepted(count) for count in counts]
            machine.made += sum(made)
            left = [each - new for each, new in zip(left, made, strict=True) if each > new]
    return machine


def scheduled(costs: Costs, work: Work, tuned: bool, most: int = MOST, seed: int = 0) -> Machine:
    """As the scheduler decides: self-tuned, or always as many as it may."""
    spec = {"method": "ngram", "num_speculative_tokens": most, "adaptive": tuned}
    config = EngineConfig(
        model="none", max_num_seqs=64, max_num_batched_tokens=2048, prefix_cache="off", speculative_config=spec
    )
    kv = KVManager([KVGroup(64 * 80)], 16, config.prefix_cache, BlockHasher(bytes(32), "none"))
    scheduler, machine, followed = Scheduler(config, kv, 10_000), Machine(costs, work, seed), set[int]()
    for wave in range(work.waves):
        for i in range(wave * work.together, (wave + 1) * work.together):
            scheduler.add(Request(i, PROMPT, SamplingParams(temperature=0.0), max_tokens=work.length))
        while not scheduler.idle:
            plan = scheduler.schedule(machine.seconds)
            assert plan is not None
            followed.update(info.request for info in plan.started if info.drafting_enabled)
            followed.difference_update(plan.ended, plan.drop_drafting)
            scheduler.commit(plan, _run(machine, plan, followed), machine.seconds)
    return machine


def _run(machine: Machine, plan: StepPlan, followed: set[int]) -> StepResult:
    drafts = [span.tokens.count(DRAFT) for span in plan.spans]
    began = machine.seconds
    seconds, drafting = machine.step(plan.num_tokens, drafts, sum(span.request in followed for span in plan.spans))
    spans = [SpanResult([7] * (1 + machine.accepted(count)), num_drafted=count) for count in drafts]
    machine.made += sum(len(span.tokens) for span in spans)
    return StepResult(plan.number, spans, seconds, began, drafting)
