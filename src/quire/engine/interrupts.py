"""Ctrl-C while an engine is driven in the calling thread waits for the end of a step, so that none is left half-done.

A second one does not wait, but takes effect only where that does no harm: while a step is computed, not while
bookkeeping changes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Delays SIGINT during what must not be interrupted. Belongs to one thread, as what it guards does."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = (
            None  # what SIGINT calls otherwise; None while not held
        )
        self._num_held = 0
        self._open = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C takes effect at the end, or when `deliver` is called; if nested, at the outer end."""
        before = signal.getsignal(signal.SIGINT)
        # Signals only interrupt the main thread, and only if Python handles them.
        if self._handler is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        if not callable(before):
            yield
            return
        self._handler, self._num_held = before, 0
        try:
            signal.signal(signal.SIGINT, self._hold)
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._handler = None
            if self._num_held:
                before(signal.SIGINT, None)

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self._num_held += 1
        if self._open and self._num_held > 1:
            self.deliver()

    def deliver(self) -> None:
        """Let a delayed Ctrl-C take effect now."""
        if self._handler is not None and self._num_held:
            self._num_held, self._open = 0, False
            self._handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def second_comes_through(self) -> Iterator[None]:
        """Inside, a second Ctrl-C takes effect at once, even if it was pressed before."""
        self._open = True
        try:
            if self._num_held > 1:
                self.deliver()
            yield
        finally:
            self._open = False
