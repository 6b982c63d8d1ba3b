"""POST /v1/messages: a chat in Anthropic's interface. See `messages_protocol.py` for requests."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Send

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server.blocks import Block, Blocks, News
from quire.server.errors import ANTHROPIC
from quire.server.generation import Document, Generation
from quire.server.messages_protocol import INCOMPLETE
from quire.server.protocol import ChatCall
from quire.server.responses import Responder
from quire.server.streaming import AnswerWriter, NamedEventWriter

_encode = msgspec.json.Encoder().encode


class Messages(Generation):
    """One call of POST /v1/messages."""

    def _writer(self, send: Send) -> AnswerWriter:
        return NamedEventWriter(send, lambda error: [_encode(error.body(ANTHROPIC))])

    def _responder(self, call: Any) -> Responder:
        return MessagesResponder(call, self._id, self._context.model_names[0], self._fingerprint)


class CountTokens(Document, Messages):
    """One call of POST /v1/messages/count_tokens."""

    async def _document(self, call: Any) -> dict[str, Any]:
        return {"input_tokens": await self._count(call)}


class MessagesResponder(Responder):
    """Builds the response or the events of one call, which has one choice. The event `message_delta` has the usage."""

    def __init__(self, call: ChatCall, response_id: str, model: str, fingerprint: str = "") -> None:
        self._params: SamplingParams = call.params
        self._head = {"id": response_id, "type": "message", "role": "assistant", "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._blocks = Blocks()
        self._begun = False

    def full(self, outputs: list[RequestOutput]) -> bytes:
        [choice] = outputs[0].outputs
        self._blocks.take(choice)
        content = [_content(block, whole=True) for block in self._blocks.blocks]
        return _encode(
            {
                **self._head,
                "content": content,
                **self._stop(outputs[0], choice),
                "usage": _usage(outputs[0], len(choice.token_ids)),
            }
        )

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        [choice] = output.outputs
        made: list[bytes] = []
        if not self._begun:
            self._begun = True
            nothing: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(output, 0),
            }
            made.append(_event("message_start", message={**self._head, **nothing}))
        made += [_block_event(news) for news in self._blocks.take(choice)]
        if choice.completed:
            usage = _usage(output, len(choice.token_ids))
            made.append(_event("message_delta", delta=self._stop(output, choice), usage=usage))
            made.append(_event("message_stop"))
        return made

    def _stop(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            full = output.clamped_from is not None
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif choice.finish_reason == "abort":
            reason = "pause_turn"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        elif any(block.kind == "tool" for block in self._blocks.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _content(block: Block, whole: bool) -> dict[str, Any]:
    """A content block; one that begins has no text yet."""
    text = block.text if whole else ""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "tool":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    """The arguments of a tool call: an object; if the reply was cut off within them, what there is."""
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {INCOMPLETE: text}
    return found


def _block_event(news: News) -> bytes:
    block = news.block
    if news.what == "begin":
        return _event("content_block_start", index=block.index, content_block=_content(block, whole=False))
    if news.what == "end":
        return _event("content_block_stop", index=block.index)
    kind, field = _DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, field: news.text})


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool": ("input_json_delta", "partial_json"),
}


def _event(kind: str, **fields: Any) -> bytes:
    return _encode({"type": kind, **fields})


def _usage(output: RequestOutput, tokens: int) -> dict[str, int]:
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": tokens,
    }
