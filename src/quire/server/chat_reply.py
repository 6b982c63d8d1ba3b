"""A reply in OpenAI's chat format: deltas of a stream, and whole messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.engine.outputs import CompletionOutput
from quire.text.reply import ContentText, ReasoningText, Reply, ReplyEvent, ToolCallArguments, ToolCallBegin, joined


def news(choice: CompletionOutput, events: int, characters: int) -> Sequence[ReplyEvent]:
    """A choice's events after the first `events`; if its reply is not parsed, its text after `characters`."""
    if choice.events is not None:
        return choice.events[events:]
    text = choice.text[characters:]
    return [ContentText(text)] if text else []


def deltas(events: Iterable[ReplyEvent]) -> list[dict[str, Any]]:
    """A delta for each event; neighbours of the same kind are joined."""
    made: list[dict[str, Any]] = []
    last: ReplyEvent | None = None
    for event in joined(events):
        match event, last:
            case ContentText(text), _:
                made.append({"content": text})
            case ReasoningText(text), _:
                made.append(reasoning_fields(text))
            case ToolCallBegin(index, id, name), _:
                function = {"name": name, "arguments": ""}
                made.append({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
            case ToolCallArguments(_, text), ToolCallBegin():
                made[-1]["tool_calls"][0]["function"]["arguments"] += text
            case ToolCallArguments(index, text), _:
                made.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        last = event
    return made


def message(reply: Reply) -> dict[str, Any]:
    """The assistant's message."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    return {
        "role": "assistant",
        "content": None if calls and not reply.content else reply.content,
        "refusal": None,
        **(reasoning_fields(reply.reasoning) if reply.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def reasoning_fields(text: str) -> dict[str, Any]:
    """Reasoning under its current name, and under the one that older clients read."""
    return {"reasoning": text, "reasoning_content": text}


def finish_reason(choice: CompletionOutput) -> str | None:
    """ "tool_calls" instead of "stop" if the reply calls tools."""
    calls = any(isinstance(event, ToolCallBegin) for event in choice.events or ())
    return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason
