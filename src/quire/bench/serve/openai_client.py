"""Requests streamed completions from an OpenAI-compatible server, and records what arrives and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire import http_client
from quire.address import Address
from quire.bench.serve.config import LoadConfig
from quire.bench.serve.records import Record
from quire.errors import BenchmarkError
from quire.http_client import HttpClient, HttpError
from quire.openai_stream import Choice, EventStream, Usage, error_text, message_of, read_chunk

MAX_ERROR_BYTES = 64 << 10
"""Most bytes read of a response that is not a stream."""


class Answer:
    """A streamed response in progress: fills a record, and keeps text and ids for a conversation's next turn."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.done = False
        self._status, self._kind = 0, ""
        self._events: EventStream | None = None
        self._plain = bytearray()
        self._usage_so_far = 0
        self._running_usage: bool | None = None  # whether chunks have the number of tokens so far; None: unknown

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def head(self, answer: http_client.Answer) -> None:
        """Its headers are there."""
        self._status, self._kind = answer.status, answer.header(b"content-type")
        if answer.status == 200 and answer.is_stream:
            self._events = EventStream()

    def body(self, data: bytes, at: float) -> None:
        """A piece of its body, and when that was read.

        Raises:
            HttpError: it is not what it should be.
        """
        if self._events is None:
            self._plain += data[: MAX_ERROR_BYTES - len(self._plain)]
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self.done, self.record.end = True, at
            elif not self.done:
                self._chunk(payload, at)

    def _chunk(self, payload: bytes, at: float) -> None:
        record = self.record
        chunk = read_chunk(payload)
        if chunk.error is not None or chunk.object == "error":
            raise HttpError("error_in_stream", error_text(chunk.error if chunk.error is not None else chunk.message))
        made = None
        if chunk.usage is not None:
            made = self._take_usage(chunk.usage)
        if chunk.choices:
            tokens = self._take_choice(chunk.choices[0], made)
            if tokens > 0:
                record.times.append(at)
                record.counts.append(tokens)

    def _take_usage(self, usage: Usage) -> int | None:
        """Store a chunk's usage; returns by how many output tokens it grew."""
        record = self.record
        record.prompt_tokens, record.output_usage = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return None
        before, self._usage_so_far = self._usage_so_far, usage.completion_tokens
        return usage.completion_tokens - before

    def _take_choice(self, choice: Choice, made: int | None) -> int:
        """Store a choice's text; returns how many tokens it has, as far as known."""
        delta = choice.delta
        content = choice.text or (delta.content if delta else None) or ""
        self.texts.append(content)
        if choice.finish_reason is not None:
            self.record.finish_reason = choice.finish_reason
        if choice.token_ids:
            self.token_ids += choice.token_ids
            return len(choice.token_ids)
        carries = bool(content or (delta and (delta.reasoning_content or delta.reasoning or delta.tool_calls)))
        if self._running_usage is None and (carries or made):  # usage in the last chunk alone is the total
            self._running_usage = made is not None and choice.finish_reason is None
        return made if self._running_usage and made is not None else int(carries)

    def finish(self) -> None:
        """Check a response that has ended.

        Raises:
            HttpError: it was an error, not a stream, or a stream that ended too soon.
        """
        if self._status != 200:
            raise HttpError(f"http_{self._status}", message_of(bytes(self._plain)))
        if self._events is None:
            kind = error_text(self._kind or "of no content type")
            raise HttpError("not_a_stream", f"the response is {kind} instead of text/event-stream")
        if not self.done:
            if self.record.finish_reason is None:
                raise HttpError("cut_short", "the stream ended without a finish reason and without [DONE]")
            self.record.end = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An encoded request, and the record that it will fill."""

    wire: bytes
    record: Record


class OpenAIClient:
    """Sends completion or chat requests to one server. Close it when done."""

    def __init__(self, config: LoadConfig) -> None:
        address = Address(config.url)
        self._headers = [(b"user-agent", b"quire-bench"), (b"accept", b"text/event-stream")]
        self._headers.append((b"content-type", b"application/json"))
        if config.api_key is not None:
            self._headers.append((b"authorization", f"Bearer {config.api_key}".encode()))
        kept = 1 << 20  # a connection for each request in flight
        self._http = HttpClient(address, cacert=config.cacert, connect_seconds=config.connect_timeout, kept=kept)
        self._path = "/v1/chat/completions" if config.endpoint == "chat" else "/v1/completions"
        self._timeout = config.timeout
        self._fields: dict[str, Any] = {
            "model": config.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": config.temperature,
        }
        if config.ignore_eos:
            self._fields["ignore_eos"] = True
        if config.asks_token_ids:
            self._fields["return_token_ids"] = True
        self._fields |= config.extra_fields
        self.root = f"{address.url}/v1"

    @property
    def model(self) -> str | None:
        """The model's name; None until it is known."""
        return self._fields["model"]  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close all connections."""
        self._http.break_off()
        while self._http.connections.open:
            await asyncio.sleep(0)

    async def find_model(self, wait: float) -> None:
        """Ask the server for its models, retrying for `wait` seconds while it starts; use the first if none was named.

        Raises:
            BenchmarkError: it cannot be reached, refuses to answer, or lists no model.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                names = await self._models()
                break
            except HttpError as error:
                starting = error.kind in ("connect", "closed", "http_503")
                if not starting or time.monotonic() > deadline:
                    raise BenchmarkError(f"{self.root}/models: {error.kind}: {error}{hint(error.kind)}") from error
            await asyncio.sleep(0.2)
        if self._fields["model"] is None:
            if not names:
                raise BenchmarkError(f"{self.root}/models lists no model; give one with --model")
            self._fields["model"] = names[0]

    async def _models(self) -> list[str]:
        status, body = await self._http.fetch("GET", "/v1/models", self._headers, seconds=self._timeout)
        if status != 200:
            raise HttpError(f"http_{status}", message_of(body))
        try:
            models = msgspec.json.decode(body)["data"]
            return [model["id"] for model in models if isinstance(model["id"], str)]
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
            raise HttpError("garbage", "the answer is not a list of models") from error

    def prepare(self, prompt: Mapping[str, Any], record: Record) -> Prepared:
        """Encode the request for a prompt (`{"prompt": ...}` or `{"messages": ...}`)."""
        body = msgspec.json.encode(self._fields | {"max_tokens": record.asked_output} | dict(prompt))
        return Prepared(self._http.address.request("POST", self._path, self._headers, body), record)

    async def send(self, request: Prepared) -> Answer:
        """Send a request and read its response to the end. Failures are recorded, never raised."""
        record, answer = request.record, Answer(request.record)
        record.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._receive(request.wire, answer)
            answer.finish()
        except (HttpError, TimeoutError) as error:
            if not answer.done:  # what goes wrong after the stream's last event no longer matters
                self._failed(record, error)
        return answer

    async def _receive(self, wire: bytes, answer: Answer) -> None:
        received = await self._http.ask(wire)
        try:
            answer.head(received)
            while data := await received.piece():
                answer.body(data, received.read_at)
        finally:
            self._http.release(received)

    def _failed(self, record: Record, error: HttpError | TimeoutError) -> None:
        record.end = time.perf_counter()
        if isinstance(error, HttpError):
            record.error, record.message = error.kind, str(error)
        else:
            record.error, record.message = "timeout", f"not finished in {self._timeout:g} s (--timeout)"


def hint(kind: str) -> str:
    """What to do about a failure of this kind, to be appended to its message."""
    hints = {
        "connect": "is the server running at this --url? --wait SECONDS gives it time to start",
        "http_401": "give the server's key with --api-key",
        "http_403": "give the server's key with --api-key",
        "http_404": "is --url the server's base URL, and --model a name that it knows?",
        "http_503": "the server is loading or overloaded; --wait SECONDS gives it time to start",
        "http_400": "--no-ignore-eos, --vocab-size or shorter lengths may suit this server better",
        "not_a_stream": "is --url a server of OpenAI's interface?",
        "garbage": "is --url a server of OpenAI's interface?",
    }
    return f"; {hints[kind]}" if kind in hints else ""
