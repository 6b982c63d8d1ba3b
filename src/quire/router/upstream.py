"""HTTP/1.1 towards a server: connections that are kept, and answers that come piece by piece.

A general client library costs several times what the rest of a request does here. This one does what the router needs:
whole requests, answers as the bytes of their bodies, an error as soon as a connection ends, and nothing unread without
bound.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.tls import client_context, why_untrusted

CONNECT_SECONDS = 3.0
UNREAD_BYTES = 256 << 10
"""Of an answer that nobody has taken yet; then the connection is read no further."""
KEPT_CONNECTIONS = 256
"""To one server, while nothing is asked of it."""
MAX_HEAD_BYTES = 64 << 10


class UpstreamError(Exception):
    """A server cannot be reached, or its answer broke off. `reached`: the request may have come there."""

    def __init__(self, message: str, *, reached: bool = False) -> None:
        super().__init__(message)
        self.reached = reached


class Address:
    """Where a server is.

    Args:
        url: http(s)://HOST[:PORT][/PREFIX], or unix:PATH of a Unix socket.

    Attributes:
        uds: the path of its Unix socket; None: it has a host and a port.

    Raises:
        ValueError: it is not such a URL.
    """

    def __init__(self, url: str) -> None:
        self.uds = _socket_path(url)
        parts = urlsplit(url if self.uds is None else "http://localhost")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not a server's URL; write one such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError(f"{url.rpartition('@')[2]!r} has a password before it; keys are given by --server-key")
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.name = f"{shown}:{self.port}{self.prefix}" if self.uds is None else url
        self.url = f"{parts.scheme}://{self.name}" if self.uds is None else url
        self._head = f"{{}} {self.prefix}{{}} HTTP/1.1\r\nhost: {shown}:{self.port}\r\n"

    def request(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
        """A request's bytes."""
        lines = [self._head.format(method, path).encode("latin-1")]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines += (b"content-length: %d\r\n\r\n" % len(body), body)
        return b"".join(lines)


def _socket_path(url: str) -> str | None:
    """Of unix:PATH, the path; None: it is another URL. Raises ValueError."""
    if not url.startswith("unix:"):
        return None
    path = url.removeprefix("unix:")
    if not path.startswith("/") or path.startswith("//") or not path.isprintable():
        raise ValueError(f"{url!r} is no Unix socket of a server; write its absolute path, as in unix:/run/quire.sock")
    return path


class Answer(asyncio.Protocol):
    """A connection, and the answer that comes over it; one at a time.

    Attributes:
        status: 0 before the head is there. headers: names in small letters.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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

    # -- for who asks --------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Another request may be sent."""
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> None:
        """Send a request, and forget the last answer."""
        self._reset()
        if self._transport is not None:
            self._transport.write(data)

    async def head(self) -> int:
        """The status, when it has come.

        Raises:
            UpstreamError: the connection ended before.
        """
        while not self._head_done:
            await self._wait()
        return self.status

    async def piece(self) -> bytes:
        """What has come of the body since the last call, at least a byte; b"" at its end.

        Raises:
            UpstreamError: it breaks off here.
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
        """The server has closed the connection before it said anything."""
        return self._lost and not self._error and not self._head_bytes

    @property
    def has_ended(self) -> bool:
        """Nothing more comes than what was read already."""
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
        """Close the connection at once; who waits is told."""
        self._fail("it was given up")

    @property
    def can_be_kept(self) -> bool:
        """The answer is whole, and the connection may carry another one."""
        return self._done and self._stays and self.is_usable

    # -- the connection's calls ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if not self._done and self._head_done:  # a body without a length ends so
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

    # -- the parser's calls --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail("its answer's headers are too large")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # others come before the answer
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
        self._stays = self._parser.should_keep_alive()  # afterwards it does not know any more


class Upstream:
    """The connections to one server. `cacert`: who vouches for it; see `quire.tls.client_context`."""

    def __init__(self, address: Address, cacert: str | None = None) -> None:
        self.address = address
        self._context = client_context(cacert) if address.tls else None
        self._idle: list[Answer] = []
        self._busy: set[Answer] = set()

    async def ask(self, data: bytes) -> Answer:
        """Send a request; its answer, of which the head is there. Give it back with `release`.

        A kept connection that the server has closed meanwhile is no failure: another one is made.

        Raises:
            UpstreamError: there is no connection, or no answer over it.
        """
        reached = False
        while self._idle:
            answer = self._idle.pop()
            if not answer.is_usable:
                continue
            try:
                return await self._asked(answer, data)
            except UpstreamError:
                if not answer.was_closed:
                    raise
                reached = True
        try:
            return await self._asked(await self._connect(), data)
        except UpstreamError as error:
            error.reached = error.reached or reached
            raise

    async def _asked(self, answer: Answer, data: bytes) -> Answer:
        self._busy.add(answer)
        try:
            answer.send(data)
            await answer.head()
        except BaseException:
            self._busy.discard(answer)
            answer.abort()
            raise
        return answer

    async def _connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                make = functools.partial(Answer, loop)
                if address.uds is not None:
                    _, answer = await loop.create_unix_connection(make, address.uds)
                else:
                    _, answer = await loop.create_connection(make, address.host, address.port, ssl=self._context)
        except TimeoutError:
            raise UpstreamError(f"no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            reason = why_untrusted(error) or error.strerror or type(error).__name__
            raise UpstreamError(f"no connection: {reason}") from None
        return answer

    def release(self, answer: Answer) -> None:
        """An answer is done with; one that was not read to its end is broken off."""
        self._busy.discard(answer)
        if answer.can_be_kept and len(self._idle) < KEPT_CONNECTIONS:
            self._idle.append(answer)
        else:
            answer.abort()

    async def fetch(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]] = (), *, body: bytes = b"", seconds: float
    ) -> tuple[int, bytes]:
        """A small whole answer: its status and body, of at most 4 MiB.

        Raises:
            UpstreamError: it did not come in time, or broke off.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await self.ask(self.address.request(method, path, headers, body))
                try:
                    pieces, size = [], 0
                    while data := await answer.piece():
                        pieces.append(data)
                        size += len(data)
                        if size > 4 << 20:
                            raise UpstreamError("its answer is too large")
                    return answer.status, b"".join(pieces)
                finally:
                    self.release(answer)
        except TimeoutError:
            raise UpstreamError(f"no answer within {seconds:g} s") from None

    def break_off(self) -> None:
        """End whatever is under way: the server is gone, as far as can be seen."""
        for answer in [*self._busy, *self._idle]:
            answer.abort()
        self._idle.clear()
