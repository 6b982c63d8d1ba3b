"""Whether blocks are better loaded than computed, as steps have shown."""

from __future__ import annotations

from collections.abc import Container

from quire.core.step import StepPlan, StepResult

_FORGET = 0.9
"""Weight that an observation keeps with each newer one."""

_RETRY = 0.98
"""What a load is expected to take shrinks by this with each one that is not tried: a bad moment is forgotten."""

MARGIN = 0.8
"""A load must take less than this share of the time that computing takes: it also takes a place in a step."""

BESIDE_DECODES = 0.25
"""Of a step's time, what loads may add where requests decode in it, and prompts where other engines compute the long
ones: tokens of streams come at even times."""

_LEAST_SHARE = 0.25
"""Of a step's time, what prompts have in it at least, though steps that only decode may have taken as long lately."""

LEAST_TOKENS = 16
"""Steps with fewer tokens than this of a request say nothing about prompts."""


class Costs:
    """Seconds to compute tokens, and to load blocks.

    Computing n tokens after c others is modelled as a n + b n (c + n / 2): what each token costs, and what each pair of
    a token and one that it sees does; fitted by least squares with exponential forgetting.

    Args:
        pair: b / a, as counted operations have it.
        read: bytes that are kept of a token, as a share of those of the weights, which a step reads.
    """

    def __init__(self, pair: float = 0.0, read: float = 0.0) -> None:
        self._pair, self._read = pair, read
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._loads: dict[str, tuple[float, float]] = {}  # by where from: blocks, and seconds that they took
        self._decode = 0.0, 0.0  # steps that only decode, and seconds that they took

    def observe(self, plan: StepPlan, result: StepResult, loaded: float = 0.0) -> None:
        """Learn from a step, which has loaded so many blocks."""
        if loaded:
            self.moved("host", loaded, result.loading)
        if plan.saves:
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
        """To compute so many tokens after others; None: not known yet."""
        if not self._xx:
            return None
        determinant = self._xx * self._zz - self._xz * self._xz
        a, b = self._xy / self._xx, 0.0
        if determinant > 1e-6 * self._xx * self._zz:
            slope = (self._xx * self._zy - self._xz * self._xy) / determinant
            base = (self._zz * self._xy - self._xz * self._zy) / determinant
            if slope > 0.0:  # neither can be negative: where noise says so, it is none
                a, b = (base, slope) if base > 0.0 else (0.0, self._zy / self._zz)
        return tokens * (a + b * (context + tokens / 2))

    def moved(self, source: str, blocks: float, seconds: float) -> None:
        """So many blocks came from a tier, or the node of that name, in so many seconds."""
        before = self._loads.get(source, (0.0, 0.0))
        self._loads[source] = _later(before[0], blocks), _later(before[1], seconds)

    def keep(self, sources: Container[str]) -> None:
        """Forget how fast others are than these."""
        self._loads = {source: known for source, known in self._loads.items() if source in sources}

    def load_seconds(self, source: str, blocks: float) -> float | None:
        """To load so many blocks; None: not known yet."""
        known, seconds = self._loads.get(source, (0.0, 0.0))
        return blocks * seconds / known if known else None

    def blocks_beside_decodes(self, source: str) -> int | None:
        """How many blocks a step may load in which requests decode; None: not known yet."""
        (steps, seconds), load = self._decode, self.load_seconds(source, 1)
        return int(BESIDE_DECODES * seconds / steps / load) if steps and load else None

    def in_tokens(self, count: int, context: int) -> float:
        """The time of so many tokens of a prompt after others of it, as that of so many with none before them. To read
        those others takes its share of the time of a step that only decodes, as such a step reads the weights."""
        (steps, seconds), tokens, compute = self._decode, self._xx, self._xy
        reading = self._read * seconds / steps * tokens / compute if steps and compute else 0.0
        return context * reading + count * (1 + self._pair * context)

    def most_tokens(self, spare: float, context: int) -> int:
        """How many tokens after others a prompt may take of such a time; one at least, if there is any."""
        return max(1, int((spare - self.in_tokens(0, context)) / (1 + self._pair * context))) if spare >= 1 else 0

    def tokens_per_load(self, source: str) -> float:
        """Tokens of a prompt that are computed in the time in which a block is loaded; 0: not known yet."""
        load = self.load_seconds(source, 1)
        return load * self._xx / self._xy if load and self._xy else 0.0

    def tokens_beside_decodes(self) -> int:
        """How many tokens of prompts a step may compute in which requests decode; 0: not known yet."""
        (steps, seconds), tokens, compute = self._decode, self._xx, self._xy  # a mean: no fit may say that one is free
        return int(BESIDE_DECODES * seconds / steps * tokens / compute) if steps and compute else 0

    def prefers_load(self, source: str, blocks: float, tokens: int, context: int) -> bool:
        """Whether to load so many blocks, rather than compute so many tokens after others. What is not known yet is
        found out."""
        load = self.load_seconds(source, blocks)
        compute = self.compute_seconds(tokens, context)
        if load is None or compute is None or load < MARGIN * compute:
            return True
        known, seconds = self._loads[source]
        self._loads[source] = known, seconds * _RETRY
        return False


def _later(before: float, value: float) -> float:
    return before * _FORGET + value
