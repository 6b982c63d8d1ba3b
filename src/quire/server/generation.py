"""One call for text, from its body to the end of its response.

A call is read, parsed, admitted to the queue, tokenized in the pool, checked against the model, and generated; the
response is one document or a stream. However it ends (by itself, an error, a disconnect, a timeout, a shutdown), its
place in the queue is released, what still runs for it is aborted, and one line is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.request import RequestUpdate
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.frontend import Prepared
from quire.engine.outputs import RequestOutput
from quire.errors import (
    EngineClosedError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    TokenizerFailedError,
    TokenizerTimeoutError,
    TokenizerUnavailableError,
)
from quire.fleet.prompt import read_prompt
from quire.log import event
from quire.server.accounts import Account
from quire.server.admission import Admission, QueueFullError
from quire.server.auth import tenant_of
from quire.server.body import check_media_type
from quire.server.context import AppContext, stop_error
from quire.server.errors import ApiError, api_error, generation_error, invalid
from quire.server.journal import (
    JOURNAL,
    MAX_JOURNAL_BYTES,
    Journal,
    Opening,
    earlier_updates,
    other_kernels,
    split_body,
)
from quire.server.limits import Limits
from quire.server.protocol import ChatCall, CompletionCall, DetokenizeCall, GenerationCall, TokenizeCall
from quire.server.request_log import REQUEST_ID, note_call, summary_of
from quire.server.responses import ChatResponder, CompletionResponder, Responder
from quire.server.streaming import AnswerWriter, CutOffError, merged, supervised, unless
from quire.server.transport import SMALL_BODY_BYTES, Bodies, drop, read_body
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import RenderedChat
from quire.text.tokenizer_pool import TokenizerPool

logger = logging.getLogger(__name__)

MAX_IGNORED_NAMES = 1000
"""Most names of unknown fields that a process logs, once each."""

ASK_NAMES = "x-quire-names"
"""Header with which a router asks for reports of what is cached, in the names of `fleet/prompt.py`."""

REPLICA = "x-data-parallel-rank"
"""vLLM's header with which a request chooses its replica; also the scope's key for it."""

PROMPT_TOKENS = "x-quire-prompt-tokens"
"""Response header that tells such a router the number of prompt tokens, which streams do not have otherwise."""

PROMPT_NAMES = "quire.prompt_names"
"""The scope's key for the names."""

ENTRIES = "quire.journal_entries"
"""The scope's key for the entries of the journal that another server began; there if a router asks for one."""

LARGE_BODIES = 16
"""How many bodies of the largest size, or more smaller ones, may be held at once before they are parsed."""

Call = CompletionCall | ChatCall
Parse = Callable[[bytes, Limits], Any]
"""Parses a body into the call of some kind of `Generation`."""
C = TypeVar("C", bound=CompletionCall | ChatCall | TokenizeCall | DetokenizeCall)


@dataclass(slots=True)
class Shared:
    """Shared state of the calls of one process.

    Attributes:
        admission: the queue bound.
        bodies: the bound on bodies that are received and not yet parsed.
        ignored: names of unknown fields that have been logged.
    """

    context: AppContext
    admission: Admission
    bodies: Bodies
    ignored: set[str] = field(default_factory=set)

    @property
    def pool(self) -> TokenizerPool:
        """The tokenizer workers.

        Raises:
            ApiError: there are none yet.
        """
        if self.context.pool is None:
            raise self.context.not_ready() or ApiError(503, "the tokenizers are still starting; try again")
        return self.context.pool

    def log_ignored(self, names: tuple[str, ...]) -> None:
        """Log unknown fields, each once, up to `MAX_IGNORED_NAMES`."""
        for name in names:
            if name not in self.ignored and len(self.ignored) < MAX_IGNORED_NAMES:
                self.ignored.add(name)
                event(logger, "ignored_field", f"requests have a field {name!r}, which is ignored", field=name)

    def count_refused(self, error: ApiError) -> None:
        """Count a refused call in the metrics."""
        self.context.metrics.rejected(_rejection(error))


