"""Fault injection: shows what a server does when an engine dies or hangs.

`quire serve ... --inject-fault KIND:TOKEN` causes a fault in the step that computes this token id.
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
    """Passes steps on to another executor, but fails if a span has the token.

    "crash" kills this process as a bug in a kernel would, "block" waits forever, "spin" computes forever, and "raise"
    raises an error as a bug in the engine would.
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
