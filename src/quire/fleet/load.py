"""A server's load and prefill rate, as seen by the sender of its requests."""

from __future__ import annotations

from collections.abc import Iterable

FORGET_SECONDS = 10.0
"""Half-life of the count of recent requests."""

FIRST_RATE = 2000.0
"""Prompt tokens per second that are assumed until any server has computed a prompt."""

TRUSTED_TOKENS = 1024
"""Weight of the servers' common rate in each one's estimate: that of this many tokens which it computed."""

MEASURED_TOKENS = 16
"""Requests that compute fewer tokens are not used to measure the rate."""

KEEP = 0.9
"""Factor by which the weight of measurements decays with each newer one."""


class Load:
    """One server's requests, each from `sent` through `begun` to `ended`. Times are seconds on the caller's clock.

    Attributes:
        queued: uncached prompt tokens of requests without a first token.
        waiting: number of these requests.
        running: number of requests that have a first token, and have not ended.
    """

    def __init__(self) -> None:
        self.queued = self.waiting = self.running = 0
        self._recent, self._as_of = 0.0, 0.0
        self._tokens = self._seconds = 0.0  # tokens computed, and their seconds; both decay
        self._told: float | None = None
        self._work_end = 0.0  # time of the latest first token

    @property
    def shown(self) -> float | None:
        """Prompt tokens per second, as the server reports or as measured; None if nothing was computed yet."""
        return self._told or (self._tokens / self._seconds if self._tokens else None)

    def rate(self, common: float) -> float:
        """Estimated prompt tokens per second; `common`: the rate of similar servers.

        A server without requests so far, or with a slow first one, must not be taken for slow: it would get no
        requests, and the estimate would never be corrected.
        """
        return self._told or (self._tokens + TRUSTED_TOKENS) / (self._seconds + TRUSTED_TOKENS / common)

    def tell(self, rate: float | None) -> None:
        """Set the rate that the server itself reports; None if it reports none."""
        self._told = rate if rate and rate > 0 else None

    def recent(self, now: float) -> float:
        """Number of requests that it got recently."""
        return self._recent * _faded(now - self._as_of)

    def sent(self, now: float, tokens: int) -> None:
        """A request was sent, of which this many prompt tokens must be computed."""
        self._recent = self.recent(now) + 1.0
        self._as_of = now
        self.queued += tokens
        self.waiting += 1

    def begun(self, sent: float, now: float, tokens: int, computed: int | None = None) -> None:
        """A request has its first token. `tokens`: as given to `sent`. `computed`: the true number, if known.

        Its time is measured from the latest first token on, since before that it waited for other requests.
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
        """A request has ended, with or without a first token."""
        if has_begun:
            self.running -= 1
        else:
            self.queued -= tokens
            self.waiting -= 1


def common_rate(loads: Iterable[Load]) -> float:
    """The mean rate of the servers whose rate is known, in prompt tokens per second."""
    shown = [rate for load in loads if (rate := load.shown) is not None]
    return sum(shown) / len(shown) if shown else FIRST_RATE


def _faded(seconds: float) -> float:
    return float(0.5 ** (max(0.0, seconds) / FORGET_SECONDS))
