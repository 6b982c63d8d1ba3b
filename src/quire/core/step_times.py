"""How long steps take by their size, as they were measured lately."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

_RECENT = 8
"""Steps of about one size whose times are kept: the context grows, and others load the machine."""


class StepTimes:
    """Seconds by size, measured in cells (1, 2, ... 16, 18, 20, ... 32, 36, ...) and interpolated between them.

    A cell is believed once it was seen twice: the first time may be slow for being the first. Larger sizes take no less
    time. Up to twice the largest size seen may take no more, so that it is tried; beyond, time grows in proportion.
    """

    def __init__(self) -> None:
        self._cells: dict[int, deque[tuple[float, int]]] = {}
        self._usual: dict[int, tuple[float, int]] = {}  # by cell: seconds, and at which size
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def observe(self, size: int, seconds: float) -> None:
        """A step of this size took so long. What is usual is the lower third: hiccups do not show."""
        number = _cell_of(size)
        cell = self._cells.setdefault(number, deque(maxlen=_RECENT))
        cell.append((seconds, size))
        if len(cell) > 1:
            self._usual[number] = sorted(cell)[(len(cell) - 1) // 3]
        known = sorted(self._usual.values(), key=lambda pair: pair[1])
        self._sizes = [size for _, size in known]
        self._seconds = [seconds for seconds, _ in known]
        for i in range(len(known) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i], self._seconds[i + 1])

    def at(self, size: int) -> float:
        """Seconds at this size; 0 where nothing is known."""
        sizes, seconds = self._sizes, self._seconds
        i = bisect_left(sizes, size)
        if i == len(sizes):
            return seconds[-1] * max(1.0, size / (2 * sizes[-1] or math.inf)) if sizes else 0.0
        if i == 0 or sizes[i] == size:
            return seconds[i]
        part = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])


def _cell_of(size: int) -> int:
    """The number of the cell: up to 16 a size has its own, then there are eight to every doubling."""
    shift = max(0, size.bit_length() - 4)
    return 8 * shift + (size >> shift)