async def read_call(shared: Shared, request: Request, parse: Callable[[bytes, Limits], C]) -> C:
    """Read and parse the request's body, and check that its model is served.

    Raises:
        ApiError: it is not valid. ClientDisconnect: the client left before it was complete.
    """
    server, info = shared.context.server, shared.context.client.info
    check_media_type(request.headers)
    if (number := request.headers.get(REPLICA)) is not None:
        request.scope[REPLICA] = _replica(number, len(shared.context.client.links))
    limits = Limits(max_model_len=info.max_model_len if info is not None else None)
    with shared.bodies.holding(tenant_of(request.scope).queue) as fits:
        extra = _journal_bytes(request)
        body = await read_body(request, server.max_body_bytes + (extra or 0), fits, server.request_timeout)
        # A large body is parsed in a thread, so that it does not delay the tokens of other requests.
        large = len(body) > SMALL_BODY_BYTES
        if extra is not None:
            split = await asyncio.to_thread(split_body, body, extra) if large else split_body(body, extra)
            body, request.scope[ENTRIES] = split
        call = await asyncio.to_thread(parse, body, limits) if large else parse(body, limits)
        if request.headers.get(ASK_NAMES) is not None:  # a router's request
            named = body, request.headers.get("authorization", "").encode("latin-1")
            prompt = await asyncio.to_thread(read_prompt, *named) if large else read_prompt(*named)
            request.scope[PROMPT_NAMES] = b"".join(prompt.hashes)
    user = call.user if isinstance(call, GenerationCall) else None
    note_call(request.scope, call.model or shared.context.model_names[0], user)
    shared.context.check_model(call.model)
    shared.log_ignored(call.ignored)
    return call


async def render(pool: TokenizerPool, call: ChatCall | TokenizeCall, max_tokens: int | None = None) -> RenderedChat:
    """The call's chat, rendered and tokenized; see `Tokenizer.apply_chat_template`."""
    chat = await pool.render(
        call.messages or [],
        add_generation_prompt=call.add_generation_prompt,
        continue_final_message=call.continue_final_message,
        variables=call.chat_template_kwargs,
        reply=call.reply,
        max_tokens=max_tokens,
    )
    call.ignore([call.hints.get(name, f"chat_template_kwargs.{name}") for name in chat.unused])
    return chat


def _journal_bytes(request: Request) -> int | None:
    """How many bytes of a journal follow the body; None if no router asks for a journal.

    Raises:
        ApiError: no number, or too many.
    """
    told = request.headers.get(JOURNAL)
    if told is None:
        return None
    if not (told.isascii() and told.isdigit() and len(told) < 9 and int(told) <= MAX_JOURNAL_BYTES):
        raise invalid(f"{JOURNAL} is {told[:16]!r}; it is a number of bytes, at most {MAX_JOURNAL_BYTES}", JOURNAL)
    return int(told)


def _replica(named: str, count: int) -> int:
    """The replica of this number.

    Raises:
        ApiError: there is none.
    """
    if not (named.isascii() and named.isdigit() and len(named) < 9 and int(named) < count):
        raise invalid(f"there is no replica {named[:16]!r}: {REPLICA} is a number from 0 to {count - 1}")
    return int(named)


Kind = Callable[[Shared, Parse, Scope], "Generation"]
"""Makes the object that handles a call."""


class GeneratedAnswer(Response):
    """The response that a route returns; it is generated while it is sent."""

    def __init__(self, shared: Shared, parse: Parse, kind: Kind | None = None) -> None:
        super().__init__()
        self._shared, self._parse, self._kind = shared, parse, kind or Generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._kind(self._shared, self._parse, scope).run(receive, send)


