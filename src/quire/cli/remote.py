"""Chats with a model on a server, Quire's or any other with OpenAI's API.

Responses are not trusted: their size is limited, they are decoded with types, and shown without control characters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from quire.address import Address
from quire.cli.report import rate
from quire.cli.talk import NO_TOOLS, Answer, Messages, Show, ToolUse
from quire.cli.terminal import loading, note, visible
from quire.errors import PromptTooLongError, RemoteError, RequestError
from quire.http_client import HttpClient, HttpError
from quire.openai_stream import (
    MAX_MESSAGE,
    Chunk,
    CompletionDetails,
    Delta,
    EventStream,
    Function,
    PromptDetails,
    error_in,
    error_text,
    message_of,
    read_chunk,
)
from quire.text.reply import ContentText, ReasoningText, Reply, ReplyEvent, ToolCallArguments, ToolCallBegin
from quire.typed_json import BAD_JSON

MAX_BODY_BYTES = 1 << 20
"""Maximum size of a response that is not a stream."""

MAX_CALLS = 128
"""Tool calls of one answer."""

CONNECT_SECONDS, REPLY_SECONDS = 10.0, 30.0
SILENCE_SECONDS = 300.0
"""A stream without any data for this long is given up. Quire sends at least a comment every 15 s."""

POLL_SECONDS = 0.5

T = TypeVar("T")


class _Suggestions(msgspec.Struct):
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    sampling_suggestions: _Suggestions | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Health(msgspec.Struct):
    status: str = ""
    phase: str | None = None
    percent: float | None = None


class RemoteTalker:
    """A model on a server.

    Args:
        url: the server's, with or without `/v1`.
        api_key: sent with every request.
        model: its name there; None: the first in the server's list.
        wait: seconds to wait for a server that is still loading.
        cacert: see `quire.tls.client_context`.

    Raises:
        ConfigError: the URL is not valid, or the file has no certificates.
        RemoteError: the server cannot be reached, refuses, is not ready in time, or has no such model.
    """

    more_context = "the server's --max-model-len sets its size"
    refused: tuple[str, ...] = ("logprobs", "prompt_logprobs")  # a chat does not show them

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        wait: float = 120.0,
        cacert: str | None = None,
    ) -> None:
        address = Address(url)
        self._client = HttpClient(address, cacert=cacert, connect_seconds=CONNECT_SECONDS)
        self._runner = asyncio.Runner()
        self.url, self._wait = address.url, wait
        self._told: set[str] = set()  # ignored fields that the user was told about
        self._answers = self._tokens = 0
        self._seconds = 0.0
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))
        try:
            found = self._find(model)
        except BaseException:
            self.close()
            raise
        self.model, self.context = found.id, found.max_model_len
        temperature = (found.sampling_suggestions or _Suggestions()).temperature
        self.suggested: dict[str, float] = {} if temperature is None else {"temperature": temperature}

    def close(self) -> None:
        self._client.break_off()
        self._runner.close()

    # -- the start -----------------------------------------------------------------------------------------

    def _find(self, name: str | None) -> _Model:
        """The model, once the server is ready."""
        status, body = self._wait_until_ready()
        if status != 200:
            self._refuse(status, body)
        models: _Models | None = _read(body, _Models)
        if models is None or not models.data:
            raise RemoteError(f"{self.url}/v1/models lists no models; is this an OpenAI-compatible server?")
        for model in models.data:
            if name in (None, model.id):
                return model
        known = ", ".join(visible(model.id) for model in models.data[:20])
        raise RemoteError(f"the server has no model {name!r}; it has: {known}")

    def _wait_until_ready(self) -> tuple[int, bytes]:
        """The response of `/v1/models`, as soon as it is not a 503; shows the server's progress meanwhile."""
        deadline = time.monotonic() + self._wait
        status, body = self._get("/v1/models")
        if status != 503:
            return status, body
        with loading("the server") as on_load:
            if on_load is None:
                note(f"waiting for the server: {message_of(body)}")
            while status == 503 and time.monotonic() < deadline:
                health = self._health()
                if on_load is not None:
                    on_load(visible(health.phase or health.status), (health.percent or 0.0) / 100)
                time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
                status, body = self._get("/v1/models")
        if status == 503:
            raise RemoteError(
                f"the server is not ready after {self._wait:g} s: {message_of(body)}; wait longer with --wait SECONDS"
            )
        return status, body

    def _health(self) -> _Health:
        return _read(self._get("/health")[1], _Health) or _Health()

    def _get(self, path: str) -> tuple[int, bytes]:
        fetch = self._client.fetch("GET", path, self._headers, seconds=REPLY_SECONDS, most=MAX_BODY_BYTES)
        return self._run(fetch)

    # -- answers -------------------------------------------------------------------------------------------

    def answer(self, messages: Messages, fields: Mapping[str, Any], show: Show, use: ToolUse = NO_TOOLS) -> Answer:
        request = _encoded(
            {
                **fields,
                **use.fields,
                "model": self.model,
                "messages": messages,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        answer = Answer(reason="error", error="the connection ended before the answer did")
        began = time.monotonic()
        try:
            if not self._stream(request, answer, began, show):
                self._wait_until_ready()
                if not self._stream(request, answer, began, show):
                    raise RemoteError("the server is not ready; try again")
        except KeyboardInterrupt:
            self._client.break_off()  # so that the server notices, wherever the interrupt came
            answer.reason, answer.error = "abort", None
        except RemoteError as error:
            if not answer.reply.content:
                raise
            answer.error = str(error)
        answer.seconds = time.monotonic() - began
        self._count(answer)
        return answer

    def _stream(self, request: bytes, answer: Answer, began: float, show: Show) -> bool:
        """Run a request into `answer`; False if the server is not ready."""
        status, body = self._run(self._received(request, answer, began, show))
        if status == 503 and self._health().status in ("loading", "restarting"):
            return False
        if status != 200:
            self._refuse(status, body)
        return True

    async def _received(self, request: bytes, answer: Answer, began: float, show: Show) -> tuple[int, bytes]:
        """Send a request and read its stream into `answer`; returns the status, and what is no stream."""
        client, headers = self._client, [*self._headers, (b"accept", b"text/event-stream")]
        async with asyncio.timeout(SILENCE_SECONDS) as silence:
            response = await client.ask(client.address.request("POST", "/v1/chat/completions", headers, request))
            try:
                if response.status != 200:
                    return response.status, await response.whole(MAX_BODY_BYTES)
                self._tell_ignored(response.header(b"x-quire-ignored"))
                events = EventStream()
                while data := await response.piece():
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
                    for event in events.feed(data):
                        if event == b"[DONE]":
                            return 200, b""
                        _take(read_chunk(event), answer, began, show)
            finally:
                client.release(response)
        return 200, b""

    def _tell_ignored(self, header: str) -> None:
        names = {name.strip() for name in header[:MAX_MESSAGE].split(",")} - self._told - {""}
        if names:
            self._told |= names
            note(f"the server does not know, and ignores: {visible(', '.join(sorted(names)))}")

    def _count(self, answer: Answer) -> None:
        self._answers += 1
        if answer.output_tokens is not None:
            self._tokens += answer.output_tokens
            self._seconds += answer.seconds

    def session(self) -> list[tuple[str, str]]:
        return [
            ("session: server", f"{visible(self.model)} at {self.url}"),
            ("session: answers", f"{self._answers:,}"),
            ("session: output", rate(self._tokens, self._seconds)),
        ]

    # -- errors --------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this to its end, or until Ctrl-C, which closes its connection. Errors of the connection become
        RemoteErrors that say where."""
        try:
            return self._runner.run(work)
        except TimeoutError as error:
            raise RemoteError(f"the server at {self.url} did not answer in time") from error
        except HttpError as error:
            reason = visible(str(error))[:MAX_MESSAGE]
            if error.kind == "connect":
                reason = f"no server answers at {self.url} ({reason}); is 'quire serve' running there?"
            else:
                reason = f"the exchange with {self.url} failed: {reason}"
            raise RemoteError(reason) from error

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise the error for a status other than 200."""
        error = error_in(body)
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            raise PromptTooLongError(message_of(body))
        hints = {
            401: "; give the server's key with --api-key KEY or --api-key @FILE",
            403: "; is it the right --api-key?",
        }
        hint = hints.get(status, "")
        if status == 404 and not isinstance(error, dict):
            hint = "; is this the URL of an OpenAI-compatible server?"
        raise RemoteError(f"{self.url} answers {status}: {message_of(body)}{hint}")


def _take(chunk: Chunk, answer: Answer, began: float, show: Show) -> None:
    """Add one event of a stream to an answer."""
    if chunk.error is not None:
        answer.reason, answer.error = "error", error_text(chunk.error)
        return
    for choice in (chunk.choices or [])[:1]:
        for event in _events(choice.delta, answer.reply) if choice.delta is not None else ():
            if answer.first_seconds is None:
                answer.first_seconds = time.monotonic() - began
            answer.reply.add(event)
            show(event)
        if choice.finish_reason is not None:
            ended = choice.finish_reason
            answer.reason, answer.error = "stop" if ended == "tool_calls" else ended, None
    if chunk.usage is not None:
        prompt = chunk.usage.prompt_tokens_details or PromptDetails()
        completion = chunk.usage.completion_tokens_details or CompletionDetails()
        answer.prompt_tokens, answer.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        answer.cached_tokens = prompt.cached_tokens
        answer.reasoning_tokens = completion.reasoning_tokens


def _events(delta: Delta, reply: Reply) -> Iterator[ReplyEvent]:
    """The events that a delta adds to the reply so far.

    Raises:
        RemoteError: tool calls are not numbered consecutively, or there are too many.
    """
    if thought := delta.reasoning or delta.reasoning_content:
        yield ReasoningText(thought)
    if delta.content:
        yield ContentText(delta.content)
    for call in delta.tool_calls or ():
        count, function = len(reply.tool_calls), call.function or Function()
        index = call.index if call.index is not None else count if function.name else count - 1
        if index == count and function.name and count < MAX_CALLS:
            yield ToolCallBegin(index, call.id or f"call_{index}", function.name)
        elif index != count - 1 or not count:
            raise RemoteError(f"the server sent an invalid chunk: tool call number {index}")
        if function.arguments:
            yield ToolCallArguments(index, function.arguments)


def _encoded(request: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError as error:
        raise RequestError("the text has an unpaired surrogate; it must be valid Unicode") from error


def _read(body: bytes, kind: type[Any]) -> Any:
    """The body as this type; None if it is not."""
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_JSON:
        return None
