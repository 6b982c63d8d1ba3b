"""Stand-ins for a GPU, so that the way a step takes through one is tested without one.

`DelayedDevice` computes at once, as a CPU does, but shows nothing of it until somebody waits; what it records, it runs
again. Numbers are packed for it as for a GPU. `SpanKernels` are the plain-torch kernels behind the interface of those
that read a step's spans on the device.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.engine import engine, loading
from quire.ops import HeadNorm, Kernels, KVCache, RaggedBatch
from quire.ops.ragged import DeviceSpans, DeviceTrees, Trees
from quire.runner.device import CudaDevice, Device, Reached

UNREAD = 77
"""Fills what is downloaded until somebody has waited for it."""


class Unpinned(CudaDevice):
    """Packs and sends numbers as a GPU's device does, in plain memory."""

    def __init__(self) -> None:
        Device.__init__(self)

    def _staging(self, size: int) -> tuple[Tensor, NDArray[np.uint8]]:
        host = np.empty(size, np.uint8)
        return torch.from_numpy(host), host


class DelayedDevice(Unpinned):
    """A device that works by itself, as far as its caller can tell.

    Args:
        memory: bytes of it, all of them free.
        most_graphs: so many recordings fit into it.

    Attributes:
        num_recorded, num_replayed: graphs, and their repetitions.
        num_elsewhere: copies that were not queued here, but where a GPU would do them in no order with this one's.
        peaks: measurements of `peak`.
    """

    describe, release = Device.describe, Device.release

    def __init__(self, memory: int = 2**30, most_graphs: int = 1000) -> None:
        super().__init__()
        self._most_graphs = most_graphs
        self._active = 0
        self.num_recorded = self.num_replayed = self.num_elsewhere = 0
        self.peaks = 0
        self._memory = memory
        self._hidden: deque[tuple[Tensor, Tensor]] = deque()  # what is downloaded, and what will stand there
        self._num_shown = 0  # that are not there any more

    @property
    def is_active(self) -> bool:
        """Whether what is computed is queued here."""
        return self._active > 0

    @contextmanager
    def active(self) -> Iterator[None]:
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        self.num_elsewhere += not self._active
        return super().upload(*arrays)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self.num_elsewhere += not self._active
        super().write(tensor, array)

    def download(self, *tensors: Tensor) -> list[Tensor]:
        self.num_elsewhere += not self._active
        shown = [torch.full_like(tensor, UNREAD) for tensor in tensors]
        self._hidden += [(show, tensor.clone()) for show, tensor in zip(shown, tensors, strict=True)]
        return shown

    def mark(self) -> Any:
        downloads = self._num_shown + len(self._hidden)
        return _Mark(lambda: self._show(downloads))

    def _show(self, downloads: int) -> None:
        """All that was queued before a mark."""
        with torch.inference_mode():
            while self._num_shown < downloads:
                shown, tensor = self._hidden.popleft()
                shown.copy_(tensor)
                self._num_shown += 1

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.num_recorded == self._most_graphs:
            raise torch.OutOfMemoryError("no")
        made = run()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            for before, now in zip(made, run(), strict=True):
                before.copy_(now)

        return replay, made

    def peak(self, run: Callable[[], None]) -> int:
        run()
        self.peaks += 1
        return 2**20

    def memory(self) -> tuple[int, int]:
        return self._memory, self._memory


class _Mark(Reached):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait


class StrictDevice(DelayedDevice):
    """One that is told what to do without ever being waited for; a test in which it is, fails.

    To wait is to wait for a mark, or to look at what is on the device, while a step is launched. Trial steps, which are
    measured before any request comes, may wait.
    """

    _in_trial = False

    @contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), nullcontext() if self._in_trial else _Unseen():
            yield

    def peak(self, run: Callable[[], None]) -> int:
        self._in_trial = True
        try:
            return super().peak(run)
        finally:
            self._in_trial = False

    def _show(self, downloads: int) -> None:
        if self._active and not self._in_trial:
            pytest.fail("a step is waited for while another one is launched")
        super()._show(downloads)


