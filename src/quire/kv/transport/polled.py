"""Links of libraries that write into the region on their own, and are polled for completion."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from quire.kv.transport.base import Range, TransferError, check_ranges

SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Bounds in seconds of the polling interval, which is a tenth of the time that has passed."""


def address_of(memory: memoryview) -> int:
    """A region's address in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class PolledLink(ABC):
    """See `Link`. A read continues after `read` has given up, until the library reports its end or is itself ended
    (`_failed`).

    Args:
        there, here: sizes of the other region and of this engine's.
    """

    def __init__(self, there: int, here: int) -> None:
        self._there, self._here = there, here
        self._closed = False
        self._reading = threading.Lock()
        self._left: Callable[[], bool] | None = None  # what was begun, and has not ended yet

    @abstractmethod
    def _begin(self, ranges: Sequence[Range]) -> Callable[[], bool]:
        """Begin to read; returns a function that says whether the read is complete.

        Raises:
            TransferError: (here, or from that function) the read has failed.
        """

    def read(self, ranges: Sequence[Range], seconds: float) -> None:
        check_ranges(ranges, self._there, self._here)
        if not ranges:
            return
        with self._reading:
            try:
                self._read(ranges, seconds)
            except BaseException:
                self._failed()
                raise

    def _read(self, ranges: Sequence[Range], seconds: float) -> None:
        if self._closed:
            raise TransferError("the link was closed")
        began = time.monotonic()
        self._left = done = self._begin(ranges)
        while not done():
            passed = time.monotonic() - began
            if passed > seconds:
                raise TransferError(f"the read took longer than {seconds:g} seconds")
            if self._closed:
                raise TransferError("the link was closed")
            time.sleep(max(SHORTEST_PAUSE, min(LONGEST_PAUSE, passed / 10)))
        self._left = None

    def _failed(self) -> None:
        """A read has failed: nothing more is read."""
        self._closed = True

    def settled(self) -> bool:
        with self._reading, contextlib.suppress(TransferError):  # then it has ended, too
            if self._left is not None and not self._left():
                return False
        self._left = None
        return True

    def close(self) -> None:
        self._closed = True
        with self._reading:
            pass  # until `read` has noticed
