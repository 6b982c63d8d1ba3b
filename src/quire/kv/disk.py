"""The disk tier: KV blocks in files, which outlive the process.

Blocks are appended to segment files, and the oldest segment is deleted when they exceed the budget. A record is a
header (the block's name, the lengths of what follows, and a keyed hash of these), the block's bytes, and their check.
Nothing else is written, so nothing can be inconsistent: the index is built from the headers, and a block is verified by
its check when it is loaded (`HostTier`). A segment torn by a crash ends at its last whole record, and a process appends
only to its own segments.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from blake3 import blake3

from quire.errors import QuireError
from quire.kv.host import CHECK_BYTES, HostTier
from quire.kv.mailbox import Ended, Mailbox

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
LEAST_SEGMENTS = 8
"""The budget is divided into at least this many segments, since a whole one is deleted at a time."""

HEADER = struct.Struct("<4sIH32s16s")  # magic, lengths of block and check, name, keyed hash of these
MAGIC = b"QKV2"
KEY_FILE, LOCK_FILE = "key", "lock"


class DiskTierError(QuireError):
    """The disk tier's folder cannot be used."""


class Place(NamedTuple):
    """The position of a block's record."""

    segment: int
    offset: int


def open_folder(path: str) -> tuple[Path, bytes, int]:
    """Open a folder for the disk tier; returns it, its key (created if missing), and the descriptor of its lock.

    Raises:
        DiskTierError: the folder belongs to another user, cannot be written, or is in use.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := folder.stat().st_uid) != os.geteuid():
            raise DiskTierError(f"{folder} belongs to user {owner}, not to {os.geteuid()}; name a folder of your own")
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, _key(folder / KEY_FILE), lock
        except BaseException:
            os.close(lock)
            raise
    except BlockingIOError as error:
        raise DiskTierError(f"{folder} is in use by another engine; give each a folder of its own") from error
    except FileExistsError as error:
        raise DiskTierError(f"{folder} is not a folder; name one, which is created if there is none") from error
    except OSError as error:
        raise DiskTierError(f"{folder} cannot be used: {error.strerror or error}") from error


def _key(file: Path) -> bytes:
    """Read the folder's key, 32 secret bytes, or create it."""
    if not file.exists():
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(32))
        new.rename(file)
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise DiskTierError(f"{file} can be read by others, or is not your own file; it must have mode 0600")
    key = file.read_bytes()
    if len(key) != 32:
        raise DiskTierError(f"{file} has {len(key)} bytes, not 32; remove it; the blocks beside it are then lost")
    return key


