"""Tools of the end-to-end tests: a real `quire serve` in processes of its own, and plain clients for it.

The clients are made of sockets and `http.client`, so that a test says exactly which bytes go over the wire.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.warm import WarmProcess

T = TypeVar("T")
URL = re.compile(r"https?://[^\s/]+:(\d+)")
MODULES = {"engine": "quire.ipc.engine_process", "http": "quire.server.http_process"}
CHECKED = ("--check-invariants", "--num-kv-blocks", "1024")
"""Options of a server that checks itself after each step; of 8,192 blocks, that took ten times as long as the step."""

DEADLINE = 60.0
"""Seconds that anything may take on a busy machine before a test gives up."""


def wait_until(condition: Callable[[], T], deadline: float = DEADLINE, what: str = "the condition") -> T:
    """The first true value of `condition`, which is asked again and again.

    Raises:
        TimeoutError: it was not true within `deadline` seconds.
    """
    end = time.monotonic() + deadline
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come true within {deadline} s")
        time.sleep(0.02)
    return found


# -- processes ----------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of this machine that nothing listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`, oldest first (Linux)."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())
    except OSError:
        return []


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on."""
    return [one for child in children_of(pid) for one in (child, *descendants_of(child))]


def command_of(pid: int) -> str:
    """A process's command line; "" if it is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def listening_addresses(pids: list[int]) -> set[str]:
    """Every TCP address that one of these processes listens on, as "127.0.0.1:8000" or "[::1]:8000"."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                found.add(_address(family, fields[1]))
    return found


def _address(family: socket.AddressFamily, text: str) -> str:
    """`0100007F:1F90`, words in the machine's byte order, as the kernel writes them."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
    shown = socket.inet_ntop(family, b"".join(words))
    return f"[{shown}]:{int(port, 16)}" if family == socket.AF_INET6 else f"{shown}:{int(port, 16)}"


class ServeProcess:
    """`quire serve MODEL ... --port 0`, as a user would start it, until the `with` block ends.

    Args:
        arguments: flags after the model; `--threads 1` goes before them.
        wait: for "ready" (`/health` says 200), "url" (the port is open), or "nothing".
        warm: its processes are forks of one that has imported what they need, see `tests/warm.py`.

    Attributes:
        started: when the command was run, on the monotonic clock.
        process: the supervisor.
    """

    def __init__(
        self,
        *arguments: str,
        model: str = "demo",
        wait: str = "ready",
        deadline: float = DEADLINE,
        key: str = "",
        warm: bool = True,
    ) -> None:
        self.command = [sys.executable, "-m", "quire.cli.main", "serve", model, "--threads", "1", *arguments]
        self.command += ["--port", "0"]
        self.key = key
        self.started = 0.0
        self._wait, self._deadline, self._warm = wait, deadline, warm
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        self.process = self._start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._seen: set[int] = set()
        try:
            if self._wait in ("url", "ready"):
                self.wait_for_url(self._deadline)
            if self._wait == "ready":
                self.wait_ready(self._deadline)
            self.pids("all")
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _start(self) -> WarmProcess | subprocess.Popen[bytes]:
        if not self._warm:
            nothing = subprocess.DEVNULL
            return subprocess.Popen(self.command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)
        from tests.warm import WarmProcess

        return WarmProcess(*self.command[2:])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            error.add_note("the server's log ended with:\n" + "\n".join(self._lines[-40:]))

    def _read(self) -> None:
        if self.process.stderr is not None:
            for line in self.process.stderr:
                self._lines.append(line.decode(errors="replace").rstrip("\r\n"))

    # -- what it says and is -------------------------------------------------------------------------------------

    @property
    def stderr(self) -> str:
        """What it wrote so far."""
        return "\n".join(self._lines)

    @property
    def port(self) -> int:
        """The port it told; wait for it first."""
        found = URL.search(self.stderr)
        if found is None:
            raise LookupError(f"the server has told no URL; it wrote: {self.stderr!r}")
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for_url(self, deadline: float = DEADLINE) -> str:
        """Wait until it has told its URL."""
        wait_until(lambda: URL.search(self.stderr) or self._check_runs(), deadline, "the server's URL")
        return self.url

    def wait_ready(self, deadline: float = DEADLINE) -> None:
        """Wait until `/health` says 200."""
        wait_until(lambda: self.health() == 200 or self._check_runs(), deadline, "/health 200")

    def _check_runs(self) -> bool:
        """False: it is not there yet. Raises where it never will be."""
        if (code := self.process.poll()) is not None:
            self._reader.join(5)
            raise RuntimeError(f"the server has ended with exit code {code}; it wrote:\n{self.stderr}")
        return False

    def health(self) -> int:
        """The status of `/health`; 0 if nobody answers."""
        try:
            return self.get("/health")[0]
        except (OSError, http.client.HTTPException):
            return 0

    def pids(self, role: str) -> list[int]:
        """Its processes of one role, oldest first: "supervisor", "engine", "rank", "http", "tokenizer", "all"."""
        supervisor = self.process.pid
        everything = [supervisor, *descendants_of(supervisor)]
        self._seen.update(everything)
        if role == "all":
            return everything
        if role == "supervisor":
            return [supervisor]
        if role == "tokenizer":
            return [child for pid in self.pids("http") for child in children_of(pid)]
        if role == "rank":
            return [child for pid in self.pids("engine") for child in children_of(pid)]
        return [pid for pid in children_of(supervisor) if MODULES[role] in command_of(pid)]

    # -- ending it ---------------------------------------------------------------------------------------------

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal (default: `kill -9`) to one of its processes; returns its pid."""
        pid = self.pids(role)[index]
        os.kill(pid, number)
        return pid

    def terminate(self, deadline: float = DEADLINE, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait; returns its exit code."""
        self.pids("all")
        self.process.send_signal(number)
        return self.wait(deadline)

    def wait(self, deadline: float = DEADLINE) -> int:
        """Wait until it has ended; returns its exit code."""
        code = self.process.wait(deadline)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        """Leave nothing behind, however it stands."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.terminate(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(5)

    def survivors(self) -> list[int]:
        """Processes that belonged to it when `pids` was last asked, and are still there."""
        return [pid for pid in self._seen if pid != self.process.pid and "quire." in command_of(pid)]

    # -- asking it ---------------------------------------------------------------------------------------------

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower-case names) and body."""
        return request(self.port, "GET", path, headers=self._headers(headers))

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """The same of a POST; `body` is sent as JSON, unless it is bytes."""
        return request(self.port, "POST", path, body, headers=self._headers(headers))

    def json(self, path: str, body: Any = None) -> Any:
        """The JSON document that a path answers with (POST if there is a body), whatever the status."""
        return json.loads((self.get(path) if body is None else self.post(path, body))[2])

    def stream(self, path: str, body: Mapping[str, Any], **headers: str) -> EventStream:
        """An open stream of server-sent events."""
        return EventStream(self.port, path, {"stream": True, **body}, self._headers(headers))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 if there are none."""
        text = self.get("/metrics")[2].decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def held_blocks(self) -> float:
        """KV blocks that requests hold."""
        return self.metric("quire:kv_blocks", state="held")

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return ({"authorization": f"Bearer {self.key}"} if self.key else {}) | given


