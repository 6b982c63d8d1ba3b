"""What a transport is: it reads ranges of another engine's host tier into slots of one's own.

An engine *reads* what another one has: no engine ever writes into another one's memory. So whatever happens to a
transfer concerns the reader's own slots alone, and the engine that is read from need only keep its slots as they are
for as long as it said. What arrives is checked like every block (`HostTier.load`), so a transport need not be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from quire.errors import QuireError


class TransferError(QuireError):
    """Ranges could not be read; the message says why."""


class Region(NamedTuple):
    """The memory of a host tier, registered once.

    Attributes:
        memory: [size] uint8, writable.
        fd: of the memory as a file (a memfd), from its first byte on; -1: it is none, and other processes cannot open
            it. Whoever made the region keeps it open for as long as there is a transport of it.
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
            TransferError: not all have come, and the link is of no use any more: connect anew. With a fenced transport
                nothing of them comes later.
        """
        ...

    def close(self) -> None:
        """End the connection; a `read` under way in another thread fails soon. Of a fenced transport, nothing is
        written any more when this returns.
        """
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
        """Where others find this region; text that `connect` takes. Of a fenced transport anyone may see it; of the
        others it may be all that one needs, beside a way to their ports, to read the region and write into it.
        """
        ...

    def connect(self, address: str) -> Link:
        """A link to another engine's region.

        Raises:
            TransferError: it cannot be reached from here, or is not what it says.
        """
        ...

    def close(self) -> None:
        """Let go of the region, and end all links; nobody can connect to it any more."""
        ...


CONNECT_SECONDS = 5.0
"""How long `connect` waits at most, once the system knows a host's address."""

Struct = TypeVar("Struct", bound=msgspec.Struct)


def write_address(address: msgspec.Struct) -> str:
    """An address as text."""
    return msgspec.json.encode(address).decode()


def read_address(text: str, kind: type[Struct]) -> Struct:
    """What `write_address` has written.

    Raises:
        TransferError: it is no address of this kind.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        tag = kind.__struct_config__.tag
        raise TransferError(f"{text[:80]!r} is not the address of a region by {tag}: {error}") from error


def check_ranges(ranges: Sequence[Range], there: int, here: int) -> None:
    """Ranges of one byte or more lie within a region of `there` bytes, and one's own of `here`.

    Raises:
        TransferError: one does not.
    """
    for source, target, length in ranges:
        if length < 1 or source < 0 or target < 0 or source + length > there or target + length > here:
            raise TransferError(
                f"{length} bytes from {source} to {target} are not within regions of {there} and {here} bytes"
            )
