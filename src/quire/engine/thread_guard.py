"""Who may use an engine: one thread at a time, which others are told; and no fork of its process may end it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec

from quire.errors import ConcurrentUseError

P = ParamSpec("P")


def unless_forked(call: Callable[P, object]) -> Callable[P, None]:
    """This call, which does nothing in a fork of the present process: the fork may exit before it."""
    process = os.getpid()

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == process:
            call(*args, **kwargs)

    return guarded


class ThreadGuard:
    """Tracks which thread is inside an object that only one may use at a time.

    A second thread is refused instead of waiting, since it would wait for a whole batch; whoever wants that can put a
    lock around each call.

    Args:
        what: the object, for messages.
        instead: what to use for several threads.
    """

    def __init__(self, what: str, instead: str) -> None:
        self._what, self._instead = what, instead
        self._lock = threading.RLock()  # not Lock: a signal's handler may call `entered` in the middle of it
        self._inside: tuple[threading.Thread, str] | None = None

    @property
    def free(self) -> bool:
        """Whether no thread is inside, not even this one."""
        return self._inside is None

    @contextlib.contextmanager
    def entered(self, call: str) -> Iterator[None]:
        """Hold the object while `call`, a method's name, runs in this thread.

        Raises:
            ConcurrentUseError: another thread is inside, or this one (a signal's handler runs amid what it interrupts).
        """
        me, entered = threading.current_thread(), False
        try:
            with self._lock:
                self._refuse_second(me, call)
                self._inside, entered = (me, call), True
            yield
        finally:  # Ctrl-C at any point leaves no thread inside
            if entered:
                self._inside = None

    def _refuse_second(self, me: threading.Thread, call: str) -> None:
        if self._inside is not None:
            owner, busy = self._inside
            if owner is me:
                raise ConcurrentUseError(
                    f"{self._what}.{call} was called amid {self._what}.{busy} of the same thread, perhaps by a "
                    "signal's handler; call it when that has returned"
                )
            raise ConcurrentUseError(
                f"{self._what}.{call} was called in thread {me.name!r} while thread {owner.name!r} is in "
                f"{self._what}.{busy}; one thread at a time may use it: {self._instead}"
            )
