"""One request's way through the router: read, choose, send, pass on what comes, and go on elsewhere if that breaks off.

Until something was sent to the client, any other server may answer in place of one that failed. Afterwards only a Quire
server may: the same request has the same tokens there, and what the client has already is cut (`resume.py`). A request
in whose course several servers went away is not sent to yet another one: it may be the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from quire.fleet.prompt import Prompt, read_prompt
from quire.router.resume import EVENT_END, CannotResumeError, Continuation, StreamPosition, payloads
from quire.router.servers import Choice, Server
from quire.router.site import KEPT_NAMES, Sending, Site
from quire.router.upstream import Answer, UpstreamError
from quire.server.auth import tenant_of
from quire.server.body import check_media_type
from quire.server.context import RETRY_RESTARTING, stop_error
from quire.server.errors import ApiError
from quire.server.generation import ASK_NAMES, PROMPT_TOKENS, REPLICA
from quire.server.request_log import note_call, summary_of
from quire.server.streaming import CLOSING_SECONDS
from quire.server.transport import SMALL_BODY_BYTES, read_body

RESUMABLE_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Streams whose chunks say how much of a choice they hold; others that break off end with an error."""
MAX_DEATHS = 3
"""So many servers may go away while they work on a request; then it ends with an error."""
WAIT_SECONDS = 15.0
"""A request that has lost its server waits so long for one that can take it."""
WHOLE_BYTES = 1 << 20
"""Of an answer that is no stream: up to here it is collected, so that it can still come from elsewhere."""

SEED_BITS = 31
"""Of the seed that a request without one is given."""

MOST_EVENT_BYTES = 4 << 20
"""What is longer is no event."""

_BUSY = frozenset({429, 502, 503, 504})
"""Another server may do better."""
_GONE = frozenset({"shutting_down", "engine_failed", "engine_unavailable", "engine_restarting"})
"""What a Quire server says at the end of a stream that can go on elsewhere."""
_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"content-length",
        b"x-request-id",
        b"date",
        b"server",
        PROMPT_TOKENS.encode(),
    }
)
"""Headers of answers that are between the server and the router, or that the router makes itself."""
_ASK_NAMES = (ASK_NAMES.encode(), b"1")
_REPLICA = REPLICA.encode()
_PROMPT_TOKENS = PROMPT_TOKENS.encode()
_ERROR_EVENT = b'data: {"error"'


class _Whole(msgspec.Struct):
    """What is read of a whole answer."""

    usage: dict[str, Any] | None = None


_whole = msgspec.json.Decoder(_Whole)