class Generation:
    """One call.

    Args:
        parse: parses its body.
        scope: the ASGI scope, with the tenant and the request's summary.
    """

    def __init__(self, shared: Shared, parse: Parse, scope: Scope) -> None:
        self._shared, self._context = shared, shared.context
        self._parse = parse
        self._scope = scope
        self._summary = summary_of(scope)
        self._id = self._summary.request_id
        self._created = int(time.time())
        self._arrived = time.monotonic()
        self._tokenize_seconds = 0.0
        self._account: Account | None = None  # once it runs
        self._reason = "error"
        self._error: str | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        """Handle the call.

        Raises:
            ApiError: it failed before anything was sent; the app responds with it.
            ClientDisconnect: the client is gone.
        """
        writer = self._writer(send)
        try:
            call = await read_call(self._shared, Request(self._scope, receive), self._parse)
            self._resume()
            await self._supervised(self._answer(call, writer), writer, receive)
            self._reason = self._account.finish_reason if self._account else "stop"
        except ClientDisconnect:
            self._reason = "disconnect"
            raise
        except asyncio.CancelledError:
            self._reason = "shutdown"
            raise
        except Exception as error:
            await self._fail(error, writer)
        finally:
            self._end()

    def _resume(self) -> None:
        """If another server has begun this stream, its events are to be one stream's.

        Raises:
            ApiError: the tokens would be others.
        """
        opening = next((entry.opening for entry in self._scope.get(ENTRIES, ()) if entry.opening), None)
        if opening is None:
            return
        if opening.fingerprint != self._fingerprint:
            raise other_kernels()
        if not REQUEST_ID.fullmatch(opening.id):
            raise invalid(f"the journal has the id {opening.id[:64]!r}, which is no response's", JOURNAL)
        self._id, self._created = opening.id, opening.created

    @property
    def _fingerprint(self) -> str:
        info = self._context.client.info
        return info.fingerprint if info is not None else ""

    def _writer(self, send: Send) -> AnswerWriter:
        return AnswerWriter(send)

    async def _supervised(self, work: Coroutine[Any, Any, None], writer: AnswerWriter, receive: Receive) -> None:
        """Run the work of a response (`supervised`). A cut-off becomes an error, or means that the client has left."""
        limit = self._context.server.request_timeout
        try:
            await supervised(
                work,
                writer,
                receive,
                deadline=None if limit is None else self._arrived + limit,
            )
        except CutOffError as cut:
            if cut.cause == "timeout":
                message = f"the request took longer than {limit:g} s, the server's --request-timeout, and was ended"
                raise ApiError(503, message, code="request_timeout") from None
            if cut.cause == "shutdown":
                raise stop_error() from None
            raise ClientDisconnect from None

    # -- the work ------------------------------------------------------------------------------------------

    async def _answer(self, call: Call, writer: AnswerWriter) -> None:
        """Everything from admission to the last byte. It may be cancelled at any point."""
        ticket = self._shared.admission.enter(call.num_choices, call.price(), tenant_of(self._scope).queue)
        try:
            began = time.monotonic()
            prepared = await unless(self._context.stopping, self._prepare(call))
            self._tokenize_seconds = time.monotonic() - began
            prompts = [prompt.token_ids for prompt in prepared]
            ticket.correct([len(prompt) for prompt in prompts], call.params.n)
            self._account = Account(
                self._context.metrics,
                ticket,
                prompts,
                call.params,
                arrived=self._arrived,
                tokenize_seconds=self._tokenize_seconds,
            )
            await self._generate(call, prepared, self._account, writer)
        finally:
            ticket.leave()

    async def _prepare(self, call: Call) -> list[Prepared]:
        """The call's prompts, tokenized and checked.

        Raises:
            QuireError: a prompt or a parameter is not valid for this model, or tokenizing took too long.
        """
        words = call.params.bad_words
        bad_words = await self._shared.pool.bad_words(list(words)) if words else []
        info = self._context.client.info
        most = info.max_model_len if info is not None and call.params.truncate_prompt_tokens is None else None
        try:
            prompts = await self._tokenize(call, most)
        except PromptTooLongError as error:
            error.param = self._prompt_field(call)
            raise
        if call.params.structured_outputs is not None:
            await self._compile(call.params.structured_outputs)
        prepared = []
        for index, (text, token_ids, reply) in enumerate(prompts):
            try:
                prompt = self._context.client.prepare(text, token_ids, call.params, bad_words, reply)
            except RequestError as error:
                if error.param == "prompt":
                    error.param = self._prompt_field(call)
                raise (error.at(index) if len(prompts) > 1 else error) from None
            if text is None and isinstance(call, CompletionCall) and call.echo:
                prompt = dataclasses.replace(prompt, text=await self._shared.pool.decode(token_ids))
            prepared.append(prompt)
        return prepared

    def _prompt_field(self, call: Call) -> str | None:
        """The field that has the prompt, for errors."""
        return "messages" if isinstance(call, ChatCall) else "prompt"

    async def _compile(self, wanted: StructuredOutputsParams) -> None:
        """Try to compile a grammar in a tokenizer worker, where it can do no harm, before an engine does."""
        try:
            await self._shared.pool.compile_grammar(wanted)
        except SamplingParamsError as error:
            error.param = "structured_outputs"
            raise
        except TokenizerUnavailableError:
            raise
        except (TokenizerTimeoutError, TokenizerFailedError) as error:
            raise SamplingParamsError(
                f"structured_outputs.{wanted.kind} takes too much time or memory to compile; make it smaller",
                param="structured_outputs",
            ) from error

    async def _tokenize(
        self, call: Call, max_tokens: int | None = None
    ) -> Sequence[tuple[str | None, list[int], ReplyForm | None]]:
        """Each prompt's text, if it was given as text, its tokens, and for a chat the form of its reply.

        Args:
            max_tokens: see `Tokenizer.encode_batch`.
        """
        pool = self._shared.pool
        if isinstance(call, ChatCall):
            chat = await render(pool, call, max_tokens)
            call.constrain(chat)
            self._shared.log_ignored(call.ignored)
            return [(chat.text, chat.token_ids, chat.reply)]
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        given = call.add_special_tokens, max_tokens, call.parse_special
        encoded = iter(await pool.encode(texts, *given) if texts else [])
        return [
            (prompt, next(encoded), None) if isinstance(prompt, str) else (None, list(prompt), None)
            for prompt in call.prompts
        ]

    async def _generate(self, call: Call, prepared: list[Prepared], account: Account, writer: AnswerWriter) -> None:
        """Run all prompts at once, and send their output."""
        responder = self._responder(call)
        headers = _headers(call, prepared)
        if PROMPT_NAMES in self._scope:
            headers[PROMPT_TOKENS] = str(sum(len(prompt.token_ids) for prompt in prepared))
        streams = self._streams(call, prepared, account, responder, writer)
        outputs: dict[int, RequestOutput] = {}
        chunks: list[bytes] = []
        if call.stream:
            await writer.start(headers | ({} if writer.journal is None else {JOURNAL: "1"}))
        async with contextlib.aclosing(merged(streams)) as news:
            async for batch in news:
                now = time.monotonic()
                for index, output in batch:
                    outputs[index] = output
                    account.take(index, output, now)
                if call.stream:
                    chunks = self._chunks(batch, responder, writer)
                if not account.num_open and account.failure is None:
                    break
                if call.stream:
                    await writer.events(chunks)
                if account.failure is not None:
                    raise generation_error(account.failure)
        ordered = [outputs[index] for index in range(len(prepared))]
        if not call.stream:
            if self._context.stopping.is_set() and account.has_nothing:
                raise stop_error()  # clients retry a 503, but would keep an empty response
            long = responder.takes_long
            body = await asyncio.to_thread(responder.full, ordered) if long else responder.full(ordered)
            await writer.whole(body, headers)
            return
        await writer.end([*chunks, *responder.closing(ordered)])

    def _chunks(
        self, batch: Sequence[tuple[int, RequestOutput]], responder: Responder, writer: AnswerWriter
    ) -> list[bytes]:
        """What is new for the client, noted in the journal if there is one.

        Raises:
            ApiError: another server can generate the rest, which this one cannot.
        """
        if writer.journal is None:
            return [chunk for index, output in batch for chunk in responder.chunks(index, output)]
        if self._context.stopping.is_set():
            raise stop_error()
        if self._context.client.state == "failed":
            raise EngineClosedError("the engine is gone")
        chunks = []
        for index, output in batch:
            chunks += responder.chunks(index, output)
            writer.journal.note(index, output)
        writer.journal.events = responder.num_events
        return chunks

    def _streams(
        self, call: Call, prepared: list[Prepared], account: Account, responder: Responder, writer: AnswerWriter
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """The outputs of all prompts as they grow. What another server has sent of them is replayed.

        Raises:
            ApiError: what it has sent cannot be of this request.
        """
        client, entries = self._context.client, self._scope.get(ENTRIES)
        earlier: dict[int, list[RequestUpdate]] = {}
        if call.stream and entries is not None and client.info is not None:
            earlier = earlier_updates(entries, prepared, client.info.vocab_size)
            opening = None if entries else Opening(self._id, self._created, self._fingerprint)
            writer.journal = Journal(call.params.n, opening)

        def replay(index: int, output: RequestOutput) -> None:
            responder.chunks(index, output)
            account.replay(index, output)
            if writer.journal is not None and entries:
                writer.journal.replayed(index, output)
                responder.num_events = entries[-1].events

        # A router knows names, and chooses a replica, only for bodies with a single prompt.
        told = (self._scope.get(PROMPT_NAMES, b""), self._scope.get(REPLICA)) if len(prepared) == 1 else (b"", None)
        return [
            client.generate(
                prompt,
                name=self._id,
                owner=tenant_of(self._scope).owner,
                queue=tenant_of(self._scope).queue,
                arrived=self._arrived,
                tokenize_seconds=self._tokenize_seconds,
                prompt_names=told[0],
                replica=told[1],
                earlier=earlier.get(index, ()),
                replayed=functools.partial(replay, index),
                leaves=writer.journal is not None,
            )
            for index, prompt in enumerate(prepared)
        ]

    def _responder(self, call: Call) -> Responder:
        info, tokenizer = self._context.client.info, self._context.client.tokenizer
        texts = (tokenizer.token_text, tokenizer.token_bytes) if tokenizer is not None else (_no_text, _no_bytes)
        created, model = self._created, self._context.model_names[0]
        of_server = model, self._fingerprint, *texts, info.kv_transfer if info is not None else {}
        if isinstance(call, ChatCall):
            return ChatResponder(call, self._id, created, *of_server)
        return CompletionResponder(call, self._id, created, *of_server)

    # -- the end -------------------------------------------------------------------------------------------

    async def _fail(self, error: Exception, writer: AnswerWriter) -> None:
        """Report the error to the client, as a response or as the last event of its stream."""
        answer = api_error(error)
        if answer.code == "internal_error":
            text = f"{self._id}: an unexpected {type(error).__name__}"
            event(logger, "internal_error", text, level=logging.ERROR, exc_info=error, request_id=self._id)
        self._error = answer.message
        self._reason = _CAUSES.get(answer.code or "", "error" if self._account else f"refused {answer.status}")
        if self._account is None:
            self._shared.count_refused(answer)
        if not writer.begun:
            raise answer from None
        if not await writer.fail(answer):
            drop(self._scope)
            raise ClientDisconnect from None

    def _end(self) -> None:
        """Finish the account and the summary."""
        if self._account is not None:
            self._account.close()
            self._account.add_to(self._summary)
        self._summary.end(self._reason, self._error)


class Document(Generation, ABC):
    """A call that runs no request: `_document` makes its response, while the call has a place in the queue."""

    async def _answer(self, call: Any, writer: AnswerWriter) -> None:
        ticket = self._shared.admission.enter(1, call.price(), tenant_of(self._scope).queue)
        try:
            document = await unless(self._context.stopping, self._document(call))
        finally:
            ticket.leave()
        await writer.whole(msgspec.json.encode(document), ignored_header(call.ignored))

    @abstractmethod
    async def _document(self, call: Any) -> dict[str, Any]:
        """The response; it may be cancelled at any point."""

    async def _count(self, call: ChatCall) -> int:
        """Tokens of a chat's prompt."""
        [(_, tokens, _)] = await self._tokenize(call)
        return len(tokens)


_CAUSES = {"request_timeout": "timeout", "shutting_down": "shutdown"}
"""What the log calls errors whose cause is outside the request, by code."""

_REJECTIONS = {
    "model_not_found": "unknown_model",
    "context_length_exceeded": "context_length",
    "tokenizer_timeout": "timeout",
    "request_timeout": "timeout",
    "shutting_down": "draining",
}


def _no_text(token: int) -> str:
    """A token's text if the checkpoint has no tokenizer."""
    return ""


def _no_bytes(token: int) -> bytes:
    """The same for its bytes."""
    return b""


def _rejection(error: ApiError) -> str:
    """Why a call was refused: one of the metrics' reasons."""
    if isinstance(error, QueueFullError):
        return error.reason
    by_status = {400: "invalid", 413: "too_large", 415: "invalid"}
    return _REJECTIONS.get(error.code or "", by_status.get(error.status, "other"))


MAX_LOOSENED = 2000
"""Most characters of the header that says what is not enforced of tools."""


def _headers(call: Call, prepared: list[Prepared]) -> dict[str, str]:
    """Headers for differences from the request: ignored fields, loosened tools, and a clamped `max_tokens`."""
    headers: dict[str, str] = {}
    clamped = [prompt.max_tokens for prompt in prepared if prompt.clamped_from is not None]
    if clamped:
        headers["x-quire-clamped"] = f"max_tokens={min(clamped)}"
    if isinstance(call, ChatCall) and call.loosened:
        told = "; ".join(call.loosened)[:MAX_LOOSENED]
        headers["x-quire-loosened"] = "".join(letter if " " <= letter <= "~" else "?" for letter in told)
    return headers | ignored_header(call.ignored)


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """The header that names unknown fields."""
    return {"x-quire-ignored": ", ".join(names)} if names else {}
