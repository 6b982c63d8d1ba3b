"""The syntax of a model's replies: delimiters of reasoning, content and tool calls.

Plain data, found by a tokenizer worker (`reply_formats.py`) and sent to other processes. Strings are as printed by the
template: the text of a special token in them stands for that token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from quire.core.structured_outputs import ReasoningBudget


class ReasoningSyntax(msgspec.Struct, frozen=True):
    """Delimiters of reasoning."""

    start: str
    end: str


class ContentSyntax(msgspec.Struct, frozen=True):
    """For formats in which every part of a reply is a message with a header (Harmony).

    Attributes:
        starts: headers of content.
        end: ends a message.
        glue: precedes the header of every message but the first.
    """

    starts: tuple[str, ...]
    end: str
    glue: str


class ParameterSyntax(msgspec.Struct, frozen=True):
    """Arguments one by one; strings are verbatim, other values are JSON.

    Attributes:
        before_json: replaces `before_value` for values other than strings (DeepSeek V3.2).
        python: Python keyword arguments, `a="b", c=True` (LFM2): quoted strings, separated by commas.
        quote: delimits strings, at every depth; names are unquoted, members separated by commas, and everything else is
            JSON (Gemma 4).
    """

    before_name: str
    before_value: str
    after_value: str
    before_json: str = ""
    python: bool = False
    quote: str = ""


ID, NINE, NUMBER, NAME = "\0ID\0", "\0NINE\0", "\0NUMBER\0", "\0NAME\0"
SPACE, TYPE = "\0SPACE\0", "\0TYPE\0"
"""Placeholders in the texts of `ToolSyntax`: a call's id; one of nine letters and digits (Mistral); the call's number;
and its tool's name once more. In calls without a marker, as Llama writes them: white space of JSON, and a member before
the name. Both may be missing (`OPTIONAL`)."""

_WHITE = r"[ \t]{1,4}|\r?\n[ \t]{0,16}"
PLACEHOLDERS = {
    ID: "[A-Za-z0-9_.:-]{1,64}",
    NINE: "[A-Za-z0-9]{9}",
    NUMBER: "0|[1-9][0-9]{0,2}",
    SPACE: _WHITE,
    TYPE: f'"type":(?:{_WHITE})?"function",(?:{_WHITE})?',
}
"""What may stand in the place of each, as regular expressions."""

OPTIONAL = SPACE, TYPE

_SPLIT = re.compile("(" + "|".join(PLACEHOLDERS) + ")")


class ToolSyntax(msgspec.Struct, frozen=True):
    """Calls: `begin`, call, `between`, call, ..., `end`. Each call is `before_name`, the tool's name,
    `before_arguments`, the arguments, `after_arguments`; these may have placeholders.

    Attributes:
        trigger: a prefix of a call's opening; once it appears in a reply, a call must follow.
        anchored: the trigger counts only at the start of the content.
        parameters: syntax of the arguments; None: a JSON object.
        numbered: a call's id is "functions.NAME:NUMBER" (Kimi K2).
        single: templates accept one call per message.
        others: other ways in which the model writes calls, where messages have headers (`ContentSyntax`); they differ
            in `trigger`, `before_name` and `before_arguments`.
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
    others: tuple[ToolSyntax, ...] = ()

    @property
    def ways(self) -> tuple[ToolSyntax, ...]:
        """All ways in which the model writes calls, this one first."""
        return self, *self.others

    def as_written(self) -> ToolSyntax:
        """The syntax as models write it: a call that is JSON from its first letter has any white space, and may have a
        type, whatever the template prints.
        """
        if not (self.anchored and (self.begin + self.before_name).startswith("{")):
            return self

        def free(text: str) -> str:
            return re.sub("(?=})", SPACE, re.sub("([{:,]) ?", rf"\1{SPACE}", text))

        return msgspec.structs.replace(
            self,
            begin="",
            before_name=free(self.begin + self.before_name).replace("{" + SPACE, "{" + SPACE + TYPE, 1),
            before_arguments=free(self.before_arguments),
            after_arguments=free(self.after_arguments),
        )

    def openings(self, names: Iterable[str]) -> str:
        """A regular expression of what begins calls to these tools, for calls that only begin a reply."""
        opening = "".join(
            (
                f"(?:{PLACEHOLDERS[piece]}){'?' if piece in OPTIONAL else ''}"
                if piece in PLACEHOLDERS
                else _literal(piece)
            )
            for piece in pieces(self.begin + self.before_name)
        )
        after = _literal(self.before_arguments.replace(NAME, "")[:1])
        return f"{opening}(?:{'|'.join(map(_literal, sorted(names)))}){after}"


def _literal(text: str) -> str:
    """A regular expression, in Python's language and Rust's, that matches only this text."""
    return "".join(letter if letter.isalnum() or letter in '"_' else f"\\U{ord(letter):08x}" for letter in text)


def pieces(text: str) -> list[str]:
    """A text of the syntax, split into literal texts and placeholders."""
    return [piece for piece in _SPLIT.split(text) if piece]


class ReplySyntax(msgspec.Struct, frozen=True):
    """The whole syntax; parts that a model does not have are None.

    Attributes:
        name: its name for users.
        answers: tags in which the content after reasoning may stand (Granite 3.3, Hunyuan); they are no part of it.
        no_chats: why chats are refused, if the checkpoint's template cannot be used.
        lost: what could not be derived from the template since that failed, and why.
    """

    name: str = "plain"
    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    content: ContentSyntax | None = None
    answers: tuple[tuple[str, str], ...] = ()
    no_chats: str = ""
    lost: str = ""

    @property
    def described(self) -> str:
        """A description for logs and messages."""
        if self.no_chats:
            return self.no_chats
        tools = "no tool calls" if self.tools is None else f"tool calls in the format {self.name}"
        reasoning = "" if self.reasoning is None else f", reasoning from {self.reasoning.start}"
        return tools + reasoning + (f"; {self.lost}" if self.lost else "")

    def texts(self) -> list[str]:
        """All strings in it, to look for special tokens."""
        return [text for text in _strings(msgspec.to_builtins(self)) if text]


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _strings(item)]


class ReplyForm(msgspec.Struct, frozen=True):
    """How to parse one request's reply.

    Attributes:
        tools: the tools that may be called, each with its parameters that are bare text, and for each of those the
            types of JSON that such text is read as where it is JSON; None: calls are content.
        in_reasoning: the prompt ends within reasoning.
        reasoned: the prompt ends after the reasoning, so the reply has none.
        continues: the prompt ends within a message, which the reply continues.
    """

    syntax: ReplySyntax = ReplySyntax()
    tools: dict[str, dict[str, tuple[str, ...]]] | None = None
    in_reasoning: bool = False
    reasoned: bool = False
    continues: bool = False

    @property
    def trigger(self) -> str:
        """What begins a call within reasoning that was not ended; empty if nothing does."""
        tools = self.syntax.tools if self.tools is not None else None
        return "" if tools is None or tools.anchored or self.syntax.content is not None else tools.trigger

    def budget(self, tokens: int) -> ReasoningBudget | None:
        """A limit on the tokens of its reasoning; None if it has none."""
        reasoning = self.syntax.reasoning
        if reasoning is None or self.reasoned:
            return None
        again = self.syntax.content is not None
        start, end = reasoning.start, reasoning.end
        return ReasoningBudget(tokens, start, end, begun=self.in_reasoning, again=again, call=self.trigger)


PLAIN = ReplyForm()
"""Content only."""
