"""The queue bound: how many calls may wait for their first token, in requests and in tokens.

A call is priced before any work is done for it, and refused with a 429 if its price does not fit. It stops counting at
its first token: the engine has found room for it, so the bound is on waiting requests, not on running ones. Owners (API
keys) share the bound (`shares.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.server.errors import ApiError
from quire.server.shares import Shares

MAX_RETRY_SECONDS = 60
"""Largest `Retry-After`: OpenAI's clients ignore longer ones and retry at once."""
MAX_BURSTS = 16
BURST_SECONDS = 0.25
"""The drain rate is measured over this many recent bursts. Requests that leave within `BURST_SECONDS`, such as those of
one step, are one burst."""


class QueueFullError(ApiError):
    """429: a call does not fit into the queue. `reason` names the bound, as the metrics do."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        headers = {"retry-after": str(retry_after)}
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.reason = reason


class _Outflow:
    """The queue's drain rate: what left it recently, over the time in which anything waited."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._waited = 0.0  # seconds in which something waited, so far
        self._left: deque[dict[str, float]] = deque([{"at": 0.0, "requests": 0, "tokens": 0}], maxlen=MAX_BURSTS + 1)

    def pass_time(self, waiting: bool) -> None:
        """Advance the clock to now. `waiting`: whether anything waited since the last call."""
        now = time.monotonic()
        if waiting:
            self._waited += now - self._now
        self._now = now

    def count(self, requests: int, tokens: int) -> None:
        """Count what has left the queue."""
        if len(self._left) == 1 or self._waited - self._left[-1]["at"] >= BURST_SECONDS:
            self._left.append({"at": self._waited, "requests": 0, "tokens": 0})
        self._left[-1]["requests"] += requests
        self._left[-1]["tokens"] += tokens

    def seconds_for(self, what: str, amount: float) -> float:
        """Estimated seconds until this much has left. If nothing leaves, it is the time waited so far."""
        first, *later = self._left
        left = sum(burst[what] for burst in later)
        seconds = (self._waited - first["at"]) * amount / left if left else 0.0
        return max(seconds, self._waited - self._left[-1]["at"])


class Admission:
    """One HTTP process's share of the server's queue bound.

    A call larger than the whole bound is admitted when nothing else of its owner waits; it would never fit otherwise.

    Args:
        max_requests, max_tokens: of the whole server.
        processes: how many HTTP processes share them.
        tell: called with the numbers of waiting requests and tokens, whenever they change.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        processes: int = 1,
        tell: Callable[[int, int], None] = lambda requests, tokens: None,
    ) -> None:
        self._requests = Shares(math.ceil(max_requests / processes))
        self._tokens = Shares(math.ceil(max_tokens / processes))
        self._tell = tell
        self._outflow = _Outflow()

    @property
    def requests(self) -> int:
        """Waiting requests."""
        return self._requests.total

    @property
    def tokens(self) -> int:
        """Waiting tokens."""
        return self._tokens.total

    def enter(self, requests: int, tokens: int, owner: str = "") -> Ticket:
        """Admit a call.

        Args:
            requests: choices of all prompts. tokens: estimated prompt tokens.
            owner: whose call it is.

        Raises:
            QueueFullError: there is no room.
        """
        if self._requests.held_by(owner):  # otherwise it is admitted, whatever its size
            for what, shares, asked in (("requests", self._requests, requests), ("tokens", self._tokens, tokens)):
                if not shares.fits(owner, asked):
                    raise self._full(what, shares, owner, asked)
        return Ticket(self, requests, tokens, owner)

    def _full(self, what: str, shares: Shares, owner: str, asked: int) -> QueueFullError:
        """The error. Room is expected when enough requests have left: any, or this owner's at its share of turns."""
        self._outflow.pass_time(waiting=True)
        owners, held, share = shares.num_owners(owner), shares.held_by(owner), shares.share_of(owner)
        excess = min(shares.total, shares.total + asked - shares.limit)
        own_excess = min(held, held + asked - share) * owners
        seconds = max(1, math.ceil(self._outflow.seconds_for(what, min(excess, own_excess))))
        about = "about " if what == "tokens" else ""
        if owners == 1:
            full = f"the queue is full: {about}{held} {what} wait already"
            limit = f"the limit is {shares.limit}"
        else:
            full = f"this key's part of the queue is full: {about}{held} {what} of it wait already"
            limit = f"its share is {share} while others wait"
        message = f"{full}, this call would add {about}{asked}, and {limit}; room is expected in about {seconds} s"
        return QueueFullError(f"queue_{what}", message, min(MAX_RETRY_SECONDS, seconds))

    def change(self, owner: str, requests: int, tokens: int) -> None:
        """Change the owner's waiting requests and tokens; only tickets call this."""
        self._outflow.pass_time(waiting=self.requests > 0)
        self._requests.change(owner, requests)
        self._tokens.change(owner, tokens)
        self._tell(self.requests, self.tokens)

    def leave(self, owner: str, requests: int, tokens: int) -> None:
        """Count requests and tokens of this owner that have left the queue; only tickets call this."""
        self.change(owner, -requests, -tokens)
        self._outflow.count(requests, tokens)


class Ticket:
    """One call's place in the queue. It is released prompt by prompt, and by `leave` for good; never twice."""

    __slots__ = ("_admission", "_owner", "_parts", "_requests", "_tokens")

    def __init__(self, admission: Admission, requests: int, tokens: int, owner: str) -> None:
        self._admission = admission
        self._owner = owner
        self._requests, self._tokens = requests, tokens
        self._parts: dict[int, tuple[int, int]] = {}  # by prompt: requests and tokens still held
        admission.change(owner, requests, tokens)

    def correct(self, tokens: list[int], num_choices: int) -> None:
        """Replace the estimate by the true token counts. `tokens`: of each prompt."""
        if not self._requests:
            return  # it has left
        self._parts = {index: (num_choices, count * num_choices) for index, count in enumerate(tokens)}
        requests, total = num_choices * len(tokens), num_choices * sum(tokens)
        requests, self._requests = requests - self._requests, requests
        total, self._tokens = total - self._tokens, total
        self._admission.change(self._owner, requests, total)

    def begun(self, prompt: int) -> None:
        """Release a prompt that has its first token, or has ended."""
        part = self._parts.pop(prompt, None)
        if part is not None:
            self._release(*part)

    def leave(self) -> None:
        """Release whatever is still held."""
        self._parts.clear()
        if self._requests or self._tokens:
            self._release(self._requests, self._tokens)

    def _release(self, requests: int, tokens: int) -> None:
        self._requests -= requests
        self._tokens -= tokens
        self._admission.leave(self._owner, requests, tokens)