class Relay:
    """One request for text."""

    def __init__(self, site: Site, scope: Scope) -> None:
        self._site, self._scope = site, scope
        self._summary = summary_of(scope)
        self._arrived = site.servers.clock()
        self._tried: set[str] = set()
        self._deaths = 0
        self._patience_end = 0.0  # set when a server was lost
        self._refusal: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None  # the last server that was busy
        self._answer: Answer | None = None  # what is being read
        self._left = False  # the client has
        self._begun = False  # the status went out
        self._position = StreamPosition()
        self._continues: Continuation | None = None
        self._seed: dict[str, object] = {}

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ApiError: nothing has been sent yet. ClientDisconnect: the client is gone.
        """
        self._receive, self._send = receive, send
        prompt = await self._read()
        watching = asyncio.ensure_future(receive())
        watching.add_done_callback(self._on_left)
        try:
            await self._serve(prompt)
        except (ApiError, CannotResumeError, UpstreamError) as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if self._begun and self._site.stopping.is_set():
                await self._fail(stop_error())
            raise
        finally:
            watching.cancel()

    async def _read(self) -> Prompt:
        scope, config = self._scope, self._site.config
        with self._site.bodies.holding(tenant_of(scope).owner) as fits:
            request = Request(scope, self._receive)
            check_media_type(request.headers.getlist("content-type"))
            body = await read_body(request, config.max_body_bytes, fits)
            self._key = self._site.key_for(scope)
            # A large one in a thread, so that everybody else's tokens get their turns meanwhile.
            large = len(body) > SMALL_BODY_BYTES
            prompt = await asyncio.to_thread(read_prompt, body, self._key) if large else read_prompt(body, self._key)
        if prompt.streams and not prompt.seeded:
            self._seed = {"seed": secrets.randbits(SEED_BITS)}  # so that it says the same wherever it goes on
        note_call(scope, prompt.model, None)
        return prompt

    def _on_left(self, done: asyncio.Future[Any]) -> None:
        """The client has gone, or the answer has ended."""
        if not done.cancelled():
            self._left = True
            if self._answer is not None:
                self._answer.abort()

    # -- sending -------------------------------------------------------------------------------------------

    async def _serve(self, prompt: Prompt) -> None:
        """Try one server after the other, until one has answered."""
        while True:
            choice = await self._choose(prompt)
            if choice is None:
                return
            server = choice.server
            try:
                if await self._attempt(prompt, choice):
                    return
                self._tried.add(server.name)
            except UpstreamError as error:
                if self._left:
                    raise ClientDisconnect from None
                self._lost(server, error)

    async def _choose(self, prompt: Prompt) -> Choice | None:
        """A server; None: there is none, and the last one's refusal was passed on."""
        servers = self._site.servers
        while True:
            choice = servers.choose(prompt, self._tried, goes_on=self._begun)
            if choice is not None:
                return choice
            if self._refusal is not None and not self._begun:
                status, headers, body = self._refusal
                await self._whole(status, headers, body)
                return None
            if not servers.has_new:
                if not servers.has_model(prompt.model):
                    raise _unknown_model(servers.by_name.values())
                if not self._patience_end or time.monotonic() >= self._patience_end:
                    raise nobody()
            self._tried.clear()  # who died may be back
            await servers.wait_for_change(0.25)
            if self._left:
                raise ClientDisconnect

    def _lost(self, server: Server, error: UpstreamError) -> None:
        """A server went away; what is to be done next.

        Raises:
            ApiError: the request cannot go on.
        """
        self._site.servers.failed(server, str(error))
        self._tried.add(server.name)
        if not self._patience_end:
            self._patience_end = time.monotonic() + WAIT_SECONDS
        self._deaths += error.reached
        if self._begun and not self._resumes(server):
            raise ApiError(502, "the server went away while it answered; try again", code="server_lost")
        if self._deaths >= MAX_DEATHS:
            message = f"{self._deaths} servers went away while they worked on this request; it is not sent to others"
            raise ApiError(502, message, code="server_lost")
        if self._begun:
            self._continues = self._position.follow()

    async def _attempt(self, prompt: Prompt, choice: Choice) -> bool:
        """Whether the server has answered; else it was busy, and its refusal is kept.

        Raises:
            UpstreamError: it went away.
        """
        server, servers = choice.server, self._site.servers
        sending = Sending(
            self._summary.request_id,
            choice,
            self._position.has_sent,
            prompt.hashes[:KEPT_NAMES],
            self._arrived,
            servers.clock(),
        )
        self._site.routed(self._summary, sending)
        choice.engine.load.sent(sending.sent, choice.missing)
        servers.knowledge.sent(choice.engine.name, prompt.hashes)
        server.num_requests += 1
        answer = None
        try:
            self._answer = answer = await server.upstream.ask(self._request(prompt, choice))
            elsewhere = prompt.follows and answer.status == 404
            if (elsewhere or answer.status in _BUSY) and not self._begun:
                self._refusal = (answer.status, answer.headers, await _collected(answer))
                return False
            if answer.status in _BUSY or (self._begun and answer.status != 200):
                raise UpstreamError(f"it answered {answer.status} to a stream that was to go on", reached=True)
            if _is_stream(answer):
                self._learn_from_headers(prompt, answer.headers)
                await self._stream(answer, sending)
            else:
                await self._pass_on(answer, prompt, sending)
            return True
        except UpstreamError as error:
            sending.lost = str(error)
            raise
        finally:
            self._answer, sending.ended = None, servers.clock()
            if answer is not None:
                server.upstream.release(answer)
            if sending.timer is not None:
                sending.timer.cancel()
            choice.engine.load.ended(choice.missing, sending.begun)

    def _resumes(self, server: Server) -> bool:
        """Whether what is lost of this server's stream can come from another one."""
        return server.is_quire and self._scope["path"] in RESUMABLE_PATHS

    def _request(self, prompt: Prompt, choice: Choice) -> bytes:
        """The bytes for a server: those of the client, and what makes the answer the same elsewhere."""
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
        if self._site.traces is not None:
            headers += self._site.traces.onward(self._scope)
        return server.address.request("POST", self._scope["path"], headers, prompt.with_fields(fields))

    # -- answering -----------------------------------------------------------------------------------------

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        self._summary.end("answered" if status == 200 else f"refused {status}")
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        own = [header for header in headers if header[0] not in _HOP]
        await self._start(status, [*own, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def _pass_on(self, answer: Answer, prompt: Prompt, sending: Sending) -> None:
        """An answer that is no stream: whole, unless it is very large."""
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
        """A whole answer does not show when its first token came: about when it was to."""
        loop, seconds = asyncio.get_running_loop(), sending.choice.decision.chosen.seconds
        sending.timer = loop.call_later(seconds, self._site.begun_unseen, sending)

    def _learn(self, prompt: Prompt, body: bytes) -> None:
        """How many tokens the prompt had."""
        with contextlib.suppress(msgspec.DecodeError):
            usage = _whole.decode(body).usage or {}
            if isinstance(usage.get("prompt_tokens"), int):
                self._site.servers.learn_size(prompt.size, usage["prompt_tokens"])
                self._summary.prompt_tokens = usage["prompt_tokens"]
                self._summary.output_tokens = usage.get("completion_tokens") or 0
                self._summary.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _learn_from_headers(self, prompt: Prompt, headers: list[tuple[bytes, bytes]]) -> None:
        """How many tokens the prompt of a stream has, where its server says so."""
        told = next((value for name, value in headers if name == _PROMPT_TOKENS), b"")
        if told.isdigit() and len(told) < 12:
            self._summary.prompt_tokens = int(told)
            self._site.servers.learn_size(prompt.size, int(told))

    async def _stream(self, answer: Answer, sending: Sending) -> None:
        """Pass events on as they come, whole ones, so that an error can still follow."""
        server = sending.choice.server
        if not self._begun:
            await self._start(200, [header for header in answer.headers if header[0] not in _HOP])
        rest = b""
        while data := await answer.piece():
            if not sending.begun:
                self._first_token(sending)
            data, rest = _whole_events(rest + data if rest else data)
            if data and self._resumes(server):
                await self._events(data)
            elif data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if self._resumes(server) and not self._position.has_finished:
            raise UpstreamError("its stream ended without its end", reached=True)
        await self._send({"type": "http.response.body", "body": b"" if self._resumes(server) else rest})

    async def _events(self, data: bytes) -> None:
        """Whole events of a Quire server; of a stream that goes on, what is new of them."""
        lost = None
        if _ERROR_EVENT in data:
            data, lost = _before_loss(data)
        if self._continues is not None:
            data = self._continues.events(data)
        if data:
            self._position.sent(data)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if lost is not None:
            raise UpstreamError(lost, reached=True)

    def _first_token(self, sending: Sending) -> None:
        now = sending.first = self._site.servers.clock()
        sending.begun = True
        sending.choice.engine.load.begun(sending.sent, now, sending.choice.missing)
        if self._summary.first_token_seconds is None:
            self._summary.first_token_seconds = now - self._arrived
            self._site.metrics.first_token(self._summary.first_token_seconds)

    async def _fail(self, error: Exception) -> None:
        """Tell the client, in whichever form there is still time for."""
        if isinstance(error, ApiError):
            answer = error
        else:
            answer = ApiError(502, str(error), code="server_lost")
        if not self._begun:
            raise answer
        self._summary.reason, self._summary.error = "error", answer.message
        if self._position.has_finished:
            return
        data = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer.body())
        if self._scope["path"] not in RESUMABLE_PATHS:
            data = b"event: error\ndata: %b\n\n" % msgspec.json.encode(answer.stream_body(self._scope["path"]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._send({"type": "http.response.body", "body": data})


def _is_stream(answer: Answer) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers)


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """What may be passed on: up to the end of the last event, or all of it where that does not come. And the rest."""
    cut = max(data.rfind(EVENT_END) + 2, data.rfind(b"\r\n\r\n") + 4)
    if cut < 4:
        return (data, b"") if len(data) > MOST_EVENT_BYTES else (b"", data)
    return data[:cut], data[cut:]


async def _collected(answer: Answer, most: int = WHOLE_BYTES) -> bytes:
    """The body, up to about this size."""
    pieces, size = [], 0
    while size < most and (data := await answer.piece()):
        pieces.append(data)
        size += len(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _before_loss(data: bytes) -> tuple[bytes, str | None]:
    """Events up to one that says that the server leaves, and what it says; or all of them, and None."""
    at = data.index(_ERROR_EVENT)
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, IndexError):
        error = msgspec.json.decode(payloads(data[at:])[0])["error"]
        if error["code"] in _GONE:
            return data[:at], str(error["message"])
    return data, None


def nobody() -> ApiError:
    """No server is up that could take a request."""
    message = "no server can take requests now; try again"
    return ApiError(503, message, code="no_server", headers={"retry-after": str(RETRY_RESTARTING)})


def _unknown_model(servers: Any) -> ApiError:
    names = sorted({name for one in servers for name in one.models})
    message = f"there is no model of that name; the servers serve: {', '.join(names)}"
    return ApiError(404, message, param="model", code="model_not_found")
