"""Which grammars requests use, and what these take in memory together."""

from __future__ import annotations

import weakref
from collections import Counter, deque

from quire.core.structured_outputs import StructuredOutputsParams

MAX_USED_BYTES = 1 << 30
"""Most bytes of the grammars that requests use at the same time: a request whose own would take more waits."""

STEPS_KEPT = 16
"""Steps, the one that is being planned included, in which a grammar that was found for a request counts as used: the
request's matcher is made when its first step is computed, and fewer are in flight."""


class InUse:
    """The grammars for which requests have a matcher, or will have one soon. Its methods are called one at a time;
    matchers may end in any thread, at any time."""

    def __init__(self) -> None:
        self._sizes: dict[StructuredOutputsParams, int] = {}
        self._matchers: Counter[StructuredOutputsParams] = Counter()
        self._ended: deque[StructuredOutputsParams] = deque()  # those of matchers that are gone
        self._found: deque[set[StructuredOutputsParams]] = deque([set()], STEPS_KEPT)  # of each step

    def __contains__(self, wanted: StructuredOutputsParams) -> bool:
        self._forget()
        return wanted in self._matchers or any(wanted in found for found in self._found)

    @property
    def total(self) -> int:
        """Bytes that they take, each counted once."""
        self._forget()
        used = self._matchers.keys() | set[StructuredOutputsParams]().union(*self._found)
        self._sizes = {wanted: self._sizes[wanted] for wanted in used}
        return sum(self._sizes.values())

    def has_room(self, wanted: StructuredOutputsParams, size: int) -> bool:
        """Whether one more request may use this grammar. One alone always may."""
        return wanted in self or (total := self.total) == 0 or total + size <= MAX_USED_BYTES

    def found(self, wanted: StructuredOutputsParams, size: int) -> None:
        """A request that is admitted will have a matcher."""
        self._found[-1].add(wanted)
        self._sizes[wanted] = size

    def made(self, matcher: object, wanted: StructuredOutputsParams, size: int) -> None:
        """A request has a matcher, as long as that object exists."""
        self._forget()
        self._matchers[wanted] += 1
        self._sizes[wanted] = size
        weakref.finalize(matcher, self._ended.append, wanted).atexit = False

    def begin_step(self) -> None:
        """Another step is planned."""
        self._found.append(set())

    def settle(self) -> None:
        """All that were found have their matcher by now, if they are to have one."""
        for found in self._found:
            found.clear()

    def _forget(self) -> None:
        while self._ended:
            wanted = self._ended.popleft()
            self._matchers[wanted] -= 1
            if not self._matchers[wanted]:
                del self._matchers[wanted]
