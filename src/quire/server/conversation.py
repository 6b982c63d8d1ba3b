"""The messages of a chat, and how its prompt ends.

JSON, sizes and support are checked here; what a chat template does with the messages is checked when it is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from quire.server.body import BodyFields, Shape, decode, has_more_strings, shorten, wrong_type, wrong_value
from quire.server.errors import invalid
from quire.server.fields import MESSAGE_UNSUPPORTED
from quire.server.limits import (
    MAX_NAME_LENGTH,
    MAX_REASONING_LENGTH,
    Limits,
)
from quire.server.thinking import Thinking

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages, and what chat templates get: OpenAI's "developer" is "system" elsewhere."""

STRINGS_PER_OBJECT = 8
"""Strings (names and values) of a message or text part: more than any client sends on average."""

_KNOWN = {
    "name": MAX_NAME_LENGTH,
    "tool_call_id": MAX_NAME_LENGTH,
    "reasoning": MAX_REASONING_LENGTH,
    "reasoning_content": MAX_REASONING_LENGTH,
}
"""Texts that a message may have besides its content, with their longest lengths."""

_MESSAGE = Shape(["role", "content", "tool_calls", *_KNOWN, *MESSAGE_UNSUPPORTED], "messages", num_required=1)
_TOOL_CALL = Shape(["id", "type", "function", "index"], "tool_calls")
_FUNCTION = Shape(["name", "arguments"], "function", num_required=2)
_PART = Shape(["type", "text"], "messages", num_required=1)


