"""Ranks whose tensors lie on devices of their own: torch.distributed moves these, and the rest is as on CPUs."""

from __future__ import annotations

import os
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

SEEN_SECONDS = 1.0
"""After so long whoever watches the ranks has seen that one died."""


class TorchGroup:
    """A rank's place among others, each with a device of its own.

    What is gathered or added stays on the device, in the order of what that is told to do; so the host neither waits
    nor knows when it is done. What ranks tell each other beside that (digests, which loads are bad, that one is lost)
    goes through `host`. Queued work waits for ranks that do not take part, and nothing takes it back: a rank that
    cannot go on with a step ends all of them, and the engine with them.

    Args:
        host: the same ranks' group for what lies in the host's memory.
        store: descriptor of an empty file in memory, which all ranks have: that is where they find each other.
        device: this rank's. NCCL connects GPUs, gloo what stands for them in tests.
        timeout: seconds after which a rank that does not take part is lost.
    """

    def __init__(self, host: Group, store: int, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.shared_bytes = host.rank, host.size, host.shared_bytes
        self.address: int | None = None  # kernels leave gathers to this
        self.counts: tuple[int, int] | None = None  # what a recorded graph repeats passes by here,
        self.reduced = 0, 0  # sums as well
        self._host, self._device, self._timeout = host, device, timedelta(seconds=timeout)
        self._store, self._connection = os.dup(store), None
        weakref.finalize(self, os.close, self._store)

    def _connected(self) -> Any:
        """Made by the first of what all do together: it takes all of them."""
        if self._connection is not None:
            return self._connection
        file = c10d.FileStore(f"/proc/self/fd/{self._store}", self.size)  # so there is neither a name nor a port
        made = (_nccl if self._device.type == "cuda" else _gloo)(file, self.rank, self.size, self._timeout)
        weakref.finalize(self, made.shutdown).atexit = False
        self._connection = made
        return made

    @property
    def lost(self) -> int | None:
        """See `Group`."""
        return self._host.lost

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        widest = max(map(len, parts))  # all must bring as much
        x = x.contiguous() if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        found = x.new_empty(self.size, len(x), widest)
        with self._taking_part():
            self._connected()._allgather_base(found.view(-1), x.view(-1)).wait()
        return torch.cat([each[:, : len(part)] for each, part in zip(found, parts, strict=True)], dim=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in the order and precision that the connection chooses."""
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
        """See `Group`; of the host's memory."""
        return self._host.exchange(own, word)

    def check(self, digest: int) -> None:
        self._host.check(digest)

    def give_up(self, number: int) -> None:
        self._host.give_up(number)

    def lose(self, rank: int) -> None:
        self._host.lose(rank)
        if self._connection is not None:
            self._connection.abort()  # what waits for it on the device

    def ended(self, outcome: int) -> None:
        self._host.ended(outcome)

    def begin_anew(self, number: int) -> None:
        """Raises RankLostError: what this device or another one was told of the last step may never end."""
        raise RankLostError(
            f"rank {self.rank} cannot go on after a step that was given up: ranks on GPUs start again together",
            self.rank,
        )


def _nccl(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, size, options)
