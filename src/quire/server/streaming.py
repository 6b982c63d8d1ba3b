"""Sends responses while they are generated: server-sent events, and what may cut a response off.

Starlette's streaming response creates a task group and passes everything through queues. Here a token is one `send`,
and what else must be watched (disconnects, deadlines, shutdown) costs nothing per token: it is checked when something
happens, or a few times a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.types import Receive, Send

from quire.engine.outputs import RequestOutput
from quire.server.errors import ApiError
from quire.server.journal import GONE, Journal, lost

SILENCE_SECONDS = 15.0
"""After this long without events a stream sends a comment, since proxies and clients close silent ones."""

CLOSING_SECONDS = 2.0
"""How long a stream that is cut off may take to send its last event."""

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx would buffer events
}

T = TypeVar("T")
Cause = Literal["disconnect", "timeout", "shutdown"]


class CutOffError(Exception):
    """A response was cut off, for this cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class AnswerWriter:
    """Writes one response: a whole body, or a stream of events.

    It keeps order and format: headers once, whole events, one end. Writing waits for a client that reads slowly.

    Attributes:
        begun: the status has been sent and cannot be changed.
        ended: nothing more can be written.
        journal: of the stream, if a router asked for one.
    """

    def __init__(self, send: Send) -> None:
        self.begun = False
        self.ended = False
        self.journal: Journal | None = None
        self._send = send
        self._lock = asyncio.Lock()  # so that a comment never interrupts another write
        self._streams = False
        self._since = time.monotonic()  # when the current write began, or the last one ended

    async def whole(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a JSON body."""
        headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._start(200, headers)
        await self._write(body, more=False)

    async def start(self, headers: Mapping[str, str]) -> None:
        """Begin a stream of events."""
        await self._start(200, {**EVENT_HEADERS, **headers})
        self._streams = True

    async def events(self, bodies: Sequence[bytes]) -> None:
        """Send events with these JSON bodies, in one write."""
        if bodies:
            await self._write(self._framed(bodies) + self._mark())

    async def end(self, bodies: Sequence[bytes] = ()) -> None:
        """Send the last events, and the one event that ends every stream."""
        mark = b"" if self.journal is None else self.journal.end()
        await self._write(self._framed([*bodies, *self._last]) + mark, more=False)

    async def fail(self, error: ApiError) -> bool:
        """End a stream with an error; False if it is too late for that."""
        if self.ended or not self._streams:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                if self.journal is not None and error.code in GONE:
                    await self._write(lost(error.message), more=False)
                else:
                    await self.end(self._failed(error))
        return self.ended

    _last: Sequence[bytes] = (b"[DONE]",)

    def _framed(self, bodies: Sequence[bytes]) -> bytes:
        return b"".join([b"data: %b\n\n" % body for body in bodies])

    def _failed(self, error: ApiError) -> list[bytes]:
        """The events that report an error."""
        return [msgspec.json.encode(error.body())]

    # -- for `supervised` ----------------------------------------------------------------------------------

    def is_silent(self) -> bool:
        """Whether the stream has been silent for too long."""
        idle = self._streams and not self.ended and not self._lock.locked()
        return idle and time.monotonic() - self._since >= SILENCE_SECONDS

    def next_look(self) -> float:
        """Seconds until `is_silent` could become true."""
        left = self._since + SILENCE_SECONDS - time.monotonic()
        return left if left > 0 else SILENCE_SECONDS

    async def comment(self) -> None:
        """Send a comment, unless something else is being sent."""
        if self.is_silent():
            await self._write(b": waiting\n\n" + self._mark())

    def _mark(self) -> bytes:
        """What ends a write that has a journal."""
        return b"" if self.journal is None else self.journal.comment()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        async with self._lock:
            self._since = time.monotonic()
            await self._send({"type": "http.response.start", "status": status, "headers": encoded})
            self._since = time.monotonic()

    async def _write(self, data: bytes, more: bool = True) -> None:
        async with self._lock:
            if self.ended:
                return
            self._since = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._since = time.monotonic()
            self.ended = not more


class NamedEventWriter(AnswerWriter):
    """The same for streams with named events, without a last `[DONE]`. A name is the `type` that the JSON begins with.

    Args:
        failed: makes the events that report an error.
    """

    _last = ()

    def __init__(self, send: Send, failed: Callable[[ApiError], list[bytes]]) -> None:
        super().__init__(send)
        self._told = failed

    def _framed(self, bodies: Sequence[bytes]) -> bytes:
        return b"".join([b"event: %b\ndata: %b\n\n" % (_type_of(body), body) for body in bodies])

    def _failed(self, error: ApiError) -> list[bytes]:
        return self._told(error)


def _type_of(body: bytes) -> bytes:
    start = len(b'{"type":"')
    return body[start : body.index(b'"', start)]


async def supervised(
    work: Coroutine[Any, Any, None],
    writer: AnswerWriter,
    receive: Receive,
    *,
    deadline: float | None = None,
) -> None:
    """Run the work of a response until it is done or cut off; in any case `work` has ended when this returns.

    Args:
        work: writes to `writer`. It is cancelled if the response is cut off; its exceptions are raised here.
        receive: ASGI's, after the body has been read: it reports when the client disconnects.
        deadline: on the monotonic clock.

    Raises:
        CutOffError: the client disconnected, or the deadline has passed.
    """
    making = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    comments: set[asyncio.Task[None]] = set()
    cause: Cause | None = None
    try:
        while cause is None:
            patience = writer.next_look()
            if deadline is not None:
                patience = min(patience, max(0.0, deadline - time.monotonic()))
            await asyncio.wait((making, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                break
            cause = _cause(gone, deadline)
            if cause is None and writer.is_silent():
                comment = asyncio.create_task(writer.comment())  # it may have to wait, which must not block this loop
                comments.add(comment)
                comment.add_done_callback(comments.discard)
    finally:
        await _ended(making, gone, *comments)
    if not making.cancelled():
        making.result()  # it may have ended just before it was cut off
    elif cause is not None:
        raise CutOffError(cause)
    else:
        raise RuntimeError("the work was cancelled from within")


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the event is set first; then `work` is cancelled.

    Raises:
        CutOffError: the server is shutting down.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CutOffError("shutdown")
        return working.result()
    finally:
        await _ended(working, leaving)


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all `works`, in order. If one fails, the others are cancelled, and its exception is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _ended(*tasks)


def _cause(gone: asyncio.Task[None], deadline: float | None) -> Cause | None:
    """Why the response must be cut off now, if it must."""
    if gone.done():
        return "disconnect"
    if deadline is not None and time.monotonic() >= deadline:
        return "timeout"
    return None


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them; their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """The outputs of several streams, with the stream's index, as they come: all that are there at once in one list.

    A stream is asked for more only when its last output has been handled, so that news accumulates meanwhile. Closing
    this closes all streams; the first error is raised, and ends the others.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for output in only:
                yield [(0, output)]
        return
    merge = _Merge(streams)
    try:
        while merge.running:
            batch, done = await merge.take()
            if batch:
                yield batch
            done.set()
    finally:
        await _ended(*merge.tasks)


class _Merge:
    """A task for each stream, and their outputs since `take`."""

    def __init__(self, streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> None:
        self._batch: list[tuple[int, RequestOutput]] = []
        self._errors: list[Exception] = []
        self._news = asyncio.Event()
        self._done = asyncio.Event()  # set when the batch that is being collected has been handled
        self._left = len(streams)
        self.tasks = [asyncio.create_task(self._follow(index, stream)) for index, stream in enumerate(streams)]

    @property
    def running(self) -> bool:
        """Whether there is, or may be, something to take."""
        return self._left > 0 or bool(self._batch) or bool(self._errors)

    async def take(self) -> tuple[list[tuple[int, RequestOutput]], asyncio.Event]:
        """The outputs since the last call, and the event to set when they have been handled."""
        await self._news.wait()
        self._news.clear()
        if self._errors:
            raise self._errors[0]
        batch, done = self._batch, self._done
        self._batch, self._done = [], asyncio.Event()
        return batch, done

    async def _follow(self, index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    self._batch.append((index, output))
                    self._news.set()
                    await self._done.wait()
        except Exception as error:
            self._errors.append(error)
        finally:
            self._left -= 1
            self._news.set()
