"""Turns outputs into the JSON that clients get: whole responses, and the chunks of a stream.

The constant parts of a chunk are made once. Counters here find what is new in the growing output, so it does not matter
how often, or how late, a stream asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server.chat_reply import deltas, finish_reason, message, news
from quire.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from quire.server.protocol import ChatCall, CompletionCall

_encode = msgspec.json.Encoder().encode
CallT = TypeVar("CallT", CompletionCall, ChatCall)


class _Sent:
    """How much of a choice has been sent."""

    __slots__ = ("begun", "characters", "ended", "events", "offset", "tokens")

    def __init__(self) -> None:
        self.begun = False
        self.ended = False
        self.characters = 0
        self.events = 0
        self.tokens = 0
        self.offset = 0  # of the next token in the returned text


class Responder(ABC):
    """Builds the response of one call: a document, or the chunks of a stream.

    Attributes:
        takes_long: building the document may take long, so that it is built in a thread.
        num_events: events so far, where they are numbered.
    """

    takes_long = False
    num_events = 0

    @abstractmethod
    def full(self, outputs: list[RequestOutput]) -> bytes:
        """The whole response.

        Args:
            outputs: one per prompt, in order, finished and without errors.
        """

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """What is new of a prompt's output since the last call for it; nothing if responses are never streamed."""
        return []

    def closing(self, outputs: list[RequestOutput]) -> list[bytes]:
        """Chunks after the last ones of all prompts."""
        return []


class OpenAIResponder(Responder, Generic[CallT]):
    """Builds responses in the format of OpenAI's completions and chats.

    Args:
        response_id: its id. created: Unix time in whole seconds. model: the model's name.
        system_fingerprint: identifies what tokens depend on besides the request.
        token_text: a token's text by its id, for tokens without one. token_bytes: its bytes.
        kv_transfer: where other engines find the prompt's blocks, for calls that are decoded elsewhere.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        call: CallT,
        response_id: str,
        created: int,
        model: str,
        system_fingerprint: str,
        token_text: Callable[[int], str],
        token_bytes: Callable[[int], bytes],
        kv_transfer: Mapping[str, Any],
    ) -> None:
        self._call: CallT = call
        self._token_text, self._token_bytes = token_text, token_bytes
        self._fields = {
            "id": response_id,
            "object": self.kind,
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
            "seed": call.params.seed,
        }
        if (call.params.kv_transfer_params or {}).get("do_remote_decode") and kv_transfer:
            told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": None}
            self._fields["kv_transfer_params"] = told | dict(kv_transfer)
        self._head = _encode({**self._fields, "object": self.chunk_kind})[:-1]
        self._tail = b',"usage":null}' if call.include_usage else b"}"
        self._sent: dict[int, _Sent] = {}
        self.takes_long = call.params.logprobs is not None or call.params.prompt_logprobs is not None

    def full(self, outputs: list[RequestOutput]) -> bytes:
        choices = [
            self._choice(self._index(number, choice), output, choice)
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return _encode({**self._fields, **self._extras(outputs[0]), "choices": choices, "usage": usage(outputs)})

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """Chunks of one choice each. A choice's last chunk has its `finish_reason`; a choice that failed gets none,
        since its stream ends with an error.
        """
        scored = output.prompt_logprobs
        if scored is not None and len(scored) < len(output.prompt_token_ids) and not output.finished:
            return []  # the response begins with them, and they are not complete
        made: list[bytes] = []
        for choice in output.outputs:
            index = self._index(prompt_index, choice)
            sent = self._sent.get(index)
            if sent is None:
                sent = self._sent[index] = _Sent()
            if not sent.ended:
                self._add_chunks(made, index, sent, output, choice)
        return made

    def closing(self, outputs: list[RequestOutput]) -> list[bytes]:
        """With `include_usage`, a chunk that has no choices, but the usage."""
        if not self._call.include_usage:
            return []
        return [b'%b,"choices":[],"usage":%b}' % (self._head, _encode(usage(outputs)))]

    def _index(self, prompt_index: int, choice: CompletionOutput) -> int:
        return prompt_index * self._call.params.n + choice.index

    def _wrap(self, choice: bytes, output: RequestOutput, tokens: int, extras: bytes = b"") -> bytes:
        """One choice's JSON as a chunk. `tokens`: how many of the choice have been sent with it."""
        tail = self._tail
        if self._call.continuous_usage:
            tail = b',"usage":%b}' % _encode(_usage(len(output.prompt_token_ids), tokens, output.cached_tokens))
        return b'%b%b,"choices":[%b]%b' % (self._head, extras, choice, tail)

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The fields about a prompt, if they were requested: of each choice of a completion, or of a whole chat."""
        fields: dict[str, Any] = {}
        if (most := self._call.prompt_logprobs) is not None:
            entries = output.prompt_logprobs or ()
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_token_ids, entries, most)
        if self._call.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _extras(self, output: RequestOutput) -> dict[str, Any]:
        """Further fields of the whole response."""
        return {}

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def _add_chunks(
        self, made: list[bytes], index: int, sent: _Sent, output: RequestOutput, choice: CompletionOutput
    ) -> None:
        """Append the chunks with what is new in a choice, and count it as sent."""


class CompletionResponder(OpenAIResponder[CompletionCall]):
    """Responses of POST /v1/completions."""

    kind = chunk_kind = "text_completion"

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        prompt, logprobs = self._opening(output)
        self._add_logprobs(logprobs, choice, 0)
        return {
            "index": index,
            "text": prompt + choice.text,
            "logprobs": None if logprobs is None else logprobs.lists,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._prompt_fields(output),
            **({"token_ids": choice.token_ids} if self._call.return_token_ids else {}),
        }

    def _add_chunks(
        self, made: list[bytes], index: int, sent: _Sent, output: RequestOutput, choice: CompletionOutput
    ) -> None:
        call, text = self._call, choice.text[sent.characters :]
        num_tokens = len(choice.token_ids)
        shows_tokens = call.return_token_ids or call.params.logprobs is not None
        opens = not sent.begun and (call.echo or call.return_token_ids or call.prompt_logprobs is not None)
        if not (text or choice.completed or opens or (shows_tokens and num_tokens > sent.tokens)):
            return
        logprobs, fields = b"null", b""
        if shows_tokens or opens:
            prompt, lists = self._opening(output) if not sent.begun else ("", self._lists(sent.offset))
            text = prompt + text
            self._add_logprobs(lists, choice, sent.tokens)
            if lists is not None:
                logprobs, sent.offset = _encode(lists.lists), lists.offset
            more = self._prompt_fields(output) if not sent.begun else {}
            if call.return_token_ids:
                more["token_ids"] = choice.token_ids[sent.tokens :]
            fields = _members(more)
        made.append(
            self._wrap(
                b'{"index":%d,"text":%b,"logprobs":%b%b%b}'
                % (index, _encode(text), logprobs, _ending(choice, lambda one: one.finish_reason), fields),
                output,
                num_tokens,
            )
        )
        sent.begun, sent.ended = True, choice.finish_reason is not None
        sent.characters, sent.tokens = len(choice.text), num_tokens

    def _lists(self, offset: int) -> CompletionLogprobs | None:
        most = self._call.params.logprobs
        return None if most is None else CompletionLogprobs(most, offset, self._token_text)

    def _opening(self, output: RequestOutput) -> tuple[str, CompletionLogprobs | None]:
        """What precedes a choice's own text, and the lists of log-probabilities that begin with it."""
        lists = self._lists(0)
        if not self._call.echo:
            return "", lists
        text = output.prompt
        if text is None:
            text = "".join(map(self._token_text, output.prompt_token_ids))
        if lists is not None:
            lists.add_prompt(text, output.prompt_token_ids, output.prompt_logprobs or ())
        return text, lists

    @staticmethod
    def _add_logprobs(lists: CompletionLogprobs | None, choice: CompletionOutput, first: int) -> None:
        if lists is not None:
            for token, entry in zip(choice.token_ids[first:], (choice.logprobs or [])[first:], strict=False):
                lists.add(token, entry)


