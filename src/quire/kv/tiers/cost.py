"""Whether it is faster to load blocks than to compute them, from measured step times."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from quire.core.step import StepPlan, StepResult
from quire.kv.tiers.tier import HOST

_FORGET = 0.9
"""Factor by which an observation's weight decays with each newer one."""

_RETRY = 0.98
"""The expected time of a load is reduced by this factor whenever it is not tried, so that one bad measurement fades."""

MARGIN = 0.8
"""A load must take less than this share of the time to compute: it also takes up room in a step."""

BESIDE_DECODES = 0.25
"""How much loads may lengthen a step with decoding requests, and prompts may where other engines compute the long ones,
as a share of its time, so that streams get their tokens at even intervals."""

_LITTLE = 0.1
"""A chunk takes further tokens as long as that lengthens it by no more than this share of the time of its first one."""

_LEAST_SHARE = 0.25
"""The least share of a step's time for prompts, even if steps that only decode have lately taken as long."""

LEAST_ODDS = 0.02
"""Blocks are saved with such odds to come back, as long as not known what that costs and gains."""

LEAST_TOKENS = 16
"""Steps with fewer tokens of a request than this are not used to learn about prompts."""


class Costs:
    """Estimates the seconds to compute tokens and to load blocks.

    Computing n tokens after c others is modelled as a n + b n (c + n / 2): a cost per token, and a cost per pair of a
    token and one that it sees; fitted by least squares with exponential forgetting.

    Args:
        pair: b / a, from counted operations.
        read: bytes of KV per token, relative to those of the weights, which a step reads.
    """

    def __init__(self, pair: float = 0.0, read: float = 0.0) -> None:
        self.pair, self._read = pair, read
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._loads: dict[str, tuple[float, float]] = {}  # by source: blocks, and the seconds that they took
        self._saves = 0.0, 0.0  # blocks, and the seconds that they took
        self._decode = 0.0, 0.0  # number of steps that only decode, and their seconds

    def observe(self, plan: StepPlan, result: StepResult, loaded: float = 0.0, saved: float = 0.0) -> None:
        """Learn from a step that loaded and saved this many blocks."""
        if loaded:
            self.moved(HOST, loaded, result.loading)
        if plan.saves:
            self._saves = _later(self._saves[0], saved), _later(self._saves[1], result.saving)
            return
        y = result.seconds - result.loading
        prompts = [span for span in plan.spans if len(span.tokens) >= LEAST_TOKENS]
        if not prompts:
            if plan.spans and all(len(span.tokens) <= max(1, span.num_sampled) for span in plan.spans):
                self._decode = _later(self._decode[0], 1.0), _later(self._decode[1], y)
            return
        steps, seconds = self._decode
        if steps and len(prompts) < len(plan.spans):
            y = max(y - seconds / steps, y * _LEAST_SHARE)
        x = float(sum(len(span.tokens) for span in prompts))
        z = sum(len(span.tokens) * (span.start + len(span.tokens) / 2) for span in prompts)
        self._xx, self._xz, self._zz = _later(self._xx, x * x), _later(self._xz, x * z), _later(self._zz, z * z)
        self._xy, self._zy = _later(self._xy, x * y), _later(self._zy, z * y)

    def compute_seconds(self, tokens: int, context: int) -> float | None:
        """Seconds to compute tokens after others; None if not known yet."""
        if not self._xx:
            return None
        determinant = self._xx * self._zz - self._xz * self._xz
        a, b = self._xy / self._xx, 0.0
        if determinant > 1e-6 * self._xx * self._zz:
            slope = (self._xx * self._zy - self._xz * self._xy) / determinant
            base = (self._zz * self._xy - self._xz * self._zy) / determinant
            if slope > 0.0:  # neither can be negative; if noise suggests it, it is 0
                a, b = (base, slope) if base > 0.0 else (0.0, self._zy / self._zz)
        return tokens * (a + b * (context + tokens / 2))

    def moved(self, source: str, blocks: float, seconds: float) -> None:
        """Learn that blocks came from a tier, or from the node of that name, in this many seconds."""
        before = self._loads.get(source, (0.0, 0.0))
        self._loads[source] = _later(before[0], blocks), _later(before[1], seconds)

    def keep(self, sources: Container[str]) -> None:
        """Forget the speed of all sources but these."""
        self._loads = {source: known for source, known in self._loads.items() if source in sources}

    def load_seconds(self, source: str, blocks: float) -> float | None:
        """Seconds to load blocks; None if not known yet."""
        known, seconds = self._loads.get(source, (0.0, 0.0))
        return blocks * seconds / known if known else None

    def blocks_beside_decodes(self, source: str) -> int | None:
        """How many blocks a step with decoding requests may load; None if not known yet."""
        (steps, seconds), load = self._decode, self.load_seconds(source, 1)
        return int(BESIDE_DECODES * seconds / steps / load) if steps and load else None

    def in_tokens(self, count: int, context: int) -> float:
        """The number of tokens at a prompt's beginning that take as long as these tokens after others. Reading the
        others is counted relative to a step that only decodes, which reads the weights."""
        (steps, seconds), tokens, compute = self._decode, self._xx, self._xy
        reading = self._read * seconds / steps * tokens / compute if steps and compute else 0.0
        return context * reading + count * (1 + self.pair * context)

    def most_tokens(self, spare: float, context: int) -> int:
        """How many tokens after others fit into such a time. If there is any time left, at least one, and as many as
        take little longer: a chunk reads those others once, and each further chunk would read them again.
        """
        if spare < 1:
            return 0
        spare = max(spare, (1 + _LITTLE) * self.in_tokens(1, context))
        return int((spare - self.in_tokens(0, context)) / (1 + self.pair * context))

    def tokens_per_load(self, source: str) -> float:
        """Prompt tokens that are computed in the time it takes to load a block; 0 if not known yet."""
        load = self.load_seconds(source, 1)
        return load * self._xx / self._xy if load and self._xy else 0.0

    def tokens_beside_decodes(self) -> int:
        """How many prompt tokens a step with decoding requests may compute; 0 if not known yet."""
        (steps, seconds), tokens, compute = self._decode, self._xx, self._xy  # means, as a fit may give 0
        return int(BESIDE_DECODES * seconds / steps * tokens / compute) if steps and compute else 0

    def prefers_load(self, source: str, blocks: float, tokens: int, context: int) -> bool:
        """Whether to load blocks rather than compute their tokens after others. True while too little is known, so
        that it is measured."""
        load = self.load_seconds(source, blocks)
        compute = self.compute_seconds(tokens, context)
        if load is None or compute is None or load < MARGIN * compute:
            return True
        known, seconds = self._loads[source]
        self._loads[source] = known, seconds * _RETRY
        return False

    def worth_saving(self, odds: float, tokens: int) -> bool:
        """Whether to save a block of so many tokens that comes back with such odds: what is gained then, as it is
        loaded and not computed, must be more on average than what saving it takes."""
        blocks, seconds = self._saves
        if not blocks or not self._xx:
            return odds > LEAST_ODDS
        save = seconds / blocks
        load = self.load_seconds(HOST, 1)
        return odds * (tokens * self._xy / self._xx - (save if load is None else load)) > save


@dataclass
class Spare:
    """The time that prompts and loads may take of a step with decodes (`external.Pace`).

    Attributes:
        tokens: what is left of it, counted in tokens at a prompt's beginning.
    """

    costs: Costs
    tokens: float

    def take(self, count: int, context: int) -> None:
        """See `Pace`."""
        self.tokens -= self.costs.in_tokens(count, context)

    def room(self, context: int) -> int:
        """See `Pace`."""
        return self.costs.most_tokens(self.tokens, context)

    def load(self, blocks: float, source: str) -> None:
        """The step loads these blocks."""
        self.tokens -= blocks * self.costs.tokens_per_load(source)

    def blocks(self, source: str) -> float:
        """How many blocks it may still load; infinite if the time of one is not known yet."""
        each = self.costs.tokens_per_load(source)
        return int(self.tokens / each) if each else math.inf


def _later(before: float, value: float) -> float:
    return before * _FORGET + value
