"""A Redis of the tests' own, on a free port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.http_tools import free_port

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


def listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until it does."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None, "it does not start"
            time.sleep(0.02)


class RedisServer:
    """Keeps nothing over its end; a context.

    Args:
        options: as on its command line.
    """

    def __init__(self, *options: str, port: int = 0) -> None:
        self.port, self._options = port or free_port(), options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.TemporaryDirectory()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        assert BINARY is not None
        ports = () if "--tls-port" in self._options else ("--port", str(self.port))
        folder = Path(self._folder.name)
        command = [BINARY, *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        listening(self.port, self.process)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
