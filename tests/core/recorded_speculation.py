"""Speculation by the real scheduler on recorded drafts: what the demo model's drafters were accepted at each position.

`demo_drafts.json` has, for each drafter and kind of sampling, how many drafts would have been accepted at each position
of eight texts, and what steps take. `benchmarks/draft_traces.py` records it. No clock is read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import DRAFT, SpanResult, StepPlan, StepResult

PROMPT = [1, 2, 3, 4]
NOISE, HICCUPS = 0.1, 0.01
"""A step takes up to so much longer, as a share; and so many of all steps take four times as long."""
SPECS: dict[str, dict[str, Any]] = {
    "n-grams": {"method": "ngram"},
    "demo-draft": {"method": "draft_model", "model": "none"},
    "demo-eagle": {"method": "eagle", "model": "none"},
    "demo-eagle, trees of 16": {"method": "eagle", "model": "none", "tree_width": 4},
}
PARAMS = {"greedy": SamplingParams(temperature=0.0), "temperature 1": SamplingParams(seed=1)}


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "demo_drafts.json").read_text())
    return found


@dataclass(frozen=True)
class Costs:
    """Seconds of steps: see `benchmarks.draft_traces.Times`."""

    step: Sequence[float]
    follow: Sequence[float]
    draft: Sequence[float]


class Recorded:
    """A drafter whose drafts were recorded, on a machine of which the times were.

    Args:
        seed: of noise and hiccups.

    Attributes:
        seconds, made: in all steps.
    """

    def __init__(self, drafter: str, seed: int = 0) -> None:
        self._kinds = recorded()[drafter]
        self._random = random.Random(seed)
        self.seconds, self.made, self.steps = 0.0, 0, 0
        self.kind = "greedy"

    def use(self, kind: str) -> None:
        """From here on, requests are of this kind."""
        self.kind = kind
        self.lines: list[str] = self._kinds[kind]["accepted"]
        times = self._kinds[kind]["milliseconds"]
        self.costs = Costs(*(times[name] for name in ("step", "follow", "draft")))

    @property
    def length(self) -> int:
        return len(self.lines[0]) + 1

    def verified(self, text: int, known: int, count: int) -> tuple[int, int]:
        """Of `count` drafts wanted when so many tokens are known: how many there are, and how many are accepted."""
        mark = self.lines[text % len(self.lines)][known - 1] if known <= len(self.lines[0]) else "."
        if not count or mark == ".":
            return 0, 0
        return count, min(count, int(mark, 36))

    def step(
        self, requests: int, followed: int, wanted: Sequence[int], drafts: Sequence[int], tokens: int
    ) -> tuple[float, float]:
        """A step's seconds, and those of drafting; it made so many tokens."""
        rows, depth, asked = requests + sum(drafts), max(drafts), sum(count > 0 for count in wanted)
        slow = (1 + NOISE * self._random.random()) * (4 if self._random.random() < HICCUPS else 1)
        one, n, row, any_ = self.costs.step
        step = one + n * requests + row * rows + any_ * (depth > 0)
        drafting = 0.0
        if asked:
            one, n, d, nd = self.costs.draft
            depth = max(wanted)
            drafting = one + n * asked + d * depth + nd * asked * depth
        elif followed:
            drafting = self.costs.follow[0] + self.costs.follow[1] * followed
        drafting = max(0.0, drafting)
        self.seconds += slow * (step + drafting) / 1000
        self.made += tokens
        self.steps += 1
        return slow * (step + drafting) / 1000, slow * drafting / 1000

    def rate(self) -> float:
        """Tokens a second since it was asked last."""
        rate = self.made / self.seconds if self.seconds else 0.0
        self.seconds, self.made, self.steps = 0.0, 0, 0
        return rate


