"""Work on the device that is recorded once per size, and replayed: CUDA graphs.

What is recorded is a function of tensors whose launches depend on nothing but their shapes. Before a replay its inputs
are written into the same memory; its result is in the same memory as before, too.

Memory that a function no longer uses when it has been recorded is used for those that are recorded after it. So a
replay may overwrite results of what was recorded later: read or copy a result before anything else is replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.parallel.group import Group
from quire.runner.device import Device, RecordingError, is_out_of_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Graph:
    """Recorded work: write `inputs`, call `replay`, and read `made`."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    made: Any


class Graphs:
    """What a runner has recorded, by kind and size.

    Args:
        ranks: they record the same, and all or none of them.
        mode: "lazy", "eager" or "off"; see `EngineConfig.cuda_graphs`.
        spare: bytes that must be free to record another graph: for it, and for steps without one.

    Attributes:
        mode: see above.
        full: whether no more are recorded, for lack of memory, or because the device refused one.
    """

    def __init__(self, device: Device, ranks: Group, mode: str = "off", spare: int = 0) -> None:
        self._device, self._ranks, self._spare = device, ranks, spare
        self.mode, self.full = mode, False
        self._recorded: dict[Hashable, _Graph] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        """Drop all, since they read memory that is no longer used."""
        self._recorded, self.full = {}, False

    def __call__(
        self, key: Hashable, sent: NDArray[np.int32], run: Callable[..., T], *tensors: Tensor, records: bool = True
    ) -> T:
        """The result of `run(inputs, *tensors)`. The next call with this key overwrites it, and one with another may.

        Args:
            key: of the kind of work, and all sizes on which its launches depend.
            sent: the inputs on the host: one copy sends them.
            run: must not wait for the device.
            tensors: more inputs, on the device.
            records: whether to record it, so that it is replayed from the next time on.
        """
        graph = self._recorded.get(key)
        if graph is not None and self._replay(key, graph, sent, tensors):
            made: T = graph.made
            return made
        inputs = torch.empty(len(sent), dtype=torch.int32, device=self._device.torch)
        self._device.write(inputs, sent)
        made = run(inputs, *tensors)  # this call itself, which also compiles kernels
        if records and self.mode != "off" and not self.full:
            self._record(key, [inputs, *tensors], run)
        return made

    def _replay(self, key: Hashable, graph: _Graph, sent: NDArray[np.int32], tensors: Sequence[Tensor]) -> bool:
        """Whether it was replayed. If there is no memory for that, it is dropped, so that its work is launched."""
        self._device.write(graph.inputs[0], sent)
        for held, given in zip(graph.inputs[1:], tensors, strict=True):
            held.copy_(given)
        try:
            graph.replay()
        except Exception as error:
            if not is_out_of_memory(error) or self._ranks.size > 1:  # all ranks replay it, or none
                raise
            self._device.mark().wait()  # an earlier replay may still run
            del self._recorded[key]
            self._stop(error)
            return False
        return True

    def _record(self, key: Hashable, given: list[Tensor], run: Callable[..., Any]) -> None:
        """Record it, if possible; if not, that fails no step whose work has been done, which would be redone."""
        begin = time.perf_counter()
        self._device.release()  # cached memory cannot be used for recording
        recorded, why = None, None
        try:
            enough, inputs = self._device.memory()[0] >= self._spare, [tensor.clone() for tensor in given]
            recorded = self._device.record(lambda: run(*inputs)) if enough else None
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, RecordingError)):
                raise
            why = error
        if not self._on_all_ranks(recorded is not None) or recorded is None:
            self._stop(why)
            return
        self._recorded[key] = _Graph(inputs, *recorded)
        logger.debug("recorded %s in %.0f ms", key, (time.perf_counter() - begin) * 1000)

    def _stop(self, why: Exception | None) -> None:
        """Record no more graphs."""
        if self.full:
            return
        self.full = True
        if isinstance(why, RecordingError):
            logger.warning(
                "no more than %d CUDA graphs are recorded, and steps of other sizes take longer to launch: %s",
                len(self),
                why,
            )
            return
        logger.warning(
            "no memory for more than %d CUDA graphs: steps of other sizes take longer to launch; a lower "
            "gpu_memory_utilization or max_num_batched_tokens leaves more",
            len(self),
        )

    def _on_all_ranks(self, recorded: bool) -> bool:
        """Whether all ranks have recorded it. NCCL wants a collective in a graph on all of them, or on none."""
        if self._ranks.size == 1:
            return recorded
        return all(part.item() for part in self._ranks.exchange([torch.tensor([recorded], dtype=torch.uint8)]))


def aligned(lengths: Sequence[int]) -> list[slice]:
    """Places of arrays among 32-bit words, one behind the other, each aligned to 16 bytes, for which kernels are
    compiled."""
    places, start = [], 0
    for length in lengths:
        places.append(slice(start, start + length))
        start += -(-length // 4) * 4
    return places
