"""HTTP on the wire: bounds, deadlines, and what is not HTTP. Raw sockets against a real server on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server import transport
from quire.server.app import create_app
from quire.server.replies import json_reply
from tests.server_fakes import AppThread, app_context, wait_until

LIMIT = 4096
PATIENCE = 10.0
"""Seconds that anything may take on a busy machine. What the server is told to wait for is far less, or far more."""


class Bench:
    """A server with a few routes that do what the tests need."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.disconnects: list[str] = []
        self.context = app_context(max_body_bytes=LIMIT)
        self.bodies = transport.Bodies(2 * LIMIT)
        self.thread = AppThread(lambda: create_app(self.context, self.router()))

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post("/v1/echo")
        async def echo(request: Request) -> Response:
            with self.bodies.holding() as fits:
                body = await transport.read_body(request, LIMIT, fits)
            return json_reply({"bytes": len(body)})

        @router.post("/v1/ignore")
        async def ignore() -> Response:
            return json_reply({"read": False})

        @router.get("/v1/watch/{name}")
        async def watch(name: str) -> Response:
            return Watcher(self, name)

        @router.get("/v1/large/{mebibytes}")
        async def large(mebibytes: int) -> Response:
            return Response(bytes(mebibytes << 20))

        @router.get("/v1/parts")
        async def whole_stream() -> Response:
            async def parts() -> object:
                for part in (b"one", b"", b"two\r\n", b"5\r\nthree\r\n"):
                    yield part

            return StreamingResponse(parts())  # type: ignore[arg-type]

        @router.get("/v1/broken-stream")
        async def broken() -> Response:
            async def parts() -> object:
                yield b"one"
                raise ValueError("in the middle")

            return StreamingResponse(parts())  # type: ignore[arg-type]

        return router

    def ask(self, data: bytes, *, half_close: bool = False, seconds: float = PATIENCE) -> bytes:
        """Everything that the server sends for these bytes, until it closes the connection."""
        with self.connect(seconds) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def connect(self, seconds: float = PATIENCE) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.thread.port), timeout=seconds)


