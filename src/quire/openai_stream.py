"""What clients read of an OpenAI-compatible server's answers: events, their chunks, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.http_client import HttpError
from quire.typed_json import BAD_JSON

MAX_EVENT_BYTES = 4 << 20
"""Longest event of a stream."""

MAX_MESSAGE = 500
"""Characters kept of a server's error message."""


class PromptDetails(msgspec.Struct):
    """Where a prompt's tokens came from."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """What a completion's tokens are."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """The tokens of a request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Function(msgspec.Struct):
    """What a call calls, or a part of that."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A tool call, or a part of one."""

    index: int | None = None
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    """What a chunk adds to a message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the name in older servers; newer ones may send both
    tool_calls: list[Call] | None = None


class Choice(msgspec.Struct):
    """What a chunk adds to one of the answers; `text` is that of a completion."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event of a stream. `object`, `message`: an error in an old style."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


def read_chunk(data: bytes) -> Chunk:
    """An event's data as a chunk.

    Raises:
        HttpError: it is none.
    """
    try:
        return _decode_chunk(data)
    except BAD_JSON as error:
        raise HttpError("garbage", f"a chunk of the stream is not what it should be: {error}") from error


class EventStream:
    """Splits bytes, as they arrive, into the data of events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that these bytes complete.

        Raises:
            HttpError: an event is too long.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise HttpError("garbage", f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


def error_in(body: bytes) -> Any:
    """The error in a response's body; without one, the whole body, as text if it is not JSON."""
    try:
        content = msgspec.json.decode(body)
    except BAD_JSON:
        return body.decode(errors="replace")
    return content.get("error", content) if isinstance(content, dict) else content


def error_text(error: Any) -> str:
    """The message in an error of any format, as one line that is safe to print."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    text = " ".join(text.split()) or "(no message)"
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def message_of(body: bytes) -> str:
    """The message in the body of a response that is an error."""
    return error_text(error_in(body))
