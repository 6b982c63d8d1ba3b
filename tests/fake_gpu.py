"""A GPU that computes nothing: tensors have a shape, a type and a device, but no numbers (torch's fake tensors).

A CPU does not mind where a tensor lies, and knows each number. Here an operation of tensors on different devices fails,
as does a kernel that is given one of the host's, and a host that waits while a step is launched: it looks at a number,
or sends some out of memory that is not pinned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from quire.ops import CodedWeight
from quire.ops.coded import Scheme
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.quantize_groups import quantize_groups
from quire.ops.triton import experts_coded, latent, weights
from quire.ops.triton.coded import Lain
from quire.ops.triton.linear_vendor import Library
from quire.runner.device import Device, Reached
from tests.devices import Unpinned

NUMBERLESS = FakeTensorMode(allow_non_fake_inputs=True)
MEMORY = 80 * 2**30
GPU = torch.device("cuda", 0)
LOOKS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
"""What a host does with a tensor whose numbers it sees."""

Index = int | slice | Tensor | EllipsisType | None


Argument = tuple[str, Any]
Launch = tuple[str, str, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]
"""Of a kernel: its module and name, and its arguments as `described`, by place and by name."""


class FakeGpu(Unpinned):
    """A device of such tensors.

    Attributes:
        launched: what a compiler needs of each launch.
    """

    describe, release = Device.describe, Device.release

    def __init__(self) -> None:
        super().__init__()
        self.torch = GPU
        self.launched = set[Launch]()

    @contextmanager
    def active(self) -> Iterator[None]:
        with NUMBERLESS, _Watch():
            yield

    def _staging(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        return torch.empty(size, dtype=torch.uint8), np.empty(size, np.uint8)

    def download(self, *tensors: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor, device="cpu") for tensor in tensors]

    def mark(self) -> Reached:
        return Reached()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), run()

    def memory(self) -> tuple[int, int]:
        return MEMORY, MEMORY


class _Watch(TorchFunctionMode):
    """Fails where the host waits. And does what a torch that was built without CUDA cannot begin: copies, and indexing.

    Args:
        loading: the host may look, also at its own tensors: it is told that all is well.
    """

    def __init__(self, loading: bool = False) -> None:
        super().__init__()
        self._loading = loading

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if self._loading and isinstance(first, FakeTensor) and name in LOOKS:
            return {"__float__": 1.0, "__int__": 1, "__index__": 1}.get(name, True)
        if isinstance(first, Tensor) and first.device.type == "cuda":
            if name in LOOKS:
                pytest.fail(f"the host looks at a tensor of the GPU: {name}")
            if name == "contiguous" and not first.is_contiguous():
                return torch.ops.aten.clone(first, memory_format=torch.contiguous_format)
            if name == "contiguous":
                return first
            if name == "__getitem__":
                return _part(first, args[1])
            if name == "__setitem__":
                return _set(first, args[1], args[2])
        kwargs = kwargs or {}
        if name == "pin_memory":
            return first
        if name == "copy_" and "cuda" in (args[0].device.type, args[1].device.type):
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
            result = args[0]
        else:
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.device.type == "cuda" and not self._loading:
            sent = name in ("tensor", "as_tensor") or any(_is_on_host(arg) for arg in args)
            if sent and not kwargs.get("non_blocking"):
                pytest.fail(f"the host waits until it has sent a tensor to the GPU: {name}")
        return result


def _is_on_host(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.device.type == "cpu" and arg.dim() > 0


@contextmanager
def loading() -> Iterator[None]:
    """A model is loaded within."""
    with torch.inference_mode(), NUMBERLESS, _Watch(loading=True):
        yield


def _view(tensor: Tensor, index: Index | tuple[Index, ...]) -> tuple[Tensor, list[Tensor | None]]:
    """What views there are in an index, and the tensors that are left of it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    given = [part for part in parts if part is not None and part is not Ellipsis]
    rest: list[Index] = [slice(None)] * (tensor.dim() - len(given))
    at = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = rest
    aten, dim, tensors = torch.ops.aten, 0, list[Tensor | None]()
    for part in parts:
        if isinstance(part, Tensor):
            assert part.dtype != torch.bool, "the number of elements under a mask is not known to the host"
            assert part.device == tensor.device, f"an index on {part.device}"
            tensors += [None] * (dim - len(tensors)) + [part]
        if isinstance(part, int | np.integer):
            tensor = aten.select.int(tensor, dim, int(part))
            continue
        if part is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        dim += 1
    return tensor, tensors


def _part(tensor: Tensor, index: Index | tuple[Index, ...]) -> Any:
    view, tensors = _view(tensor, index)
    return torch.ops.aten.index.Tensor(view, tensors) if tensors else view


def _set(tensor: Tensor, index: Index | tuple[Index, ...], value: Any) -> None:
    view, tensors = _view(tensor, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if tensors:
        torch.ops.aten.index_put_(view, tensors, value)
    else:
        assert torch.broadcast_shapes(view.shape, value.shape) == view.shape


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """An H100 whose kernels are launched and do nothing; their tensors must lie there."""
    made = FakeGpu()

    def launch(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool = False, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for name, value in given.items():
            assert not isinstance(value, Tensor) or value.device == GPU, f"{self.fn.__name__}: {name} {value.device}"
        assert all(count > 0 for count in grid) and all(count < 2**16 for count in grid[1:]), (self.fn.__name__, grid)
        by_name = tuple(sorted((name, described(value)) for name, value in kwargs.items()))
        made.launched.add((self.fn.__module__, self.fn.__name__, tuple(map(described, args)), by_name))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "H100")
    monkeypatch.setattr(latent, "_shared_memory", lambda device: 227 * 1024)
    monkeypatch.setattr(Library, "settled", classmethod(lambda cls: cls()))
    monkeypatch.setattr(Library, "holds", lambda self, kind, weight: True)
    monkeypatch.setattr(weights, "addresses_of", _addresses_of)
    monkeypatch.setattr(experts_coded, "addresses_of", _addresses_of_parts)
    monkeypatch.setattr(weights, "_aligned", lambda weight: weight)
    monkeypatch.setattr(CpuKernels, "quantize_groups", _quantized)
    return made


def described(value: Any) -> tuple[str, Any]:
    """An argument of a kernel, without memory: its kind, and its type or value. (Else 1 and True would be one.)"""
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype).removeprefix("torch.")
    if isinstance(value, triton.language.dtype):
        return "dtype", value.name
    return type(value).__name__, value


def _addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)


def _addresses_of_parts(parts: Sequence[Lain | None], device: torch.device) -> Tensor:
    return torch.zeros(len(parts), 6, dtype=torch.int64, device=device)


def _quantized(self: CpuKernels, weight: Tensor, scheme: Scheme) -> CodedWeight:
    """Of weights without numbers: all outputs as one, since compiled kernels would read memory that is not there."""
    return _one_output(scheme, weight.shape[1]).outputs(torch.empty(len(weight), dtype=torch.int64))


@functools.cache
def _one_output(scheme: Scheme, inputs: int) -> CodedWeight:
    with unset_fake_temporarily():
        return quantize_groups(torch.zeros(1, inputs), scheme)
