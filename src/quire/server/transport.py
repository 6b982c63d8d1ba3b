"""HTTP on the wire: uvicorn's protocol with bounds and deadlines, and the reading of bodies.

What is not valid HTTP, too large or too slow is refused before any route sees it. An error here is answered in
OpenAI's shape like everywhere else, and the connection is closed, since nobody knows where its next request begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.errors import ApiError

MAX_HEAD_BYTES = 32 * 1024
"""Of the request line and all headers together."""
MAX_HEADERS = 100
HEAD_SECONDS = 20.0
"""From a request's first byte, or from the connection's beginning, until its headers are complete."""
BODY_SECONDS = 30.0
"""For a request's body."""
KEEP_ALIVE_SECONDS = 75.0
"""How long a connection may wait for its next request: longer than clients' pools keep one unused, so that it is the
client who closes it and no request runs into a closing connection."""
MAX_PIPELINED = 16
"""Requests that a connection may send ahead of the answer to the first."""
SMALL_BODY_BYTES = 256 * 1024
"""Bodies up to this size need not ask for room among the others."""
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20
"""What is left of a body that was refused is read for so long and so far, so that a client which sends before it
reads finds the answer, and no reset connection."""
STUCK_SECONDS = 120.0
"""A client that takes nothing for so long, while something waits to be sent to it, is given up."""
SPARE_FILES = 64
"""File descriptors that connections leave for everything else."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. As uvicorn's, and:

    - request line and headers are bounded, and must come in time;
    - what is not HTTP is answered with a 400 in OpenAI's shape, never into an answer that has begun;
    - an answer that runs is told when its client goes, also if the client had sent further requests ahead;
    - a client that does not read is given up, whatever is sent to it;
    - the scope's "quire.drop" closes the connection at once, whatever waits to be sent.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None  # runs while the client is behind with its reading
        self._running: RequestResponseCycle | None = None  # the one that is answered now
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0  # of the lines that are complete
        self._pending_bytes = 0  # received since the parser last handed something on
        self._refused = False  # nothing more is read from this connection

    # -- the connection ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            self._refuse(503, "the server has too many open connections; try again", "too_many_connections")
            return
        self._deadline(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline(None)
        self._set_unread(False)
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        self._pending_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Other protocols are not spoken; the request itself is a valid one, and is answered as HTTP/1.1.
            self._stop_reading()
        except httptools.HttpParserError as error:
            self._refuse(400, self._what_is_wrong(error), "invalid_http")
        else:
            if self._pending_bytes > MAX_HEAD_BYTES:
                # A line without end: the parser keeps it, and copies it for each piece. Trailers have lines too.
                self._refuse(400, _TOO_LARGE, "invalid_http")

    def _what_is_wrong(self, error: Exception) -> str:
        cause = error.__context__
        return str(cause) if isinstance(cause, _HeadTooLargeError) else "this is not a valid HTTP request"

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error if no answer has begun, and close when the one that runs has ended."""
        self._stop_reading()
        self.pipeline.clear()
        cycle = self._running
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
            return  # a whole request is being answered: what follows it is not HTTP, and is dropped
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its body is broken off: nobody waits for its answer any more
            cycle.message_event.set()
        self.transport.write(_raw_error(ApiError(status, message, code=code)))
        self._close()

    def _close(self) -> None:
        """Close when everything is sent, or in a while even so."""
        self.transport.close()
        self._deadline(STUCK_SECONDS)

    def _stop_reading(self) -> None:
        """Take nothing more from this connection, and close it after the answer at hand."""
        self._refused = True
        for cycle in (self.cycle, self._running):
            if cycle is not None:
                cycle.keep_alive = False

    # -- deadlines -----------------------------------------------------------------------------------------

    def _deadline(self, seconds: float | None) -> None:
        """Close the connection after this time, unless another deadline is set; None: no deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and self.parser is not None:  # without a parser the connection is gone
            self._timer = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._in_head:
            self._refuse(400, f"the request's headers did not come within {HEAD_SECONDS:g} s", "timeout")
        else:
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_unread(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_unread(False)

    def _set_unread(self, unread: bool) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = self.loop.call_later(STUCK_SECONDS, self.transport.abort) if unread else None

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the deadlines here cover what uvicorn's timer does, and more
        if self.transport.is_closing():
            self._close()
        if self.transport.is_closing() or self._running is not None or self._in_head:
            return  # a deadline runs already, or none is needed
        # The rest of a body that nobody wanted to read may come in until the linger's end.
        self._deadline(LINGER_SECONDS if self._in_message else KEEP_ALIVE_SECONDS)

    # -- the parser's calls --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["quire.drop"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._in_head = self._in_message = True
        self._head_bytes = self._pending_bytes = 0
        self._deadline(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise _HeadTooLargeError(f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self._pending_bytes = 0
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._deadline(None)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _HeadTooLargeError(f"more than {MAX_PIPELINED} requests were sent ahead of their answers")
        super().on_headers_complete()
        # uvicorn reads no further behind a request that must wait for its turn; but then the running answer would
        # not hear of its client's leaving. What may come in is bounded: by the count here, and in a body by uvicorn.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if self._running is None and not self.transport.is_closing():
            self._deadline(KEEP_ALIVE_SECONDS)  # the rest of a refused body has come

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]


class _HeadTooLargeError(Exception):
    """The request line and headers are over a bound; the text is for the client."""


_TOO_LARGE = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"


def _raw_error(error: ApiError) -> bytes:
    """A whole answer, as bytes, after which the connection is closed."""
    body = msgspec.json.encode(error.body())
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[error.status] + head + body


def raise_file_limit() -> None:
    """Let this process open as many files, connections that is, as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _max_connections() -> int:
    """What the limit of open files leaves for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft - SPARE_FILES)


# -- bodies ------------------------------------------------------------------------------------------------


class Bodies:
    """Bounds what the large bodies of a process take together; small ones always have room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], bool]]:
        """A function that one body asks, with its size so far, whether there is room; it is given back at the end."""
        held = 0

        def fits(size: int) -> bool:
            nonlocal held
            total = self._bytes - held + size
            if size > SMALL_BODY_BYTES and total > self._max_bytes:
                return False
            held, self._bytes = size, total
            return True

        try:
            yield fits
        finally:
            self._bytes -= held