class Watcher(Response):
    """Sends one chunk, then waits for the gate or for its client's leaving."""

    def __init__(self, bench: Bench, name: str) -> None:
        super().__init__()
        self.bench, self.name = bench, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        leaving = asyncio.ensure_future(receive())
        while not leaving.done() and not self.bench.gate.is_set():
            await asyncio.sleep(0.005)
            if leaving.done() and leaving.result()["type"] != "http.disconnect":
                leaving = asyncio.ensure_future(receive())
        if leaving.done() and leaving.result()["type"] == "http.disconnect":
            self.bench.disconnects.append(self.name)
            return
        leaving.cancel()
        await send({"type": "http.response.body", "body": b"ended"})


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.thread:
        yield bench
        bench.gate.set()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    data = b""
    while marker not in data:
        part = connection.recv(65536)
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def error_of(answer: bytes, status: int) -> dict[str, object]:
    """The error in an answer, which must be whole, in OpenAI's shape, and the last on its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} ")
    assert "connection: close" in lines
    assert "content-type: application/json" in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def get(path: str = "/live", extra: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{extra}\r\n".encode()


def post(path: str, body: bytes, extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


# -- what is not HTTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS hello
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon here\r\n\r\n",
        b"GET / HTTP/1.1\r\nA\x00B: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nContent-Length: nine\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/echo HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_gets_a_400_in_openais_shape_and_no_traceback(
    bench: Bench, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert error_of(bench.ask(data), 400)["code"] == "invalid_http"
    assert not [record for record in caplog.records if record.exc_info]
    assert b"200 OK" in bench.ask(get("/live", "Connection: close\r\n"))


def test_a_broken_chunk_after_good_ones_ends_the_request(bench: Bench) -> None:
    data = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nXX\r\n"
    error_of(bench.ask(data), 400)


@pytest.mark.parametrize("whole", [True, False])
def test_headers_over_the_bound_are_refused(bench: Bench, whole: bool) -> None:
    """In one piece, and dripping in as a header that never ends."""
    data = get(extra="X-Long: " + "a" * (transport.MAX_HEAD_BYTES + 10) + "\r\n")
    if whole:
        answer = bench.ask(data)
    else:
        with bench.connect() as connection:
            for start in range(0, 2 * len(data), 4096):
                try:
                    connection.sendall((data[:-4] + b"a" * len(data))[start : start + 4096])
                except OSError:
                    break
                time.sleep(0.001)
            answer = read_all(connection)
    assert "larger than 32768 bytes" in str(error_of(answer, 400)["message"])


def test_a_line_without_end_after_a_body_is_refused(bench: Bench) -> None:
    """A trailer, or the size of a chunk: the parser would keep all of it."""
    head = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    for line in (b"0\r\nX-Long: ", b"1;"):
        with bench.connect() as connection:
            connection.sendall(head + line)
            for _ in range(40):
                try:
                    connection.sendall(b"a" * 4096)
                except OSError:
                    break
                time.sleep(0.001)
            assert "larger than 32768 bytes" in str(error_of(read_all(connection), 400)["message"])


def test_what_is_not_http_behind_an_answer_is_not_answered_again(bench: Bench) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    with bench.connect() as connection:
        connection.sendall(head)
        assert answer_of(connection)[0] == 404
        connection.sendall(b"nonsense\r\n")
        assert read_all(connection) == b""


def test_a_large_body_is_no_line_without_end(bench: Bench) -> None:
    answer = bench.ask(post("/v1/echo", b"x" * LIMIT, "Connection: close\r\n"))
    assert answer.endswith(b'{"bytes":%d}' % LIMIT)


def test_a_url_over_the_bound_is_refused(bench: Bench) -> None:
    assert "larger than" in str(error_of(bench.ask(get("/" + "a" * 40_000)), 400)["message"])


def test_too_many_headers_are_refused(bench: Bench) -> None:
    many = "".join(f"X-{index}: 1\r\n" for index in range(transport.MAX_HEADERS))
    assert "more than 100 headers" in str(error_of(bench.ask(get(extra=many)), 400)["message"])


def test_headers_up_to_the_bounds_are_taken(bench: Bench) -> None:
    many = "".join(f"X-{index}: {'b' * 290}\r\n" for index in range(transport.MAX_HEADERS - 3))
    assert bench.ask(get(extra=many + "Connection: close\r\n")).startswith(b"HTTP/1.1 200")


def test_another_protocol_is_not_spoken_but_the_request_is_answered(bench: Bench) -> None:
    for upgrade in ("websocket", "h2c"):
        answer = bench.ask(get(extra=f"Connection: Upgrade\r\nUpgrade: {upgrade}\r\n"))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()


# -- who is slow ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", ["", "Host: localhost\r\nConnection: keep-alive\r\n", "Expect: 100-continue\r\n"])
def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(bench: Bench, headers: str) -> None:
    head, _, body = bench.ask(f"GET /v1/parts HTTP/1.0\r\n{headers}\r\n".encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"onetwo\r\n5\r\nthree\r\n"
    assert b"transfer-encoding" not in head and b"connection: close" in head
    chunked = bench.ask(b"GET /v1/parts HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"transfer-encoding: chunked" in chunked and chunked.endswith(b"\r\n0\r\n\r\n")


def test_headers_that_come_too_slowly_are_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEAD_SECONDS", 0.3)
    with bench.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        begun = time.monotonic()
        answer = b""
        connection.settimeout(0.05)
        while time.monotonic() - begun < PATIENCE:  # one byte at a time keeps no connection open
            try:
                connection.sendall(b"a")
                answer += connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not answer or b"\r\n\r\n" in answer:
                break
        assert time.monotonic() - begun < PATIENCE
    assert answer == b"" or b" 400 " in answer


def test_a_silent_connection_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEAD_SECONDS", 0.2)
    assert bench.ask(b"") == b""
    assert bench.ask(b"\r\n\r\n") == b""


def test_an_idle_connection_is_kept_for_a_while_and_then_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench.connect() as connection:
        for seconds in (PATIENCE, PATIENCE, 0.3):
            monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", seconds)
            begun = time.monotonic()
            connection.sendall(get())
            assert read_until(connection, b'{"status":"ok"}').startswith(b"HTTP/1.1 200")
        assert connection.recv(100) == b""
        assert time.monotonic() - begun > 0.2


def test_a_body_that_comes_too_slowly_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BODY_SECONDS", 0.3)
    error = error_of(bench.ask(post("/v1/echo", b"x" * 10)[:-5]), 408)
    assert error["code"] == "timeout"


@pytest.mark.parametrize("extra", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("mebibytes", [1, 8])
def test_a_client_that_does_not_read_is_given_up_on_every_route(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, mebibytes: int, extra: str
) -> None:
    for name in ("STUCK_SECONDS", "KEEP_ALIVE_SECONDS"):
        monkeypatch.setattr(transport, name, 0.3)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", bench.thread.port))
        connection.sendall(get(f"/v1/large/{mebibytes}", extra))
        state = bench.thread.server.server_state
        assert wait_until(lambda: state.total_requests == 1)
        assert wait_until(lambda: not state.connections and not state.tasks)


def test_a_running_answer_has_no_deadline_of_the_connections(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", 0.1)
    with begun_answer(bench) as connection:
        time.sleep(0.4)
        bench.gate.set()
        read_until(connection, b"ended")


def begun_answer(bench: Bench) -> socket.socket:
    """A connection on which an answer has begun; others, whose request came too late, were closed before."""
    while True:
        connection, data = bench.connect(), b""
        with contextlib.suppress(OSError):
            connection.sendall(get("/v1/watch/a"))
            while b"begun" not in data and (part := connection.recv(65536)):
                data += part
        if b"begun" in data:
            return connection
        connection.close()


# -- bodies --------------------------------------------------------------------------------------------------


def test_a_body_of_just_the_limit_is_taken_and_one_byte_more_is_not(bench: Bench) -> None:
    close = "Connection: close\r\n"
    assert b'{"bytes":4096}' in bench.ask(post("/v1/echo", b"x" * LIMIT, close))
    error = error_of(bench.ask(post("/v1/echo", b"x" * (LIMIT + 1))), 413)
    assert error["code"] == "request_too_large"
    assert "4096" in str(error["message"])


def test_a_chunked_body_is_counted(bench: Bench) -> None:
    head = b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    assert b'{"bytes":4096}' in bench.ask(head + 4 * chunk + b"0\r\n\r\n")
    error_of(bench.ask(head + 5 * chunk + b"0\r\n\r\n"), 413)


def test_a_client_that_sends_much_before_it_reads_finds_the_413(bench: Bench) -> None:
    """A closed connection under a sender would be reset, and the answer lost."""
    for _ in range(3):
        error_of(bench.ask(post("/v1/echo", b"x" * 8_000_000)), 413)


def test_who_asks_before_sending_too_much_is_told_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINGER_SECONDS", "BODY_SECONDS"):  # it is not waited for the body
        monkeypatch.setattr(transport, name, 2 * PATIENCE)
    with bench.connect() as connection:
        connection.sendall(
            b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n"
        )
        error_of(read_all(connection), 413)


def test_who_asks_before_sending_gets_a_go_ahead(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(
            b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        connection.sendall(b"abc")
        read_until(connection, b'{"bytes":3}')


def test_large_bodies_share_their_room_and_small_ones_always_have_some(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SMALL_BODY_BYTES", 10)
    large = post("/v1/echo", b"x" * LIMIT, "Connection: close\r\n")
    with bench.connect() as one, bench.connect() as other:
        for connection in (one, other):
            connection.sendall(large[:-1])
        assert wait_until(lambda: bench.bodies.bytes.total == 2 * LIMIT - 2)
        error = error_of(bench.ask(large), 429)
        assert error["code"] == "rate_limit_exceeded" and "too many large bodies" in str(error["message"])
        small = post("/v1/echo", b"x" * 10, "Connection: close\r\n")
        assert bench.ask(small).endswith(b'{"bytes":10}')
        one.sendall(large[-1:])
        assert read_all(one).endswith(b'{"bytes":%d}' % LIMIT)
    assert wait_until(lambda: bench.bodies.bytes.total == 0)  # also that of the client that has left
    assert bench.ask(large).endswith(b'{"bytes":%d}' % LIMIT)


def test_an_endless_body_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_SECONDS", 0.3)
    with bench.connect() as connection:
        connection.sendall(b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begun < PATIENCE:
                connection.sendall(chunk)


def test_a_body_that_no_route_reads_does_not_keep_the_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_SECONDS", 0.3)
    with bench.connect() as connection:
        connection.sendall(post("/v1/ignore", b"x" * 100)[:-50])
        read_until(connection, b'{"read":false}')
        assert connection.recv(100) == b""


def test_after_a_body_that_no_route_read_the_connection_goes_on(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(post("/v1/ignore", b"x" * 100))
        read_until(connection, b'{"read":false}')
        connection.sendall(get())
        read_until(connection, b'{"status":"ok"}')


def test_a_client_that_leaves_within_its_body_leaves_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for half_close in (False, True):
            with bench.connect() as connection:
                connection.sendall(post("/v1/echo", b"x" * 100)[:-50])
                assert wait_until(lambda: bench.thread.num_tasks == 1)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                    assert read_all(connection) == b""
            assert wait_until(lambda: bench.thread.num_tasks == 0)
    assert not caplog.records


# -- answers that come before the body ------------------------------------------------------------------------

LARGE = 8_000_000
"""More than the kernel keeps for a connection: who sends it must be read from, or does not come to its answer."""
JSON = "Content-Type: application/json\r\n"
KEY = "Authorization: Bearer secret\r\n"


@pytest.fixture(scope="module")
def front() -> Iterator[AppThread]:
    """The real routes, with a key; those under /draining of a server that is about to leave."""
    contexts = [app_context(max_body_bytes=LIMIT, api_key=("secret",)) for _ in range(2)]
    contexts[1].client.draining = True
    open_to_all = app_context(max_body_bytes=LIMIT)

    def app() -> ASGIApp:
        apps = [create_app(context) for context in (*contexts, open_to_all)]

        async def choose(scope: Scope, receive: Receive, send: Send) -> None:
            prefix, _, rest = scope["path"].partition("//")
            chosen = {"/draining": apps[1], "/open": apps[2]}.get(prefix)
            await (chosen or apps[0])(scope | {"path": "/" + rest} if chosen else scope, receive, send)

        return choose

    with AppThread(app) as thread:
        yield thread


def answer_of(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Status, head and body of the next answer, which says its length."""
    head, _, body = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split(b" ")[1]), head, body


