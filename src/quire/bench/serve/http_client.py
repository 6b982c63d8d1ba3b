"""A small HTTP/1.1 client for the load generator: one connection per request in flight, kept for the next one.

The load generator often shares a machine with the server, and a general client library would spend several times as
much on every streamed chunk. Responses go to a sink as they arrive, each piece with the time at which it was read. HTTP
and HTTPS, chunked and plain bodies; no redirects, no compression, no proxies.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, RemoteError
from quire.tls import client_context, why_untrusted

MAX_HEAD_BYTES = 256 << 10
"""Longest status line and headers of a response."""


class HttpError(RemoteError):
    """No response, or an incomplete one. `kind` is "connect", "closed" (by the server) or "garbage" (not HTTP)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Sink(Protocol):
    """Receives a response as it arrives. Times are of `time.perf_counter`, in seconds."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The status and the headers, with names in lower case."""

    def body(self, data: bytes, at: float) -> None:
        """A piece of the body. Raising an HttpError here ends the exchange."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server's address: a URL without its path. `uds`: the path of its Unix socket, if it has one."""

    host: str
    port: int
    tls: bool
    uds: str | None = None

    @property
    def name(self) -> str:
        """HOST:PORT, as in the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> tuple[Origin, str]:
    """A base URL's origin, and its path without a slash at the end. `unix:PATH` is a server's Unix socket.

    Raises:
        ConfigError: not an http or https URL with a host, or one with more than a path.
    """
    if (uds := unix_path(url)) is not None:
        return Origin("localhost", 80, tls=False, uds=uds), ""
    example = "give one such as http://127.0.0.1:8000"
    if re.search(r"[^!-~]", url):
        raise ConfigError(f"--url {url!r} holds a space or a character that is not ASCII; {example}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url!r} is not a URL: {error}; {example}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url {url!r} is not an http or https URL; {example}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"--url must hold no user, query or fragment; {example} (a key goes into --api-key)")
    tls = parts.scheme == "https"
    return Origin(host, port if port is not None else (443 if tls else 80), tls), parts.path.rstrip("/")


def unix_path(url: str) -> str | None:
    """The path in a unix:PATH or unix://PATH URL; None for other URLs."""
    return url.removeprefix("unix:").removeprefix("//") or None if url.startswith("unix:") else None


class HttpClient:
    """Sends requests to one server.

    Args:
        origin: the server.
        headers: sent with every request; they must be printable ASCII.
        connect_timeout: seconds that opening a connection may take.
        cacert: see `quire.tls.client_context`.
    """

    def __init__(
        self, origin: Origin, headers: Mapping[str, str], connect_timeout: float = 10.0, cacert: str | None = None
    ) -> None:
        self.origin = origin
        fixed = {"host": origin.name, "user-agent": "quire-bench"} | dict(headers)
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._connect_timeout = connect_timeout
        self._tls = client_context(cacert) if origin.tls else None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    @property
    def connections(self) -> int:
        """Number of open connections, including idle ones."""
        return len(self._open)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Encode a request, ahead of time so that sending it is fast."""
        content = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        return f"{method} {path} HTTP/1.1\r\n{self._fixed}{content}\r\n".encode("ascii") + body

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request and pass the response to `sink`, until its end.

        If the server had closed the idle connection, it is replaced once. On cancellation the connection is closed.

        Raises:
            HttpError: see there; the sink may have received part of the response.
        """
        while True:
            connection = self._idle.pop() if self._idle else None
            kept = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                await connection.exchange(request, sink)
                return
            except HttpError as error:
                if not (kept and error.kind == "closed" and not connection.answered):
                    raise
            finally:
                self._put_back(connection)

    async def close(self) -> None:
        """Close all connections."""
        open_now = list(self._open)
        for connection in open_now:
            connection.abort()
        await asyncio.gather(*(connection.closed for connection in open_now))

    async def _connect(self) -> _Connection:
        loop, origin = asyncio.get_running_loop(), self.origin
        try:
            async with asyncio.timeout(self._connect_timeout):
                make = lambda: _Connection(self._open.add, self._gone)  # noqa: E731
                if origin.uds is not None:
                    _, connection = await loop.create_unix_connection(make, origin.uds)
                else:
                    _, connection = await loop.create_connection(make, origin.host, origin.port, ssl=self._tls)
        except TimeoutError as error:
            raise HttpError("connect", f"no connection to {origin.name} in {self._connect_timeout:g} s") from error
        except (OSError, UnicodeError) as error:
            reason = why_untrusted(error) or getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HttpError("connect", f"cannot connect to {origin.name}: {reason}") from error
        return connection

    def _put_back(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    def _gone(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time.

    Attributes:
        answered: whether a byte of the current response has arrived.
        reusable: whether another exchange may follow.
        closed: a future that is done when the connection is closed.
    """

    def __init__(self, on_made: Callable[[_Connection], None], on_gone: Callable[[_Connection], None]) -> None:
        self._on_made, self._on_gone = on_made, on_gone
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answered = False
        self.reusable = False
        self._done: asyncio.Future[None] | None = None
        self._complete = False

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """See `HttpClient.exchange`."""
        self.answered = self.reusable = self._complete = False
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes: int | None = 0  # None once the headers are complete
        self._until_close = False
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise HttpError("closed", "the server closed the connection before it answered")
        self._transport.write(request)
        await self._done

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        if (
            self._done is None or self._done.done()
        ):  # a response without a request: the connection must not be used again
            self.reusable = False
            self.abort()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
            self._check_head(len(data))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, Exception) else error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(HttpError("garbage", f"the answer is not HTTP: {error}"))
        except HttpError as error:
            self._fail(error)
        if self._complete and not self._done.done():
            self.reusable = self._keep and not self._transport.is_closing()
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._on_gone(self)
        if self._done is not None and not self._done.done():
            if self._until_close and error is None:
                self._done.set_result(None)
            else:
                when = "in mid-answer" if self.answered else "before it answered"
                self._done.set_exception(HttpError("closed", f"the server closed the connection {when}"))
        if not self.closed.done():
            self.closed.set_result(None)

    def _check_head(self, received: int) -> None:
        if self._head_bytes is not None:
            self._head_bytes += received
            if self._head_bytes > MAX_HEAD_BYTES:
                raise HttpError("garbage", f"the answer's header is longer than {MAX_HEAD_BYTES} bytes")

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._complete:  # such as 100 Continue; the final response follows
            return
        self._head_bytes = None
        self._until_close = "content-length" not in self._headers and "transfer-encoding" not in self._headers
        self._sink.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._sink.body(data, self._at)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = {}
        elif not self._complete:
            self._complete = True
            self._keep = self._parser.should_keep_alive()  # the parser forgets it once this returns
