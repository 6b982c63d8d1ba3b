"""A stand-in for a GPU whose graphs know nothing of the program: as on a real one, a replay repeats operations on the
memory that they had, and no line of the host runs again; nor is the memory a recording's own but for its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from quire.ops import Kernels
from tests.devices import DelayedDevice, SpanKernels

LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


class TapedDevice(DelayedDevice):
    """Records operations, and those of `kernels` as one each, and repeats them.

    Attributes:
        num_launched: calls of kernels outside recordings.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tape: list[tuple[Callable[..., Any], Any, Any, Any]] | None = None
        self._in_kernel = False
        self._results: list[list[Tensor]] = []  # of each recording
        self.num_launched = 0
        self.kernels = self._watched(_Padded())

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.num_recorded == self._most_graphs:
            raise torch.OutOfMemoryError("no")
        tape: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._tape = tape
        try:
            with _Taping(self):
                made = run()
        finally:
            self._tape = None
        self.num_recorded += 1
        self._results.append(tree_flatten(tuple(made) if isinstance(made, tuple) else made)[0])
        _forget(self._results[-1])  # recording computes nothing
        later = len(self._results)

        def replay() -> None:
            self.num_replayed += 1
            for results in self._results[later:]:  # they may lie where this one computed
                _forget(results)
            with self._inside():
                for call, args, kwargs, before in tape:
                    _write(before, call(*args, **kwargs))

        return replay, made

    def took(self, call: Callable[..., Any], args: Any, kwargs: Any, made: Any) -> None:
        """An operation was done."""
        if self._tape is not None and not self._in_kernel:
            self._tape.append((call, args, kwargs, made))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._in_kernel = self._in_kernel, True
        try:
            yield
        finally:
            self._in_kernel = before

    def _watched(self, kernels: Kernels) -> Kernels:
        for name in dir(Kernels):
            method = getattr(kernels, name)
            if not name.startswith("_") and callable(method):
                setattr(kernels, name, self._kernel(method))
        return kernels

    def _kernel(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_launched += self._tape is None and not self._in_kernel
            with self._inside():
                made = method(*args, **kwargs)
            self.took(method, args, kwargs, made)
            return made

        return call


class _Padded(SpanKernels):
    """Results have as many rows as a step has with its padding, however many are real."""

    def rotate_and_store(self, qkv: Tensor, *args: Any) -> Tensor:
        rotated = super().rotate_and_store(qkv, *args)
        return torch.cat([rotated, rotated.new_full((len(qkv) - len(rotated), *rotated.shape[1:]), torch.nan)])


class _Taping(TorchDispatchMode):
    def __init__(self, device: TapedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._device._in_kernel and func.name().startswith(LOOKS):
            pytest.fail(f"{func.name()} looks at what is recorded")
        made = func(*args, **(kwargs or {}))
        self._device.took(func, args, kwargs or {}, made)
        return made


def _forget(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 1)


def _write(before: Any, now: Any) -> None:
    """Tensors have the memory that they had; views have it already."""
    for old, new in zip(tree_flatten(before)[0], tree_flatten(now)[0], strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
