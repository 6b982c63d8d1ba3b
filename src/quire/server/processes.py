"""A supervisor's parts: the listening socket, the server's private folder, and child processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from quire import child, log
from quire.errors import ServerError
from quire.server.http_options import MAX_SOCKET_PATH, HttpOptions

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Backlog: connections that may wait while every HTTP process is busy, or none is up yet."""

LONGEST_NAME = "/engine-255-1000000.sock"
LOCK_NAME = "supervisor.lock"
FOLDER_PREFIX = "quire-"
"""Together they tell a server's folder from others, such as one of cached KV, which has a lock, too."""

RESTART_WINDOW = 3600.0
"""Seconds after which a restart is forgiven."""
FIRST_BACKOFF, MAX_BACKOFF = 1.0, 15.0
"""Seconds before processes that could not be started, or died, are started again."""
SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Why a process cannot be started now, though it could later."""


# -- the listening socket -------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(place: HttpOptions) -> Iterator[socket.socket]:
    """A listening socket. A Unix socket's file is removed afterwards.

    Raises:
        ServerError: see `listen` and `listen_on_path`.
    """
    if place.uds is None:
        with listen(place.host, place.port) as listener:
            yield listener
        return
    with listen_on_path(place.uds) as listener:
        inode = os.stat(place.uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(place.uds).st_ino == inode:  # else another server has taken the place
                    os.unlink(place.uds)


def listen_on_path(path: str) -> socket.socket:
    """A Unix socket that listens at `path`. One that a killed server left there is replaced.

    Raises:
        ServerError: another program listens there, it is no socket, or it cannot be created.
    """
    at = f"cannot listen on the Unix socket {path}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ServerError(f"{at}: a file of that name exists; remove it, or give another --uds")
            if _answers(path):
                raise ServerError(f"{at}: another program listens there; stop it, or give another --uds")
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ServerError(f"{at}: {error.strerror or error}") from error
    except ServerError:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    """Whether a program listens on this Unix socket. Raises OSError if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Of a name's addresses, the first IPv4 one is used.

    Raises:
        ServerError: the port is occupied or not allowed, or the host is unknown or not one of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not a valid name"
        raise ServerError(f"cannot listen on host {host!r}: {reason}; give an address of this machine") from error
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # "::" means every address, of IPv4 too, whatever the system's default is
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ServerError(_why_not(error, host, port)) from error
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    """Why the socket could not be bound, and what to do about it."""
    at = f"{host} port {port}"
    match error.errno:
        case errno.EADDRINUSE:
            hint = "stop it, or choose another --port (0: any free one)"
            return f"cannot listen on {at}: another program listens there; {hint}"
        case errno.EACCES | errno.EPERM:
            return f"cannot listen on {at}: no permission; ports below 1024 need root; choose a higher --port"
        case errno.EADDRNOTAVAIL:
            return f"cannot listen on {at}: this machine does not have that address; choose another --host"
        case _:
            return f"cannot listen on {at}: {error.strerror or error}"


def url_of(listener: socket.socket, place: HttpOptions) -> str:
    """The server's URL on this machine; "every address" is shown as the loopback's. For a Unix socket it is unix:PATH,
    which Quire's own clients accept.
    """
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{scheme_of(place)}://{host_and_port(host, port)}"


def scheme_of(place: HttpOptions) -> str:
    """The scheme of this server's URLs."""
    return "http" if place.ssl_certfile is None else "https"


