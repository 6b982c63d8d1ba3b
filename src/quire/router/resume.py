"""Resuming a stream on another server: the part that the client already has is cut from the second stream.

A Quire server generates the same tokens for the same request, and so the same texts; only chunk boundaries differ,
since they depend on timing. So the characters of each text (content, reasoning, a call's arguments), tokens and
log-probabilities that were sent are counted per choice, and as many are dropped from the second stream. Events are
parsed only when that happens, or when many of them have accumulated.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

KEPT_BYTES = 64 << 10
"""Bytes of events that may accumulate before they are counted."""

DELTA_TEXTS = "content", "reasoning", "reasoning_content"
"""Texts of a chat's deltas."""

DONE = b"[DONE]"
EVENT_END = b"\n\n"


class CannotResumeError(Exception):
    """The second stream does not continue the first one; the message says why, for clients."""


@dataclass(slots=True)
class _Choice:
    """How much of a choice the client has.

    Attributes:
        characters: of each text, by the names of `_texts`.
        tokens: of `token_ids`.
    """

    ended: bool = False
    characters: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    logprobs: int = 0

    def count(self, choice: dict[str, Any]) -> None:
        """Count what a chunk adds."""
        self.ended = self.ended or choice.get("finish_reason") is not None
        for name, part, key in _texts(choice):
            self.characters[name] += len(part[key])
        self.tokens += len(choice.get("token_ids") or ())
        self.logprobs += len(_logprobs(choice))


def payloads(data: bytes) -> list[bytes]:
    """The data of whole events; comments have none."""
    return [event[6:] for event in data.split(EVENT_END) if event.startswith(b"data: ")]


class StreamPosition:
    """How much of a stream has been sent to the client.

    Attributes:
        has_sent: something has been sent.
        has_finished: the last event has been sent.
    """

    def __init__(self) -> None:
        self.has_sent = False
        self.has_finished = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}  # fields that all events of the stream share
        self._has_usage = False  # the event without choices was sent

    def sent(self, events: bytes) -> None:
        """Take note of whole events that were sent."""
        self.has_sent = True
        self._kept.append(events)
        self._kept_bytes += len(events)
        if events.endswith(b"data: [DONE]\n\n"):
            self.has_finished = True
        if self._kept_bytes > KEPT_BYTES:
            self._count()

    def _count(self) -> None:
        data, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        for payload in payloads(data):
            if payload != DONE:
                self._count_one(msgspec.json.decode(payload))

    def _count_one(self, event: dict[str, Any]) -> None:
        for name in ("id", "created", "system_fingerprint"):
            self._head.setdefault(name, event.get(name))
        self._has_usage = self._has_usage or event.get("choices") == []
        for choice in event.get("choices", ()):
            self._choices.setdefault(choice["index"], _Choice()).count(choice)

    def follow(self) -> Continuation:
        """A `Continuation` that cuts what has been sent from a second stream."""
        self._count()
        return Continuation(self._head, copy.deepcopy(self._choices), self._has_usage)


class Continuation:
    """Cuts from a stream the part that has been sent already.

    Args:
        had: what has been sent of each choice; counted down as the stream repeats it.
        had_usage: the event with the usage of the whole response has been sent.
    """

    def __init__(self, head: dict[str, Any], had: dict[int, _Choice], had_usage: bool = False) -> None:
        self._head, self._left, self._had_usage = head, had, had_usage

    def events(self, data: bytes) -> bytes:
        """The part of these whole events that is new to the client.

        Raises:
            CannotResumeError: the second server has another model or other kernels.
        """
        out = []
        for payload in payloads(data):
            if payload != DONE:
                event = msgspec.json.decode(payload)
                if "error" not in event and not self._cut(event):
                    continue
                payload = msgspec.json.encode(event)
            out.append(b"data: %b\n\n" % payload)
        return b"".join(out)

    def _cut(self, event: dict[str, Any]) -> bool:
        """Remove from the event what the client has; whether anything is left."""
        print_of = self._head.get("system_fingerprint")
        if print_of is not None and event.get("system_fingerprint") != print_of:
            raise CannotResumeError("the server died, and the others compute in another way; try again")
        for name in ("id", "created"):
            if self._head.get(name) is not None:
                event[name] = self._head[name]
        choices = event.get("choices", ())
        event["choices"] = [choice for choice in choices if self._cut_choice(choice)]
        return bool(event["choices"]) or not (choices or self._had_usage)

    def _cut_choice(self, choice: dict[str, Any]) -> bool:
        """The same for one choice."""
        left = self._left.get(choice["index"])
        if left is None:
            return True
        for name in ("prompt_token_ids", "prompt_logprobs"):  # of the first chunk
            choice.pop(name, None)
        for name, part, key in _texts(choice):
            if cut := min(left.characters[name], len(part[key])):
                part[key] = part[key][cut:]
                left.characters[name] -= cut
        if tokens := choice.get("token_ids"):
            cut = min(left.tokens, len(tokens))
            choice["token_ids"] = tokens[cut:]
            left.tokens -= cut
        cut = min(left.logprobs, len(_logprobs(choice)))
        _cut_logprobs(choice, cut)
        left.logprobs -= cut
        if choice.get("delta"):
            _cut_delta(choice["delta"], left)
        ends = choice.get("finish_reason") is not None and not left.ended
        return bool(choice.get("text") or choice.get("delta") or choice.get("token_ids") or _logprobs(choice) or ends)


def _texts(choice: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The texts that a chunk adds to, each by a name, and the object and the key of what it adds."""
    if "text" in choice:
        yield "text", choice, "text"
    delta = choice.get("delta") or {}
    for name in DELTA_TEXTS:
        if delta.get(name) is not None:
            yield name, delta, name
    for call in delta.get("tool_calls") or ():
        yield _arguments(call), call["function"], "arguments"


def _arguments(call: dict[str, Any]) -> str:
    """The name of the text of a call's arguments."""
    return f"tool_calls[{call['index']}]"


def _cut_delta(delta: dict[str, Any], had: _Choice) -> None:
    """Remove from a delta whose texts were cut the rest of what the client has, and what is empty."""
    delta.pop("role", None)
    for name in DELTA_TEXTS:
        if not delta.get(name):
            delta.pop(name, None)
    calls = delta.pop("tool_calls", None) or []
    for call in calls:
        if _arguments(call) in had.characters:  # the client has its beginning
            call["function"] = {"arguments": call["function"]["arguments"]}
            call.pop("id", None)
            call.pop("type", None)
    if new := [call for call in calls if "id" in call or call["function"]["arguments"]]:
        delta["tool_calls"] = new


def _logprobs(choice: dict[str, Any]) -> list[Any]:
    """The log-probabilities of a chat (a list of entries) or a completion (a list of tokens)."""
    found = choice.get("logprobs") or {}
    return found.get("content") or found.get("tokens") or []


def _cut_logprobs(choice: dict[str, Any], count: int) -> None:
    found = choice.get("logprobs")
    if found:
        for name, entries in found.items():
            if isinstance(entries, list):
                found[name] = entries[count:]