REFUSALS = {
    "no key": (401, "/v1/completions", JSON),
    "a host that is not known": (403, "/open//v1/completions", JSON + "Host: evil.example\r\n"),
    "a page elsewhere": (403, "/open//v1/completions", JSON + "Origin: http://evil.example\r\n"),
    "no such path": (404, "/v1/nothing", JSON + KEY),
    "no such method": (405, "/v1/models", JSON + KEY),
    "a body that is too large": (413, "/v1/completions", JSON + KEY),
    "a body that is not JSON": (415, "/v1/completions", KEY + "Content-Type: text/plain\r\n"),
    "a server that leaves": (503, "/draining//v1/completions", JSON + KEY),
    "two hosts": (400, "/v1/completions", JSON + KEY + "Host: localhost\r\nHost: localhost\r\n"),
    "a head that is too large": (400, "/v1/completions", JSON + KEY + f"X-Long: {'x' * transport.MAX_HEAD_BYTES}\r\n"),
    "too many headers": (400, "/v1/completions", JSON + KEY + "X: 1\r\n" * transport.MAX_HEADERS),
    "no header": (400, "/v1/completions", JSON + KEY + "this is no header\r\n"),
    "a length that is none": (400, "/v1/completions", JSON + KEY + "Content-Length: nine\r\n"),
}


