"""A stand-in for a server of OpenAI's interface, whose every delay and flaw is the test's, and loads for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.bench.serve.config import LoadConfig
from quire.bench.serve.driver import Driver
from quire.bench.serve.openai_client import OpenAIClient
from quire.bench.serve.records import Record

DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


@dataclass
class Reply:
    """Writes an answer. `stream` begins a chunked event stream, `raw` is whatever a test wants."""

    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    chat: bool = False

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        await self.raw(b"HTTP/1.1 %d X\r\ncontent-type: %s\r\n" % (status, kind.encode()))
        await self.raw(b"content-length: %d\r\n\r\n" % len(body) + body)

    async def stream(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        await self.raw(b"transfer-encoding: chunked\r\n\r\n")

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n"
        await self.raw(b"%x\r\n%s\r\n" % (len(text), text))

    async def token(self, text: str, finish: str | None = None, **more: Any) -> None:
        """A chunk with some text. Keyword arguments go into the choice, but `usage`, which goes beside it."""
        usage = {"usage": more.pop("usage")} if "usage" in more else {}
        said = {"delta": {"content": text}} if self.chat else {"text": text}
        await self.event({"choices": [{"index": 0, **said, "finish_reason": finish, **more}], **usage})

    async def usage(self, prompt: int, output: int, cached: int | None = None) -> None:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **details}
        await self.event({"choices": [], "usage": usage})

    async def end(self) -> None:
        await self.event(DONE)
        await self.raw(b"0\r\n\r\n")


Behaviour = Callable[[Asked, Reply], Awaitable[None]]


def answering(first: float = 0.0, gap: float = 0.0, text: str = " word", cached: int | None = None) -> Behaviour:
    """As many tokens as were asked for: the first after `first` seconds, the others `gap` seconds apart."""

    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        count = asked.body["max_tokens"]
        for number in range(count):
            await asyncio.sleep(gap if number else first)
            await reply.token(text, "length" if number + 1 == count else None)
        await reply.usage(prompt_tokens(asked.body), count, cached)
        await reply.end()

    return behave


def prompt_tokens(body: dict[str, Any]) -> int:
    """Ids, or words."""
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    return len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])


@dataclass
class StandIn:
    """The server.

    Attributes:
        behave: answers each completion.
        asked: the completions that were asked for, in order.
        connections: how many were made.
        open: how many are.
    """

    behave: Behaviour
    model: str = "stand-in"
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    running: int = 0
    most_running: int = 0
    server: asyncio.Server | None = None
    tasks: set[Any] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.tasks.add(asyncio.current_task())
        try:
            while True:
                await self._one(reader, writer)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (text.split(": ", 1) for text in rest)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = line.split()[1]
        if path.endswith("/models"):
            await Reply(writer, reader).whole(200, json.dumps({"data": [{"id": self.model}]}).encode())
            return
        asked = Asked(path, headers, json.loads(body), time.perf_counter())
        self.asked.append(asked)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.behave(asked, Reply(writer, reader, path.endswith("/chat/completions")))
        finally:
            self.running -= 1

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=2**24)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self.server is not None:
            self.server.close()
            self.server = None
        here = asyncio.current_task()
        for task in self.tasks - {here}:
            task.cancel()


@asynccontextmanager
async def stand_in(behave: Behaviour) -> AsyncIterator[StandIn]:
    """A server in this event loop."""
    server = StandIn(behave)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def stand_in_thread(behave: Behaviour) -> Iterator[StandIn]:
    """A server in a thread of its own, for callers that block."""
    server, ready, loop = StandIn(behave), threading.Event(), asyncio.new_event_loop()

    async def main() -> None:
        await server.start()
        ready.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await server.stop()

    def work() -> None:
        nonlocal task
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    task = None
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        if not ready.wait(60):
            raise TimeoutError("the stand-in did not start")
        yield server
    finally:

        def cancel_all() -> None:
            for each in asyncio.all_tasks(loop):
                each.cancel()

        loop.call_soon_threadsafe(cancel_all)
        thread.join(60)


def status(code: int, body: bytes, kind: str = "application/json") -> Behaviour:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.whole(code, body, kind)

    return behave


@contextmanager
def closed_port() -> Iterator[socket.socket]:
    """A socket with a port of its own, where nobody listens as long as it is held: connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def url_of(held: socket.socket) -> str:
    return f"http://127.0.0.1:{held.getsockname()[1]}"


def config(url: str = "http://127.0.0.1:1", **options: Any) -> LoadConfig:
    defaults: dict[str, Any] = {"model": "m", "warmup": 0, "timeout": 60.0, "input_len": "5", "output_len": "3"}
    if options.get("trace"):
        del defaults["input_len"], defaults["output_len"]
    return LoadConfig(url=url, **(defaults | options))


async def load(settings: LoadConfig) -> Driver:
    """Send a load and check that no connection is left."""
    client = OpenAIClient(settings)
    driver = Driver(settings, client)
    try:
        if settings.warmup:
            await driver.warm_up()
        await driver.run()
    finally:
        await client.close()
    assert client._http.connections.open == 0
    return driver


async def one(behave: Behaviour, **options: Any) -> Record:
    """The record of a single request."""
    async with stand_in(behave) as server:
        driver = await load(config(server.url, num_requests=1, **options))
    [record] = driver.records
    return record


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def record(sent: float, times: list[float], end: float, **more: Any) -> Record:
    counts = more.pop("counts", [1] * len(times))
    made = Record(asked_input=10, asked_output=sum(counts), sent=sent, end=end, **more)
    made.times, made.counts = array("d", times), array("L", counts)
    return made
