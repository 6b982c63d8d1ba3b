"""The HTTP/1.1 client of the router, the load generator and the commands that speak to servers.

A general client library would cost a router several times as much as the rest of a request, and a load generator, which
often shares a machine with the server, as much on every streamed chunk. This one does only what they need: keep-alive
connections, requests sent whole, response bodies as raw bytes piece by piece, an error as soon as a connection ends,
and bounded buffers. HTTP and HTTPS, also over Unix sockets; no redirects, no compression, no proxies.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import cast

import httptools

from quire.address import Address
from quire.errors import RemoteError
from quire.tls import client_context, unverified_context, why_untrusted

CONNECT_SECONDS = 3.0
UNREAD_BYTES = 256 << 10
"""Unread bytes of a response after which reading from the connection pauses."""
KEPT_CONNECTIONS = 256
"""Idle connections kept open per server, unless said otherwise."""
MAX_HEAD_BYTES = 64 << 10
"""Longest status line and headers of a response."""
FETCHED_BYTES = 4 << 20
"""Most bytes of a response that is fetched whole, unless said otherwise."""


class HttpError(RemoteError):
    """A server cannot be reached, or its response is none or incomplete.

    Args:
        kind: "connect", "closed" (by the server), "aborted" (by this side), "timeout", "garbage" (not what was agreed).

    Attributes:
        reached: the request may have arrived there.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.reached = kind, kind != "connect"


class NoAnswerError(HttpError):
    """A server did not lose its connection, but its answer took too long, or is too large."""


