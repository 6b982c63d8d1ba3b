"""Processes that have imported torch and Quire when they begin, which takes ten times as long as to load a small model.

They are forked from one that does nothing else, so that they have nothing of what a test has patched in its own.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec

from quire import log

FORKS = multiprocessing.get_context("forkserver")
SERVERS = ["quire.cli.serve", "quire.server.supervisor", "quire.server.worker", "quire.ipc.engine_process"]
FORKS.set_forkserver_preload(["quire.engine.engine", *SERVERS, "tests.warm"])
DESCRIPTORS = ("link", "memory", "stage_memory", "store", "bell", "host_memory", "fd")
"""The fields of start messages that name what a process inherits, under other numbers here."""


class Inherited:
    """A descriptor; where the fork unpickles it, it is the number that the same file has there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _arrived, (DupFd(self.number),)


def _arrived(sent: Any) -> int:
    return int(sent.detach())


class Fork:
    """A process that calls a function, as `subprocess.Popen` shows one."""

    def __init__(self, target: Callable[..., None], *given: Any) -> None:
        self._process = FORKS.Process(target=target, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def spawn_rank(command: Sequence[str], start: msgspec.Struct, *, fds: Sequence[int] = ()) -> Fork:
    """As `quire.child.spawn_beside` starts one, with a command that ends with a module; or another such process."""
    numbers = {name: number for name in DESCRIPTORS if (number := getattr(start, name, -1)) >= 0}
    assert sorted(numbers.values()) == sorted(fds), "DESCRIPTORS names all fields that have one"
    inherited = {name: Inherited(number) for name, number in numbers.items()}
    return Fork(
        _run_rank, command[-1], type(start), msgspec.json.encode(start), inherited, Inherited(2), dict(os.environ)
    )


def _run_rank(
    module: str,
    kind: type[msgspec.Struct],
    start: bytes,
    inherited: Mapping[str, int],
    errors: int,
    environment: Mapping[str, str],
) -> None:
    """What `python -m quire.engine.rank` does with this on its standard input."""
    gc.freeze()  # what it shares with all forks is no garbage, and to look at it takes longer than to load a model
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(errors, number)
    told = msgspec.structs.replace(msgspec.json.decode(start, type=kind), **inherited)
    tell(msgspec.json.encode(told))
    code = importlib.import_module(module).main()
    log.flush()
    os._exit(code or 0)


def tell(start: bytes) -> None:
    """Have this process find its start message on its standard input."""
    reading, writing = os.pipe()
    os.write(writing, start)
    os.close(writing)
    os.dup2(reading, 0)
    sys.stdin = open(0)  # noqa: SIM115  # until the process ends


def in_a_fork(call: Callable[[], object]) -> str:
    """What a fork of this process returns from the call, or raises."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            told = repr(call())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        told = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return told