class ChatResponder(OpenAIResponder[ChatCall]):
    """Responses of POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _extras(self, output: RequestOutput) -> dict[str, Any]:
        return self._prompt_fields(output)

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": message(choice.reply),
            "logprobs": self._logprobs(choice, 0),
            "finish_reason": finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._call.return_token_ids else {}),
        }

    def _add_chunks(
        self, made: list[bytes], index: int, sent: _Sent, output: RequestOutput, choice: CompletionOutput
    ) -> None:
        call, new = self._call, deltas(news(choice, sent.events, sent.characters))
        num_tokens = len(choice.token_ids)
        if not sent.begun:
            sent.begun = True
            made.append(self._role_chunk(index, output))
        shows_tokens = call.return_token_ids or call.params.logprobs is not None
        body = b'{"index":%d,"delta":%b,"logprobs":%b%b%b}'
        for early in new[:-1]:
            chunk = body % (index, _encode(early), b"null", b',"finish_reason":null', b"")
            made.append(self._wrap(chunk, output, num_tokens))
        if new or choice.completed or (shows_tokens and num_tokens > sent.tokens):
            logprobs, fields = b"null", b""
            if shows_tokens:
                logprobs = _encode(self._logprobs(choice, sent.tokens))
                if call.return_token_ids:
                    fields = _members({"token_ids": choice.token_ids[sent.tokens :]})
            delta = _encode(new[-1]) if new else b"{}"
            chunk = body % (index, delta, logprobs, _ending(choice, finish_reason), fields)
            made.append(self._wrap(chunk, output, num_tokens))
            sent.characters, sent.events, sent.tokens = len(choice.text), len(choice.events or ()), num_tokens
        sent.ended = choice.finish_reason is not None

    def _role_chunk(self, index: int, output: RequestOutput) -> bytes:
        """A choice's first chunk, with the role. The first choice's also has what was requested about the prompt."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._wrap(choice, output, 0, _members(self._extras(output)) if index == 0 else b"")

    def _logprobs(self, choice: CompletionOutput, first: int) -> dict[str, Any] | None:
        most = self._call.params.logprobs
        if most is None:
            return None
        ids, entries = choice.token_ids[first:], (choice.logprobs or [])[first:]
        return chat_logprobs(ids, entries, most, self._token_text, self._token_bytes)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Usage of a whole call. A prompt counts once, however many choices it has."""
    choices = [choice for output in outputs for choice in output.outputs]
    told = _usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(choice.token_ids) for choice in choices),
        sum(output.cached_tokens for output in outputs),
    )
    if any(choice.events is not None for choice in choices):
        reasoning = sum(choice.reasoning_tokens for choice in choices)
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return told


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _ending(choice: CompletionOutput, reason: Callable[[CompletionOutput], str | None]) -> bytes:
    """The fields of a chunk that say whether its choice has ended, and why."""
    if not choice.completed:
        return b',"finish_reason":null'
    return b',"finish_reason":%b,"stop_reason":%b' % (_encode(reason(choice)), _encode(choice.stop_reason))


def _members(fields: dict[str, Any]) -> bytes:
    """Fields as JSON to append to an object's members."""
    return b"," + _encode(fields)[1:-1] if fields else b""
