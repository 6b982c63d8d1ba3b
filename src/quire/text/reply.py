"""Parts of a chat's reply (reasoning, content and tool calls), as events in their order.

`ReplyParser` (`reply_parser.py`) turns a reply's tokens into events as they are generated; they add up to a `Reply`.
A streaming consumer keeps its own index into `CompletionOutput.events`, which only grows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
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
    """The start of a call. Calls of a reply are numbered from 0, and do not overlap.

    Attributes:
        id: referred to by the message with its result; 9 letters and digits, or the id that the model wrote.
        name: the name of one of the request's tools.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments, which are a JSON object unless the reply was cut."""

    index: int
    text: str


ReplyEvent = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments


def joined(events: Iterable[ReplyEvent]) -> Iterator[ReplyEvent]:
    """The same events, with neighbours of a kind as one. A long reply has an event for each token, and adding texts one
    by one would take time that grows with the square of its length.
    """
    for (kind, index), some in itertools.groupby(events, lambda one: (type(one), getattr(one, "index", 0))):
        if kind is ToolCallBegin:
            yield from some
            continue
        text = "".join(one.text for one in some if not isinstance(one, ToolCallBegin))
        if kind is ToolCallArguments:
            yield ToolCallArguments(index, text)
        else:
            yield ReasoningText(text) if kind is ReasoningText else ContentText(text)


@dataclass(slots=True)
class ToolCall:
    """A complete call; the arguments are JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A reply, complete or so far."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[ReplyEvent]) -> Reply:
        """The reply that the events add up to."""
        reply = cls()
        for event in joined(events):
            reply.add(event)
        return reply

    def add(self, event: ReplyEvent) -> None:
        """Append an event."""
        match event:
            case ReasoningText(text):
                self.reasoning += text
            case ContentText(text):
                self.content += text
            case ToolCallBegin(_, id, name):
                self.tool_calls.append(ToolCall(id, name))
            case ToolCallArguments(index, text):
                self.tool_calls[index].arguments += text
