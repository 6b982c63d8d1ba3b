"""The machine that steps run on: moving numbers to and from it, waiting for it, and repeating what it did."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A point in the order of what a device was told to do."""

    def wait(self) -> None:
        """Return once the device has come so far."""
        ...


class Reached:
    """A point that is behind us."""

    def wait(self) -> None:
        return


class Device:
    """The CPU: whatever it is told is done when the call returns.

    Attributes:
        torch: where tensors lie.
        asynchronous: whether it works while the host goes on. Then what `download` gives may only be read after
            waiting for a later `mark`.
    """

    asynchronous = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Arrays as tensors on the device, in one copy; the arrays may be changed afterwards."""
        return [torch.from_numpy(array.copy()) for array in arrays]

    def download(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host, as the tensors are when the device comes to this point."""
        return [tensor.clone() for tensor in tensors]

    def mark(self) -> Mark:
        """This point."""
        return Reached()


class CudaDevice(Device):
    """A GPU: everything is queued on the current stream, in order, and the host goes on."""

    asynchronous = True

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        places = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)]).tolist()
        # torch keeps pinned memory from being used again before the copy has run.
        staged = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
        host = staged.numpy()
        for array, place in zip(arrays, places, strict=False):
            host[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = staged.to(self.torch, non_blocking=True)
        return [
            sent[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, place in zip(arrays, places, strict=False)
        ]

    def download(self, *tensors: Tensor) -> list[Tensor]:
        return [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
