"""The interface of transports, which read ranges of another engine's host tier into this engine's slots.

Engines only *read* from each other; none ever writes into another one's memory. So a failed transfer affects only the
reader's own slots, and the engine that is read from need only keep its slots unchanged for as long as it promised. What
arrives is verified like every block (`HostTier.load`), so a transport need not be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from quire.errors import QuireError


class TransferError(QuireError):
    """A read failed; the message says why."""


class Region(NamedTuple):
    """The memory of a host tier, registered once.

    Attributes:
        memory: [size] uint8, writable.
        fd: of the memory as a file (a memfd), from its first byte on; -1 if it is not a file, so that other processes
            cannot open it. The region's creator keeps it open for as long as a transport uses it.
    """

    memory: memoryview
    fd: int


class Range(NamedTuple):
    """Bytes to read, from offset `source` in the other engine's region to `target` in this engine's."""

    source: int
    target: int
    length: int


class Link(Protocol):
    """A connection to another engine's region. One thread at a time calls `read`."""

    def read(self, ranges: Sequence[Range], seconds: float) -> None:
        """Read ranges, and wait for them, at most this many seconds.

        Raises:
            TransferError: not all of them have arrived; the link is unusable now, so connect again. With a fenced
                transport, nothing arrives later; with others, until the link is `settled`.
        """
        ...

    def settled(self) -> bool:
        """Whether nothing of a failed `read` can be written any more. Always true for a fenced transport."""
        ...

    def close(self) -> None:
        """End the connection; a `read` in progress in another thread fails soon. With a fenced transport, nothing is
        written after this returns.
        """
        ...


class Transport(Protocol):
    """A way to read from another engine's region.

    Attributes:
        name: "shared_memory", "socket", "mooncake" or "nixl".
        fenced: nothing is written after `read` has returned or raised. Other transports may write late, so the slots of
            a failed read must not be used again until the link is `settled`.
    """

    name: str
    fenced: bool

    @property
    def address(self) -> str:
        """This region's address, as text for `connect`. With a fenced transport it is not secret; with others, anyone
        who has it and can reach their ports may be able to read and write the region.
        """
        ...

    def connect(self, address: str) -> Link:
        """Connect to another engine's region.

        Raises:
            TransferError: it cannot be reached from here, or is not what its address says.
        """
        ...

    def close(self) -> None:
        """Release the region and end all links; nobody can connect to it any more."""
        ...


CONNECT_SECONDS = 5.0
"""Timeout of `connect`, after name resolution."""

Struct = TypeVar("Struct", bound=msgspec.Struct)


def write_address(address: msgspec.Struct) -> str:
    """Encode an address as text."""
    return msgspec.json.encode(address).decode()


def read_address(text: str, kind: type[Struct]) -> Struct:
    """Decode what `write_address` has written.

    Raises:
        TransferError: this is not an address of this kind.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        tag = kind.__struct_config__.tag
        raise TransferError(f"{text[:80]!r} is not the address of a region by {tag}: {error}") from error


def check_ranges(ranges: Sequence[Range], there: int, here: int) -> None:
    """Check that ranges are not empty, and lie within the other region of `there` bytes and this one of `here` bytes.

    Raises:
        TransferError: one is or does not.
    """
    for source, target, length in ranges:
        if length < 1 or source < 0 or target < 0 or source + length > there or target + length > here:
            raise TransferError(
                f"{length} bytes from {source} to {target} are not within regions of {there} and {here} bytes"
            )
