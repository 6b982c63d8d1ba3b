"""Where members run: the interface, and this machine. `quire.cluster.ray_place` is the other implementation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire import child
from quire.cluster.member import Start
from quire.cluster.spec import Member, Need
from quire.errors import ClusterError

LOG_BYTES = 64 << 20
"""A log that is longer starts anew."""


class Running(Protocol):
    """A member's process."""

    async def exit_code(self) -> int | None:
        """None while it runs; a negative signal number if a signal killed it. Asked at least every second, and so the
        place where its log is kept short."""

    async def signal(self, number: signal.Signals) -> None:
        """Send it a signal; does nothing once it has ended."""

    def describe(self) -> str:
        """Where it runs, for the table: a process id, a machine."""


class Place(Protocol):
    """Finds machines for members and starts them there."""

    def hosts(self, needs: Sequence[Need]) -> dict[str, str]:
        """Find a machine for each server; returns their addresses by server name.

        Raises:
            ClusterError: no machine has room for one of them.
        """

    async def start(self, member: Member) -> Running:
        """Start a member's process.

        Raises:
            ClusterError: it cannot be started.
        """

    async def close(self) -> None:
        """Release what was reserved for members, all of which have ended."""


def command_of(member: Member, folder: str) -> list[str]:
    """A member's command line; `folder` has its files."""
    program = ["redis-server"] if member.kind == "redis" else child.python("quire.cli.main")
    return [*program, *(argument.replace("{folder}", folder) for argument in member.arguments)]


def write_files(member: Member, folder: Path) -> None:
    """Write a member's files, readable only by this user since they may hold keys."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in member.files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text.replace("{folder}", str(folder)))


def log_of(member: Member, folder: Path) -> Path:
    """The file for a member's output."""
    return folder / f"{member.name}.log"


def bound(log: Path) -> None:
    """Keep a log short: beyond `LOG_BYTES` it starts anew, and the last one is kept as NAME.log.1.

    Its writer appends to it, so it is copied and emptied; what is printed in between is lost. If there is no room for a
    copy, it is emptied all the same.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            shutil.copy(log, log.with_name(log.name + ".1"))
        os.truncate(log, 0)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    async def exit_code(self) -> int | None:
        bound(self._log)
        return self._process.returncode

    async def signal(self, number: signal.Signals) -> None:
        """SIGKILL goes to the whole process group; on other signals a member stops its own children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)

    def describe(self) -> str:
        return f"pid {self._process.pid}"


class Here:
    """This machine.

    Args:
        folder: the cluster's; members' output goes to NAME.log in it.
        host: address at which all members listen.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host

    def hosts(self, needs: Sequence[Need]) -> dict[str, str]:
        """Every server is on this machine."""
        return {need.name: self._host for need in needs}

    async def start(self, member: Member) -> Running:
        """Start a member's process here. Raises ClusterError."""
        log = log_of(member, self._folder)
        start = Start(command_of(member, str(self._folder)), str(log))
        try:
            write_files(member, self._folder)
            return _Process(await child.spawn(child.python("quire.cluster.member"), start), log)
        except OSError as error:
            raise ClusterError(f"{member.name} cannot be started: {error.strerror or error}") from error

    async def close(self) -> None:
        """Nothing was reserved."""
