"""Servers to put behind a router: they answer at once, the same to the same request, and go away when told to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from quire.fleet.cached_prompts import CachedPrompts
from quire.router.app import create_app
from quire.router.config import RouterConfig
from quire.router.run import make_site
from quire.router.site import Site
from tests.server_fakes import AppThread, wait_until

DEADLINE = 60.0


class Loop:
    """A loop in a thread, for servers to run on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE)

    def close(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE)


def answer_text(body: dict[str, Any], count: int = 60) -> str:
    """What every server says to this request: it depends on the prompt and the seed alone."""
    asked = json.dumps([body.get("prompt"), body.get("messages"), body.get("seed")])
    letters = random.Random(hashlib.sha256(asked.encode()).digest())
    return "".join(letters.choice("abcdefghij äöü😀\n") for _ in range(count))


OWN = b"x-request-id: own\r\nrequest-id: own\r\nx-content-type-options: nosniff\r\n"
"""Headers that a router sets itself."""


@dataclass
class FakeServer:
    """One server.

    Attributes:
        stalls_after: events after which it says nothing more, whatever it is asked: it is stalled.
        chunk: characters an event. pause: seconds before each. die_after: events after which it goes away, once.
        status: of answers to requests for text. answers: status and content by path, instead of those.
        answer_dies_after: bytes of such content after which it goes away.
        requests: bodies that came, with their headers in "headers".
        keeps_journal: of streams, for routers. had: how many characters of each stream another server had sent.
        told: of itself, and replicas: of each of its engines; by default it has one, which tells the same.
        cached: what each engine tells of its cache; empty: nothing. lives: of requests.
    """

    loop: Loop
    name: str = "m"
    quire: bool = True
    key: str = ""
    chunk: int = 3
    pause: float = 0.0
    die_after: int | None = None
    stalls_after: int | None = None
    stalled: bool = False
    status: int = 200
    error_code: str = "busy"
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    answer_dies_after: int | None = None
    last_words: str | None = None
    models_answer: tuple[int, Any] | None = None
    told: dict[str, Any] = field(default_factory=dict)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    cached: list[CachedPrompts] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    fingerprint: str = "fp"
    card: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keeps_journal: bool = True
    had: list[int] = field(default_factory=list)
    port: int = 0
    uds: str | None = None
    connections: int = 0

    def __post_init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.uds is None else f"unix:{self.uds}"

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def start(self) -> None:
        async def begin() -> None:
            if self.uds is not None:
                self._server = await asyncio.start_unix_server(self._serve, self.uds)
                return
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        self.loop.call(begin())

    def stop(self) -> None:
        """As with `kill -9`: connections end in the middle of what is said."""

        async def end() -> None:
            self._vanish()

        self.loop.call(end())

    def _vanish(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._answer(await _read(reader), writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, request: tuple[str, dict[str, str], bytes], writer: asyncio.StreamWriter) -> None:
        path, headers, data = request
        size = int(headers.get("x-quire-journal", 0))
        data, journal = (data[:-size], json.loads(data[-size:])) if size else (data, [])
        while self.stalled:
            await asyncio.sleep(0.01)
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return _json(writer, 401, {"error": {"message": "no", "code": "invalid_api_key"}})
        if path == "/v1/models":
            owner = "quire" if self.quire else "somebody"
            card = {"id": self.name, "object": "model", "owned_by": owner, **self.card}
            status, content = self.models_answer or (200, {"object": "list", "data": [card]})
            return _json(writer, status, content)
        if path == "/load":
            engines = self.replicas or [{"engine": "1.1", "up": True, **self.told}]
            return _json(
                writer, 200, {"checkpoint": "c", "fingerprint": self.fingerprint, **self.told, "engines": engines}
            )
        if path.startswith("/load/prompts?since="):
            since = [int(number) for number in path.partition("=")[2].split(",")]
            told = [each.told(number) for each, number in zip(self.cached, since, strict=True)] if self.cached else None
            return _json(writer, *((404, {}) if told is None else (200, {"engines": told})))
        if path.startswith("/load/requests/"):
            return _json(writer, 200, [one for one in self.lives if path.endswith(f"/{one['id']}")])
        try:
            body = json.loads(data or b"{}")
        except ValueError:
            return _json(writer, 400, {"error": {"message": "no JSON", "code": "invalid_json"}})
        self.requests.append({**body, "path": path, "headers": headers})
        if path in self.answers:
            return await self._given(writer, *self.answers[path])
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return _json(writer, 404 if "nobody" in path else 200, {"path": path, "server": self.port})
        if self.status != 200:
            return _json(writer, self.status, {"error": {"message": "not now", "code": self.error_code}})
        await asyncio.sleep(self.pause)
        if body.get("stream"):
            if journal and journal[0]["fingerprint"] != self.fingerprint:
                return _json(writer, 409, {"error": {"message": "other kernels", "code": "other_kernels"}})
            await self._stream(body, headers, writer, journal)
        elif self._dies(1):
            self._vanish()
        else:
            usage = {"prompt_tokens": len(str(body["prompt"])) // 4, "completion_tokens": 60}
            _json(writer, 200, {"choices": [{"index": 0, "text": answer_text(body)}], "usage": usage})

    async def _given(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        if self.answer_dies_after is None:
            return _json(writer, status, content)
        head = b"HTTP/1.1 %d X\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            status,
            OWN,
            len(content),
        )
        writer.write(head + content[: self.answer_dies_after])
        await writer.drain()
        writer.close()  # what was written still arrives
        await writer.wait_closed()

    def _dies(self, events: int) -> bool:
        dies = self.die_after is not None and events >= self.die_after
        if dies:
            self.die_after = None
        return dies

    async def _stream(
        self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter, journal: list[Any]
    ) -> None:
        keeps = self.quire and self.keeps_journal and "x-quire-journal" in headers
        own = OWN + b"x-quire-journal: 1\r\n" if keeps else OWN
        head = b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" % own
        writer.write(head)
        text, had = answer_text(body), sum(entry["characters"] for entry in journal)
        self.had.append(had)
        created = journal[0]["created"] if journal else self.port
        pieces = [text[start : start + self.chunk] for start in range(had, len(text), self.chunk)]
        for number, piece in enumerate(pieces, 1):
            ends = "length" if number == len(pieces) else None
            event = self._event(headers, created, {"index": 0, "text": piece, "finish_reason": ends})
            if self._dies(number):
                if self.last_words is None:
                    writer.write(b"%x\r\n%b" % (len(event), event[:20]))  # it goes in the middle of an event
                    await writer.drain()
                    return self._vanish()
                words = {"error": {"message": "bye", "code": self.last_words}}
                if keeps:
                    return _chunks(writer, event, b": quire-lost bye\n\n", b"")
                return _chunks(writer, f"data: {json.dumps(words)}\n\n".encode(), b"data: [DONE]\n\n", b"")
            entry = {"characters": len(piece), "created": created, "fingerprint": self.fingerprint}
            _chunks(writer, event + b": quire-entry %b\n\n" % json.dumps(entry).encode() if keeps else event)
            await writer.drain()
            self.stalled = self.stalled or number == self.stalls_after
            while self.stalled:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.pause)
        _chunks(writer, b"data: [DONE]\n\n" + (b": quire-end\n\n" if keeps else b""), b"")

    def _event(self, headers: dict[str, str], created: int, choice: dict[str, Any]) -> bytes:
        event = {
            "id": headers.get("x-request-id"),
            "created": created,
            "system_fingerprint": self.fingerprint,
            "choices": [choice],
        }
        return f"data: {json.dumps(event)}\n\n".encode()


def _chunks(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    writer.write(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))


def _json(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = b"HTTP/1.1 %d X\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, OWN, len(data))
    writer.write(head + data)


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return head[0].split()[1], headers, body


class RouterThread:
    """A router in front of servers, in a thread, and a client for it."""

    def __init__(self, servers: Sequence[FakeServer] = (), wait: bool = True, **options: Any) -> None:
        given = {"server": [one.url for one in servers], "log_requests": True, **options}
        self.config = RouterConfig.from_options(given)
        self.site: Site
        self._wait = len(servers) if wait else 0

        def app() -> Any:
            self.site = make_site(self.config)
            return create_app(self.site)

        self.thread = AppThread(app, lambda: self.site.servers.close())

    def __enter__(self) -> RouterThread:
        self.thread.__enter__()
        key = self.config.api_key[0] if self.config.api_key else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None)
        self.http = httpx2.Client(base_url=self.thread.url, timeout=DEADLINE, headers=headers, limits=limits)
        assert wait_until(lambda: self.up >= self._wait), self.states
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.thread.__exit__(*error)

    @property
    def up(self) -> int:
        return sum(state == "up" for state in self.states.values())

    @property
    def states(self) -> dict[str, str]:
        return {name: one.state for name, one in list(self.site.servers.by_name.items())}

    def reason(self, server: FakeServer) -> str:
        return self.site.servers.by_name[server.address].reason

    def complete(self, **body: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"prompt": "p", **body})

    def stream(self, **body: Any) -> list[str]:
        """What the events of a stream carry."""
        with self.http.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]


def text_of(events: Sequence[str]) -> str:
    """A stream's text."""
    found = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["text"] for event in found for choice in event.get("choices", ()))


def errors_of(events: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Its errors."""
    for event in events:
        if event != "[DONE]" and "error" in (found := json.loads(event)):
            yield found["error"]