@pytest.mark.parametrize("framing", ["length", "chunked", "1.0"])
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("kind", REFUSALS)
def test_who_sends_a_large_body_before_it_reads_finds_every_early_refusal(
    front: AppThread, kind: str, close: bool, framing: str
) -> None:
    status, path, extra = REFUSALS[kind]
    host = "" if "Host:" in extra else "Host: localhost\r\n"
    chunk = b"x" * 64_000
    sized = "" if "Content-Length" in extra else f"Content-Length: {LARGE // len(chunk) * len(chunk)}\r\n"
    version, length = ("1.1", "Transfer-Encoding: chunked\r\n") if framing == "chunked" else ("1.1", sized)
    version = "1.0" if framing == "1.0" else version
    head = f"POST {path} HTTP/{version}\r\n{host}{'Connection: close' * close}{CRLF * close}{length}{extra}\r\n"
    piece = b"%x\r\n%s\r\n" % (len(chunk), chunk) if framing == "chunked" else chunk
    with socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode())
        for _ in range(LARGE // len(chunk)):
            connection.sendall(piece)
        if framing == "chunked":
            connection.sendall(b"0\r\n\r\n")
        found, answer, body = answer_of(connection)
        assert found == status and json.loads(body)["error"]["message"]
        if b"connection: close" in answer.lower():
            assert read_all(connection) == b""
        else:  # the body was read to its end, and the connection goes on
            connection.sendall(get("/live", "Connection: close\r\n"))
            assert answer_of(connection)[0] == 200


CRLF = "\r\n"


def test_who_is_refused_for_too_many_connections_finds_that_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "max_connections", lambda: 0)
    with bench.connect() as connection:
        connection.sendall(post("/v1/echo", b"x" * LARGE))
        assert answer_of(connection)[0] == 503
    monkeypatch.setattr(transport, "max_connections", lambda: -transport.SPARE_FILES)
    with bench.connect() as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(100) == b""  # so many that nobody can be waited for


