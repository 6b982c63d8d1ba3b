"""A cluster's folder: its members' files and logs, its key, and a lock while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
import time
from pathlib import Path

from quire import child
from quire.errors import ClusterError

LOCK_NAME, KEY_NAME = "lock", "cluster.key"


def folder_of(file: Path, name: str) -> Path:
    """The folder of the cluster that this file describes: the same for `up` and `down`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "quire" / "clusters" / f"{name}-{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:8]}"


class ClusterFolder:
    """A cluster's folder, locked by this process. A context manager; the files remain when it ends.

    Raises:
        ClusterError: on entering, if the cluster is running already or the folder cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def __enter__(self) -> ClusterFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ClusterError(
                f"the cluster's folder {self.path} cannot be created: {error.strerror or error}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ClusterError(
                f"this cluster is running already ({self.path}); stop it with 'quire down' first"
            ) from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()} {child.began(os.getpid()):.0f}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def key(self) -> str:
        """The cluster's key, created at the first start."""
        path = self.path / KEY_NAME
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
        return path.read_text().strip()


def end(path: Path, seconds: float, hurry: bool) -> bool:
    """Tell the process that runs a cluster to stop it, and wait for that; False if it is not running.

    Raises:
        ClusterError: it has not ended within this many seconds, or is none of this machine's processes.
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
            raise ClusterError(
                f"process {owner} is still stopping the cluster after {seconds:g} seconds; "
                "--now does not wait for running requests"
            )
        time.sleep(0.1)
    return True


def _owner(path: Path) -> int | None:
    """The id of the process that has locked the folder.

    Raises:
        ClusterError: another process has this id here: the folder is shared with another machine or container.
    """
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(2):  # it may be ending, or may not have written yet who it is
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None  # not locked
            except OSError:
                pid, _, began = os.pread(lock, 64, 0).decode().partition(" ")
            if pid and float(began or 0) == child.began(int(pid)):
                return int(pid)
            time.sleep(0.1)
    finally:
        os.close(lock)
    raise ClusterError(
        f"the cluster's folder {path} is in use, but not by process {pid or 0} of this machine; run 'quire down' "
        "where the cluster was started"
    )