class DiskTier:
    """Blocks in the files of a folder, written from and read into slots of the host tier by a background thread.

    Args:
        folder: opened by `open_folder`.
        key: returned by `open_folder`.
        budget: most bytes of all files together.
        host: the host tier.
        mailbox: gets an `Ended` for each write and read; default: a mailbox of its own.

    Attributes:
        index: each block's place, by name. Changed only by the thread, except in `forget`.
        failures: number of writes and reads that failed.
    """

    def __init__(self, folder: Path, key: bytes, budget: int, host: HostTier, mailbox: Mailbox | None = None) -> None:
        self.folder, self.budget, self.host = folder, budget, host
        self.mailbox = mailbox or Mailbox()
        self.index: dict[bytes, Place] = {}
        self.failures = 0
        self._key = blake3(key, derive_key_context="quire 2026 header of a KV block's record").digest()
        self._segment_bytes = min(SEGMENT_BYTES, budget // LEAST_SEGMENTS)
        self._sizes: dict[int, int] = {}  # of the segments, in bytes
        self._names: dict[int, list[bytes]] = {}
        self._open: int | None = None  # the segment that is appended to
        self._file = -1  # its descriptor; others are opened to be read, since there may be more than a process may open
        for file in sorted(folder.glob("*.kv")):
            self._scan(file)
        self._next = 1 + max(self._sizes, default=0)
        self._shrink()
        self._thread = ThreadPoolExecutor(1, "quire-disk")

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(self._sizes.values())

    # -- called by the engine -----------------------------------------------------------------------------------

    def write(self, slot: int, name: bytes) -> None:
        """Write a slot's block to the disk; the slot must not change until the write has ended."""
        self._thread.submit(self._run, "write", slot, lambda: self._append(slot, name))

    def read(self, number: int, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Read blocks into slots, in this order, stopping at the first one that cannot be read."""
        self._thread.submit(self._run, "read", number, lambda: self._fill(blocks))

    def forget(self, name: bytes) -> None:
        """Remove a bad block from the index."""
        self.index.pop(name, None)

    def drain(self) -> None:
        """Wait until all writes and reads have ended."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Finish all writes, and close the files."""
        self._thread.shutdown()
        self._close_segment()

    # -- in the thread ----------------------------------------------------------------------------------------

    def _run(self, kind: Literal["write", "read"], number: int, work: Callable[[], int]) -> None:
        begin, count = time.monotonic(), 0
        try:
            count = work()
        except Exception as error:
            self._failed(error)
        self.mailbox.post(Ended(kind, number, count, time.monotonic() - begin))

    def _failed(self, error: Exception) -> None:
        """Count a failure; the 1st, 10th, 100th and so on are logged."""
        self.failures += 1
        if str(self.failures).strip("0") == "1":
            why = (isinstance(error, OSError) and error.strerror) or error
            logger.warning("disk tier %s: %s (failures: %d); serving goes on", self.folder, why, self.failures)

    def _append(self, slot: int, name: bytes) -> int:
        if name in self.index:
            return 1
        payload, check = self.host.block(slot).numpy().data, self.host.checks[slot]
        record = HEADER.size + len(payload) + len(check)
        if record > self._segment_bytes:
            raise OSError(f"a block of {len(payload)} bytes is too large for a budget of {self.budget}")
        if self._open is None or self._sizes[self._open] + record > self._segment_bytes:
            self._begin_segment()
            self._shrink(record)
        segment = self._open
        if segment is None:
            raise OSError("the budget is smaller than a segment")
        offset = self._sizes[segment]
        try:
            header = self._header(name, len(payload), len(check))
            written = os.pwritev(self._file, [header, payload, check], offset)
            if written != record:
                raise OSError(f"only {written} of {record} bytes could be written")
        except OSError:
            if offset:  # records after a torn one would not be found again, so a new segment begins, and only one
                self._close_segment()
            raise
        self._sizes[segment] = offset + record
        self._names[segment].append(name)
        self.index[name] = Place(segment, offset)
        return 1

    def _fill(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        for count, (slot, name) in enumerate(blocks):
            place = self.index.get(name)
            if place is None:
                return count
            try:
                self.host.checks[slot] = self._read(place, name, self.host.block(slot).numpy().data)
            except OSError as error:
                self.forget(name)
                self._failed(error)
                return count
        return len(blocks)

    def _read(self, place: Place, name: bytes, payload: memoryview) -> bytes:
        """Read a record's block, and return its check."""
        header, check = bytearray(HEADER.size), bytearray(CHECK_BYTES)  # a shorter check is followed by the next record
        descriptor = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            read = os.preadv(descriptor, [header, payload, check], place.offset)
        finally:
            os.close(descriptor)
        known = self._parsed(header)
        whole = known is not None and known[:2] == (name, len(payload))
        if known is None or not whole or read < HEADER.size + len(payload) + known[2]:
            raise OSError(f"segment {place.segment}: a record has changed")
        return bytes(check[: known[2]])

    # -- segments --------------------------------------------------------------------------------------------

    def _header(self, name: bytes, length: int, check: int) -> bytes:
        fields = HEADER.pack(MAGIC, length, check, name, bytes(16))[:-16]
        return fields + blake3(fields, key=self._key).digest(16)

    def _parsed(self, header: bytes | bytearray) -> tuple[bytes, int, int] | None:
        """The name, and the lengths of the block and its check, if the header is whole and made with this key."""
        if len(header) < HEADER.size or header[-16:] != blake3(header[:-16], key=self._key).digest(16):
            return None
        _, length, check, name, _ = HEADER.unpack(header)
        return name, length, check

    def _scan(self, file: Path) -> None:
        """Add a segment's records to the index, up to one that is not whole."""
        try:
            number, descriptor = int(file.stem, 16), os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError):
            return  # not ours
        try:
            if file == self._path(number):
                self._scan_records(number, descriptor)
        finally:
            os.close(descriptor)

    def _scan_records(self, number: int, descriptor: int) -> None:
        self._names[number] = []
        self._sizes[number] = end = os.fstat(descriptor).st_size
        offset, lengths = 0, {each.block_bytes for each in self.host.groups}
        while (known := self._parsed(os.pread(descriptor, HEADER.size, offset))) is not None:
            name, length, check = known
            if offset + HEADER.size + length + check > end:
                break
            if length in lengths:
                self.index[name] = Place(number, offset)
                self._names[number].append(name)
            offset += HEADER.size + length + check

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:016x}.kv"

    def _begin_segment(self) -> None:
        self._close_segment()
        number, self._next = self._next, self._next + 1
        self._file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._sizes[number], self._names[number] = 0, []
        self._open = number

    def _close_segment(self) -> None:
        """Nothing more is appended to the segment that is open, if one is."""
        if self._open is not None:
            os.close(self._file)
            self._open, self._file = None, -1

    def _shrink(self, more: int = 0) -> None:
        """Delete the oldest segments until there is room for a full one."""
        room = self.budget - (self._segment_bytes if more else 0)
        while self._sizes and sum(self._sizes.values()) > max(room, 0):
            oldest = min(self._sizes)
            if oldest == self._open:
                break
            for name in self._names.pop(oldest):
                if self.index.get(name, Place(-1, 0)).segment == oldest:
                    self.index.pop(name, None)
            del self._sizes[oldest]
            self._path(oldest).unlink(missing_ok=True)