def fixed(machine: Recorded, together: int, drafts: int, rounds: int = 1) -> float:
    """Tokens a second of all texts, `together` at once, with always so many drafts; 0: plain."""
    machine.rate()
    for _ in range(rounds):
        for first in range(0, len(machine.lines), together):
            known = dict.fromkeys(range(first, first + together), 1)
            while known:
                wanted = [min(drafts, machine.length - known[text] - 1) for text in known]
                results = [
                    machine.verified(text, known[text], count) for text, count in zip(known, wanted, strict=True)
                ]
                counts = [proposed for proposed, _ in results]
                made = {text: 1 + accepted for text, (_, accepted) in zip(known, results, strict=True)}
                machine.step(len(known), len(known) if drafts else 0, wanted, counts, sum(made.values()))
                known = {text: n + made[text] for text, n in known.items() if n + made[text] < machine.length}
    return machine.rate()


class Tuned:
    """A scheduler, and the requests that it has had."""

    def __init__(self, drafter: str, machine: Recorded) -> None:
        config = EngineConfig(
            model="none",
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            prefix_cache="off",
            speculative_config=SPECS[drafter],
        )
        kv = KVManager([KVGroup(64 * 80)], 16, config.prefix_cache, BlockHasher(bytes(32), "none"))
        self.scheduler, self.machine, self._next = Scheduler(config, kv, 10_000), machine, 0
        self.clock = 0.0
        self._texts: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._followed: set[int] = set()

    def run(self, together: int, rounds: int = 1) -> float:
        """Tokens a second of all texts, after their prompts."""
        machine = self.machine
        machine.rate()
        for _ in range(rounds):
            for first in range(0, len(machine.lines), together):
                self._wave(range(first, first + together))
        return machine.rate()

    def _wave(self, texts: Sequence[int]) -> None:
        for text in texts:
            self._texts[self._next], self._known[self._next] = text, 0
            params = PARAMS[self.machine.kind]
            self.scheduler.add(Request(self._next, PROMPT, params, max_tokens=self.machine.length))
            self._next += 1
        while not self.scheduler.idle:
            plan = self.scheduler.schedule(self.clock)
            assert plan is not None
            self._followed.update(info.request for info in plan.started if info.drafting_enabled)
            self._followed.difference_update(plan.ended, plan.drop_drafting)
            self.scheduler.commit(plan, self._compute(plan), self.clock)

    def _compute(self, plan: StepPlan) -> StepResult:
        machine, began = self.machine, self.clock
        if not all(self._known[span.request] for span in plan.spans):  # the prompts
            for span in plan.spans:
                self._known[span.request] = 1
            self.clock += 0.001 * len(plan.spans)
            return StepResult(plan.number, [SpanResult([7]) for _ in plan.spans], 0.001 * len(plan.spans), began, 0.0)
        wanted = [span.tokens.count(DRAFT) for span in plan.spans]
        results = [
            machine.verified(self._texts[span.request], self._known[span.request], count)
            for span, count in zip(plan.spans, wanted, strict=True)
        ]
        spans = [SpanResult([7] * (1 + accepted), num_drafted=proposed) for proposed, accepted in results]
        for span, result in zip(plan.spans, spans, strict=True):
            self._known[span.request] += len(result.tokens)
        followed = sum(span.request in self._followed for span in plan.spans)
        made = sum(len(span.tokens) for span in spans)
        seconds, drafting = machine.step(len(spans), followed, wanted, [n for n, _ in results], made)
        self.clock += seconds
        return StepResult(plan.number, spans, seconds, began, drafting)


ROWS = [("greedy", 1), ("greedy", 8), ("temperature 1", 1), ("temperature 1", 8)]


def table(drafter: str, seed: int = 0, rounds: int = 4) -> dict[tuple[str, int], tuple[float, float, float]]:
    """By row of the table: tokens a second of plain, of always as many drafts, and self-tuned after a first round."""
    machine, other = Recorded(drafter, seed), Recorded(drafter, seed)
    tuned, made = Tuned(drafter, machine), {}
    most = tuned.scheduler._speculation.num_speculative_tokens  # type: ignore[union-attr]
    for kind, together in ROWS:
        machine.use(kind)
        other.use(kind)
        tuned.run(together)
        made[kind, together] = (
            fixed(other, together, 0, rounds),
            fixed(other, together, most, rounds),
            tuned.run(together, rounds),
        )
    return made
