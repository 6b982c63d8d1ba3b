"""What a transport is: it reads ranges of another engine's host tier into slots of one's own.

An engine *reads* what another one has: nobody ever writes into another engine's memory. So whatever happens to a
transfer concerns the reader's own slots alone, and the engine that is read from need only keep its slots as they are for
as long as it said. What arrives is checked like every block (`HostTier.load`), so a transport need not be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.errors import QuireError


class TransferError(QuireError):
    """Ranges could not be read; the message says why."""


class Region(NamedTuple):
    """The memory of a host tier, registered once.

    Attributes:
        memory: [size] uint8, writable.
        fd: of the memory as a file; -1: it is none, and other processes cannot map it.
    """

    memory: memoryview
    fd: int


class Range(NamedTuple):
    """Bytes to read: from `source` in the other engine's region, to `target` in one's own."""

    source: int
    target: int
    length: int


class Link(Protocol):
    """A connection to another engine's region. One thread at a time calls `read`."""

    def read(self, ranges: Sequence[Range], seconds: float) -> None:
        """Read ranges, and wait for them, so long at most.

        Raises:
            TransferError: not all have come. With a fenced transport nothing of them comes later.
        """
        ...

    def close(self) -> None:
        """End the connection; a `read` under way in another thread fails soon."""
        ...


class Transport(Protocol):
    """A way between regions.

    Attributes:
        name: "shared_memory", "socket", "mooncake" or "nixl".
        fenced: once `read` has ended, however it did, nothing is written any more. Others may write late, so that their
            slots must not be used again before the process ends, or the region is registered anew.
    """

    name: str
    fenced: bool

    @property
    def address(self) -> str:
        """Where others find this region; text that `connect` takes, and that anyone may see."""
        ...

    def connect(self, address: str) -> Link:
        """A link to another engine's region.

        Raises:
            TransferError: it cannot be reached from here, or is not what it says.
        """
        ...

    def close(self) -> None:
        """Let go of the region; nobody can read it any more."""
        ...
