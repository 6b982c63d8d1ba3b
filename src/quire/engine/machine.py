"""The ranks of one machine: what they have in common, and how they are started."""

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
"""Of a `SharedGroup` whose matrices stay on devices: room for what ranks tell each other."""


def groups_of(config: EngineConfig) -> list[range]:
    """The ranks of each group that gathers: all; then those of each stage, where both kinds are more than one."""
    size, width = config.num_ranks, config.tensor_parallel_size
    return [range(size), *(range(first, first + width) for first in range(0, size, width) if 1 < width < size)]


def check_gpus(config: EngineConfig, found: int) -> None:
    """Whether ranks can run on the GPUs of this machine, of which so many were found: each has one of its own.

    Raises:
        ConfigError: there are too few, or ranks are to share the work in a way that only CPUs do so far.
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
    """Whether there is a rank in both."""
    return some.start < others.stop and others.start < some.stop


class Machine:
    """The ranks of this machine.

    Args:
        config: the engine's options.
        own: which of all ranks are here.
        matrix_bytes: see `SharedGroup`.

    Attributes:
        bell: see `SharedGroup`.
        mirrors: of the groups that have ranks elsewhere, by number.
        threads: of each rank here.
        host_memory: descriptor of the host tier's memory, which belongs to the caller; -1: there is none.

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
        """A rank's process, and this end of its link.

        Raises:
            OSError: the system does not start it.
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
        """All ranks that share the memory have it open: it needs no descriptor here any more."""
        for descriptor in (*self._memories.values(), *([self._store] if self._store >= 0 else [])):
            os.close(descriptor)
        self._memories.clear()
        self._store = -1

    def close(self) -> None:
        """Free what no rank needs any more; the mirrors are used no longer."""
        self.all_started()
        self.mirrors.clear()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


class RemoteRank:
    """The process of a rank on another machine, as far as is known of it here.

    Args:
        where: the machine, for people.
    """

    def __init__(self, where: str) -> None:
        self.where, self._exited = where, threading.Event()
        self._how: tuple[str, bool] = ("", False)

    def ended(self, how: str, outside: bool) -> None:
        """See `how_it_ended`; what is told first is true."""
        if not self._exited.is_set():
            self._how = how, outside
            self._exited.set()

    def how_it_ended(self, seconds: float) -> tuple[str, bool] | None:
        """None: it has not, so many seconds from now."""
        return self._how if self._exited.wait(seconds) else None

    def wait(self, seconds: float | None = None) -> int:
        """As of a `Popen`."""
        if not self._exited.wait(seconds):
            raise subprocess.TimeoutExpired("a rank on another machine", seconds or 0.0)
        return 0

    def kill(self) -> None:
        """Its machine ends it, when the connection is closed."""
        self.ended("was left", True)


def out_of_memory_kills() -> int:
    """How many processes of this machine the system has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


def how_it_ended(code: int, out_of_memory: bool) -> tuple[str, bool]:
    """How a rank ended, in words, and whether it was ended from outside, so that no request is to blame.

    Args:
        code: as `Popen.wait` gives it.
        out_of_memory: the system has killed processes for want of memory meanwhile.
    """
    if code >= 0:
        return f"ended with exit code {code}; its log says why", False
    for_memory = -code == signal.SIGKILL and out_of_memory
    name = f"{signal.Signals(-code).name}{': the system is out of memory' if for_memory else ''}"
    return f"died (killed by {name})", -code in (signal.SIGKILL, signal.SIGTERM) and not for_memory
