"""Keeps the shared memory of a group with ranks on several machines in sync: see group.cpp."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator

from quire.ops.cpu.group import library
from quire.ops.cpu.library import I32, I64, POINTER, Prototype

PROTOTYPES: dict[str, Prototype] = {
    "mirror_look": (I32, (POINTER, I32, I32, POINTER, POINTER)),
    "mirror_copy": (None, (POINTER, POINTER, POINTER)),
    "mirror_bring": (I32, (POINTER, I32, POINTER, I64)),
    "mirror_ends": (None, (POINTER, POINTER)),
    "mirror_doze": (None, (POINTER,)),
}


class _News(ctypes.LittleEndianStructure):
    """`News` in group.cpp."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("arrived", "word")),
        *((name, I64) for name in ("begin", "own", "width", "rows")),
    )


NEWS_BYTES = ctypes.sizeof(_News)


class Mirror:
    """One machine's copy of a group's shared memory. To be used by one thread.

    Args:
        memory, matrix_bytes: see `SharedGroup`.
        size: number of ranks. own: the ranks of this machine.
    """

    def __init__(self, memory: int, matrix_bytes: int, size: int, own: range) -> None:
        self._lib, self._own = library(PROTOTYPES), own
        self._memory = mmap.mmap(memory, self._lib.group_bytes(matrix_bytes))
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self._address = self._lib.group_join(ctypes.addressof(self._anchor), matrix_bytes, 0, size, 0.0, -1)
        if self._address is None:
            raise MemoryError("no memory for a group of ranks")
        weakref.finalize(self, self._lib.group_leave, self._address).atexit = False
        self._seen = (ctypes.c_uint64 * size)()
        self._ends = 0, 0  # see `quire_mirror_ends`: what the other machines know

    def news(self) -> Iterator[tuple[int, bytes | bytearray]]:
        """What this machine's ranks have written since the last call, as (rank, bytes); rank -1 is for `ends`."""
        news, found = _News(), []
        look = self._own.start, self._own.stop, ctypes.addressof(self._seen), ctypes.addressof(news)
        while (rank := self._lib.mirror_look(self._address, *look)) >= 0:
            out = bytearray(NEWS_BYTES + news.rows * news.own)
            out[:NEWS_BYTES] = bytes(news)
            if len(out) > NEWS_BYTES:
                place = ctypes.addressof(ctypes.c_char.from_buffer(out, NEWS_BYTES))
                self._lib.mirror_copy(self._address, ctypes.addressof(news), place)
            found.append((rank, out))
        # Read after the counters and sent before them: a rank that resumes has given up earlier steps.
        if (ends := self._exchange_ends((0, 0))) != self._ends:
            self._ends = ends
            yield -1, b"%d %d" % ends
        yield from found

    def bring(self, rank: int, news: memoryview) -> None:
        """Write what `news` has returned on another machine.

        Raises:
            ValueError: it is not valid.
        """
        if rank == -1:
            given_up, lost = map(int, bytes(news[:64]).split())
            self._exchange_ends((given_up, lost))
            # What only this machine knows is still to be sent.
            self._ends = max(self._ends[0], given_up), self._ends[1] or lost
            return
        told = bytes(news)
        if rank in self._own or not self._lib.mirror_bring(self._address, rank, told, len(told)):
            raise ValueError(f"{len(told)} bytes of rank {rank} do not fit into what the ranks have in common")

    def doze(self) -> None:
        """From now on, ranks that write something ring the bell."""
        self._lib.mirror_doze(self._address)

    def _exchange_ends(self, known: tuple[int, int]) -> tuple[int, int]:
        ends = (I64 * 2)(*known)
        self._lib.mirror_ends(self._address, ctypes.addressof(ends))
        return ends[0], ends[1]
