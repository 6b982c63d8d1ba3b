"""How child processes of a server start: bound to their parent's life, deaf to the terminal's signals."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

PR_SET_PDEATHSIG = 1


# -- the parent's side ---------------------------------------------------------------------------------------


def python(module: str) -> list[str]:
    """The command line that runs a module of Quire as this interpreter would.

    `-P` keeps the folder that the user happens to be in from being searched for modules.
    """
    return [sys.executable, "-P", *["-O"] * sys.flags.optimize, "-m", module]


async def spawn(
    command: Sequence[str],
    start: msgspec.Struct,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a child, in a session of its own, and tell it `start` on its standard input.

    Args:
        fds: what it inherits.
        environment: variables beside those of this process, for libraries that offer no other switch; nothing of
            ours is told that way.

    Raises:
        OSError: the system does not start it.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=2,  # what a library prints must not get among a command's output
        **_own_session(fds, environment),
    )
    if process.stdin is not None:
        process.stdin.write(_told(start))
        process.stdin.close()  # when all of it is written
    return process


def spawn_quietly(
    command: Sequence[str],
    start: msgspec.Struct,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """As `spawn`, without an event loop, for a child whose standard error is not read.

    Raises:
        OSError: the system does not start it.
    """
    told = _told(start)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **_own_session(fds, environment),
    )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it has died: whoever waits for it will see that
            process.stdin.write(told)
    return process


def spawn_beside(command: Sequence[str], start: msgspec.Struct, *, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """As `spawn`, without an event loop; its standard error is this process's.

    Raises:
        OSError: the system does not start it.
    """
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, **_own_session(fds, None))
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it has died: whoever waits for it will see that
            process.stdin.write(_told(start))
    return process


def _own_session(fds: Sequence[int], environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Arguments of `Popen` for a child in a session of its own."""
    return {"start_new_session": True, "pass_fds": fds, "env": {**os.environ, **(environment or {})}}


def _told(start: msgspec.Struct) -> bytes:
    """What a child reads in `begin`."""
    return b"%d\n%b" % (os.getpid(), msgspec.json.encode(start))


def cpu_seconds(pid: int) -> float:
    """How long a process has had a processor, in all; not a number if it is gone, or where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the child's side ----------------------------------------------------------------------------------------


def begin(message: type[T], *, dies_with_parent: bool = True) -> T:
    """Read the start message from standard input, after arranging that this process outlives no parent.

    Args:
        dies_with_parent: the system ends it, when the *thread* ends that has started it. False: it sees to that itself.

    Signals that end a server are the supervisor's to handle: it tells its children over the wire.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if dies_with_parent:
        die_with_parent()
    parent, _, start = sys.stdin.buffer.read().rpartition(b"\n")
    if parent and int(parent) != os.getppid():  # it died while this process came up
        os._exit(1)
    if not start.endswith(b"}"):  # it was cut off: whoever wrote it gave up, and has said why
        os._exit(1)
    return msgspec.json.decode(start, type=message)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies from now on (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
