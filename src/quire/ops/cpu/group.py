"""Groups of ranks on CPUs, which communicate through shared memory: see group.cpp."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from quire.errors import ConfigError, RankLostError, RanksDisagreeError, StepGivenUpError
from quire.ops.cpu.library import I32, I64, POINTER, Library, Prototype, usable
from quire.parallel.group import Gather

PROTOTYPES: dict[str, Prototype] = {
    "group_bytes": (I64, (I64,)),
    "group_join": (POINTER, (POINTER, I64, I32, I32, ctypes.c_double, I32)),
    "group_leave": (None, (POINTER,)),
    "group_gather": (I32, (POINTER, POINTER, I64, POINTER, I64, POINTER)),
    "group_exchange": (I32, (POINTER, POINTER, I64, ctypes.c_uint64, POINTER)),
    "group_check": (I32, (POINTER, ctypes.c_uint64)),
    "group_give_up": (None, (POINTER, I64)),
    "group_begin_anew": (I32, (POINTER, I64)),
    "group_lose": (None, (POINTER, I32)),
    "group_lost": (I32, (POINTER,)),
    "group_counts": (None, (POINTER, POINTER)),
}
DONE, GIVEN_UP, LOST, DIFFER, TOO_LARGE = range(5)
"""`Outcome` in group.h."""


class Share(ctypes.Structure):
    """`Share` in group.h: this rank's columns of a matrix."""

    _fields_ = tuple((name, I64) for name in ("begin", "own", "width"))


class Bytes(ctypes.Structure):
    """`Bytes` in group.h."""

    _fields_ = (("data", POINTER), ("size", I64))


def share_of(gather: Gather) -> Share:
    """A gather's columns, as C++ expects them."""
    return Share(gather.own.start, len(gather.own), gather.width)


class SharedGroup:
    """See `Group`; the ranks of a machine share memory.

    Args:
        memory: descriptor of a memfd; the first rank creates it with `new_memory`, others inherit it.
        matrix_bytes: size of the largest matrix that is gathered at a time; larger ones are gathered in parts.
        timeout: seconds after which a rank that does not answer is lost.
        first: number of this group's rank 0 in error messages.
        bell: an eventfd that wakes this machine's `Mirror`; -1 if all ranks are on this machine.

    Raises:
        ConfigError: the kernels, which contain the collectives, are not compiled.
    """

    def __init__(
        self, memory: int, matrix_bytes: int, rank: int, size: int, timeout: float, first: int = 0, bell: int = -1
    ) -> None:
        self.rank, self.size, self._lib = rank, size, library()
        self._timeout, self._first = timeout, first
        self.reduced = (0, 0)
        self._room = matrix_bytes // size  # bytes of each rank in an exchange
        self.shared_bytes: int = self._lib.group_bytes(matrix_bytes)
        self._memory = mmap.mmap(memory, self.shared_bytes)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        place = ctypes.addressof(self._anchor)
        self.address: int | None = self._lib.group_join(place, matrix_bytes, rank, size, timeout, bell)
        if self.address is None:
            raise MemoryError("no memory for a group of ranks")
        weakref.finalize(self, self._lib.group_leave, self.address).atexit = False

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        width = parts[-1].stop
        x, share = x.contiguous(), Share(parts[self.rank].start, x.shape[1], width)
        out = torch.empty(len(x), width, dtype=x.dtype)
        pointers = x.data_ptr(), len(x), ctypes.addressof(share), x.element_size(), out.data_ptr()
        self.ended(self._lib.group_gather(self.address, *pointers))
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        rows, total = max(1, self._room // max(1, x[:1].nbytes)), torch.empty_like(x)
        for first in range(0, len(x), rows):
            parts = [part.view(x.dtype) for part in self.exchange([x[first : first + rows]])]
            total[first : first + rows] = functools.reduce(torch.add, (part.float() for part in parts)).view(
                -1, x.shape[1]
            )
        self.reduced = (self.reduced[0] + 1, self.reduced[1] + x.nbytes)
        return total

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        own = [part.contiguous() for part in own]
        brought = (Bytes * len(own))(*(Bytes(part.data_ptr(), part.nbytes) for part in own))
        found = (Bytes * self.size)()
        pointers = ctypes.addressof(brought), len(own), word, ctypes.addressof(found)
        self.ended(self._lib.group_exchange(self.address, *pointers))
        begin = ctypes.addressof(self._anchor)
        return [
            torch.frombuffer(self._memory, dtype=torch.uint8, offset=part.data - begin, count=part.size)
            if part.size
            else torch.empty(0, dtype=torch.uint8)
            for part in found
        ]

    def check(self, digest: int) -> None:
        self.ended(self._lib.group_check(self.address, digest))

    def give_up(self, number: int) -> None:
        self._lib.group_give_up(self.address, number)

    def resume(self, number: int) -> None:
        self.ended(self._lib.group_begin_anew(self.address, number))

    def lose(self, rank: int) -> None:
        """See `Group`."""
        self._lib.group_lose(self.address, rank)

    @property
    def lost(self) -> int | None:
        """See `Group`."""
        rank: int = self._lib.group_lost(self.address)
        return None if rank < 0 else rank

    @property
    def counts(self) -> tuple[int, int]:
        """See `Group`."""
        counts = (ctypes.c_int64 * 2)()
        self._lib.group_counts(self.address, counts)
        return counts[0], counts[1]

    def ended(self, outcome: int) -> None:
        if outcome == GIVEN_UP:
            raise StepGivenUpError("another rank could not go on with the step; its own log says why")
        if outcome == LOST:
            rank = self._first + (self.lost or 0)
            raise RankLostError(f"rank {rank} died, or has not answered for {self._timeout:g} seconds", rank)
        if outcome == TOO_LARGE:
            raise ValueError("a step has more rows than the ranks have room for")
        if outcome == DIFFER:
            raise RanksDisagreeError(
                f"rank {self._first + self.rank} and another one have different tokens, or rows of other sizes: a bug"
            )


def new_memory(matrix_bytes: int) -> int:
    """A memfd for a group; it has no name, and is freed when the last process closes it."""
    memory = os.memfd_create("quire-ranks", 0)
    os.ftruncate(memory, library().group_bytes(matrix_bytes))
    return memory


def library(more: Mapping[str, Prototype] | None = None) -> Library:
    """The compiled functions, and `more` of them; they are the same for every instruction set.

    Raises:
        ConfigError: the kernels are not compiled.
    """
    names = usable()
    if not names:
        raise ConfigError("several ranks need the compiled kernels; 'quire doctor' says how to get them")
    return Library(names[0], {**PROTOTYPES, **(more or {})})
