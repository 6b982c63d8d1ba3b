"""A stream that goes on at another server: what the client has already is cut from what that one says.

A Quire server gives the same request the same tokens, so the same text; only where chunks end differs, as that depends
on time. So what was sent is counted by choice, in characters, tokens and log-probabilities, and as much is dropped from
the second stream. Events are read only when this happens, or when many of them have been kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

KEPT_BYTES = 64 << 10
"""Of events that were sent and not counted yet."""

DONE = b"[DONE]"
EVENT_END = b"\n\n"


class CannotResumeError(Exception):
    """The second stream is not the continuation of the first; the text says why, for clients."""


@dataclass(slots=True)
class _Choice:
    """What the client has of a choice."""

    begun: bool = False
    ended: bool = False
    characters: int = 0
    tokens: int = 0  # of `token_ids`
    logprobs: int = 0


def payloads(data: bytes) -> list[bytes]:
    """What whole events carry; comments have nothing."""
    return [event[6:] for event in data.split(EVENT_END) if event.startswith(b"data: ")]


class StreamPosition:
    """How much of a stream has been sent.

    Attributes:
        has_sent: anything at all.
        has_finished: the last event was among it.
    """

    def __init__(self) -> None:
        self.has_sent = False
        self.has_finished = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}  # what all events of the stream have in common

    def sent(self, events: bytes) -> None:
        """Whole events were sent."""
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
        """For the stream that begins again."""
        self._count()
        return Continuation(self._head, self._choices)


class Continuation:
    """Cuts the beginning from a stream."""

    def __init__(self, head: dict[str, Any], had: dict[int, _Choice]) -> None:
        self._head = head
        self._had = {index: replace(one) for index, one in had.items()}
        self._seen: dict[int, _Choice] = {}

    def events(self, data: bytes) -> bytes:
        """What is new to the client of these whole events.

        Raises:
            CannotResumeError: another model or other kernels answer now.
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
        """Whether anything of the event is new; what is not is taken out."""
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
        if is_opening:  # what a first chunk tells once
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
    """A chat's list of entries, or a completion's list of tokens."""
    found = choice.get("logprobs") or {}
    return found.get("content") or found.get("tokens") or []


def _cut_logprobs(choice: dict[str, Any], count: int) -> None:
    found = choice.get("logprobs")
    if found:
        for name, entries in found.items():
            if isinstance(entries, list):
                found[name] = entries[count:]
