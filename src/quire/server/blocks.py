"""A reply as consecutive blocks of reasoning, text and tool calls, as in Anthropic's and OpenAI's newer interface.
Counters here find what is new, so it does not matter how often a stream asks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.outputs import CompletionOutput
from quire.server.chat_reply import news
from quire.text.partial_json import MemberText
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin, joined


@dataclass(slots=True)
class Block:
    """One block of a reply.

    Attributes:
        index: its index in the reply.
        id, name: of a tool call.
        text: the text so far; of a tool call, its arguments, or its input.
        custom: it calls a tool whose input is text.
    """

    index: int
    kind: Literal["reasoning", "text", "tool"]
    id: str = ""
    name: str = ""
    text: str = ""
    custom: bool = False


class News(NamedTuple):
    """A change of a block: it begins, has more text, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one choice.

    Args:
        custom: names of the tools whose input is text: the only member of their arguments.
    """

    def __init__(self, custom: Container[str] = ()) -> None:
        self.blocks: list[Block] = []
        self._custom, self._input = custom, MemberText()
        self._events = self._characters = 0
        self._ended = False

    def take(self, choice: CompletionOutput) -> list[News]:
        """Take in and return what is new. A choice that failed ends no block, since its stream ends with an error."""
        events = news(choice, self._events, self._characters)
        self._events, self._characters = self._events + len(events), len(choice.text)
        found = [each for event in joined(events) for each in self._take(event)]
        if choice.completed and not self._ended:
            self._ended = True
            found += self._end_last()
        return found

    def _take(self, event: ReplyEvent) -> Iterator[News]:
        match event:
            case ReasoningText(text):
                yield from self._more("reasoning", text)
            case ContentText(text):
                yield from self._more("text", text)
            case ToolCallBegin(_, id, name):
                yield from self._end_last()
                self._input = MemberText()
                yield self._begin(Block(len(self.blocks), "tool", id, name, custom=name in self._custom))
            case ToolCallArguments(_, text):
                text = self._input.take(text) if self.blocks[-1].custom else text
                if text:
                    yield from self._more("tool", text)

    def _more(self, kind: Literal["reasoning", "text", "tool"], text: str) -> Iterator[News]:
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._end_last()
            yield self._begin(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.text += text
        yield News("more", block, text)

    def _begin(self, block: Block) -> News:
        self.blocks.append(block)
        return News("begin", block)

    def _end_last(self) -> Iterator[News]:
        if self.blocks:
            yield News("end", self.blocks[-1])
