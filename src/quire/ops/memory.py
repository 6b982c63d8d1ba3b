"""Memory for what a step reads or needs, and the advice that the system gets about it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict

import torch

HUGE_PAGE = 2 * 2**20
SMALL = 8 * HUGE_PAGE
"""Bytes of a weight below which its begin and end, which fill no huge page, are much of it."""
LINE = 64
"""Bytes of a line of the processor's caches."""
_ADVISE_HUGE_PAGES = 14  # Linux: MADV_HUGEPAGE
_POPULATE = 23  # MADV_POPULATE_WRITE, since 5.14


class Scratch:
    """A buffer for what a kernel needs for the length of a call; it grows to the largest need and stays."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._address = self._size = 0  # of what of it may be used

    @staticmethod
    def room(size: int) -> int:
        """Bytes that the buffer has where `size` is the largest need."""
        return size + size // 4 + 64

    def at_least(self, size: int) -> int:
        """The address of `size` bytes, aligned to a cache line. They belong to the caller until the next call."""
        if size > self._size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one is freed before
            self._size = 0
            self._buffer = huge(self.room(size))
            address = self._buffer.data_ptr()
            self._address, self._size = address + -address % LINE, self._buffer.nbytes - LINE
        return self._address


class WeightMemory:
    """Where weights lie: in huge pages, and small ones side by side.

    What weights leave is used again for others of the same size, as those of experts that move: then the system has no
    pages to give, which may take longer than all the rest, and none to take back.
    """

    CHUNK = 64 * HUGE_PAGE  # of which pages are taken as they are used

    def __init__(self) -> None:
        self._lock, self._free = threading.Lock(), defaultdict[int, list[torch.Tensor]](list)  # by size
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def take(self, size: int, owner: object) -> torch.Tensor:
        """`size` bytes, which may hold anything, for as long as their owner lives."""
        with self._lock:
            place = self._free[size].pop() if self._free[size] else self._new(size)
        weakref.finalize(owner, self._free[size].append, place).atexit = False
        return place

    def _new(self, size: int) -> torch.Tensor:
        if size >= SMALL:
            return huge(size)
        whole = -(-size // LINE) * LINE
        if whole > len(self._chunk):
            self._chunk = huge(self.CHUNK)
        place, self._chunk = self._chunk[:size], self._chunk[whole:]
        return place


def huge(size: int) -> torch.Tensor:
    """`size` bytes, all 0, for something that every step reads, in huge pages where the system has them.

    Weights and keys are read in long streams: with pages of 4 KiB the processor looks up an address every 64 lines.
    Like any memory, it is taken from the system where it is first written.
    """
    if size < HUGE_PAGE or sys.platform != "linux":
        return torch.zeros(size, dtype=torch.uint8)  # torch aligns to 64 bytes
    # A mapping of its own: the heap would keep what lies between, and what is freed later.
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    first = -buffer.data_ptr() % HUGE_PAGE
    _madvise(buffer.data_ptr() + first, size, _ADVISE_HUGE_PAGES)
    return buffer[first : first + size]


def shared(size: int, fd: int = -1) -> tuple[torch.Tensor, int]:
    """`size` bytes that other processes may map, too, and the descriptor of the file in memory that they are.

    The file has no name: it is gone with the last process that has it open or mapped. Its pages are taken where they
    are first written; huge ones where the system has them for shared memory (`shmem_enabled`).

    Args:
        fd: such a file; -1: a new one, all 0. Where the system has none, the memory is private, and the descriptor -1.
    """
    if sys.platform != "linux":
        return huge(size), -1
    if fd < 0:
        fd = os.memfd_create("quire-memory")
        os.ftruncate(fd, size)
    buffer = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    _madvise(buffer.data_ptr(), size, _ADVISE_HUGE_PAGES)
    return buffer, fd


def pinned(size: int, fd: int = -1) -> torch.Tensor:
    """`size` bytes, all 0, that a GPU copies to and from by itself; they are taken from the system at once.

    torch's own pinned memory is for what comes and goes: it is rounded up to a power of two, up to twice as much.

    Args:
        fd: a file in memory (see `shared`) whose bytes they are, which others may have pinned, too; -1: their own.

    Raises:
        MemoryError: the driver cannot pin so much.
    """
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(fd, max(size, 1), flags=flags)
    held = (ctypes.c_uint8 * len(pages)).from_buffer(pages)
    buffer = torch.frombuffer(held, dtype=torch.uint8)[:size]
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(driver.cudaHostRegister(buffer.data_ptr(), len(pages), 0))
    except RuntimeError as error:
        raise MemoryError(f"{size:,} bytes cannot be pinned for a GPU: {error}") from error
    # Not with the mapping's own end, which Python reports when it is unmapped already.
    weakref.finalize(held, driver.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


def map_file(fd: int, start: int, size: int) -> torch.Tensor:
    """`size` bytes of a file from `start` on, which are read when touched, and unmapped with the tensor.

    What is written there never reaches the file. Unlike Python's `mmap`, which keeps a descriptor of its own for as
    long as the memory is mapped, this needs none: a quantized model of 128 experts has 36,000 tensors.

    Raises:
        OSError: the file is shorter, or the system has no more mappings for this process.
    """
    if start + size > os.fstat(fd).st_size:
        raise OSError(errno.ENODATA, f"it ends before byte {start + size}")
    skip = start % mmap.ALLOCATIONGRANULARITY
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    length, access = ctypes.c_size_t(skip + size), mmap.PROT_READ | mmap.PROT_WRITE
    address = library.mmap(None, length, access, mmap.MAP_PRIVATE, fd, ctypes.c_int64(start - skip))
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        more = "; raise the system's limit of mappings for a process, vm.max_map_count" if code == errno.ENOMEM else ""
        raise OSError(code, os.strerror(code) + more)
    pages = (ctypes.c_uint8 * (skip + size)).from_address(address)
    weakref.finalize(pages, library.munmap, ctypes.c_void_p(address), length).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)[skip:]


def populate(tensor: torch.Tensor) -> None:
    """Take memory from the system that was not written to yet, where the system can be told so; what stands there
    stays. Others may use it meanwhile."""
    if sys.platform != "linux" or not tensor.nbytes:
        return
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    for begin in range(first, tensor.data_ptr() + tensor.nbytes, HUGE_PAGE):
        size = min(HUGE_PAGE, tensor.data_ptr() + tensor.nbytes - begin)
        _madvise(begin, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, _POPULATE)


def give_back() -> None:
    """Let the system have what the heap keeps of memory that was freed, where the C library can do that.

    Loading frees much: each weight is made in one place, and then goes to where it is read.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _madvise(address: int, size: int, advice: int) -> int:
    """Advice to Linux, which may not know it: then nothing changes. Elsewhere the numbers mean something else.

    Returns the error's number, 0 if there is none.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None) if sys.platform == "linux" else None
    if function is None or function(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0:
        return 0
    return ctypes.get_errno()
