"""`python -m quire...` without its start: a fork of a process that has imported torch and Quire already, which is most
of what a server of a small model computes until it answers.

Processes that Quire starts itself begin so, too, with the parent, the descriptors, the session, the environment and the
command line that they would have; only those of untrusted tokenizers, whose memory is limited, are real ones.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

from tests.forks import Fork, Inherited

COMMAND, MEMBER = "quire.cli.main", "quire.cluster.member"
MODULES = (
    COMMAND,
    MEMBER,
    "quire.bench.kv_prefill",
    "quire.engine.rank",
    "quire.ipc.engine_process",
    "quire.server.http_process",
    "tests.server_stand_ins",
)
START_EXECUTED = subprocess._fork_exec  # type: ignore[attr-defined]


class WarmProcess(Fork):
    """`python -m MODULE ARGUMENTS`, as `subprocess.Popen` shows one.

    Args:
        environment: its; by default that of this process.
        streams: its standard input, output and error: a file or a descriptor, or `PIPE` or `DEVNULL` of `subprocess`.

    Attributes:
        stdin, stdout, stderr: the other ends of its pipes, for bytes.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.PIPE,
    ) -> None:
        self._pipes: list[IO[bytes]] = []
        theirs = [
            self._stream(name, stream) for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr))
        ]
        standard = [Inherited(number) for number in theirs]
        super().__init__(_begin, module, arguments, standard, dict(os.environ if environment is None else environment))
        for number in theirs:
            os.close(number)

    def _stream(self, name: str, stream: Any) -> int:
        """A descriptor for the process."""
        if stream == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_RDWR)
        if stream != subprocess.PIPE:
            return os.dup(stream if isinstance(stream, int) else stream.fileno())
        reading, writing = os.pipe()
        own, its = (writing, reading) if name == "stdin" else (reading, writing)
        self._pipes.append(open(own, "wb" if name == "stdin" else "rb"))  # noqa: SIM115  # until the end
        setattr(self, name, self._pipes[-1])
        return its

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float = 60.0) -> tuple[bytes, bytes]:
        """What it writes until its end."""
        with ThreadPoolExecutor(2) as pool:
            read = {name: pool.submit(vars(self)[name].read) for name in ("stdout", "stderr") if name in vars(self)}
        self.wait(timeout)
        out, err = (read[name].result() if name in read else b"" for name in ("stdout", "stderr"))
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        self.wait()


def run(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """What `quire ARGUMENTS` writes, and how it ends."""
    with WarmProcess(COMMAND, *arguments, **({"stdout": subprocess.PIPE} | streams)) as process:
        out, err = process.communicate()
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, out.decode(), err.decode())


def _begin(module: str, arguments: Sequence[str], standard: Sequence[int], environment: Mapping[str, str]) -> None:
    _be([sys.executable, "-m", module, *arguments], environment, standard, ())


def start_process(
    command: Sequence[bytes | str],
    executables: Any,
    close_fds: bool,
    kept: Sequence[int],
    folder: Any,
    environment: Sequence[bytes] | None,
    *more: Any,
) -> int:
    """What `subprocess` calls to start a process: it is a fork of this one, where that is known to do."""
    words = [os.fsdecode(word) for word in command]
    if not _known(words):
        return cast(int, START_EXECUTED(command, executables, close_fds, kept, folder, environment, *more))
    if child := os.fork():
        return child
    try:
        stdin, _, _, stdout, _, stderr, _, failure, _, own_session = more[:10]
        if own_session:
            os.setsid()
        told = dict(os.fsdecode(each).split("=", 1) for each in environment or ())
        _be(words, told or os.environ.copy(), (stdin, stdout, stderr), set(kept) - {failure})
    finally:
        os._exit(1)


def _execute(file: str, command: list[str]) -> None:
    """`os.execvp`, where a process becomes another one."""
    if not _known(command):
        os.execv(shutil.which(file) or file, command)
    _be(command, os.environ.copy(), (-1, -1, -1), ())


def _known(command: Sequence[str]) -> bool:
    return command[0] == sys.executable and "-m" in command and command[command.index("-m") + 1] in MODULES


def _be(command: list[str], environment: Mapping[str, str], standard: Sequence[int], kept: Any) -> NoReturn:
    """Run a command's module as a process that has just been started, and end.

    Args:
        standard: what becomes its standard input, output and error; -1: as they are. kept: what stays open beside them.
    """
    gc.freeze()  # what is not this process's would close descriptors when it is found to be garbage
    for number, given in enumerate(standard):
        if given != -1:
            os.dup2(given, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for signal_number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(signal_number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    logging.getLogger().handlers.clear()
    os.environ.clear()
    os.environ.update(environment)
    _show(command)
    module = command.index("-m") + 1
    sys.argv = command[module:]
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.execvp = _execute  # type: ignore[assignment]
    # An engine, whose kernels have threads, is not what a process should be a fork of.
    start = start_process if command[module] == COMMAND else START_EXECUTED
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    try:
        code = importlib.import_module(command[module]).main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    log = importlib.import_module("quire.log")
    log.flush()
    os._exit(code or 0)


def _show(command: Sequence[str]) -> None:
    """Have the system tell this command line of this process: it stands where that of its first ancestor stood."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