@dataclass(slots=True)
class Conversation:
    """A chat as chat templates get it.

    Attributes:
        thinking_token_budget, hints: see `Thinking`.
        ignored: unknown fields of messages, and others without effect.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]
    thinking_token_budget: int | None = None
    hints: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read_conversation(given: BodyFields, limits: Limits) -> Conversation:
    """The fields in `fields.CONVERSATION`.

    Raises:
        ApiError: one of them is missing, of the wrong type, not supported, too large, or at odds with another one.
    """
    goes_on = given.boolean("continue_final_message")
    opens = given.boolean("add_generation_prompt", default=not goes_on)
    if goes_on and opens:
        message = (
            "continue_final_message goes on with the last message and add_generation_prompt opens a new one; "
            "set one of them to false"
        )
        raise invalid(message, "continue_final_message")
    reader = _Reader(limits)
    messages = reader.read(given.raw("messages"))
    thinking = Thinking(given)
    ignored = [*reader.ignored, *thinking.ignored]
    return Conversation(messages, opens, goes_on, thinking.variables, thinking.budget, thinking.hints, ignored)


def message_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """UTF-8 bytes of all texts of messages."""
    return sum(len(text.encode()) for message in messages for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    called = [text for function in functions for text in (function["name"], function["arguments"])]
    return [*parts, *called, *(message[name] for name in _KNOWN if name in message)]


class _Reader:
    """Reads the messages of one request, within limits on their total size."""

    def __init__(self, limits: Limits) -> None:
        self.ignored: dict[str, None] = {}
        self._limits = limits
        self._text_left = limits.text
        self._parts_left = limits.content_parts

    def read(self, raw: Raw | None) -> list[dict[str, Any]]:
        if raw is None:
            raise invalid("messages is missing; it must be a list of messages", "messages", "missing_parameter")
        data = bytes(raw)
        most = self._limits.messages
        if has_more_strings(data, STRINGS_PER_OBJECT * (most + self._limits.content_parts)):
            raise invalid(
                f"messages has more than {most} messages or {self._limits.content_parts} text parts", "messages"
            )
        given = _MESSAGE.read_list(raw)
        if not given:
            raise invalid("messages is an empty list; give at least one message", "messages", "empty_prompt")
        if len(given) > most:
            raise invalid(f"messages has {len(given)} messages; at most {most} are allowed", "messages")
        return [self._message(f"messages[{index}]", fields) for index, fields in enumerate(given)]

    def _message(self, where: str, raw: dict[str, Raw]) -> dict[str, Any]:
        given = BodyFields(raw, f"{where}.")
        for name, harmless in MESSAGE_UNSUPPORTED.items():
            if given.has(name) and given.get(name) not in harmless:
                raise invalid(
                    f"{where}.{name} is not supported; leave it out", f"{where}.{name}", "unsupported_parameter"
                )
        role = given.text("role", MAX_NAME_LENGTH)
        if role not in ROLES:
            allowed = "one of " + ", ".join(ROLES)
            if "role" not in raw:
                raise invalid(f"{where}.role is missing; it must be {allowed}", f"{where}.role", "missing_parameter")
            raise wrong_value(f"{where}.role", role, allowed)
        calls = self._tool_calls(where, given.raw("tool_calls"))
        if calls and role != "assistant":
            raise invalid(f"{where}.tool_calls is for the assistant's messages; leave it out", f"{where}.tool_calls")
        # A message that only calls tools has no content; one that only reasons is null in vLLM's answers, and so is the
        # result of a tool that returns nothing.
        nothing = role in ("assistant", "tool") and "content" in raw
        silent = not given.has("content") and bool(calls or nothing)
        content = (None if role == "assistant" else "") if silent else self._content(where, given.raw("content"))
        message: dict[str, Any] = {"role": ROLES[role], "content": content, **({"tool_calls": calls} if calls else {})}
        for name, most in _KNOWN.items():
            text = given.text(name, most)
            if text is not None:
                message[name] = text
                self._count(text)
        self._ignore("messages[].", given, _MESSAGE)
        return message

    def _tool_calls(self, where: str, raw: Raw | None) -> list[dict[str, Any]]:
        calls = []
        for index, fields in enumerate(_TOOL_CALL.read_list(raw) if raw is not None else ()):
            place = f"{where}.tool_calls[{index}]"
            given = BodyFields(fields, f"{place}.")
            kind, told = given.text("type", MAX_NAME_LENGTH), given.raw("function")
            if kind not in (None, "function") or told is None:
                raise invalid(f"{place} must be a call of a function, with its name and arguments", place)
            function = BodyFields(_FUNCTION.read(told), f"{place}.function.")
            name = function.text("name", MAX_NAME_LENGTH)
            encoded = function.raw("arguments")
            arguments = "{}" if encoded is None else decode(encoded, where=f"{place}.function.arguments")
            if not name or not isinstance(arguments, str):
                raise invalid(f"{place}.function must have a name, and arguments as JSON text", f"{place}.function")
            self._count(name + arguments)
            called = {"name": name, "arguments": arguments}
            calls.append({"id": given.text("id", MAX_NAME_LENGTH) or "", "type": "function", "function": called})
        return calls

    def _content(self, where: str, raw: Raw | None) -> str | list[dict[str, str]]:
        param = f"{where}.content"
        if raw is None:
            raise invalid(
                f"{param} is missing; it must be a string or a list of text parts", param, "missing_parameter"
            )
        if bytes(memoryview(raw)[:1]) == b'"':
            text = decode(raw, where=param)
            self._count(text)
            return str(text)
        if bytes(memoryview(raw)[:1]) != b"[":
            raise invalid(f"{param} must be a string or a list of text parts", param, "invalid_type")
        parts = _PART.read_list(raw)
        self._parts_left -= len(parts)
        if self._parts_left < 0:
            raise invalid(f"messages has more than {self._limits.content_parts} text parts", param)
        if not parts:
            raise invalid(f"{param} is an empty list; give at least one text part", param)
        return [self._part(f"{param}[{index}]", part) for index, part in enumerate(parts)]

    def _part(self, where: str, raw: dict[str, Raw]) -> dict[str, str]:
        given = BodyFields(raw, f"{where}.")
        kind = given.text("type", MAX_NAME_LENGTH)
        if kind != "text":
            message = (
                f'{where} is of type {shorten(kind)}; only text is supported, as {{"type": "text", "text": "..."}}'
            )
            raise invalid(message, where, "unsupported_content")
        encoded = given.raw("text")
        text = None if encoded is None else decode(encoded, where=f"{where}.text")
        if not isinstance(text, str):
            raise wrong_type(f"{where}.text", text, "a string")
        self._count(text)
        self._ignore("messages[].content[].", given, _PART)
        return {"type": "text", "text": text}

    def _ignore(self, prefix: str, given: BodyFields, shape: Shape) -> None:
        """Unknown fields, each named once however many messages have it."""
        self.ignored.update((prefix + name, None) for name in given.unknown(shape.names, prefix=False))

    def _count(self, text: str) -> None:
        self._text_left -= len(text)
        if self._text_left < 0:
            raise invalid(f"messages have more than {self._limits.text} characters", "messages")
