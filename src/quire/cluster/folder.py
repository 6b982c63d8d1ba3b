"""The folder of a cluster: its members' files and logs, its key, and whose it is while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
import time
from pathlib import Path

from quire.errors import ClusterError

LOCK_NAME, KEY_NAME = "lock", "cluster.key"


def folder_of(file: Path, name: str) -> Path:
    """Where the cluster of this file lives: the same for `up` and `down`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "quire" / "clusters" / f"{name}-{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:8]}"


class ClusterFolder:
    """A cluster's folder, taken by this process. A context manager; files stay, for the next time and for reading.

    Raises:
        ClusterError: on entering: the cluster runs already, or the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def __enter__(self) -> ClusterFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(f"the cluster's folder {self.path} cannot be made: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ClusterError(
                f"this cluster runs already ({self.path}); end it with 'quire down', or go on"
            ) from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def key(self) -> str:
        """The cluster's key, made at the first start."""
        path = self.path / KEY_NAME
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
        return path.read_text().strip()


def end(path: Path, seconds: float, hurry: bool) -> bool:
    """Have the process that runs a cluster end it, and wait for that; False if none runs.

    Raises:
        ClusterError: it has not ended within so many seconds.
    """
    until = time.monotonic() + seconds
    owner = _owner(path)
    if owner is None:
        return False
    for _ in range(2 if hurry else 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGTERM)
        time.sleep(0.2)
    while _owner(path) == owner:
        if time.monotonic() > until:
            raise ClusterError(f"process {owner} still ends the cluster after {seconds:g} seconds; --now does not wait")
        time.sleep(0.1)
    return True


def _owner(path: Path) -> int | None:
    """The process that has taken the folder."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None  # nobody has it
    except OSError:
        return int(os.read(lock, 32) or b"0") or None
    finally:
        os.close(lock)
