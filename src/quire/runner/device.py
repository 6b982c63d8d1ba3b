"""The device that steps run on: transfers, synchronization, and recorded graphs."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import DeviceError

OLDEST_CAPABILITY = (8, 0)
"""Ampere, the first with bf16 products and asynchronous copies."""
OLDEST_TRITON = (3, 6)

OF_TRITON = "Triton Error [CUDA]: "
"""Prefix of Triton's messages about CUDA errors."""
REFUSED = ("out of memory", "invalid argument", "invalid configuration argument", "too many resources requested")
"""Messages about work that was refused and not started: the device can be used afterwards."""

T = TypeVar("T")


class RecordingError(Exception):
    """Work could not be recorded, for another reason than memory; the device can be used afterwards."""


class Mark(Protocol):
    """A point in a device's queue."""

    def wait(self) -> None:
        """Wait until the device has reached it."""
        ...

    def time(self) -> float:
        """When the device reached it, on the clock of `time.monotonic`; only after `wait`."""
        ...


class Reached:
    """A point that has been reached."""

    def __init__(self) -> None:
        self._time = time.monotonic()

    def wait(self) -> None:
        return

    def time(self) -> float:
        return self._time


class Device:
    """The CPU, on which every call completes before it returns.

    Attributes:
        torch: the device of tensors.
        asynchronous: whether work is queued. Then the results of `download` are valid only after waiting for a later
            `mark`.
    """

    asynchronous = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def describe(self) -> str:
        """A description for people."""
        return "CPU"

    def active(self) -> AbstractContextManager[Any]:
        """A context in which work is queued on this device."""
        return nullcontext()

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Arrays as tensors on the device, in one copy; the arrays may be changed afterwards."""
        return [torch.from_numpy(array.copy()) for array in arrays]

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Write an array into a tensor on the device; the array may be changed afterwards."""
        tensor.copy_(torch.from_numpy(array))

    def download(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host, with the values that the tensors have at this point of the queue."""
        return [tensor.clone() for tensor in tensors]

    def mark(self) -> Mark:
        """The current end of the queue."""
        return Reached()

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record the work that `run` queues, without executing it, so that it can be replayed at almost no cost.

        `run` must not wait for the device; each replay reads and writes the same memory.

        Returns:
            A function that replays it, and the result of `run`: tensors that each replay overwrites.

        Raises:
            torch.OutOfMemoryError: there is not enough memory; nothing remains allocated.
            RecordingError: it cannot be recorded.
        """
        raise NotImplementedError("a CPU runs what it is told at once; there is nothing to record")

    def peak(self, run: Callable[[], None]) -> int:
        """Most bytes that `run` allocates in addition to what is allocated; waits for all queued work first."""
        raise NotImplementedError("counted, not measured, on a CPU")

    def memory(self) -> tuple[int, int]:
        """Free and total memory in bytes."""
        raise NotImplementedError("see memory_plan.free_memory")

    def release(self) -> None:
        """Free cached memory."""


class CudaDevice(Device):
    """A GPU: everything is queued on one stream, in order, and the host does not wait.

    Raises:
        DeviceError: there is no such GPU, or it or the software is too old; the message says what to do.
    """

    asynchronous = True

    def __init__(self, index: int = 0) -> None:
        check_cuda(index)
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._stream = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs, which never run concurrently
        self._last = self._event()
        self._last.synchronize()
        self._last_time = time.monotonic()

    def describe(self) -> str:
        found = torch.cuda.get_device_properties(self.torch)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        places = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)]).tolist()
        staged, host = self._staging(places[-1])
        for array, place in zip(arrays, places, strict=False):
            host[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = staged.to(self.torch, non_blocking=True)
        parts = zip(arrays, places, strict=False)
        made = [sent[place : place + array.nbytes].view(_dtype_of(array.dtype)) for array, place in parts]
        return [part if array.ndim == 1 else part.view(array.shape) for part, array in zip(made, arrays, strict=True)]

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        staged, host = self._staging(array.nbytes)
        host[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor.copy_(staged.view(tensor.dtype).view(tensor.shape), non_blocking=True)

    def _staging(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        """Pinned memory; torch does not reuse it before the copy from it has run."""
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return staged, staged.numpy()

    def download(self, *tensors: Tensor) -> list[Tensor]:
        return [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]

    def mark(self) -> Mark:
        return _CudaMark(self, self._event())

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        if not self._graphs:  # torch does not accept a pool all of whose graphs are gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.torch)
        try:
            with torch.cuda.stream(self._stream), _without_garbage():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    made = run()
                finally:
                    graph.capture_end()
        except Exception as error:
            torch.cuda.synchronize(self.torch)  # raises if the device has failed
            if is_out_of_memory(error):  # also the driver's memory for the graph itself
                raise torch.OutOfMemoryError(str(error)) from error
            raise RecordingError(f"{type(error).__name__}: {error}") from error
        self._graphs.add(graph)
        return graph.replay, made

    def peak(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.torch)  # including fragmentation
        torch.cuda.reset_peak_memory_stats(self.torch)
        with self.active():
            run()
        torch.cuda.synchronize(self.torch)
        return torch.cuda.max_memory_reserved(self.torch) - before

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def time_of(self, event: torch.cuda.Event) -> float:
        """When an event was reached, on the host's clock: measured from the event of the last call."""
        self._last_time += self._last.elapsed_time(event) / 1000
        self._last = event
        return self._last_time


@functools.cache
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """torch's for numpy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@contextmanager
def _without_garbage() -> Iterator[None]:
    """A context without garbage collection, since freeing tensors in a cycle would become part of the graph."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CudaMark:
    def __init__(self, device: CudaDevice, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._event.synchronize()

    def time(self) -> float:
        return self._device.time_of(self._event)


def is_lost(error: Exception) -> bool:
    """Whether an error means that the GPU has failed: all further calls fail, and only a new process can use it.

    The driver reports this to the next caller, torch or Triton, which has no class for it. Running out of pinned memory
    and a refused launch are reported in the same way, but are not such errors.
    """
    told = isinstance(error, torch.AcceleratorError) or str(error).startswith(OF_TRITON)
    return told and not any(sign in str(error) for sign in REFUSED)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that the device or the host is out of memory. torch has no class for the latter."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("out of memory", "DefaultCPUAllocator")
    )


def open_device(kind: str, rank: int = 0) -> Device:
    """The device of an `EngineConfig`, "cpu" or "cuda"; each rank of a machine has a GPU of its own.

    Raises:
        DeviceError: see `CudaDevice`.
    """
    return CudaDevice(rank) if kind == "cuda" else Device()


def check_cuda(index: int = 0) -> None:
    """Raises DeviceError unless GPU `index` can run Quire's kernels."""
    if torch.version.cuda is None:
        raise DeviceError(
            f"device=cuda, but the installed torch {torch.__version__} was built for CPUs only; "
            "install torch with CUDA (pip install torch), or use device=cpu"
        )
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(
            f"device=cuda, but there is no GPU {index} here ({torch.cuda.device_count()} found); check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use device=cpu"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        raise DeviceError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}; Quire's "
            f"kernels need {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or newer: use device=cpu"
        )
    _check_triton()


def _check_triton() -> None:
    least = ".".join(map(str, OLDEST_TRITON))
    try:
        import triton
    except ImportError as error:
        raise DeviceError(f"device=cuda needs Triton: pip install 'triton>={least}', or use device=cpu") from error
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        raise DeviceError(
            f"Triton {triton.__version__} is too old for Quire's kernels; pip install 'triton>={least}' (torch 2.11 "
            "and newer bring it), or use device=cpu"
        )
    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:  # of its own, of a compiler, of the loader
        raise DeviceError(
            f"Triton cannot start here: {error}. It compiles its connection to the driver once, with gcc or clang "
            "(CC=... names another) and Python's headers (python3-dev); install them, or use device=cpu"
        ) from error