# -- clients ------------------------------------------------------------------------------------------------------


def request(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers (lower-case names) and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    with contextlib.closing(connection):
        connection.request(method, path, _encoded(body), _with_type(body, headers))
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def _encoded(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def _with_type(body: Any, headers: Mapping[str, str] | None) -> dict[str, str]:
    return ({} if body is None else {"content-type": "application/json"}) | dict(headers or {})


class EventStream:
    """A stream of server-sent events on a connection of its own; close it whenever you like.

    Attributes:
        status: of the answer; where it is not 200, `events` is empty and `error` holds the body.
        comments: the comment lines that came so far.
    """

    def __init__(
        self, port: int, path: str, body: Any, headers: Mapping[str, str] | None = None, buffer: int | None = None
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        if buffer is not None:  # a small one makes a slow reader
            self._connection.connect()
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._connection.request("POST", path, _encoded(body), _with_type(body, headers))
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.headers = {name.lower(): value for name, value in self._response.getheaders()}
        self.error = b"" if self.status == 200 else self._response.read()
        self.comments: list[str] = []

    def events(self) -> Iterator[str]:
        """The `data:` of each event, "[DONE]" included, until the stream ends."""
        if self.status != 200:
            return
        for raw in self._response:
            line = raw.decode().rstrip("\r\n")
            if line.startswith("data: "):
                yield line[len("data: ") :]
            elif line.startswith(":"):
                self.comments.append(line)

    def chunks(self) -> Iterator[Any]:
        """The events' JSON documents, without "[DONE]"."""
        return (json.loads(event) for event in self.events() if event != "[DONE]")

    def texts(self) -> dict[int, str]:
        """Read to the end; the text of each choice, by its index."""
        found: dict[int, str] = {}
        for chunk in self.chunks():
            for choice in chunk.get("choices", []):
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                found[choice["index"]] = found.get(choice["index"], "") + text
        return found

    def close(self) -> None:
        """Go away, as a client that was closed does."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raw_request(port: int, data: bytes, *, timeout: float = 10.0, half_close: bool = False) -> bytes:
    """Send these bytes; what comes back until one answer is whole, the server closes, or `timeout` seconds passed.

    `half_close` ends the sending side, as `nc` does.
    """
    end = time.monotonic() + timeout
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        while not is_whole(received) and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                part = connection.recv(65536)
            except (TimeoutError, ConnectionResetError):
                break
            if not part:
                break
            received += part
    return received


def is_whole(answer: bytes) -> bool:
    """Whether these bytes hold an HTTP answer with all of its body, as far as its head tells."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found or head.startswith(b"HTTP/1.1 100"):
        return False
    length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    if length:
        return len(body) >= int(length[1])
    return re.search(rb"(?im)^transfer-encoding:\s*chunked", head) is not None and body.endswith(b"0\r\n\r\n")