class _Unseen(TorchFunctionMode):
    """Numbers on the device cannot be seen by the host; nor can anything be made whose size depends on them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in SEEN or (name in SIZED and any(_decides_size(name, arg) for arg in args[SIZED[name]])):
            pytest.fail(f"{name} looks at what is on the device while a step is launched")
        return func(*args, **(kwargs or {}))


SEEN = {"tolist", "item", "numpy", "cpu", "equal", "allclose"} | {
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *(f"__{name}__" for name in ("bool", "int", "float", "index", "array", "iter", "contains")),
}
"""What a host does with a tensor that it can see."""

SIZED = {
    **dict.fromkeys(("__getitem__", "__setitem__"), slice(1, 2)),
    **dict.fromkeys(("zeros", "ones", "empty", "full", "arange"), slice(None)),
    "repeat_interleave": slice(1, None),
}
"""What makes as many elements as some arguments say, and which."""


def _decides_size(name: str, arg: Any) -> bool:
    if name not in ("__getitem__", "__setitem__"):
        return isinstance(arg, Tensor)
    parts = arg if isinstance(arg, tuple) else (arg,)
    bounds = [bound for part in parts if isinstance(part, slice) for bound in (part.start, part.stop)]
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts) or any(
        isinstance(bound, Tensor) for bound in bounds
    )


def opaque(kernels: Kernels) -> Kernels:
    """The same, whose insides a `StrictDevice` does not look at: they stand for what runs on a GPU."""
    for name in dir(Kernels):
        method = getattr(kernels, name)
        if not name.startswith("_") and callable(method):
            setattr(kernels, name, functools.partial(_unwatched, method))
    return kernels


def _unwatched(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return method(*args, **kwargs)


class SpanKernels(Kernels):
    """Plain torch, reading spans as a GPU's kernels do: from tensors, with rows and spans of padding."""

    reads_spans = True

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[object, tuple[int, RaggedBatch]] | None = None

    def _host(self, batch: RaggedBatch, kv: KVCache) -> tuple[int, RaggedBatch]:
        """See `_on_host`. The layers of a step share one, and what is planned for it; a replay's numbers differ."""
        spans = batch.spans
        assert isinstance(spans, DeviceSpans)
        read = [batch.token_ids, batch.positions, batch.slots, spans.row_starts, spans.context_lens, spans.table_rows]
        read += [spans.block_tables, *((trees.bases, trees.depths, trees.paths) if (trees := spans.trees) else ())]
        seen = kv.numbers.data_ptr(), [(part.data_ptr(), part.shape, part.numpy().tobytes()) for part in read]
        if self._known is None or self._known[0] != seen:
            self._known = seen, _on_host(batch)
        return self._known[1]

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm: HeadNorm | None,
        tables: tuple[Tensor, Tensor],
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
    ) -> Tensor:
        real, host = self._host(batch, kv)
        if not real:
            return qkv.view(len(qkv), -1, kv.head_dim)[:, : -2 * kv.kv_heads]
        cos, sin = tables
        return super().rotate_and_store(qkv[:real], norm, (cos[:real], sin[:real]), kv, host, layer)

    def attend(
        self,
        q: Tensor,
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        real, host = self._host(batch, kv)
        if not real:
            return _padded(batch, q.flatten(1)[:0])
        return _padded(batch, super().attend(q[:real], kv, host, layer, scale, window, sinks, causal))

    def attend_latent(self, q: Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int) -> Tensor:
        real, host = self._host(batch, kv)
        return _padded(
            batch, super().attend_latent(q[:real], kv, host, layer, scale, width) if real else q[:0, :, :width]
        )


def _padded(batch: RaggedBatch, out: Tensor) -> Tensor:
    """With rows of padding, which nobody may read, as the batch has them."""
    return torch.cat([out, out.new_full((len(batch.positions) - len(out), *out.shape[1:]), torch.nan)])


def _on_host(batch: RaggedBatch) -> tuple[int, RaggedBatch]:
    """The number of real rows, and the batch as kernels on a CPU read it."""
    spans = batch.spans
    assert isinstance(spans, DeviceSpans)
    row_starts, contexts = spans.row_starts.tolist(), spans.context_lens.tolist()
    count = sum(length > 0 for length in contexts)
    real = row_starts[count]
    assert row_starts[count:] == [real] * (len(row_starts) - count), "spans of padding are behind the others"
    width = -(-max(contexts[:count], default=0) // batch.block_size)
    tables = spans.block_tables[spans.table_rows[:count].long()][:, :width].long()
    needed = -(-torch.tensor(contexts[:count]) // batch.block_size)
    tables = tables * (torch.arange(width) < needed[:, None])
    host = RaggedBatch(
        batch.token_ids[:real],
        batch.positions[:real],
        batch.slots[:real],
        row_starts[: count + 1],
        contexts[:count],
        tables.contiguous(),
        batch.block_size,
        trees=spans.trees and _trees_on_host(spans.trees, row_starts[: count + 1], contexts[:count]),
    )
    return real, host


def _trees_on_host(trees: DeviceTrees, row_starts: list[int], contexts: list[int]) -> Trees:
    """For the real rows."""
    linear = trees.depths[row_starts[:-1]] < 0
    assert (trees.depths[row_starts[-1] :] == -1).all(), "rows of padding are in no tree"
    bases = torch.where(linear, torch.tensor(contexts), trees.bases[: len(contexts)])
    return Trees(bases, trees.paths[: row_starts[-1]].long())


@contextmanager
def on_device(device: Device, kernels: Kernels) -> Any:
    """Engines that start within run on this device with these kernels."""
    with (
        mock.patch.object(engine, "open_device", lambda kind, rank=0: device),
        mock.patch.object(loading, "choose_kernels", lambda *args: kernels),
    ):
        yield
