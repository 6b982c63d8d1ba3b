"""Faults on demand, for drills: what the server does when an engine dies or hangs can be tried out.

`quire serve ... --inject-fault KIND:TOKEN` makes the engine do so in the step that computes this token id.
"""

from __future__ import annotations

import os
import signal
import threading

from quire.core.step import StepPlan
from quire.engine.executor import Executor, PendingResult
from quire.errors import ConfigError

KINDS = ("crash", "block", "spin", "raise")


class FaultyExecutor:
    """Runs steps elsewhere, but fails where a span holds the token.

    "crash" ends this process as a bug in a kernel would, "block" waits for ever, "spin" computes for ever, and "raise"
    is a bug in the engine.
    """

    def __init__(self, inner: Executor, fault: str) -> None:
        """Raises ConfigError for a fault that does not exist."""
        kind, _, token = fault.partition(":")
        if kind not in KINDS or not token.isdecimal():
            raise ConfigError(f"inject_fault={fault!r} is not KIND:TOKEN with a kind of {', '.join(KINDS)}")
        self._inner, self._kind, self._token = inner, kind, int(token)

    def submit(self, plan: StepPlan) -> PendingResult:
        if any(self._token in span.tokens for span in plan.spans):
            if self._kind == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self._kind == "raise":
                raise RuntimeError("an injected fault")
            while self._kind == "spin":
                pass
            threading.Event().wait()
        return self._inner.submit(plan)

    def close(self) -> None:
        self._inner.close()
