"""A request's path through the router: read it, choose a server, forward it, relay the response, and fail over.

Until anything has been sent to the client, any other server can take over from one that fails. After that only a Quire
server can: it gets the tokens so far, and continues after them (`resume.py`). If
several servers die while they handle one request, it is not sent to yet another, since it may be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from quire.fleet.prompt import Prompt, read_prompt
from quire.http_client import Answer, HttpError
from quire.openai_stream import PromptDetails, Usage
from quire.router.picked import NOTHING_PICKED, SERVED, SUBSET, Picked, read_picked
from quire.router.resume import CannotResumeError, Journal
from quire.router.servers import Choice, Server
from quire.router.site import KEPT_NAMES, Sending, Site
from quire.server.auth import tenant_of
from quire.server.body import check_media_type
from quire.server.context import RETRY_RESTARTING, stop_error
from quire.server.errors import NOT_STORED, ApiError
from quire.server.generation import ASK_NAMES, PROMPT_TOKENS, REPLICA
from quire.server.journal import JOURNAL
from quire.server.request_log import note_call, summary_of
from quire.server.streaming import CLOSING_SECONDS, SILENCE_SECONDS
from quire.server.transport import SMALL_BODY_BYTES, drop, read_body
from quire.typed_json import BAD_JSON

NAMED_PATHS = ("/v1/messages", "/v1/responses")
"""Endpoints whose streams have named events."""
RESUMABLE_PATHS = ("/v1/completions", "/v1/chat/completions", *NAMED_PATHS)
"""Endpoints whose streams go on elsewhere; other streams that break off end with an error."""
MAX_DEATHS = 3
"""After this many servers have died while handling a request, it ends with an error."""
WAIT_SECONDS = 15.0
"""How long a request that has lost its server waits for another one; a stream waits longer for an engine that hangs,
since its server restarts it."""
BUSY_SECONDS = 1.0
"""How long it waits before it asks servers again that were busy."""
WHOLE_BYTES = 1 << 20
"""A response that is not a stream is buffered up to this size, so that another server can still take over."""

SEED_BITS = 31
"""Bits of the seed that is added to a request without one."""

MOST_EVENT_BYTES = 4 << 20
"""Longest server-sent event that is accepted."""

_BUSY = frozenset({429, 502, 503, 504})
"""Statuses after which another server is tried."""
_OTHER_KERNELS = 409
"""How a Quire server refuses the journal of one that computes in another way."""
_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"content-length",
        b"x-request-id",
        b"request-id",
        b"date",
        b"server",
        b"x-content-type-options",
        PROMPT_TOKENS.encode(),
        JOURNAL.encode(),
    }
)
"""Response headers that are not forwarded: they concern only the server and the router, or the router sets its own."""
_ASK_NAMES = (ASK_NAMES.encode(), b"1")
_REPLICA = REPLICA.encode()
_PROMPT_TOKENS = PROMPT_TOKENS.encode()
_JOURNAL = JOURNAL.encode()


class _Whole(msgspec.Struct):
    """The parts of a non-streaming response that the router reads."""

    usage: Usage | None = None


class _Failed(msgspec.Struct):
    """The same of an error."""

    error: dict[str, Any] = {}


_whole = msgspec.json.Decoder(_Whole)
_failed = msgspec.json.Decoder(_Failed)


class Relay:
    """Relays one request for text."""

    def __init__(self, site: Site, scope: Scope) -> None:
        self._site, self._scope = site, scope
        self._summary = summary_of(scope)
        self._arrived = site.servers.clock()
        self._tried: set[str] = set()
        self._deaths = 0
        self._patience_end = 0.0  # set when a server is lost
        self._refusal: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None  # see `_refused`
        self._answer: Answer | None = None  # the one being read
        self._left = False  # the client has disconnected
        self._begun = False  # the status has been sent
        self._streams = False  # and events follow it
        self._journal = Journal()
        self._has_journal = False  # the server keeps one
        self._fingerprint: str | None = None  # of the server that began the stream
        self._seed: dict[str, object] = {}
        self._picked = read_picked(scope["headers"])
        self._served: list[tuple[bytes, bytes]] = []  # headers that say which endpoint answers

    async def run(self, receive: Receive, send: Send) -> None:
        """Relay the request and its response.

        Raises:
            ApiError: the request failed, and nothing has been sent yet. ClientDisconnect: the client is gone.
        """
        self._receive, self._send = receive, send
        prompt = await self._read()
        watching = asyncio.ensure_future(receive())
        watching.add_done_callback(self._on_left)
        try:
            await self._serve(prompt)
        except (ApiError, CannotResumeError, HttpError) as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if self._begun and self._site.stopping.is_set():
                await self._fail(stop_error())
            raise
        finally:
            watching.cancel()

    async def _read(self) -> Prompt:
        scope, config = self._scope, self._site.config
        with self._site.bodies.holding(tenant_of(scope).queue) as fits:
            request = Request(scope, self._receive)
            check_media_type(request.headers)
            body = await read_body(request, config.max_body_bytes, fits)
            self._key = self._site.key_for(scope)
            prompt = await parsed(body, self._key)
        if prompt.streams and not prompt.seeded:
            self._seed = {"seed": secrets.randbits(SEED_BITS)}  # so that it says the same wherever it goes on
        note_call(scope, prompt.model, None)
        return prompt

    def _on_asked(self, answer: Answer) -> None:
        """A request has been sent; the headers of its answer may take as long as the answer."""
        self._answer = answer
        if self._left:
            answer.abort()

    def _on_left(self, done: asyncio.Future[Any]) -> None:
        """The client has disconnected, or the response is complete."""
        if not done.cancelled():
            self._left = True
            if self._answer is not None:
                self._answer.abort()

    # -- sending -------------------------------------------------------------------------------------------

    async def _serve(self, prompt: Prompt) -> None:
        """Try one server after another until one has answered."""
        while True:
            choice = await self._choose(prompt)
            if choice is None:
                return
            server = choice.server
            try:
                if await self._attempt(prompt, choice):
                    return
                self._tried.add(server.name)
            except HttpError as error:
                if self._left:
                    raise ClientDisconnect from None
                self._lost(server, error)

    async def _choose(self, prompt: Prompt) -> Choice | None:
        """Choose a server; None if there is none left, in which case the last refusal has been sent to the client."""
        servers, said = self._site.servers, time.monotonic()
        while True:
            choice = servers.choose(prompt, self._tried, self._fingerprint, self._picked)
            if choice is not None:
                return choice
            if self._refusal is not None and not self._begun:
                status, headers, body = self._refusal
                await self._whole(status, headers, body)
                return None
            if not servers.has_new:
                if not servers.has_model(prompt.model):
                    raise unknown_model(servers.by_name.values())
                waits = time.monotonic() < self._patience_end or (
                    self._begun and servers.hangs(prompt.model, self._fingerprint, self._picked)
                )
                if not waits:
                    if self._begun and servers.able(prompt.model, picked=self._picked):
                        raise CannotResumeError("the server died, and no other one computes in its way; try again")
                    raise no_server(self._picked)
            self._tried.clear()  # servers that died may be back, and busy ones may have room
            await servers.wait_for_change(0.25 if self._refusal is None else BUSY_SECONDS)
            if self._left:
                raise ClientDisconnect
            if self._streams and time.monotonic() - said >= SILENCE_SECONDS:
                said = time.monotonic()
                await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})

    def _lost(self, server: Server, error: HttpError) -> None:
        """Decide how to continue after losing a server.

        Raises:
            ApiError: the request cannot continue.
        """
        self._site.servers.failed(server, str(error))
        self._tried.add(server.name)
        if not self._patience_end:
            self._patience_end = time.monotonic() + WAIT_SECONDS
        self._deaths += error.reached
        if self._begun and not (self._has_journal and self._journal.is_kept):
            raise ApiError(502, "the server went away while it answered; try again", code="server_lost")
        if self._deaths >= MAX_DEATHS:
            message = f"{self._deaths} servers went away while they worked on this request; it is not sent to others"
            raise ApiError(502, message, code="server_lost")

    async def _attempt(self, prompt: Prompt, choice: Choice) -> bool:
        """Send the request to a server. False if another one is to be asked: see `_refused`.

        Raises:
            HttpError: the server went away.
        """
        server, servers = choice.server, self._site.servers
        sending = Sending(
            self._summary.request_id,
            choice,
            bool(self._journal.body()),
            prompt.hashes[:KEPT_NAMES],
            self._arrived,
            servers.clock(),
        )
        self._site.routed(self._summary, sending)
        choice.engine.load.sent(sending.sent, choice.missing)
        servers.knowledge.sent(choice.engine.name, prompt.hashes)
        server.num_requests += 1
        self._served = [(SERVED, server.address.endpoint.encode())] if choice.as_picked else []
        answer = None
        try:
            answer = await server.upstream.ask(self._request(prompt, choice), self._on_asked)
            if answer.status in _BUSY or (prompt.follows and not self._begun and answer.status in (400, 404)):
                return await self._refused(answer, server)
            if self._begun and (answer.status != 200 or not answer.is_stream):
                raise CannotResumeError(_not_resumed(answer.status))
            if answer.is_stream:
                self._learn_from_headers(prompt, answer.header(_PROMPT_TOKENS))
                await self._stream(answer, sending)
            else:
                await self._pass_on(answer, prompt, sending)
            return True
        except HttpError as error:
            sending.lost = str(error)
            raise
        finally:
            self._answer, sending.ended = None, servers.clock()
            if answer is not None:
                server.upstream.release(answer)
            if sending.timer is not None:
                sending.timer.cancel()
            choice.engine.load.ended(choice.missing, sending.begun)

    async def _refused(self, answer: Answer, server: Server) -> bool:
        """Keep a refusal for when all other servers refuse, too (False), or pass it on if they would do the same."""
        body, is_busy = await _collected(answer), answer.status in _BUSY
        if not is_busy and not _is_not_stored(answer.status, body, server.is_quire):
            await self._whole(answer.status, answer.headers, body)
            return True
        if is_busy or self._refusal is None:  # a busy server may have stored the response
            self._refusal = (answer.status, answer.headers, body)
        return False

    def _request(self, prompt: Prompt, choice: Choice) -> bytes:
        """The request to forward: the client's, plus fields that make the response reproducible on another server, and
        the journal of a stream that another one has begun."""
        server, fields = choice.server, {}
        if server.is_quire and prompt.streams:
            fields = self._seed
        if choice.prefill is not None:
            told = choice.prefill.told.get("kv_transfer") or {}
            fields = fields | {"kv_transfer_params": {"do_remote_prefill": True, **told}}
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self._summary.request_id.encode())]
        if self._key:
            headers.append((b"authorization", self._key))
        if server.is_quire:
            headers.append(_ASK_NAMES)
            if choice.engine.number is not None:
                headers.append((_REPLICA, b"%d" % choice.engine.number))
        journal = b""
        if server.is_quire and prompt.streams and self._scope["path"] in RESUMABLE_PATHS:
            journal = self._journal.body()
            headers.append((_JOURNAL, b"%d" % len(journal)))
        if self._site.traces is not None:
            headers += self._site.traces.onward(self._scope)
        return server.address.request("POST", self._scope["path"], headers, prompt.with_fields(fields) + journal)

    # -- answering -----------------------------------------------------------------------------------------

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        self._summary.end("answered" if status == 200 else f"refused {status}")
        own = self._served if status == 200 else []
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        own = [header for header in headers if header[0] not in _HOP]
        await self._start(status, [*own, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def _pass_on(self, answer: Answer, prompt: Prompt, sending: Sending) -> None:
        """Pass on a response that is not a stream: in one piece, unless it is very large."""
        self._expect_first_token(sending)
        body = await _collected(answer, WHOLE_BYTES)
        if answer.status == 200:
            self._learn(prompt, body)
        if answer.has_ended:
            return await self._whole(answer.status, answer.headers, body)
        await self._start(answer.status, [header for header in answer.headers if header[0] not in _HOP])
        while body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = await answer.piece()
        await self._send({"type": "http.response.body", "body": b""})

    def _expect_first_token(self, sending: Sending) -> None:
        """A non-streaming response does not show when its first token came, so that time is estimated."""
        loop, seconds = asyncio.get_running_loop(), sending.choice.decision.chosen.seconds
        sending.timer = loop.call_later(seconds, self._site.begun_unseen, sending)

    def _learn(self, prompt: Prompt, body: bytes) -> None:
        """Learn from usage how many tokens the prompt had."""
        with contextlib.suppress(*BAD_JSON):  # whatever it is, it is passed on
            usage = _whole.decode(body).usage or Usage()
            if usage.prompt_tokens is not None:
                self._site.servers.learn_size(prompt.size, usage.prompt_tokens)
                self._summary.prompt_tokens = usage.prompt_tokens
                self._summary.output_tokens = usage.completion_tokens or 0
                self._summary.cached_tokens = (usage.prompt_tokens_details or PromptDetails()).cached_tokens or 0

    def _learn_from_headers(self, prompt: Prompt, told: str) -> None:
        """Learn how many tokens the prompt of a stream has, if the server's headers say so."""
        if told.isdecimal() and len(told) < 12:
            self._summary.prompt_tokens = int(told)
            self._site.servers.learn_size(prompt.size, int(told))

    async def _stream(self, answer: Answer, sending: Sending) -> None:
        """Pass on events as they come. Only whole events are sent, so that an error event can still follow."""
        self._streams = True
        self._has_journal = bool(answer.header(_JOURNAL))
        if not self._begun:
            self._fingerprint = sending.choice.server.fingerprint
            await self._start(200, [header for header in answer.headers if header[0] not in _HOP])
        elif not self._has_journal:
            raise CannotResumeError("the server died, and the others cannot continue what it began; try again")
        self._journal.begin()
        rest = b""
        while data := await answer.piece():
            if not sending.begun:
                self._first_token(sending)
            if self._has_journal:
                data = self._journal.events(data)
            else:
                data, rest = _whole_events(rest + data if rest else data)
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            if self._journal.lost:
                raise HttpError("closed", self._journal.lost)
        if self._has_journal and not self._journal.has_ended:
            raise HttpError("closed", "its stream ended without its end")
        await self._send({"type": "http.response.body", "body": rest})

    def _first_token(self, sending: Sending) -> None:
        now = sending.first = self._site.servers.clock()
        sending.begun = True
        sending.choice.engine.load.begun(sending.sent, now, sending.choice.missing)
        if self._summary.first_token_seconds is None:
            self._summary.first_token_seconds = now - self._arrived
            self._site.metrics.first_token(self._summary.first_token_seconds)

    async def _fail(self, error: Exception) -> None:
        """Report an error to the client: as a response if nothing has been sent, otherwise as an event."""
        if isinstance(error, ApiError):
            answer = error
        else:
            answer = ApiError(502, str(error), code="server_lost")
        if not self._begun:
            raise answer
        self._summary.reason, self._summary.error = "error", answer.message
        if self._journal.has_ended:
            return
        if not self._streams:
            drop(self._scope)  # a document that breaks off must not look like a whole one
            return
        path, data = self._scope["path"], b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer.body())
        if path in NAMED_PATHS:
            data = b"event: error\ndata: %b\n\n" % msgspec.json.encode(answer.stream_body(path))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._send({"type": "http.response.body", "body": data})


