"""The queue bound: how many calls may wait for their first token, in requests and in tokens.

A call is priced before any work is done for it, and refused with a 429 where its price does not fit. What has begun
to answer counts no more: the engine has found room for it, so the bound is on waiting, not on running. Owners, that is
API keys, share the bound (`shares.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from quire.server.errors import ApiError
from quire.server.shares import Shares

MAX_RETRY_SECONDS = 60
"""The longest time that `Retry-After` names: OpenAI's clients pass over a longer one, and come back at once."""
MAX_BURSTS = 16
BURST_SECONDS = 0.25
"""How fast the queue empties is measured over so many of the last bursts: requests that left within so short a time, as
those of one step do, are one."""


class QueueFullError(ApiError):
    """A call does not fit into the queue: a 429. `reason` says which bound it met, in the metrics' words."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        headers = {"retry-after": str(retry_after)}
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.reason = reason


class _Outflow:
    """How fast the queue empties: what left it lately, over the time in which something waited."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._waited = 0.0  # seconds in which something waited, so far
        self._left: deque[dict[str, float]] = deque([{"at": 0.0, "requests": 0, "tokens": 0}], maxlen=MAX_BURSTS + 1)

    def pass_time(self, waiting: bool) -> None:
        """Bring the clock up to now. `waiting`: something waited since the last call."""
        now = time.monotonic()
        if waiting:
            self._waited += now - self._now
        self._now = now

    def count(self, requests: int, tokens: int) -> None:
        """So much has left."""
        if len(self._left) == 1 or self._waited - self._left[-1]["at"] >= BURST_SECONDS:
            self._left.append({"at": self._waited, "requests": 0, "tokens": 0})
        self._left[-1]["requests"] += requests
        self._left[-1]["tokens"] += tokens

    def seconds_for(self, what: str, amount: float) -> float:
        """Until so much will have left, if it goes on so. Where nothing leaves: as long again as it was waited for."""
        first, *later = self._left
        left = sum(burst[what] for burst in later)
        seconds = (self._waited - first["at"]) * amount / left if left else 0.0
        return max(seconds, self._waited - self._left[-1]["at"])


class Admission:
    """One HTTP process's share of the server's queue bound.

    A call that alone is larger than a bound is let in when nothing else of its owner waits: it would never fit
    otherwise.

    Args:
        max_requests, max_tokens: of the whole server.
        processes: how many HTTP processes share them.
        tell: is told how many requests and tokens wait, whenever that changes.
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
        """Requests that wait now."""
        return self._requests.total

    @property
    def tokens(self) -> int:
        """Tokens that wait now."""
        return self._tokens.total

    def enter(self, requests: int, tokens: int, owner: str = "") -> Ticket:
        """A place for a call of so many requests (choices of prompts), and prompt tokens by its price.

        Args:
            owner: whose call it is.

        Raises:
            QueueFullError: there is no room.
        """
        if self._requests.held_by(owner):  # else it is let in, whatever its size
            for what, shares, asked in (("requests", self._requests, requests), ("tokens", self._tokens, tokens)):
                if not shares.fits(owner, asked):
                    raise self._full(what, shares, owner, asked)
        return Ticket(self, requests, tokens, owner)

    def _full(self, what: str, shares: Shares, owner: str, asked: int) -> QueueFullError:
        """There is room when enough has left, of all or, as far as its turns bring it, of this owner's."""
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
        """What waits of this owner's grows or shrinks by so much; only tickets call this."""
        self._outflow.pass_time(waiting=self.requests > 0)
        self._requests.change(owner, requests)
        self._tokens.change(owner, tokens)
        self._tell(self.requests, self.tokens)

    def leave(self, owner: str, requests: int, tokens: int) -> None:
        """So much of this owner's waits no more; only tickets call this."""
        self.change(owner, -requests, -tokens)
        self._outflow.count(requests, tokens)


class Ticket:
    """One call's place in the queue. It is given back prompt by prompt, and for good by `leave`; never twice."""

    __slots__ = ("_admission", "_owner", "_parts", "_requests", "_tokens")

    def __init__(self, admission: Admission, requests: int, tokens: int, owner: str) -> None:
        self._admission = admission
        self._owner = owner
        self._requests, self._tokens = requests, tokens
        self._parts: dict[int, tuple[int, int]] = {}  # by prompt: what it still holds of the two
        admission.change(owner, requests, tokens)

    def correct(self, tokens: list[int], num_choices: int) -> None:
        """The prompts have been tokenized: the price becomes the truth. `tokens`: of each prompt."""
        if not self._requests:
            return  # it has left
        self._parts = {index: (num_choices, count * num_choices) for index, count in enumerate(tokens)}
        requests, total = num_choices * len(tokens), num_choices * sum(tokens)
        requests, self._requests = requests - self._requests, requests
        total, self._tokens = total - self._tokens, total
        self._admission.change(self._owner, requests, total)

    def begun(self, prompt: int) -> None:
        """This prompt has its first token, or has ended: it waits no more."""
        part = self._parts.pop(prompt, None)
        if part is not None:
            self._release(*part)

    def leave(self) -> None:
        """Give back whatever is still held."""
        self._parts.clear()
        if self._requests or self._tokens:
            self._release(self._requests, self._tokens)

    def _release(self, requests: int, tokens: int) -> None:
        self._requests -= requests
        self._tokens -= tokens
        self._admission.leave(self._owner, requests, tokens)
