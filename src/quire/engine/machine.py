"""The ranks of one machine: what they share, and how they are started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import msgspec

from quire import child
from quire.config import EngineConfig
from quire.engine.rank import RankStart
from quire.errors import ConfigError
from quire.ops.cpu.group import new_memory
from quire.ops.cpu.mirror import Mirror
from quire.ops.memory import shared
from quire.ops.threads import usable_threads

MESSAGE_BYTES = 1 << 20
"""Size of a `SharedGroup` whose matrices stay on devices: room for messages between ranks."""


def groups_of(config: EngineConfig) -> list[range]:
    """The ranks of each group: all, and those of each stage, if there are several of both kinds."""
    size, width = config.num_ranks, config.tensor_parallel_size
    return [range(size), *(range(first, first + width) for first in range(0, size, width) if 1 < width < size)]


def check_gpus(config: EngineConfig, found: int) -> None:
    """Check that ranks can run on this machine's GPUs, one each.

    Raises:
        ConfigError: there are too few, or the work would be shared in a way that only works on CPUs so far.
    """
    others = {
        f"pipeline_parallel_size={config.pipeline_parallel_size}": config.pipeline_parallel_size > 1,
        f"data_parallel_size={config.data_parallel_size} with enable_expert_parallel": config.data_parallel_size > 1,
        f"nnodes={config.nnodes}": config.nnodes > 1,
    }
    if told := [option for option, asked in others.items() if asked]:
        raise ConfigError(
            f"{told[0]} with device={config.device}: on GPUs only ranks that share each layer (tensor_parallel_size, "
            "enable_expert_parallel) on one machine are supported yet; leave it out, or set device=cpu"
        )
    if config.tensor_parallel_size > found:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs one GPU per rank, but there are {found}; "
            f"lower it to {found} or less, check nvidia-smi and CUDA_VISIBLE_DEVICES, or set device=cpu"
        )


def meets(some: range, others: range) -> bool:
    """Whether a rank is in both."""
    return some.start < others.stop and others.start < some.stop


class Machine:
    """The ranks of this machine.

    Args:
        config: the engine's options.
        own: the ranks of this machine.
        matrix_bytes: see `SharedGroup`.

    Attributes:
        bell: see `SharedGroup`.
        mirrors: mirrors of groups with ranks on other machines, by number.
        threads: threads per rank.
        host_memory: descriptor of the host tier's memory, which belongs to the caller; -1 if there is none.

    Raises:
        ConfigError: see `SharedGroup`.
    """

    def __init__(self, config: EngineConfig, own: range, matrix_bytes: int) -> None:
        self.own, self.threads = own, config.threads or max(1, usable_threads() // len(own))
        self._width = config.tensor_parallel_size
        groups = {number: ranks for number, ranks in enumerate(groups_of(config)) if meets(ranks, own)}
        self._memories = {number: new_memory(matrix_bytes) for number in groups}
        self.mirrors: dict[int, Mirror] = {}
        for number, ranks in groups.items():
            here = range(max(own.start, ranks.start) - ranks.start, min(own.stop, ranks.stop) - ranks.start)
            if len(here) < len(ranks):
                self.mirrors[number] = Mirror(self._memories[number], matrix_bytes, len(ranks), here)
        self._store = -1 if config.device == "cpu" else os.memfd_create("quire-devices", 0)
        self.host_memory = -1
        if config.host_kv_bytes:
            _, self.host_memory = shared(config.host_kv_bytes)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK) if self.mirrors else -1

    def memories(self, rank: int) -> tuple[int, int, int]:
        """Descriptors of a rank's `memory`, `stage_memory` and `store`, see `join`."""
        return self._memories[0], self._memories.get(1 + rank // self._width, -1), self._store

    def start(self, start: RankStart) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start a rank; returns its process, and this end of its link.

        Raises:
            OSError: it cannot be started.
        """
        memory, stage_memory, store = self.memories(start.rank)
        own, other = socket.socketpair()
        with other:
            here = {"link": other.fileno(), "memory": memory, "stage_memory": stage_memory, "store": store}
            here |= {"bell": self.bell, "host_memory": self.host_memory}
            start = msgspec.structs.replace(start, threads=self.threads, local_ranks=len(self.own), **here)
            fds = [fd for fd in here.values() if fd >= 0]
            process = child.spawn_beside(child.python("quire.engine.rank"), start, fds=fds)
        own.settimeout(None)
        return own, process

    def all_started(self) -> None:
        """Close the memory's descriptors, once all ranks that share it have opened it."""
        for descriptor in (*self._memories.values(), *([self._store] if self._store >= 0 else [])):
            os.close(descriptor)
        self._memories.clear()
        self._store = -1

    def close(self) -> None:
        """Free the memory. The mirrors must not be used after this."""
        self.all_started()
        self.mirrors.clear()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


class RemoteRank:
    """The process of a rank on another machine.

    Args:
        where: the machine, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where, self._exited = where, threading.Event()
        self._how: tuple[str, bool] = ("", False)

    def ended(self, how: str, outside: bool) -> None:
        """Record its end, see `how_it_ended`; the first report counts."""
        if not self._exited.is_set():
            self._how = how, outside
            self._exited.set()

    def how_it_ended(self, seconds: float) -> tuple[str, bool] | None:
        """How it ended; None if it has not within this many seconds."""
        return self._how if self._exited.wait(seconds) else None

    def wait(self, seconds: float | None = None) -> int:
        """As `Popen`'s."""
        if not self._exited.wait(seconds):
            raise subprocess.TimeoutExpired("a rank on another machine", seconds or 0.0)
        return 0

    def kill(self) -> None:
        """Record it as ended; its machine kills it when the connection is closed."""
        self.ended("was left", True)


def out_of_memory_kills() -> int:
    """Number of processes that this machine's OOM killer has killed; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


def how_it_ended(code: int, out_of_memory: bool) -> tuple[str, bool]:
    """How a rank ended, in words, and whether it was killed from outside, so that no request is at fault.

    Args:
        code: as returned by `Popen.wait`.
        out_of_memory: whether the OOM killer has killed processes meanwhile.
    """
    if code >= 0:
        return f"ended with exit code {code}; its log says why", False
    for_memory = -code == signal.SIGKILL and out_of_memory
    name = f"{signal.Signals(-code).name}{': the system is out of memory' if for_memory else ''}"
    return f"died (killed by {name})", -code in (signal.SIGKILL, signal.SIGTERM) and not for_memory
