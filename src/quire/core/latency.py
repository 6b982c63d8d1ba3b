"""How much of a step prompts may take so that decoding requests meet their latency target."""

from __future__ import annotations

import math

_FORGET = 0.8
"""Factor by which an observation's weight decays with each newer one."""

_GROWTH = 2.0
"""A step has at most this many times the prompts' work of the largest one lately. While steps are memory-bound, tokens
cost next to nothing, which says little about larger steps."""

_ATTENTION = 2.0
"""How much longer an operation of attention takes than one of a product. (Qwen3-0.6B's shape on two cores with AVX-512:
1.6 in chunks of 1,024 tokens, 1.9 in chunks of 256.) If it is less, a long context's first chunk is too small."""

_TAIL = 4.0
"""How many mean deviations above what was expected 99 of 100 steps stay. (2.9, if times were normally distributed and
the expectation exact.)"""

_MOST = 2.0
"""A step counts as at most this many times what was expected: if it was late for another reason, the next one is not,
and if not, the next one is late, too."""

_FIRST_DEVIATION, _LEARN = 0.05, 1 / 16
"""Mean deviation of a step's time, as a share of it, before steps have been seen; and the weight of the next one."""


class LatencyTarget:
    """Limits the prompts' part of a step so that 99 of 100 steps with decodes take no longer than a target.

    A step is expected to take a + b * (the prompts' work). Work is counted in tokens at a prompt's beginning: later
    ones count more, since they see more tokens. a is what steps that only decode have taken lately. b is a ratio of
    sums, not the slope of a line through recent steps: under a target all of them take about as long, whatever their
    work. What is aimed at is lower than the target by as much as steps deviate from what was expected of them, as in
    TCP's retransmission timeout (Jacobson 1988).

    Args:
        seconds: the target.
        pair: operations of a token and one that it sees, as a share of those of a token's products; see
            `Model.pair_share`.
    """

    def __init__(self, seconds: float, pair: float = 0.0) -> None:
        self._target = seconds
        self._pair = _ATTENTION * pair
        self._steps = self._decodes = self._seconds = 0.0  # of steps that only decode
        self._work = self._beside = 0.0  # of prompts, and the seconds that it added
        self._largest = 0.0
        self._deviation = _FIRST_DEVIATION

    def work(self, count: int, context: int) -> float:
        """The work of `count` tokens after `context` others."""
        return count * (1 + self._pair * (context + count / 2))

    def tokens(self, work: float, context: int) -> int:
        """How many tokens after `context` others are so much work."""
        first = 1 + self._pair * context
        return int(2 * work / (first + math.sqrt(first * first + 2 * self._pair * work)))

    def observe(self, decodes: int, work: float, seconds: float) -> None:
        """Learn from a step with so many decoding requests, and prompts of so much work."""
        base = self._base(decodes)
        expected = base + self._rate * work
        if decodes and expected and (self._work or not work):
            seconds = min(seconds, _MOST * expected)
            self._deviation += _LEARN * (abs(seconds / expected - 1) - self._deviation)
        if work:
            self._work = _FORGET * self._work + work
            self._beside = _FORGET * self._beside + seconds - base
            self._largest = max(_FORGET * self._largest, work)
        elif decodes:
            self._steps = _FORGET * self._steps + 1
            self._decodes = _FORGET * self._decodes + decodes
            self._seconds = _FORGET * self._seconds + seconds

    def room(self, decodes: int) -> float:
        """The work that prompts may have in a step with so many decoding requests; 0 if nothing is known yet."""
        spare = max(0.0, self._target / (1 + _TAIL * self._deviation) - self._base(decodes))
        most = _GROWTH * self._largest
        return min(most, spare / self._rate) if self._rate else most

    @property
    def _rate(self) -> float:
        """Seconds per unit of work."""
        return max(0.0, self._beside / self._work) if self._work else 0.0

    def _base(self, decodes: int) -> float:
        """Least seconds of a step that only decodes. For more requests than lately, no less than for those; for fewer,
        the same per request. If it is too little, prompts seem to cost more and get less; the other way round, they
        would seem to cost too little."""
        return self._seconds / self._steps * min(1.0, decodes * self._steps / self._decodes) if self._steps else 0.0
