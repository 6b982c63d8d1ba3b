"""The queue bound: how many calls may wait for their first token, in requests and in tokens.

A call is priced before any work is done for it, and refused with a 429 where its price does not fit. What has begun
to answer counts no more: the engine has found room for it, so the bound is on waiting, not on running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.server.errors import ApiError

MAX_RETRY_SECONDS = 60
"""The longest time that `Retry-After` names."""


class QueueFullError(ApiError):
    """A call does not fit into the queue: a 429. `reason` says which bound it met, in the metrics' words."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        headers = {"retry-after": str(retry_after)}
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        self.reason = reason


class Admission:
    """One HTTP process's share of the server's queue bound.

    A call that alone is larger than a bound is let in when nothing else waits: it would never fit otherwise.

    Args:
        max_requests, max_tokens: of the whole server.
        processes: how many HTTP processes share them.
        tell: is told how many requests and tokens wait, whenever that changes.

    Attributes:
        requests, tokens: what waits now.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        processes: int = 1,
        tell: Callable[[int, int], None] = lambda requests, tokens: None,
    ) -> None:
        self.max_requests = math.ceil(max_requests / processes)
        self.max_tokens = math.ceil(max_tokens / processes)
        self.requests = 0
        self.tokens = 0
        self._tell = tell
        self._last_wait = 0.0

    def enter(self, requests: int, tokens: int) -> Ticket:
        """A place for a call of so many requests (choices of prompts), and prompt tokens by its price.

        Raises:
            QueueFullError: there is no room.
        """
        if self.requests and self.requests + requests > self.max_requests:
            raise self._full("queue_requests", f"{self.requests} requests", f"{requests}", self.max_requests)
        if self.requests and self.tokens + tokens > self.max_tokens:
            raise self._full("queue_tokens", f"about {self.tokens} tokens", f"about {tokens}", self.max_tokens)
        return Ticket(self, requests, tokens)

    def _full(self, reason: str, waiting: str, asked: str, limit: int) -> QueueFullError:
        """The newest call that got through tells how long one waits."""
        retry_after = min(MAX_RETRY_SECONDS, max(1, math.ceil(self._last_wait)))
        message = (
            f"the queue is full: {waiting} wait already, this call would add {asked}, and the limit is {limit}; "
            f"try again in {retry_after} s"
        )
        return QueueFullError(reason, message, retry_after)

    def change(self, requests: int, tokens: int) -> None:
        """What waits grows or shrinks by so much; only tickets call this."""
        self.requests += requests
        self.tokens += tokens
        self._tell(self.requests, self.tokens)

    def waited(self, seconds: float) -> None:
        """A call got its first token, so long after it came in; only tickets call this."""
        self._last_wait = seconds


class Ticket:
    """One call's place in the queue. It is given back prompt by prompt, and for good by `leave`; never twice."""

    __slots__ = ("_admission", "_entered", "_parts", "_requests", "_tokens")

    def __init__(self, admission: Admission, requests: int, tokens: int) -> None:
        self._admission = admission
        self._entered = time.monotonic()
        self._requests, self._tokens = requests, tokens
        self._parts: dict[int, tuple[int, int]] = {}  # by prompt: what it still holds of the two
        admission.change(requests, tokens)

    def correct(self, tokens: list[int], num_choices: int) -> None:
        """The prompts have been tokenized: the price becomes the truth. `tokens`: of each prompt."""
        if not self._requests:
            return  # it has left
        self._parts = {index: (num_choices, count * num_choices) for index, count in enumerate(tokens)}
        requests, total = num_choices * len(tokens), num_choices * sum(tokens)
        requests, self._requests = requests - self._requests, requests
        total, self._tokens = total - self._tokens, total
        self._admission.change(requests, total)

    def begun(self, prompt: int) -> None:
        """This prompt has its first token, or has ended: it waits no more."""
        part = self._parts.pop(prompt, None)
        if part is not None:
            self._release(*part)
            self._admission.waited(time.monotonic() - self._entered)

    def leave(self) -> None:
        """Give back whatever is still held."""
        self._parts.clear()
        if self._requests or self._tokens:
            self._release(self._requests, self._tokens)

    def _release(self, requests: int, tokens: int) -> None:
        self._requests -= requests
        self._tokens -= tokens
        self._admission.change(-requests, -tokens)