def test_who_goes_on_sending_after_its_refusal_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the amount, by the time in all, and by the time in which nothing comes."""
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n"
    for name, value in (("LINGER_BYTES", 100_000), ("BODY_SECONDS", 0.3), ("LINGER_SECONDS", 0.1)):
        for extra in (b"", b"Connection: close\r\n"):
            with monkeypatch.context() as patch, bench.connect() as connection:
                patch.setattr(transport, name, value)
                connection.sendall(head % extra)
                assert answer_of(connection)[0] == 404
                begun = time.monotonic()
                while time.monotonic() - begun < PATIENCE:
                    try:
                        if name == "LINGER_SECONDS":
                            if not connection.recv(100):
                                break
                        else:
                            connection.sendall(chunk)
                    except OSError:
                        break
                assert time.monotonic() - begun < PATIENCE
    assert wait_until(lambda: not bench.thread.server.server_state.connections)


# -- several requests on one connection ----------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(bench: Bench) -> None:
    data = b"".join(post("/v1/echo", b"x" * size) for size in (1, 2, 3)) + get(extra="Connection: close\r\n")
    answer = bench.ask(data)
    places = [answer.index(part) for part in (b'{"bytes":1}', b'{"bytes":2}', b'{"bytes":3}', b'{"status":"ok"}')]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200") == 4


def test_too_many_pipelined_requests_end_the_connection_after_the_first_answer(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(get("/v1/watch/a"))
        data = read_until(connection, b"begun")
        connection.sendall(get() * 1000)
        bench.gate.set()
        data += read_all(connection)
    assert data.count(b"HTTP/1.1 ") == 1
    assert data.endswith(b"ended\r\n0\r\n\r\n")


def test_garbage_behind_a_request_does_not_disturb_its_answer(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(get("/v1/watch/a"))
        data = read_until(connection, b"begun")
        connection.sendall(b"\x00\x01 garbage \r\n\r\n")
        time.sleep(0.05)
        bench.gate.set()
        data += read_all(connection)
    assert data.count(b"HTTP/1.1 ") == 1
    assert data.endswith(b"ended\r\n0\r\n\r\n")


@pytest.mark.parametrize("ahead", [b"", get()])
def test_an_answer_notices_that_its_client_left(bench: Bench, ahead: bytes) -> None:
    """Also if the client had sent its next request already."""
    with bench.connect() as connection:
        connection.sendall(get("/v1/watch/a"))
        read_until(connection, b"begun")
        connection.sendall(ahead)
    assert wait_until(lambda: bench.thread.num_tasks == 0)
    assert bench.disconnects == ["a"]


# -- errors on the way ---------------------------------------------------------------------------------------


def test_a_stream_that_breaks_ends_its_connection(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = bench.ask(get("/v1/broken-stream"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"one" in answer and not answer.endswith(b"0\r\n\r\n")
    assert b"in the middle" not in answer
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_over_the_limit_of_connections_the_newest_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "max_connections", lambda: 2)
    with bench.connect() as first, bench.connect() as second:
        for connection in (first, second):
            connection.sendall(get())
            read_until(connection, b'{"status":"ok"}')
        assert error_of(bench.ask(b""), 503)["code"] == "too_many_connections"
    assert wait_until(lambda: b"200 OK" in bench.ask(get(extra="Connection: close\r\n")))