async def read_body(
    request: Request, limit: int, fits: Callable[[int], bool] = lambda size: True, seconds: float | None = None
) -> bytes:
    """The request's whole body, of at most `limit` bytes.

    Args:
        fits: whether there is room for this much of it; see `Bodies`.
        seconds: how long it may take to come, where that is less than `BODY_SECONDS`.

    Raises:
        ApiError: 413 if it is larger, as soon as that is known; 429 if there is no room for it among the others; 408
            if it does not come in time.
        ClientDisconnect: the client left before the body was there.
    """
    said = request.headers.get("content-length", "")
    refusal = _too_large(limit) if said.isdigit() and (len(said) > 18 or int(said) > limit) else None
    if refusal is not None and request.headers.get("expect", "").lower() == "100-continue":
        raise refusal  # the client waits for a go-ahead, and does not get one
    patience = BODY_SECONDS if seconds is None else min(BODY_SECONDS, seconds)
    chunks: list[bytes] = []
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience if refusal is None else LINGER_SECONDS) as deadline:
            while more and size <= limit + LINGER_BYTES:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if refusal is not None:
                    continue
                refusal = _too_large(limit) if size > limit else None if fits(size) else _no_room()
                if refusal is None:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    deadline.reschedule(asyncio.get_running_loop().time() + LINGER_SECONDS)
    if refusal is not None:
        raise refusal
    if more:
        message_text = f"the request's body did not come within {patience:g} s"
        raise ApiError(408, message_text, code="timeout", headers={"connection": "close"})
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, the most that this server takes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _no_room() -> ApiError:
    message = "the server is receiving too many large bodies at once; try again in 1 s"
    headers = {"retry-after": "1", "connection": "close"}
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


# -- the server --------------------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        """Take no new connections; those that are open stay."""
        for server in self.servers:
            server.close()


def make_server(app: ASGIApp, graceful_seconds: int = 2) -> HttpServer:
    """A uvicorn server for this app. `graceful_seconds`: how long open answers may take when it is told to leave."""
    config = Config(
        app,
        http=BoundedProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=graceful_seconds,
    )
    return HttpServer(config)
