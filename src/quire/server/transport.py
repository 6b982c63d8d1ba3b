"""HTTP connections: uvicorn's protocol with limits and deadlines, and the reading of bodies.

Requests that are not valid HTTP, too large or too slow are refused before they reach a route. The error has OpenAI's
format, as everywhere else, and the connection is closed, since it is unknown where its next request begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.server.errors import ApiError
from quire.server.host_policy import parse_host
from quire.server.request_log import log_unread, make_id, note_error, summary_of
from quire.server.shares import Shares
from quire.tls import ServerCertificate

MAX_HEAD_BYTES = 32 * 1024
"""Most bytes of the request line and all headers."""
MAX_HEADERS = 100
HEAD_SECONDS = 20.0
"""Deadline for a request's headers, from its first byte or from the beginning of the connection."""
BODY_SECONDS = 30.0
"""Deadline for a request's body."""
KEEP_ALIVE_SECONDS = 75.0
"""How long a connection may wait for its next request: longer than clients' pools keep one unused, so that the client
closes it, and no request is sent on a connection that is being closed."""
MAX_PIPELINED = 16
"""Most requests that a connection may send before the first one is answered."""
SMALL_BODY_BYTES = 256 * 1024
"""Bodies up to this size are never refused for lack of room."""
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20
"""The rest of a request that was answered early is read and discarded, until none has come for this time, or this much
has come, or `BODY_SECONDS` are over. So a client that sends all before it reads gets the answer, and no reset."""
STUCK_SECONDS = 120.0
"""A client that reads nothing for this long, while data waits to be sent to it, is disconnected."""
REFRESH_TICKS = 600
"""uvicorn's ticks (tenths of a second) between checks whether the certificate's files have changed."""
LAST_WORDS_SECONDS = 4.0
"""How long requests have to send their last events after the drain timeout."""
POLL_SECONDS = 0.05
SPARE_FILES = 64
"""File descriptors that are not available to connections."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Like uvicorn's, and:

    - the request line and headers have a size limit and a deadline;
    - invalid HTTP is answered with a 400 in OpenAI's format, but not within an answer that has begun;
    - the running request is told when its client disconnects, even if the client has pipelined further requests;
    - a client that does not read is disconnected;
    - an answer that is sent before its request is complete reaches a client that is still sending: the connection is
      closed for writing first, and later for reading (as with nginx's `lingering_close`);
    - the scope's "quire.drop" closes the connection immediately, and drops unsent data.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._files = config.files if isinstance(config, HttpConfig) else 1
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None  # runs while data waits for the client to read
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0  # of complete lines
        self._pending_bytes = 0  # received since the parser last returned something
        self._num_hosts = 0
        self._refused = False  # no further requests are accepted
        self._closing = False  # closed for writing, and soon for reading
        self._linger_bytes: int | None = None  # bytes that may still be discarded; None: not lingering
        self._linger_end = 0.0

    # -- the connection ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._way_out = _WayOut(self)
        excess = len(self.connections) - max_connections() // self._files
        if excess > SPARE_FILES // 2:
            transport.abort()  # not even an answer can be sent
        elif excess > 0:
            self._refuse(503, "the server has too many open connections; try again", "too_many_connections")
        else:
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
        if self._linger_bytes is not None:
            self._linger_on(len(data))
        if self._refused or self.parser is None:
            return
        self._pending_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is supported; the request itself is valid, and is answered as HTTP/1.1.
            self._stop_reading()
        except httptools.HttpParserError as error:
            self._refuse(400, self._what_is_wrong(error), "invalid_http")
        else:
            if self._pending_bytes > MAX_HEAD_BYTES:
                # A line without end, which the parser keeps, and copies for each piece. This includes trailers.
                self._refuse(400, _TOO_LARGE, "invalid_http")

    def _what_is_wrong(self, error: Exception) -> str:
        cause = error.__context__
        return str(cause) if isinstance(cause, _BadHeadError) else "this is not a valid HTTP request"

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error if no answer has begun, and close once a running one has ended."""
        self._stop_reading()
        self.pipeline.clear()
        if self._linger_bytes is not None:
            self.close()  # it has its answer already
            return
        cycle = self._running
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
            return  # a complete request is being answered; the invalid data after it is dropped
        error = ApiError(status, message, code=code)
        if cycle is not None and not cycle.response_complete and note_error(cycle.scope, error):
            request_id = summary_of(cycle.scope).request_id
        else:
            request_id = make_id()
            self.config.on_refused(request_id, error)  # type: ignore[attr-defined]
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its body is incomplete, so there will be no answer
            cycle.message_event.set()
        self.transport.write(_raw_error(error, request_id))
        self.close()

    def close(self) -> None:
        """Close once all data is sent. If more of a request may arrive, reading goes on for a while, since unread data
        would reset the connection, and the client would lose the answer."""
        if self._closing or self.transport.is_closing():
            return
        self.pipeline.clear()
        if not self._in_message and not self._refused:
            self._end()
            return
        self._closing = True
        self._stop_reading()
        if self.transport.can_write_eof():  # TLS has no half-close
            self.transport.write_eof()
        self._linger()

    def _end(self) -> None:
        """Close once everything is sent, or after a deadline."""
        self.transport.close()
        self._deadline(STUCK_SECONDS)

    def _linger(self) -> None:
        """From now on, discard what is received."""
        self._linger_bytes = LINGER_BYTES
        self._linger_end = self.loop.time() + BODY_SECONDS
        self.flow.resume_reading()
        self._linger_on(0)

    def _linger_on(self, size: int) -> None:
        """Count discarded bytes; if there are too many, close the connection."""
        left = self._linger_end - self.loop.time()
        self._linger_bytes = (self._linger_bytes or 0) - size
        if left <= 0 or self._linger_bytes < 0:
            self._refused = True
            self._end()
        else:
            self._deadline(min(LINGER_SECONDS, left))

    def _stop_reading(self) -> None:
        """Accept no further requests, and close after the current answer."""
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
        if seconds is not None and self.parser is not None:  # without a parser the connection is closed
            self._timer = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._in_head and not self._closing:
            self._refuse(400, f"the request's headers did not come within {HEAD_SECONDS:g} s", "timeout")
        else:
            self._end()

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
        self._unset_keepalive_if_required()  # the deadlines here replace uvicorn's timer
        if self._closing or self.transport.is_closing() or self._running is not None or self._in_head:
            return  # a deadline is set already, or none is needed
        if self._in_message:
            self._linger()  # discard the rest of the body; the next request may follow it
        else:
            self._deadline(KEEP_ALIVE_SECONDS)

    # -- the parser's calls --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["quire.drop"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._in_head = self._in_message = True
        self._head_bytes = self._pending_bytes = self._num_hosts = 0
        self._deadline(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise _BadHeadError(f"the request has more than {MAX_HEADERS} headers, which is the limit")
        if name.lower() == b"host":
            self._num_hosts += 1
            if parse_host(value) is None:
                raise _BadHeadError("the request's Host header is not a valid name or address, with an optional port")
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self._pending_bytes = 0
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _BadHeadError(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._deadline(None)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _BadHeadError(
                f"more than {MAX_PIPELINED} pipelined requests are waiting for their responses; that is the limit"
            )
        if self._num_hosts > 1 or (not self._num_hosts and self.parser.get_http_version() == "1.1"):
            raise _BadHeadError(
                f"the request has {self._num_hosts} Host headers; HTTP/1.1 requires exactly one (RFC 9112)"
            )
        super().on_headers_complete()
        # uvicorn stops reading after a pipelined request, but then the running one would not notice a disconnect. What
        # is received is limited by the count above, and within a body by uvicorn.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._linger_bytes = None
        super().on_message_complete()
        if self._running is None and not self.transport.is_closing():
            self._deadline(KEEP_ALIVE_SECONDS)  # the rest of a refused body was received

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        knows_chunks = cycle.scope["http_version"] != "1.0"
        cycle.transport = self._way_out if knows_chunks else _WholeWayOut(self)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]


class _WayOut:
    """The transport that a request's cycle gets: its `close` is the protocol's."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close


class _WholeWayOut(_WayOut):
    """The same for HTTP/1.0, which has neither chunks (RFC 9112, 6.1) nor status 100 (RFC 9110, 15.2): the chunks that
    uvicorn makes are joined again. The end of the connection is the end of the response.
    """

    __slots__ = ("_chunked",)

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._chunked: bool | None = None  # of the answer whose head was written
        send = self.write

        def write(data: bytes | bytearray | memoryview) -> None:
            whole = bytes(data)
            if self._chunked is None:
                if whole.startswith(b"HTTP/1.1 100 "):
                    return
                self._chunked = _CHUNKED in whole
                whole = whole.replace(_CHUNKED, b"\r\n", 1)
            elif self._chunked:
                whole = _joined(whole)
            send(whole)

        self.write = write


_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


def _joined(data: bytes) -> bytes:
    """The content of whole chunks."""
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        data = rest[length + 2 :]
    return b"".join(parts)


class _BadHeadError(Exception):
    """The request line or headers exceed a limit, or violate HTTP; the message is for the client."""


_TOO_LARGE = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"


def _raw_error(error: ApiError, request_id: str) -> bytes:
    """A complete response as bytes, after which the connection is closed."""
    body = msgspec.json.encode(error.body())
    fields = {"x-request-id": request_id, "content-type": "application/json", "content-length": len(body)}
    head = "".join(f"{name}: {value}\r\n" for name, value in (*fields.items(), ("connection", "close")))
    return STATUS_LINE[error.status] + head.encode() + b"\r\n" + body


def raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, to the highest allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Most connections, given the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft - SPARE_FILES)


# -- bodies ------------------------------------------------------------------------------------------------


class Bodies:
    """Limits the memory of all large bodies of a process, in shares by owner. Small ones are never refused."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = Shares(max_bytes)

    @contextlib.contextmanager
    def holding(self, owner: str = "") -> Iterator[Callable[[int], bool]]:
        """A function to ask, with a body's size so far, whether there is room; the room is released at the end."""
        held = 0

        def fits(size: int) -> bool:
            nonlocal held
            if size > SMALL_BODY_BYTES and not self.bytes.fits(owner, size - held):
                return False
            self.bytes.change(owner, size - held)
            held = size
            return True

        try:
            yield fits
        finally:
            self.bytes.change(owner, -held)


def drop(scope: Scope) -> None:
    """Close a request's connection at once, without sending what is buffered."""
    if at_once := scope.get("quire.drop"):
        at_once()


async def read_body(
    request: Request, limit: int, fits: Callable[[int], bool] = lambda size: True, seconds: float | None = None
) -> bytes:
    """Read the request's whole body, of at most `limit` bytes.

    Args:
        fits: whether there is room for this many bytes; see `Bodies`.
        seconds: the deadline, if it is shorter than `BODY_SECONDS`.

    Raises:
        ApiError: 413 if it is too large, as soon as that is known; 429 if there is no room for it besides other bodies;
            408 if it is not received in time.
        ClientDisconnect: the client disconnected before that.
    """
    said = request.headers.get("content-length", "")
    if said.isdigit() and (len(said) > 18 or int(said) > limit):
        raise _too_large(limit)
    patience = BODY_SECONDS if seconds is None else min(BODY_SECONDS, seconds)
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(patience):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                if not fits(size):
                    raise _no_room()
                chunks.append(chunk)
    except TimeoutError:
        message_text = f"the request's body did not come within {patience:g} s"
        raise ApiError(408, message_text, code="timeout", headers={"connection": "close"}) from None
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, the most that this server takes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _no_room() -> ApiError:
    message = "the server is receiving too many large bodies at once; try again in 1 s"
    headers = {"retry-after": "1", "connection": "close"}
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


# -- the server --------------------------------------------------------------------------------------------


class HttpConfig(Config):
    """uvicorn's, with a callback for what is refused before it is a request (its id and the error), a certificate
    that may be renewed, and the number of files that a connection may take."""

    on_refused: Callable[[str, ApiError], None] = staticmethod(log_unread)
    certificate: ServerCertificate | None = None
    files: int = 1

    def load(self) -> None:
        super().load()
        if self.certificate is not None:
            self.ssl = self.certificate.context


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, since the supervisor handles signals.

    Attributes:
        config: its `on_refused` may be replaced.
    """

    config: HttpConfig

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's, for sockets that listen already, and with a deadline for TLS handshakes, during which a
        connection is not counted yet."""
        await super().startup([])
        self.started = False
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        seconds = None if tls is None else HEAD_SECONDS
        for listener in sockets or []:
            server = await loop.create_server(
                self._connection, sock=listener, ssl=tls, backlog=self.config.backlog, ssl_handshake_timeout=seconds
            )
            self.servers.append(server)
        self.started = True

    def _connection(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self.config.certificate is not None and counter % REFRESH_TICKS == 0:
            self.config.certificate.refresh()  # here, so that no handshake sees a half-loaded one
        return await super().on_tick(counter)

    async def drain(self, deadline: Callable[[], float], stop: Callable[[], None]) -> None:
        """Accept no new connections, let running requests finish, end the rest, and then stop serving.

        Args:
            deadline: until when they may run, on the monotonic clock; asked repeatedly, since it may change.
            stop: called at the deadline. Requests have `LAST_WORDS_SECONDS` to send their last events, and are then
                cancelled.
        """
        while not self.started:
            await asyncio.sleep(POLL_SECONDS)
        for server in self.servers:
            server.close()
        await self._wait_for_requests(deadline)
        stop()
        end = time.monotonic() + LAST_WORDS_SECONDS
        await self._wait_for_requests(lambda: end)
        self.cancel_requests()
        self.should_exit = True

    async def _wait_for_requests(self, deadline: Callable[[], float]) -> None:
        while self.server_state.tasks and time.monotonic() < deadline():
            await asyncio.sleep(POLL_SECONDS)

    def cancel_requests(self) -> None:
        """Cancel the tasks of all running requests."""
        for task in list(self.server_state.tasks):
            task.cancel()


def make_server(
    app: ASGIApp, graceful_seconds: int = 2, certificate: ServerCertificate | None = None, files: int = 1
) -> HttpServer:
    """A uvicorn server for this app.

    Args:
        graceful_seconds: how long running answers may take after it was told to stop.
        certificate: for HTTPS; None: plain HTTP.
        files: file descriptors that a connection may take, with those for its request.
    """
    config = HttpConfig(
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
    config.certificate, config.files = certificate, files
    return HttpServer(config)
