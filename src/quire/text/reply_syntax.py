"""How a model writes its replies: what stands around reasoning, content and tool calls.

Plain data, so that a tokenizer worker can find it and tell others (`reply_formats.py`). Strings are as the template
prints them: where one holds the text of a special token, that token stands there.
"""

from __future__ import annotations

import msgspec

from quire.core.structured_outputs import ReasoningBudget


class ReasoningSyntax(msgspec.Struct, frozen=True):
    """What stands before and after reasoning."""

    start: str
    end: str


class ContentSyntax(msgspec.Struct, frozen=True):
    """Of formats in which every part of a reply is a message with a header (Harmony).

    Attributes:
        starts: headers of content.
        end: ends a message.
        glue: stands before the header of every message but the first.
    """

    starts: tuple[str, ...]
    end: str
    glue: str


class ParameterSyntax(msgspec.Struct, frozen=True):
    """Arguments one by one; a text stands there as it is, other values as JSON.

    Attributes:
        before_json: in place of `before_value`, before what is no text (DeepSeek V3.2).
        python: they are written as Python's named ones, `a="b", c=True` (LFM2): texts in quotes, a comma between two.
        quote: stands before and after a text, at every depth; names stand as they are, a comma between two, and
            everything else is JSON (Gemma 4).
    """

    before_name: str
    before_value: str
    after_value: str
    before_json: str = ""
    python: bool = False
    quote: str = ""


class ToolSyntax(msgspec.Struct, frozen=True):
    """Calls: `begin`, call, `between`, call, ..., `end`. Each call is `before_name`, the tool's name,
    `before_arguments`, the arguments, `after_arguments`.

    Attributes:
        trigger: a beginning of what opens a call; once it stands in a reply, a call must follow.
        anchored: it counts only where the content begins.
        parameters: how arguments are written; None: a JSON object.
        numbered: in place of the name stands "functions.NAME:INDEX", which is the call's id, too (Kimi K2).
        with_id: `after_arguments` holds `ID` in place of an id of 9 letters and digits (Mistral).
        single: templates take one call a message.
    """

    trigger: str
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    parameters: ParameterSyntax | None = None
    anchored: bool = False
    numbered: bool = False
    single: bool = False

    @property
    def with_id(self) -> bool:
        return ID in self.after_arguments


ID = "\0ID\0"
"""Stands for an id in `ToolSyntax.after_arguments`."""


class ReplySyntax(msgspec.Struct, frozen=True):
    """All of it; the parts that a model does not have are None.

    Attributes:
        name: what users may call it.
        no_chats: why there are none, where what the checkpoint has for them cannot be used.
    """

    name: str = "plain"
    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    content: ContentSyntax | None = None
    no_chats: str = ""

    @property
    def described(self) -> str:
        """For people."""
        if self.no_chats:
            return self.no_chats
        tools = "no tool calls" if self.tools is None else f"tool calls in the format {self.name}"
        return tools + ("" if self.reasoning is None else f", reasoning from {self.reasoning.start}")

    def texts(self) -> list[str]:
        """All strings in it, to look for special tokens."""
        return [text for text in _strings(msgspec.to_builtins(self)) if text]


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _strings(item)]


class ReplyForm(msgspec.Struct, frozen=True):
    """How one request's reply is to be read.

    Attributes:
        tools: the parameters that are texts, of each tool that may be called; None: calls are content.
        in_reasoning: the prompt ends within reasoning.
        reasoned: the prompt ends after reasoning, so that there is none in the reply.
    """

    syntax: ReplySyntax = ReplySyntax()
    tools: dict[str, frozenset[str]] | None = None
    in_reasoning: bool = False
    reasoned: bool = False

    def budget(self, tokens: int) -> ReasoningBudget | None:
        """A bound on the tokens of its reasoning; None where there is none to bound."""
        reasoning = self.syntax.reasoning
        if reasoning is None or self.reasoned:
            return None
        again = self.syntax.content is not None
        return ReasoningBudget(tokens, reasoning.start, reasoning.end, begun=self.in_reasoning, again=again)


PLAIN = ReplyForm()
"""Content alone."""
