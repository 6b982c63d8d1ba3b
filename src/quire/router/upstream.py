"""An HTTP/1.1 client for the router: keep-alive connections, and responses read piece by piece.

A general client library would cost several times as much as the rest of a request here. This one does only what the
router needs: requests sent whole, response bodies as raw bytes, an error as soon as a connection ends, and bounded
buffers.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import cast

import httptools

from quire.router.address import Address
from quire.tls import client_context, why_untrusted

CONNECT_SECONDS = 3.0
UNREAD_BYTES = 256 << 10
"""Unread bytes of a response after which reading from the connection pauses."""
KEPT_CONNECTIONS = 256
"""Idle connections kept open per server."""
MAX_HEAD_BYTES = 64 << 10
FETCHED_BYTES = 4 << 20
"""Most bytes of a response that is fetched whole, unless said otherwise."""


class UpstreamError(Exception):
    """A server cannot be reached, or its response broke off. `reached`: the request may have arrived there."""

    def __init__(self, message: str, *, reached: bool = False) -> None:
        super().__init__(message)
        self.reached = reached


class NoAnswerError(UpstreamError):
    """A server did not lose its connection, but its answer took too long, or is too large."""


class Connections:
    """The connections to all servers.

    Args:
        most: how many may be open; beyond that idle ones are closed before another is opened.

    Attributes:
        open: how many are open. opening: how many are being opened.
        idle: those without a request, the least recently used first.
    """

    def __init__(self, most: int) -> None:
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
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self._loop, self._connections = loop, connections
        self._transport: asyncio.Transport | None = None
        self._news: asyncio.Future[None] | None = None
        self._lost = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._head_bytes = 0
        self._head_done = self._done = self._stays = self._paused = False
        self._error = ""

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

    async def head(self) -> int:
        """Wait for the headers; returns the status.

        Raises:
            UpstreamError: the connection ended before that.
        """
        while not self._head_done:
            await self._wait()
        return self.status

    async def piece(self) -> bytes:
        """The part of the body that has come since the last call, at least one byte; b"" at its end.

        Raises:
            UpstreamError: the body breaks off here.
        """
        while not self._pieces:
            if self._done:
                return b""
            await self._wait()
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def was_closed(self) -> bool:
        """Whether the server closed the connection before it answered."""
        return self._lost and not self._error and not self._head_bytes

    @property
    def has_ended(self) -> bool:
        """Whether the whole response has been received."""
        return self._done and not self._pieces

    async def _wait(self) -> None:
        if self._error or self._lost:
            raise UpstreamError(self._error or "the connection was closed", reached=True)
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    def abort(self) -> None:
        """Close the connection at once; a waiting reader gets an error."""
        self._fail("it was given up")

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
        if not self._done and self._head_done:  # a body without a length ends this way
            self._end_by_close()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def _end_by_close(self) -> None:
        names = {name for name, _ in self.headers}
        self._done = not names & {b"content-length", b"transfer-encoding"}

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("it does not speak HTTP")
        else:
            self._wake()

    def _fail(self, message: str) -> None:
        self._error = self._error or message
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- called by the parser --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail("its answer's headers are too large")
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


class Upstream:
    """The connections to one server, among those to all. `cacert`: a CA certificate; see `quire.tls.client_context`."""

    def __init__(self, address: Address, connections: Connections, cacert: str | None = None) -> None:
        self.address, self._connections = address, connections
        self._context = client_context(cacert) if address.tls else None
        self._idle: list[Answer] = []
        self._busy: set[Answer] = set()

    async def ask(self, data: bytes, begun: Callable[[Answer], None] = lambda answer: None) -> Answer:
        """Send a request; returns the response once its headers are there. Give it back with `release`.

        If the server has closed an idle connection in the meantime, a new one is opened.

        Args:
            begun: called with each connection before the request is sent there, so that it can be aborted.

        Raises:
            UpstreamError: there is no connection, or no response.
        """
        reached = False
        while self._idle:
            answer = self._idle.pop()
            self._connections.idle.pop(answer, None)
            if not answer.is_usable:
                continue
            try:
                return await self._asked(answer, data, begun)
            except UpstreamError:
                if not answer.was_closed:
                    raise
                reached = True
        try:
            return await self._asked(await self._connect(), data, begun)
        except UpstreamError as error:
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
        self._connections.make_room()
        self._connections.opening += 1
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                make = functools.partial(Answer, loop, self._connections)
                if address.uds is not None:
                    _, answer = await loop.create_unix_connection(make, address.uds)
                else:
                    _, answer = await loop.create_connection(make, address.host, address.port, ssl=self._context)
        except TimeoutError:
            raise UpstreamError(f"no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            reason = why_untrusted(error) or error.strerror or type(error).__name__
            raise UpstreamError(f"no connection: {reason}") from None
        finally:
            self._connections.opening -= 1
        return answer

    def release(self, answer: Answer) -> None:
        """Give back a response; if it was not read to its end, the connection is closed."""
        self._busy.discard(answer)
        if answer.can_be_kept and len(self._idle) < KEPT_CONNECTIONS:
            self._idle.append(answer)
            self._connections.idle[answer] = None
        else:
            answer.abort()

    async def fetch(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        body: bytes = b"",
        seconds: float,
        most: int = FETCHED_BYTES,
    ) -> tuple[int, bytes]:
        """Fetch a whole response: its status and body, at most this many bytes.

        Raises:
            UpstreamError: it broke off. NoAnswerError: it did not come in time, or is too large.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await self.ask(self.address.request(method, path, headers, body))
                try:
                    pieces, size = [], 0
                    while data := await answer.piece():
                        pieces.append(data)
                        size += len(data)
                        if size > most:
                            raise NoAnswerError(f"its answer is larger than {most} bytes")
                    return answer.status, b"".join(pieces)
                finally:
                    self.release(answer)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {seconds:g} s") from None

    def break_off(self) -> None:
        """Abort all requests in progress: the server is assumed to be gone."""
        for answer in [*self._busy, *self._idle]:
            answer.abort()
        self._idle.clear()
