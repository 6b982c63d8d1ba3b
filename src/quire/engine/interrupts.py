"""Ctrl-C while an engine is driven in the calling thread: it waits for the end of a step, so none is left half-way.

A second one does not wait. But it comes through only where that does no harm: while a step is computed, not while books
are written.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Holds SIGINT back from what must come to its end. Belongs to one thread, as what it guards does."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # whose signals are held
        self._num_held = 0
        self._open = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C takes effect at the end, or when `deliver` is called; within another one, when that one's does."""
        before = signal.getsignal(signal.SIGINT)
        # Only the main thread is interrupted by signals, and only where Python handles them.
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
        """What was held back so far takes effect now."""
        if self._handler is not None and self._num_held:
            self._num_held, self._open = 0, False
            self._handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def second_comes_through(self) -> Iterator[None]:
        """Within, a second Ctrl-C takes effect at once, be it pressed now or before."""
        self._open = True
        try:
            if self._num_held > 1:
                self.deliver()
            yield
        finally:
            self._open = False