class Connections:
    """The connections to all servers.

    Args:
        most: how many may be open; beyond that idle ones are closed before another is opened.

    Attributes:
        open: how many are open. opening: how many are being opened.
        idle: those without a request, the least recently used first.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self.open = self.opening = 0
        self.idle: dict[Answer, None] = {}

    def make_room(self) -> None:
        """Close idle ones, so that one more may be open."""
        excess = self.open + self.opening + 1 - self._most
        for answer in list(islice(self.idle, max(0, excess))):
            del self.idle[answer]
            answer.abort()


class Answer(asyncio.Protocol):
    """A connection, and the response that is read from it; one at a time.

    Attributes:
        status: 0 until the headers are there. headers: with names in lower case.
        read_at: when the last byte was read, by `time.perf_counter`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self._loop, self._connections = loop, connections
        self._transport: asyncio.Transport | None = None
        self._news: asyncio.Future[None] | None = None
        self._lost = False
        self.read_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._head_bytes = 0  # also of the body that came with them
        self._head_done = self._done = self._stays = self._paused = False
        self._error: HttpError | None = None

    # -- for the caller --------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> None:
        """Send a request, discarding the previous response."""
        self._reset()
        if self._transport is not None:
            self._transport.write(data)

    def header(self, name: bytes) -> str:
        """A header's value; "" if there is none of this name."""
        return next((value.decode("latin-1") for known, value in self.headers if known == name), "")

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self.header(b"content-type").partition(";")[0].strip().lower() == "text/event-stream"

    async def head(self) -> int:
        """Wait for the headers; returns the status.

        Raises:
            HttpError: the connection ended before that.
        """
        while not self._head_done:
            await self._more()
        return self.status

    async def piece(self) -> bytes:
        """The part of the body that has come since the last call, at least one byte; b"" at its end.

        Raises:
            HttpError: the body breaks off here.
        """
        while not self._pieces:
            if self._done:
                return b""
            await self._more()
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def whole(self, most: int = FETCHED_BYTES) -> bytes:
        """The whole body.

        Raises:
            HttpError: it broke off. NoAnswerError: it is larger than this.
        """
        pieces, size = [], 0
        while data := await self.piece():
            pieces.append(data)
            size += len(data)
            if size > most:
                raise NoAnswerError("garbage", f"its answer is longer than {most} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def has_begun(self) -> bool:
        """Whether any of the response has been received."""
        return self._head_bytes > 0

    @property
    def has_ended(self) -> bool:
        """Whether the whole response has been received."""
        return self._done and not self._pieces

    def _more(self) -> asyncio.Future[None]:
        """Done when something has come, or the connection has ended. Raises HttpError: nothing will come."""
        if self._error is not None:
            raise self._error
        if self._lost:
            when = "in mid-answer" if self.has_begun else "before it answered"
            raise HttpError("closed", f"the connection was closed {when}")
        self._news = self._loop.create_future()
        return self._news

    def abort(self) -> None:
        """Close the connection at once; a waiting reader gets an error."""
        self._fail("aborted", "it was given up")

    @property
    def can_be_kept(self) -> bool:
        """Whether the response was read to its end and the connection can be used again: one with unread data may be
        paused."""
        return self.has_ended and self._stays and self.is_usable

    # -- called by the transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it
        self._connections.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._connections.open -= 1
        self._connections.idle.pop(self, None)
        if self._head_done and exc is None and self._error is None:  # a body without a length ends this way
            names = {name for name, _ in self.headers}
            self._done = self._done or not names & {b"content-length", b"transfer-encoding"}
        self._wake()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        self.read_at = time.perf_counter()
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("garbage", f"the answer is not HTTP: {error}")
        else:
            if not self._head_done and self._head_bytes > MAX_HEAD_BYTES:
                self._fail("garbage", f"the answer's header is longer than {MAX_HEAD_BYTES} bytes")
            self._wake()

    def _fail(self, kind: str, message: str) -> None:
        self._error = self._error or HttpError(kind, message)
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- called by the parser --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._done:
            raise ValueError("it answers more than was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 1xx responses come before the final one
            self.status, self._head_done = status, True
        else:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread += len(body)
        if self._unread > UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._done = self._head_done
        self._stays = self._parser.should_keep_alive()  # the parser forgets it afterwards


class HttpClient:
    """Sends requests to one server.

    Args:
        connections: those to all servers, among which its own count.
        cacert: see `quire.tls.client_context`. verify: False trusts any certificate.
        connect_seconds: how long opening a connection may take.
        kept: most idle connections.
    """

    def __init__(
        self,
        address: Address,
        connections: Connections | None = None,
        cacert: str | None = None,
        *,
        verify: bool = True,
        connect_seconds: float = CONNECT_SECONDS,
        kept: int = KEPT_CONNECTIONS,
    ) -> None:
        self.address, self.connections = address, connections or Connections()
        self._context = None
        if address.tls:
            self._context = client_context(cacert) if verify else unverified_context()
        self._connect_seconds, self._kept = connect_seconds, kept
        self._idle: list[Answer] = []
        self._busy: set[Answer] = set()

    async def ask(self, data: bytes, begun: Callable[[Answer], None] = lambda answer: None) -> Answer:
        """Send a request; returns the response once its headers are there. Give it back with `release`.

        If the server has closed an idle connection in the meantime, a new one is opened.

        Args:
            data: from `Address.request`.
            begun: called with each connection before the request is sent there, so that it can be aborted.

        Raises:
            HttpError: there is no connection, or no response.
        """
        reached = False
        while self._idle:
            answer = self._idle.pop()
            self.connections.idle.pop(answer, None)
            if not answer.is_usable:
                continue
            try:
                return await self._asked(answer, data, begun)
            except HttpError as error:
                if error.kind != "closed" or answer.has_begun:
                    raise
                reached = True
                break
        try:
            return await self._asked(await self._connect(), data, begun)
        except HttpError as error:
            error.reached = error.reached or reached
            raise

    async def _asked(self, answer: Answer, data: bytes, begun: Callable[[Answer], None]) -> Answer:
        self._busy.add(answer)
        try:
            answer.send(data)
            begun(answer)
            await answer.head()
        except BaseException:
            self._busy.discard(answer)
            answer.abort()
            raise
        return answer

    async def _connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        address = self.address
        self.connections.make_room()
        self.connections.opening += 1
        try:
            async with asyncio.timeout(self._connect_seconds):
                make = functools.partial(Answer, loop, self.connections)
                if address.uds is not None:
                    _, answer = await loop.create_unix_connection(make, address.uds)
                else:
                    _, answer = await loop.create_connection(make, address.host, address.port, ssl=self._context)
        except TimeoutError:
            raise HttpError("connect", f"no connection within {self._connect_seconds:g} s") from None
        except (OSError, UnicodeError) as error:  # the latter: a host name with an empty or a very long part
            reason = why_untrusted(error) or getattr(error, "strerror", None) or type(error).__name__
            raise HttpError("connect", f"no connection: {reason}") from None
        finally:
            self.connections.opening -= 1
        return answer

    def release(self, answer: Answer) -> None:
        """Give back a response; if it was not read to its end, the connection is closed."""
        self._busy.discard(answer)
        if answer.can_be_kept and len(self._idle) < self._kept:
            self._idle.append(answer)
            self.connections.idle[answer] = None
        else:
            answer.abort()

    async def fetch(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        body: bytes = b"",
        seconds: float | None,
        most: int = FETCHED_BYTES,
    ) -> tuple[int, bytes]:
        """Fetch a whole response: its status and body, at most this many bytes.

        Raises:
            HttpError: it broke off. NoAnswerError: it did not come in time, or is too large.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await self.ask(self.address.request(method, path, headers, body))
                try:
                    return answer.status, await answer.whole(most)
                finally:
                    self.release(answer)
        except TimeoutError:
            raise NoAnswerError("timeout", f"no answer within {seconds:g} s") from None

    def break_off(self) -> None:
        """Abort all requests in progress: the server is assumed to be gone, or nobody waits any more."""
        for answer in [*self._busy, *self._idle]:
            answer.abort()
        self._idle.clear()
