"""How many prompt tokens a step may have so that decoding requests meet their latency target."""

from __future__ import annotations

_FORGET = 0.95
"""Factor by which an observation's weight decays with each newer one; old load is forgotten within about 50 steps."""


class LatencyTarget:
    """Limits the prompt tokens per step to meet a target time between tokens.

    A step's time is modelled as a + b * (prompt tokens), fitted to recent steps by least squares with
    exponential forgetting; a includes the cost of the decodes.

    Args:
        seconds: the time between tokens to aim for.
        min_chunk: prompt tokens that a step may always take, so that a prompt never starves.
    """

    def __init__(self, seconds: float, min_chunk: int) -> None:
        self._target = seconds
        self._min_chunk = min_chunk
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that also had decodes."""
        x, y = float(prompt_tokens), seconds
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + x
        self._y = self._y * _FORGET + y
        self._xx = self._xx * _FORGET + x * x
        self._xy = self._xy * _FORGET + x * y

    def budget(self, most: int) -> int:
        """Prompt tokens for the next step: between `min_chunk` and `most`."""
        mean = self._x / self._n if self._n else 0.0
        probe = int(min(most, mean + self._min_chunk))  # a little more than recent steps, to learn the slope
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:  # all steps had the same number: the rest is rounding
            return probe
        slope = (self._n * self._xy - self._x * self._y) / spread
        base = (self._y - slope * self._x) / self._n
        if slope <= 0.0:  # noise suggests that more tokens take less time
            return probe
        return int(max(self._min_chunk, min(most, (self._target - base) / slope)))
