"""Resuming a stream on another server: the part that the client already has is cut from the second stream.

A Quire server generates the same tokens for the same request, and so the same text; only chunk boundaries differ, since
they depend on timing. So the characters, tokens and log-probabilities sent are counted per choice, and as many are
dropped from the second stream. Events are parsed only when that happens, or when many of them have accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

KEPT_BYTES = 64 << 10
"""Bytes of events that may accumulate before they are counted."""

DONE = b"[DONE]"
EVENT_END = b"\n\n"


class CannotResumeError(Exception):
    """The second stream does not continue the first one; the message says why, for clients."""


@dataclass(slots=True)
class _Choice:
    """How much of a choice the client has."""

    begun: bool = False
    ended: bool = False
    characters: int = 0
    tokens: int = 0  # of `token_ids`
    logprobs: int = 0


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
        for choice in event.get("choices", ()):
            counted = self._choices.setdefault(choice["index"], _Choice())
            counted.begun = True
            counted.ended = counted.ended or choice.get("finish_reason") is not None
            counted.characters += len(_text(choice))
            counted.tokens += len(choice.get("token_ids") or ())
            counted.logprobs += len(_logprobs(choice))

    def follow(self) -> Continuation:
        """A `Continuation` that cuts what has been sent from a second stream."""
        self._count()
        return Continuation(self._head, self._choices)


class Continuation:
    """Cuts from a stream the part that has been sent already."""

    def __init__(self, head: dict[str, Any], had: dict[int, _Choice]) -> None:
        self._head = head
        self._had = {index: replace(one) for index, one in had.items()}
        self._seen: dict[int, _Choice] = {}

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
        return bool(event["choices"]) or not choices

    def _cut_choice(self, choice: dict[str, Any]) -> bool:
        had = self._had.get(choice["index"])
        if had is None:
            return True
        seen = self._seen.setdefault(choice["index"], _Choice())
        is_opening = not seen.begun
        seen.begun = True
        text, tokens, logprobs = _text(choice), choice.get("token_ids"), _logprobs(choice)
        new_text = text[max(0, had.characters - seen.characters) :]
        _set_text(choice, new_text)
        if tokens is not None:
            choice["token_ids"] = tokens[max(0, had.tokens - seen.tokens) :]
            seen.tokens += len(tokens)
        cut = max(0, had.logprobs - seen.logprobs)
        _cut_logprobs(choice, cut)
        seen.characters += len(text)
        seen.logprobs += len(logprobs)
        if is_opening:  # fields of the first chunk only
            for name in ("prompt_token_ids", "prompt_logprobs"):
                choice.pop(name, None)
            choice.get("delta", {}).pop("role", None)
        ends = choice.get("finish_reason") is not None and not had.ended
        return bool(new_text or choice.get("token_ids") or _logprobs(choice) or ends)


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _set_text(choice: dict[str, Any], text: str) -> None:
    if "text" in choice:
        choice["text"] = text
    elif text:
        choice["delta"]["content"] = text
    else:
        (choice.get("delta") or {}).pop("content", None)


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
