"""What one server has been given to do, and how fast it does it, as seen by who sends."""

from __future__ import annotations

from collections.abc import Iterable

FORGET_SECONDS = 10.0
"""Time in which what was sent lately comes to count half as much."""

FIRST_RATE = 2000.0
"""Prompt tokens a second, where no server has computed anything yet."""

TRUSTED_TOKENS = 1024
"""What servers have in common counts like so many tokens that each has computed."""

MEASURED_TOKENS = 16
"""A request that computes fewer tokens says nothing about the rate."""

KEEP = 0.9
"""What earlier requests still count for the rate when the next one has been computed."""


class Load:
    """One server's requests, from `sent` over `begun` to `ended`. Times are seconds of one clock, given by the caller.

    Attributes:
        queued: prompt tokens, not cached, of requests without a first token.
        waiting: requests without one.
        running: requests that have one, and have not ended.
    """

    def __init__(self) -> None:
        self.queued = self.waiting = self.running = 0
        self._recent, self._as_of = 0.0, 0.0
        self._tokens = self._seconds = 0.0  # tokens computed, and what they took; both fade
        self._told: float | None = None
        self._work_end = 0.0  # when what was sent before had its last first token

    @property
    def shown(self) -> float | None:
        """Prompt tokens a second: as the server tells, else as first tokens came. None: nothing was computed yet."""
        return self._told or (self._tokens / self._seconds if self._tokens else None)

    def rate(self, common: float) -> float:
        """Prompt tokens a second, as far as it is known; `common`: of servers like this one.

        One that got nothing yet, or a first prompt that took long, is not taken to be slow: nothing would go there
        then, and it would never be found out that it is not.
        """
        return self._told or (self._tokens + TRUSTED_TOKENS) / (self._seconds + TRUSTED_TOKENS / common)

    def tell(self, rate: float | None) -> None:
        """What the server itself says; None: nothing."""
        self._told = rate if rate and rate > 0 else None

    def recent(self, now: float) -> float:
        """Requests that it got lately."""
        return self._recent * _faded(now - self._as_of)

    def sent(self, now: float, tokens: int) -> None:
        """A request goes there, of which so many prompt tokens must be computed."""
        self._recent = self.recent(now) + 1.0
        self._as_of = now
        self.queued += tokens
        self.waiting += 1

    def begun(self, sent: float, now: float, tokens: int, computed: int | None = None) -> None:
        """A request has its first token. `tokens`: as given to `sent`. `computed`: what it was in truth, if known.

        What waited for others before it is not its own time: it counts from the last first token on.
        """
        self.queued -= tokens
        self.waiting -= 1
        self.running += 1
        seconds = now - max(sent, self._work_end)
        self._work_end = now
        amount = tokens if computed is None else computed
        if amount >= MEASURED_TOKENS and seconds > 0:
            self._tokens = KEEP * self._tokens + amount
            self._seconds = KEEP * self._seconds + seconds

    def ended(self, tokens: int, has_begun: bool) -> None:
        """A request is over, with or without a first token."""
        if has_begun:
            self.running -= 1
        else:
            self.queued -= tokens
            self.waiting -= 1


def common_rate(loads: Iterable[Load]) -> float:
    """Prompt tokens a second of servers that are alike: the mean of those that have shown theirs."""
    shown = [rate for load in loads if (rate := load.shown) is not None]
    return sum(shown) / len(shown) if shown else FIRST_RATE


def _faded(seconds: float) -> float:
    return float(0.5 ** (max(0.0, seconds) / FORGET_SECONDS))
