"""Between processes of one user on one machine: the region is a memfd, which the reader copies from.

Nothing listens and nobody answers, so it does not matter what the other process is doing. The region is opened through
`/proc` and read like a file: unlike with a mapping, this process cannot be killed by the file becoming shorter.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.kv.transport.base import Range, Region, TransferError, check_ranges, read_address, write_address

PIECE = 2 << 20
"""Bytes copied at a time, about 0.3 ms: the delay until `close` or the deadline takes effect."""

MEMFD = "/memfd:"
"""How a memfd's path begins in `/proc`."""


class SharedAddress(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A process's memfd, with an id of the machine's boot."""

    boot: str
    pid: int
    fd: int
    device: int
    inode: int
    size: int


class SharedMemoryTransport:
    """See `Transport`; `region` must be a memfd.

    Raises:
        TransferError: it is not.
    """

    name, fenced = "shared_memory", True

    def __init__(self, region: Region) -> None:
        self._memory = region.memory
        self._links: weakref.WeakSet[SharedMemoryLink] = weakref.WeakSet()
        self._address = _address_of(region)

    @property
    def address(self) -> str:
        return write_address(self._address)

    def connect(self, address: str) -> SharedMemoryLink:
        there = read_address(address, SharedAddress)
        if there.boot != _boot():
            raise TransferError("the other engine's memory is on another machine")
        link = SharedMemoryLink(_opened(there), there.size, self._memory)
        self._links.add(link)
        return link

    def close(self) -> None:
        """End all links. Processes that have opened the region can read it until this process closes the memfd."""
        for link in list(self._links):
            link.close()


class SharedMemoryLink:
    """See `Link`.

    Args:
        fd: the other region; owned by this link. size: its size in bytes.
        memory: this engine's region.
    """

    def __init__(self, fd: int, size: int, memory: memoryview) -> None:
        self._fd, self._size, self._memory = fd, size, memory
        self._closed = False
        self._reading = threading.Lock()
        self._close_file = weakref.finalize(self, os.close, fd)

    def read(self, ranges: Sequence[Range], seconds: float) -> None:
        end = time.monotonic() + seconds
        check_ranges(ranges, self._size, len(self._memory))
        with self._reading:
            for source, target, length in ranges:
                for start in range(0, length, PIECE):
                    if self._closed:
                        raise TransferError("the link was closed")
                    if time.monotonic() > end:
                        raise TransferError(f"the copy took longer than {seconds:g} seconds")
                    self._copy(source + start, target + start, min(PIECE, length - start))

    def _copy(self, source: int, target: int, length: int) -> None:
        try:
            copied = os.preadv(self._fd, [self._memory[target : target + length]], source)
        except OSError as error:
            raise TransferError(f"the other engine's memory cannot be read: {error.strerror}") from error
        if copied != length:
            raise TransferError("the other engine's memory is shorter than it was")

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        with self._reading:
            self._close_file()


def _address_of(region: Region) -> SharedAddress:
    try:
        found = os.fstat(region.fd)
        path = os.readlink(f"/proc/self/fd/{region.fd}")
    except OSError as error:
        raise TransferError(f"the region is not a file that other processes can open: {error.strerror}") from error
    if not path.startswith(MEMFD) or found.st_size < len(region.memory):
        raise TransferError(f"the region of {len(region.memory)} bytes is no memfd but {path}, {found.st_size} bytes")
    return SharedAddress(_boot(), os.getpid(), region.fd, found.st_dev, found.st_ino, len(region.memory))


def _opened(there: SharedAddress) -> int:
    """Open the region for reading.

    Its path is checked before it is opened, since opening something other than a memfd may block or have side effects.
    """
    path = f"/proc/{there.pid}/fd/{there.fd}"
    try:
        seen = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(
            f"the other engine's memory is not to be seen from here ({path}: {error.strerror}): it has ended, or runs "
            "as another user or in another container"
        ) from error
    try:
        found, same = os.fstat(seen), f"/proc/self/fd/{seen}"
        alike = (found.st_dev, found.st_ino) == (there.device, there.inode) and found.st_size >= there.size
        if not alike or not stat.S_ISREG(found.st_mode) or not os.readlink(same).startswith(MEMFD):
            raise TransferError(f"{path} is not the other engine's memory: it has ended, or runs in another container")
        return os.open(same, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"the other engine's memory may not be read ({path}): {error.strerror}") from error
    finally:
        os.close(seen)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