def host_and_port(host: str, port: int) -> str:
    """Host and port as in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


# -- the private folder ---------------------------------------------------------------------------------------


class RuntimeFolder:
    """A server's private folder, with its sockets, boards and metrics. A context manager that removes it.

    A file in it is locked while the supervisor lives, so that later servers can recognize and remove the folders of
    killed ones. So is the folder itself, which keeps systemd-tmpfiles from removing old files there: HTTP processes
    that start later need them.

    Args:
        bases: where it may be; the first with a short enough path is used.
    """

    def __init__(self, bases: Sequence[Path] | None = None) -> None:
        places = bases if bases is not None else (Path(tempfile.gettempdir()), Path("/tmp"))
        self._bases = list(dict.fromkeys(base.absolute() for base in places))
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> Path:
        """Create it.

        Raises:
            ServerError: none of the places can be used.
        """
        for base in self._bases:
            remove_stale(base)
        self.path = self._make()
        return self.path

    def _make(self) -> Path:
        fitting = [base for base in self._bases if _fits(base)]
        reason = f"no folder among {', '.join(map(str, self._bases))} has a short enough name for Unix sockets"
        for base in fitting:
            try:
                path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))  # mode 0700
                try:
                    self._locks.callback(os.close, _locked(path))
                    self._locks.callback(os.close, _kept(path))
                except OSError:
                    self._locks.close()
                    shutil.rmtree(path, ignore_errors=True)
                    raise
                return path
            except OSError as error:
                reason = f"{base}: {error.strerror or error}"
        raise ServerError(f"cannot create the server's private folder ({reason}); set TMPDIR to another folder")

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._locks.close()


def _locked(folder: Path) -> int:
    """Lock the folder; returns the descriptor. The lock is taken before its file has the name that other servers look
    for.
    """
    unlocked = folder / "new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
        unlocked.rename(folder / LOCK_NAME)
    except OSError:
        os.close(lock)
        raise
    return lock


def _kept(folder: Path) -> int:
    """Lock the folder against cleaners, where its file system can; returns the descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _fits(base: Path) -> bool:
    return len(os.fsencode(base / f"{FOLDER_PREFIX}12345678")) + len(LONGEST_NAME) <= MAX_SOCKET_PATH


def remove_stale(base: Path, prefix: str = FOLDER_PREFIX, lock_name: str = LOCK_NAME) -> None:
    """Remove what this user's killed servers have left in `base`: folders with a lock that none holds."""
    with contextlib.suppress(OSError):
        for path in base.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _remove_if_stale(path, lock_name)


def _remove_if_stale(path: Path, lock_name: str) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    lock = os.open(path / lock_name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # a folder without one is not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its server lives
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


# -- child processes ------------------------------------------------------------------------------------------


class Child:
    """A process of the server, as `quire.child` starts them.

    Attributes:
        name: in messages: "engine 1", "HTTP process 0".
        ended: set when it has ended and was waited for.
        blame: why the supervisor killed it, if it did.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.blame: str | None = None
        self.ended = asyncio.Event()
        self._process = process
        self._task = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        message: msgspec.Struct,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start it and send it its message; see `quire.child.spawn`.

        Raises:
            ServerError: it cannot be started.
        """
        try:
            return cls(name, await child.spawn(command, message, fds=fds, environment=environment))
        except OSError as error:
            raise ServerError(f"cannot start the {name}: {error.strerror or error}") from error

    @classmethod
    async def start_again(cls, start: Callable[[], Awaitable[Child]], is_wanted: Callable[[], bool]) -> Child | None:
        """Start one in place of another. While the system lacks memory, processes or files for it, try again later;
        None if it is no longer wanted by then. Raises as `start` does.
        """
        delay = FIRST_BACKOFF
        while is_wanted():
            try:
                return await start()
            except ServerError as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in SHORTAGES:
                    raise
                text = f"{error}; trying again in {delay:g} s"
            log.event(logger, "cannot_start_yet", text, level=logging.ERROR)
            await asyncio.sleep(delay)
            delay = min(MAX_BACKOFF, 2 * delay)
        return None

    async def _wait(self) -> None:
        await self._process.wait()
        self.ended.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        return self._process.returncode

    def fate(self) -> str:
        """How it ended, for messages to clients, too: without paths and addresses."""
        if self.blame is not None:
            return self.blame
        return child.fate(self.exit_code or 0)

    def kill(self, blame: str | None = None) -> None:
        """Kill it and its process group."""
        if self._process.returncode is None:
            self.blame = self.blame or blame
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def leave(self, seconds: float) -> None:
        """Wait until it ends by itself; it is killed after this many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        if not self.ended.is_set():
            self.kill("it did not leave in time and was killed")
            await self.ended.wait()


class RestartBudget:
    """How often and how soon processes that died may be restarted: for each replica, and for HTTP processes.

    Args:
        limit: restarts within `RESTART_WINDOW`.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._spent: deque[float] = deque()  # when

    def spend(self) -> float | None:
        """Seconds to wait before the next restart: 0, then 1, 2, 4, ...; None if the limit is reached."""
        now = self._clock()
        while self._spent and now - self._spent[0] >= RESTART_WINDOW:
            self._spent.popleft()
        count = len(self._spent)
        if count >= self.limit:
            return None
        self._spent.append(now)
        return 0.0 if not count else min(MAX_BACKOFF, 2.0 ** (count - 1))
