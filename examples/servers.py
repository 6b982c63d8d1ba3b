"""No example by itself: starts `quire serve demo` for those that need servers."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """A GET, or a POST of JSON; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server of the demo model, which ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "quire.cli.main", "serve", "demo", "--threads", "1", "--port", str(port), *flags]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                ask(f"{url}/health")  # 503 while it loads
                break
            except (OSError, urllib.error.HTTPError):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with {server.returncode}: {' '.join(command)}") from None
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()
