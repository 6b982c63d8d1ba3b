"""What a chat's reply is made of: reasoning, content and tool calls, as events in the order in which they came.

`ReplyParser` (`reply_parser.py`) makes events of a reply's tokens while they come; they add up to a `Reply`. Whoever
tells a client of a reply reads events, by a counter of its own: `CompletionOutput.events` only grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call begins; those of one reply are numbered from 0, and do not overlap.

    Attributes:
        id: what the message with its result refers to; 9 letters and digits, or what the model calls it.
        name: of one of the request's tools.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments, which are a JSON object when the reply has ended by itself."""

    index: int
    text: str


ReplyEvent = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; the arguments are JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A whole reply, or as much as there is of it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[ReplyEvent]) -> Reply:
        """What the events add up to."""
        reply = cls()
        for event in events:
            reply.add(event)
        return reply

    def add(self, event: ReplyEvent) -> None:
        """Take in one more event."""
        match event:
            case ReasoningText(text):
                self.reasoning += text
            case ContentText(text):
                self.content += text
            case ToolCallBegin(_, id, name):
                self.tool_calls.append(ToolCall(id, name))
            case ToolCallArguments(index, text):
                self.tool_calls[index].arguments += text