async def parsed(body: bytes, scope: bytes = b"") -> Prompt:
    """What the router reads of a request. A large body is parsed in a thread, so that other requests' tokens go on."""
    if len(body) <= SMALL_BODY_BYTES:
        return read_prompt(body, scope)
    return await asyncio.to_thread(read_prompt, body, scope)


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split after the last whole event: what to pass on, and the rest. Without an event's end for long, pass on all."""
    cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
    if cut < 4:
        return (data, b"") if len(data) > MOST_EVENT_BYTES else (b"", data)
    return data[:cut], data[cut:]


async def _collected(answer: Answer, most: int = WHOLE_BYTES) -> bytes:
    """Read the body, up to about this size."""
    pieces, size = [], 0
    while size < most and (data := await answer.piece()):
        pieces.append(data)
        size += len(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_not_stored(status: int, body: bytes, is_quire: bool) -> bool:
    """Whether an error says that the response to be continued is not stored there. vLLM says so by the status alone."""
    with contextlib.suppress(*BAD_JSON):
        if _failed.decode(body).error.get("code") == NOT_STORED:
            return True
    return status == 404 and not is_quire


def _not_resumed(status: int) -> str:
    """Why a stream cannot go on at a server that answered this."""
    why = "the others compute in another way" if status == _OTHER_KERNELS else f"another one answered {status}"
    return f"the server died, and {why}; try again"


def no_server(picked: Picked = NOTHING_PICKED) -> ApiError:
    """The error when no server is up, or none of those that may be used."""
    message = "no server can take requests now; try again"
    if picked.among is not None:
        message = f"no server named in {SUBSET.decode()} can take requests now; try again, or name others"
    return ApiError(503, message, code="no_server", headers={"retry-after": str(RETRY_RESTARTING)})


def unknown_model(servers: Iterable[Server]) -> ApiError:
    """The error if no server has the model, not even one that is down."""
    names = sorted({name for one in servers for name in one.models})
    message = f"there is no model of that name; the servers serve: {', '.join(names)}"
    return ApiError(404, message, param="model", code="model_not_found")
