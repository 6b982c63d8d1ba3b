"""Groups of ranks with a device each: tensors are gathered by torch.distributed, everything else as on CPUs."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d  # what torch.distributed exports of it depends on the build

from quire.errors import DeviceLostError, RankLostError
from quire.parallel.group import Group

logger = logging.getLogger(__name__)

SEEN_SECONDS = 1.0
"""Within this time the thread that watches the ranks notices that one has died."""

SHUT_DOWN_SECONDS = 5.0
"""How long the end of a group waits for its connection's."""


class TorchGroup:
    """See `Group`; each rank has a device of its own.

    Collectives of tensors are queued on the device like kernels, so the host does not wait for them. Messages between
    ranks (digests, bad loads, lost ranks) go through `host`. A queued collective waits for ranks that never join it and
    cannot be cancelled, so a rank that cannot continue a step ends all ranks, and the engine.

    Args:
        host: the group of the same ranks for data in host memory.
        store: descriptor of an empty memfd that all ranks have, through which they find each other.
        device: this rank's. GPUs use NCCL; the CPU devices of tests use gloo.
        timeout: seconds after which a rank that does not join a collective is lost.
    """

    def __init__(self, host: Group, store: int, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.shared_bytes = host.rank, host.size, host.shared_bytes
        self.address: int | None = None  # kernels leave gathers to this
        self.counts: tuple[int, int] | None = None  # replayed graphs bypass this class,
        self.reduced = 0, 0  # so neither is counted
        self._host, self._device, self._timeout = host, device, timedelta(seconds=timeout)
        self._store, self._connection = os.dup(store), None
        weakref.finalize(self, os.close, self._store)

    def _connected(self) -> Any:
        """The process group, created by the first collective, since that involves all ranks."""
        if self._connection is not None:
            return self._connection
        file = c10d.FileStore(f"/proc/self/fd/{self._store}", self.size)  # needs no name and no port
        made = (_nccl if self._device.type == "cuda" else _gloo)(file, self.rank, self.size, self._timeout)
        weakref.finalize(self, _shut_down, made).atexit = False
        self._connection = made
        return made

    @property
    def lost(self) -> int | None:
        """See `Group`."""
        return self._host.lost

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        widest = max(map(len, parts))  # all ranks must send the same size
        x = x.contiguous() if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        found = x.new_empty(self.size, len(x), widest)
        with self._taking_part():
            self._connected()._allgather_base(found.view(-1), x.view(-1)).wait()
        return torch.cat([each[:, : len(part)] for each, part in zip(found, parts, strict=True)], dim=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' x, in the order and precision of the library (NCCL, gloo)."""
        total = x.clone(memory_format=torch.contiguous_format)
        with self._taking_part():
            self._connected().allreduce([total]).wait()
        return total

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            end = time.monotonic() + SEEN_SECONDS
            while self.lost is None and time.monotonic() < end:
                time.sleep(0.01)
            if self.lost is not None:
                raise RankLostError(f"rank {self.lost} died, or has not answered", self.lost) from error
            raise DeviceLostError(f"rank {self.rank} cannot reach the others' devices: {error}") from error

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        """See `Group`; for tensors in host memory."""
        return self._host.exchange(own, word)

    def check(self, digest: int) -> None:
        self._host.check(digest)

    def give_up(self, number: int) -> None:
        self._host.give_up(number)

    def lose(self, rank: int) -> None:
        self._host.lose(rank)
        if self._connection is not None:
            self._connection.abort()  # also ends collectives that wait on the device

    def ended(self, outcome: int) -> None:
        self._host.ended(outcome)

    def resume(self, number: int) -> None:
        """Raises RankLostError: collectives of the last step that are queued on a device may never end."""
        raise RankLostError(
            f"rank {self.rank} cannot go on after a step that was given up: ranks on GPUs start again together",
            self.rank,
        )


def _shut_down(connection: Any) -> None:
    """Free what a connection holds on the device. NCCL may wait for ranks that are gone: then it is left alone."""

    def shut_down() -> None:
        try:
            connection.shutdown()
        except RuntimeError as error:
            logger.debug("a connection among devices did not end well: %s", error)

    thread = threading.Thread(target=shut_down, name="quire-devices", daemon=True)
    thread.start()
    thread.join(SHUT_DOWN_SECONDS)


def _nccl(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else torch ends the process if a rank is lost
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, size, options)
