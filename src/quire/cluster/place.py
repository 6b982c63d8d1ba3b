"""Where members run: on this machine. `quire.cluster.ray_place` is the other one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire import child
from quire.cluster.member import Start
from quire.cluster.spec import Member, Need
from quire.errors import ClusterError


class Running(Protocol):
    """A member's process."""

    async def exit_code(self) -> int | None:
        """None while it runs; a signal's number, negative, where one killed it."""

    async def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""

    def describe(self) -> str:
        """Where it is, for the table: a process id, a machine."""


class Place(Protocol):
    """Finds machines for members and starts them there."""

    def hosts(self, needs: Sequence[Need]) -> dict[str, str]:
        """The address of a machine for each server, by name.

        Raises:
            ClusterError: there is no room for one.
        """

    async def start(self, member: Member) -> Running:
        """Start its process.

        Raises:
            ClusterError: that is not possible.
        """

    async def close(self) -> None:
        """Give back what was taken for members; all have ended."""


def command_of(member: Member, folder: str) -> list[str]:
    """A member's command line; `folder` is where its files lie."""
    program = ["redis-server"] if member.kind == "redis" else child.python("quire.cli.main")
    return [*program, *(argument.replace("{folder}", folder) for argument in member.arguments)]


def write_files(member: Member, folder: Path) -> None:
    """A member's files, which only this user reads: there may be keys in them."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in member.files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text.replace("{folder}", str(folder)))


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def exit_code(self) -> int | None:
        return self._process.returncode

    async def signal(self, number: signal.Signals) -> None:
        """See `Running`. Who is killed is so with all that it has started, and who is asked to end ends its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)

    def describe(self) -> str:
        return f"pid {self._process.pid}"


class Here:
    """This machine.

    Args:
        folder: the cluster's; what members print goes to NAME.log in it.
        host: where all listen.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host

    def hosts(self, needs: Sequence[Need]) -> dict[str, str]:
        """See `Place`."""
        return {need.name: self._host for need in needs}

    async def start(self, member: Member) -> Running:
        """See `Place`."""
        start = Start(command_of(member, str(self._folder)), str(self._folder / f"{member.name}.log"))
        try:
            write_files(member, self._folder)
            return _Process(await child.spawn(child.python("quire.cluster.member"), start))
        except OSError as error:
            raise ClusterError(f"{member.name} cannot be started: {error.strerror or error}") from error

    async def close(self) -> None:
        """See `Place`."""
