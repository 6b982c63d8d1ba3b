"""POST /v1/responses: a chat in OpenAI's newer interface. See `openai_responses_protocol.py` for requests, and
`response_store.py` for stored responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.log import log_request
from quire.server import request_log
from quire.server.auth import tenant_of
from quire.server.blocks import Block, Blocks, News
from quire.server.context import stop_error
from quire.server.errors import ApiError, api_error
from quire.server.generation import Document, Generation, Parse, Shared, logger
from quire.server.openai_responses_protocol import Item, ResponseCall
from quire.server.response_store import ResponseStore, Stored
from quire.server.responses import Responder
from quire.server.streaming import AnswerWriter, CutOffError, NamedEventWriter

_encode = msgspec.json.Encoder().encode
CANCEL_SECONDS = 10.0
"""How long a cancelled response may take to end."""


class Responses(Generation):
    """One call of POST /v1/responses.

    Args:
        store: where its response is stored.
    """

    def __init__(self, shared: Shared, parse: Parse, scope: Scope, store: ResponseStore) -> None:
        super().__init__(shared, parse, scope)
        self._id = f"resp_{secrets.token_hex(16)}"
        self._store = store
        self._made: ResponseObject | None = None
        self._stored: Stored | None = None

    def _writer(self, send: Send) -> AnswerWriter:
        return NamedEventWriter(send, self._failed)

    def _prompt_field(self, call: Any) -> str:
        return "input"

    async def _answer(self, call: Any, writer: AnswerWriter) -> None:
        self._begin(call)
        if not call.asked.background or self._stored is None or self._made is None:
            return await super()._answer(call, writer)
        behind = self._behind(call)
        self._stored.making = asyncio.create_task(behind.run_behind(call))
        # Start it before its id is known, since a task cancelled before its start records nothing.
        await asyncio.sleep(0)
        await writer.whole(self._made.body("queued"), {})

    def _begin(self, call: ResponseCall) -> None:
        head = self._id, self._context.model_names[0], self._fingerprint, self._created
        self._made = ResponseObject(call, *head)
        if call.stores:
            owner = tenant_of(self._scope).owner
            self._stored = Stored(self._id, owner, self._made.body("in_progress"), _encode(call.input))
            if call.stream or call.asked.background:  # otherwise its id is known when it has ended
                self._store.add(self._stored)

    def _behind(self, call: ResponseCall) -> Responses:
        """This call as a background one, which no connection waits for, with a log summary of its own."""
        scope = dict(self._scope)
        request_log.begin(scope)
        behind = Responses(self._shared, self._parse, scope, self._store)
        behind._id, behind._made, behind._stored = self._id, self._made, self._stored
        request_log.note_call(scope, call.model or self._context.model_names[0], call.user)
        return behind

    async def run_behind(self, call: ResponseCall) -> None:
        """Generate the response; the result, or what went wrong, is stored and logged."""
        error: ApiError | None = None
        try:
            async with asyncio.timeout(self._context.server.request_timeout):
                await super()._answer(call, AnswerWriter(_nowhere))
            self._reason = self._account.finish_reason if self._account else "stop"
        except TimeoutError:
            message = "the request took longer than --request-timeout, and was ended"
            error = ApiError(503, message, code="request_timeout")
        except CutOffError:
            error = stop_error()
        except asyncio.CancelledError:
            self._reason = "abort"
        except Exception as unexpected:
            error = api_error(unexpected)
            if error.code == "internal_error":
                logger.exception("request %s: an unexpected error", self._id)
        if error is not None:
            self._error = error.message
            self._shared.count_refused(error)
        self._finish(error)
        self._end()
        if self._context.server.log_requests:
            log_request(logger, self._summary)

    def _end(self) -> None:
        if self._stored is not None and not self._stored.done.is_set() and self._stored.making is None:
            if self._account is None:  # it was refused
                self._store.drop(self._stored)
            else:  # its client is gone
                self._finish(None)
        super()._end()

    def _failed(self, error: ApiError) -> list[bytes]:
        """The event that ends a stream with an error."""
        if self._made is None:
            return [_encode(error.stream_body("/v1/responses"))]
        self._finish(error)
        return [self._made.event("response.failed", response=msgspec.Raw(self._made.body("failed", error=error)))]

    def _finish(self, error: ApiError | None) -> None:
        """End a response that did not complete, with what it has."""
        if self._stored is not None and self._made is not None and not self._stored.done.is_set():
            status = "failed" if error is not None else "cancelled"
            self._store.end(self._stored, self._made.body(status, error=error), self._made.items())

    def _responder(self, call: Any) -> Responder:
        if self._made is None:
            raise RuntimeError("a response that was not begun")
        return ResponsesResponder(self._made, self._store, self._stored)


class InputTokens(Document):
    """One call of POST /v1/responses/input_tokens."""

    async def _document(self, call: Any) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": await self._count(call)}


async def _nowhere(message: Message) -> None:
    """Discards output: responses in the background are read from the store."""


class ResponseObject:
    """A response as it grows.

    Args:
        call: its request. model: the model's name. fingerprint: `system_fingerprint`, as in the chat route.
        created: Unix time in whole seconds.

    Attributes:
        sequence: the next event's number.
    """

    def __init__(
        self, call: ResponseCall, response_id: str, model: str, fingerprint: str, created: int | None = None
    ) -> None:
        asked = call.asked
        self.blocks = Blocks({name for name, tool in call.called.items() if tool.custom})
        self._call = call
        self._suffix = response_id.removeprefix("resp_")
        self.sequence = 0
        self._usage: dict[str, Any] | None = None
        self._head = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()) if created is None else created,
            "model": model,
            "background": bool(asked.background),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": call.stores,
            "temperature": call.params.temperature,
            "text": {"format": asked.text.format if asked.text else {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": 0,
            "top_p": call.params.top_p,
            "truncation": "disabled",
            "user": call.user,
            "seed": call.params.seed,
            "system_fingerprint": fingerprint,
        }

    def body(self, status: str, incomplete: str | None = None, error: ApiError | None = None) -> bytes:
        """Its JSON."""
        ends = status not in ("queued", "in_progress")
        output = [self.item(block, self._status_of(block, status)) for block in self.blocks.blocks] if ends else []
        return _encode(
            {
                **self._head,
                "status": status,
                "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
                "incomplete_details": None if incomplete is None else {"reason": incomplete},
                "output": output,
                "usage": self._usage,
            }
        )

    def items(self) -> bytes:
        """The JSON of all items up to its end, for a response that continues it."""
        output = _encode([self.item(block, "completed") for block in self.blocks.blocks])
        return _encode([*self._call.items, *msgspec.json.decode(output, type=list[Item])])

    def _status_of(self, block: Block, status: str) -> str:
        last = block is self.blocks.blocks[-1]
        return "completed" if status == "completed" or not last else "incomplete"

    def item(self, block: Block, status: str, *, begins: bool = False) -> dict[str, Any]:
        """A block as an item of the output; one that begins has no text yet, since clients append what follows."""
        text = "" if begins else block.text
        match block.kind:
            case "text":
                content = [_part(block, text)] if text else []
                head = {"id": self.id_of(block), "type": "message", "role": "assistant", "status": status}
                return {**head, "content": content}
            case "reasoning":
                content = [_part(block, text)] if text else []
                head = {"id": self.id_of(block), "type": "reasoning", "status": status}
                return {**head, "summary": [], "content": content}
            case "tool":
                kind, field = _CALLS[block.custom]
                head = {"id": self.id_of(block), "type": kind, "status": status}
                return {**head, "call_id": block.id, **self.name_of(block), field: text}

    def name_of(self, block: Block) -> dict[str, Any]:
        """A call's tool, as its client knows it."""
        tool = self._call.called.get(block.name)
        if tool is None or tool.namespace is None:
            return {"name": block.name}
        return {"name": tool.name, "namespace": tool.namespace}

    def id_of(self, block: Block) -> str:
        """An item's id."""
        return f"{_PREFIXES['custom' if block.custom else block.kind]}_{self._suffix}_{block.index}"

    def count(self, output: RequestOutput, choice: CompletionOutput) -> None:
        """Update the usage."""
        prompt, tokens = len(output.prompt_token_ids), len(choice.token_ids)
        self._usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + tokens,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event of its stream."""
        made = _encode({"type": kind, "sequence_number": self.sequence, **fields})
        self.sequence += 1
        return made


class ResponsesResponder(Responder):
    """Builds the response and its events, the last of which has the usage, and stores it."""

    def __init__(self, made: ResponseObject, store: ResponseStore, stored: Stored | None) -> None:
        self._made, self._store, self._stored = made, store, stored
        self._begun = False

    @property
    def num_events(self) -> int:
        """Events of the stream so far."""
        return self._made.sequence

    @num_events.setter
    def num_events(self, number: int) -> None:
        self._made.sequence = number

    def full(self, outputs: list[RequestOutput]) -> bytes:
        [choice] = outputs[0].outputs
        self._made.blocks.take(choice)
        return self._ended(outputs[0], choice)[1]

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        [choice] = output.outputs
        event, told = self._made.event, []
        if not self._begun:
            self._begun = True
            now = msgspec.Raw(self._made.body("in_progress"))
            told += [event(f"response.{what}", response=now) for what in ("created", "in_progress")]
        news = self._made.blocks.take(choice)
        cut = choice.finish_reason not in (None, "stop")
        for one in news:
            told += self._events(one, "incomplete" if cut and one is news[-1] else "completed")
        if choice.completed:
            status, body = self._ended(output, choice)
            kind = "response.completed" if status == "completed" else "response.incomplete"
            told.append(event(kind, response=msgspec.Raw(body)))
        return told

    def _ended(self, output: RequestOutput, choice: CompletionOutput) -> tuple[str, bytes]:
        """The response at its end: its status, and its JSON."""
        self._made.count(output, choice)
        status = {"stop": "completed", "length": "incomplete"}.get(choice.finish_reason or "", "cancelled")
        body = self._made.body(status, "max_output_tokens" if status == "incomplete" else None)
        if self._stored is not None:
            self._store.end(self._stored, body, self._made.items())
        return status, body

    def _events(self, news: News, status: str) -> list[bytes]:
        """The events of one piece of news. `status`: how the block ends, if it does."""
        block, made, event = news.block, self._made, self._made.event
        at = {"item_id": made.id_of(block), "output_index": block.index}
        inner = {**at, "content_index": 0}
        name = _DELTAS["custom" if block.custom else block.kind]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if news.what == "more":
            return [event(f"{name}.delta", **(at if block.kind == "tool" else inner), delta=news.text, **logprobs)]
        if news.what == "begin":
            item = made.item(block, "in_progress", begins=True)
            told = [event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "tool":
                told.append(event("response.content_part.added", **inner, part=_part(block, "")))
            return told
        if block.kind == "tool":
            named = {} if block.custom else made.name_of(block)
            told = [event(f"{name}.done", **at, **named, **{_CALLS[block.custom][1]: block.text})]
        else:
            told = [event(f"{name}.done", **inner, text=block.text, **logprobs)]
            told.append(event("response.content_part.done", **inner, part=_part(block, block.text)))
        return [
            *told,
            event("response.output_item.done", output_index=block.index, item=made.item(block, status)),
        ]


_CALLS = {False: ("function_call", "arguments"), True: ("custom_tool_call", "input")}
"""A call's type of item, and the field of its text, by whether its tool is a custom one."""

_PREFIXES = {"text": "msg", "reasoning": "rs", "tool": "fc", "custom": "ctc"}
_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "tool": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def cancel(shared: Shared, store: ResponseStore, response_id: str, owner: str) -> bytes:
    """Cancel a response in progress, and return it; one that has ended is unchanged.

    Raises:
        ApiError: there is none of this id, or it does not end.
    """
    stored = store.find(response_id, owner)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            while not stored.done.is_set():
                if not await shared.context.client.abort_named(response_id, owner) and stored.making is not None:
                    stored.making.cancel()  # its prompt is still being prepared
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stored.done.wait(), 0.1)
    if not stored.done.is_set():
        raise ApiError(503, "the response was not cancelled in time; try again", code="cancel_timeout")
    return stored.answer
