"""Child processes: they get their arguments as JSON, end with their parent, and ignore the terminal's signals."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from asyncio.subprocess import Process

T = TypeVar("T")

PR_SET_PDEATHSIG = 1


# -- the parent's side ---------------------------------------------------------------------------------------


def python(module: str) -> list[str]:
    """The command line that runs a module of Quire with this interpreter and its `-O`.

    `-P` keeps Python from searching the current folder for modules.
    """
    return [sys.executable, "-P", *["-O"] * sys.flags.optimize, "-m", module]


async def spawn(
    command: Sequence[str],
    start: msgspec.Struct,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a child in a session of its own, and write `start` to its standard input.

    Args:
        fds: the file descriptors that it inherits.
        environment: variables besides those of this process, for libraries that have no other switch. Quire's own
            options are never passed this way.

    Raises:
        OSError: it cannot be started.
    """
    from asyncio import create_subprocess_exec  # not above: a fifth of what a child imports that has no event loop

    process = await create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=2,  # a library's prints must not mix with a command's output
        **_own_session(fds, environment),
    )
    if process.stdin is not None:
        process.stdin.write(_message(start))
        process.stdin.close()  # once all is written
    return process


def spawn_quietly(
    command: Sequence[str],
    start: msgspec.Struct,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Like `spawn`, without an event loop; what the child prints is discarded."""
    return _spawn(command, start, fds, environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def spawn_beside(command: Sequence[str], start: msgspec.Struct, *, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Like `spawn`, without an event loop; what the child prints goes to this process's standard error."""
    return _spawn(command, start, fds, None, stdout=2)


def _spawn(
    command: Sequence[str],
    start: msgspec.Struct,
    fds: Sequence[int],
    environment: Mapping[str, str] | None,
    *,
    stdout: int,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    message = _message(start)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, **_own_session(fds, environment)
    )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it died already, which its exit code shows
            process.stdin.write(message)
    return process


def _own_session(fds: Sequence[int], environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Arguments of `Popen` for a child in a session of its own."""
    return {"start_new_session": True, "pass_fds": fds, "env": {**os.environ, **(environment or {})}}


def _message(start: msgspec.Struct) -> bytes:
    """What the child reads in `begin`: this process's id, and its arguments."""
    return b"%d\n%b" % (os.getpid(), msgspec.json.encode(start))


def fate(code: int) -> str:
    """How a process with this exit code ended, such as "exit code 1" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used; NaN if it is gone, or if the system does not report it."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else math.nan


def began(pid: int) -> float:
    """When a process began, in the system's own unit; 0.0 if it is gone, or if the system does not report it."""
    fields = _stat(pid)
    return float(fields[19]) if fields else 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty if there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# -- the child's side ----------------------------------------------------------------------------------------


def begin(message: type[T], *, dies_with_parent: bool = True) -> T:
    """Read the arguments from standard input. Called first; it also makes this process end with its parent.

    SIGINT, SIGTERM and SIGHUP are ignored from now on: the parent handles them, and sends messages to its children.

    Args:
        dies_with_parent: the kernel kills this process when the *thread* that started it ends. False: the process
            watches its parent itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if dies_with_parent:
        die_with_parent()
    parent, _, start = sys.stdin.buffer.read().rpartition(b"\n")
    if parent and int(parent) != os.getppid():  # the parent died while this process started
        os._exit(1)
    if not start.endswith(b"}"):  # cut off: the parent gave up, and has reported why
        os._exit(1)
    return msgspec.json.decode(start, type=message)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies (Linux; elsewhere this does nothing)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
