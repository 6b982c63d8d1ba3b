"""Parses a reply's tokens into events (`reply.py`). The result does not depend on how the reply is split into pieces.

The parser uses the same `ReplySyntax` as the grammar of a reply (`reply_grammar.py`), so with a grammar its input is
always well-formed. Without one, everything that is not recognized is content.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.text import python_literals, quoted_values
from quire.text.parameter_values import json_value, may_be_json
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin
from quire.text.reply_syntax import (
    ID,
    NAME,
    NINE,
    NUMBER,
    PLACEHOLDERS,
    SPACE,
    TYPE,
    ParameterSyntax,
    ReplyForm,
    ReplySyntax,
    ToolSyntax,
    pieces,
)

SPECIAL = "\ud800"
"""Precedes a special token's text, so that ordinary text cannot be mistaken for one: text has no lone surrogates."""

ID_LENGTH = 9
"""Of generated ids: Mistral's templates accept no others."""

_NAMED = re.compile(r"[A-Za-z0-9_.-]+")
_SLOTS = {
    ID: re.compile("[A-Za-z0-9_.:-]+"),
    NINE: re.compile("[A-Za-z0-9]+"),
    NUMBER: re.compile("[0-9]+"),
    SPACE: re.compile(r"\s*"),
    TYPE: re.compile(f"(?:{PLACEHOLDERS[TYPE]})?"),
}
"""Characters of tools' names, and of what stands in the place of each placeholder."""


@functools.lru_cache(maxsize=16)
def special_markers(syntax: ReplySyntax, special_texts: tuple[str, ...]) -> tuple[str, ...]:
    """Special tokens that occur in markers, the longest first."""
    markers = "\0".join(syntax.texts())
    return tuple(sorted((text for text in special_texts if text and text in markers), key=len, reverse=True))


class ReplyParser:
    """Parses one reply.

    Attributes:
        events: the events so far.
        reasoning_tokens: number of tokens of the reasoning, including its end marker.
        markers: special tokens that occur in the syntax.

    Args:
        specials: texts of the tokenizer's special tokens.
        new_id: gives the id of a call from its number in the reply.
    """

    def __init__(
        self, form: ReplyForm, specials: Iterable[str] = (), new_id: Callable[[int], str] = "call{:05d}".format
    ) -> None:
        self.events: list[ReplyEvent] = []
        self.reasoning_tokens = 0
        self.markers = frozenset(special_markers(form.syntax, tuple(specials)))
        self._form, self._new_id = form, new_id
        self._tools = form.syntax.tools.as_written() if form.syntax.tools and form.tools is not None else None
        self._ways = self._tools.ways if self._tools is not None else ()
        self._buffer = ""
        self._white = ""  # trailing white space held back: it is not part of the text
        self._fresh = True  # no reasoning was emitted yet
        self._calls = 0
        self._called = ""  # the name of the current call's tool
        self._ids: set[str] = set()
        self._slots: dict[str, str] = {}  # what stands in the place of the current call's placeholders
        self._answer_end = ""  # the tag that ends the content
        self._texts: Mapping[str, tuple[str, ...]] = {}  # parameters of the current call that are bare text
        self._types: tuple[str, ...] = ()  # of JSON that the current one may be instead
        self._scanned = 0  # how much of the buffer was searched for its end
        self._json = _JsonScanner()
        self._scanner: python_literals.PythonScanner | quoted_values.QuotedScanner = python_literals.PythonScanner()
        self._step: Callable[[bool], bool] = self._begin
        if form.in_reasoning and form.syntax.reasoning is not None:
            self._step = self._reasoning
        elif form.reasoned:
            self._step = self._begin_answer

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._reasoning

    def text(self, text: str) -> None:
        """More text of the reply."""
        if text:
            self._buffer += text
            self._run(final=False)

    def special(self, text: str) -> None:
        """A special token that is one of `markers`."""
        self.text(SPECIAL + text)

    def finish(self) -> None:
        """End of the reply."""
        self._run(final=True)

    def _run(self, final: bool) -> None:
        while self._step(final):
            pass

    # -- the parts of a reply; each consumes what it can of the buffer, and returns whether the state changed ---------

    def _begin(self, final: bool) -> bool:
        """The start of a reply, or of its next message if messages have headers."""
        syntax = self._form.syntax
        parts: list[tuple[str, Callable[[bool], bool], bool]] = []  # marker, the state after it, whether it is consumed
        if syntax.reasoning is not None:
            parts.append((syntax.reasoning.start, self._reasoning, True))
        if syntax.content is not None:
            parts += [(start, self._content, True) for start in syntax.content.starts]
            if self._tools is not None:
                parts += [(way.trigger, self._opening, False) for way in self._ways]
            elif syntax.tools is not None and _first(syntax.tools.trigger) == _first(syntax.content.starts[0]):
                parts += [
                    (way.trigger, self._header, True) for way in syntax.tools.ways
                ]  # headers like those of content
        whole, stripped = self._buffer, self._buffer.lstrip()
        glue = self._marker(syntax.content.glue) if syntax.content is not None else ""
        if glue and stripped.startswith(glue):
            whole = stripped = stripped[len(glue) :]
        elif glue and glue.startswith(stripped) and not final:
            return False
        for part, step, taken in parts:
            marker, text = self._marker(part), whole if part[0].isspace() else stripped
            if text.startswith(marker):
                self._buffer = text[len(marker) :] if taken else text
                self._step, self._fresh = step, True
                return True
            if marker.startswith(text) and not final:
                return False
        self._step = self._begin_content
        return True

    def _header(self, final: bool) -> bool:
        """The rest of the header of a call where there are no tools: its arguments are content."""
        headed = self._form.syntax.content
        if headed is None:
            raise RuntimeError("a header without a syntax for it")
        last = headed.starts[0]
        found = self._take_until(self._marker(last[last.rindex("<") :]), final)[1]
        if found:
            self._step = self._content
        return found

    def _reasoning(self, final: bool) -> bool:
        reasoning = self._form.syntax.reasoning
        if reasoning is None:
            raise RuntimeError("reasoning without a syntax for it")
        end, trigger = self._marker(reasoning.end), self._marker(self._form.trigger)
        text, found = self._take_until_first([end, trigger] if trigger else [end], final)
        if self._fresh:
            text = text.lstrip()
        kept = self._hold_white(text, drop=bool(found) or final).replace(SPECIAL, "")
        if kept:
            self._fresh = False
            self.events.append(ReasoningText(kept))
        if found and found == trigger:
            self._buffer, self._step = trigger + self._buffer, self._opening
        elif found:
            self._step = self._begin if self._form.syntax.content is not None else self._after_reasoning
        return bool(found)

    def _after_reasoning(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._step = self._begin_content if self._answer_end else self._begin_answer
        return True

    def _begin_answer(self, final: bool) -> bool:
        """Content that may stand in tags."""
        text = self._buffer.lstrip()
        for start, end in self._form.syntax.answers:
            marker = self._marker(start)
            if text.startswith(marker):
                self._buffer, self._answer_end = text[len(marker) :], self._marker(end)
                self._step = self._after_reasoning  # white space follows here, too
                return True
            if marker.startswith(text) and not final:
                return False
        self._step = self._begin_content
        return True

    def _begin_content(self, final: bool) -> bool:
        """Content, or a call recognized only at the start of the content."""
        self._step = self._content
        if self._tools is not None and self._tools.anchored:
            text = self._buffer.lstrip()
            if re.match(self._tools.openings(self._form.tools or ()), text):
                self._buffer, self._step = text, self._opening
            elif not final and self._may_open(text):
                self._step = self._begin_content
                return False
        return True

    def _may_open(self, text: str) -> bool:
        """Whether a text may be the beginning of a call that only begins a reply; white space does not count."""
        tools, begun = self._syntax(), "".join(text.split())
        opening = "".join((tools.begin + tools.before_name).replace(SPACE, "").split())
        heads = [opening.replace(TYPE, one) for one in ("", '"type":"function",')]
        heads = [head.split("\0")[0] for head in heads]
        return any((head + name).startswith(begun) for head in heads for name in self._form.tools or ())

    def _content(self, final: bool) -> bool:
        headed, tools = self._form.syntax.content, self._tools
        if headed is not None:
            text, found = self._take_until(self._marker(headed.end), final)
            self._emit(text)
            if found:
                self._step = self._begin
            return found
        trigger = "" if tools is None or tools.anchored else self._marker(tools.trigger)
        ends = [*filter(None, (trigger, self._answer_end))]
        if not ends:
            text, self._buffer = self._buffer, ""
            self._emit(text)
            return False
        text, marker = self._take_until_first(ends, final)
        if final and not marker:
            text, self._white = self._white + text, ""
            self._emit(text)
        else:
            self._emit(self._hold_white(text, drop=bool(marker)))
        if marker and marker == trigger:
            self._buffer, self._step = trigger + self._buffer, self._opening
        elif marker:
            self._answer_end, self._step = "", self._content if tools is not None else self._rest
        return bool(marker)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _opening(self, final: bool) -> bool:
        return self._choose(self._ways, lambda way: way.begin + way.before_name, self._name)

    def _name(self, final: bool) -> bool:
        found = _NAMED.match(self._buffer)
        if found is None or found.end() == len(self._buffer):
            return False if found or not self._buffer else self._give_up()
        self._called = found[0]
        if self._called not in (self._form.tools or {}):
            return self._give_up()
        self._buffer, self._step = self._buffer[found.end() :], self._before_arguments
        return True

    def _before_arguments(self, final: bool) -> bool:
        called, begun = self._called, self._syntax().before_name
        ways = [way for way in self._ways if way.before_name == begun]
        if not self._choose(ways, lambda way: way.before_arguments, self._begin_arguments):
            return False
        if self._step == self._begin_arguments:
            self._texts = (self._form.tools or {})[called]
            self.events.append(ToolCallBegin(self._calls, self._id(), called))
            self._calls += 1
        return True

    def _id(self) -> str:
        """The current call's id: the model's own if it wrote one before the arguments."""
        written = self._slots.get(ID) or self._slots.get(NINE)
        if self._syntax().numbered:
            written = f"functions.{self._called}:{self._slots.get(NUMBER)}"
        if written is None or written in self._ids:
            written = self._new_id(self._calls)
        self._ids.add(written)
        return written

    def _begin_arguments(self, final: bool) -> bool:
        parameters = self._syntax().parameters
        self._json, self._fresh = _JsonScanner(), True
        if parameters is None:
            self._step = self._object
        else:
            self._step = self._named if parameters.python or parameters.quote else self._parameter
        return True

    def _object(self, final: bool) -> bool:
        taken = self._json.object(self._buffer)
        self._argument(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        if self._json.ended:
            self._step = self._closing
        return self._json.ended

    def _parameter(self, final: bool) -> bool:
        """The name of a parameter, or the end of the parameters."""
        tools, syntax = self._syntax(), self._parameters()
        before = self._marker(syntax.before_name)
        if self._buffer.startswith(before):
            rest = self._buffer[len(before) :]
            markers = [self._marker(one) for one in (syntax.before_value, syntax.before_json) if one]
            places = [(at, marker) for marker in markers if (at := rest.find(marker)) >= 0]
            if not places:
                return False
            at, marker = min(places)
            name, self._buffer = rest[:at], rest[at + len(marker) :]
            is_text = marker == markers[0] if syntax.before_json else name in self._texts
            self._types = () if syntax.before_json else self._texts.get(name, ())
            self._argument(("{" if self._fresh else ", ") + json.dumps(name) + ": ")
            self._fresh, self._json, self._scanned = False, _JsonScanner(), 0
            self._step = self._bare_value if is_text else self._json_value
            return True
        if before.startswith(self._buffer) and not final:
            return False
        closing = self._marker(tools.after_arguments)
        if not self._buffer.startswith(closing):
            return False
        self._argument("{}" if self._fresh else "}")
        self._step = self._closing
        return True

    def _bare_value(self, final: bool) -> bool:
        """Text, or JSON of other types; it is streamed once it can be text alone."""
        marker = self._marker(self._parameters().after_value)
        end = self._buffer.find(marker, self._scanned)
        if end >= 0 and json_value(value := self._buffer[:end].replace(SPECIAL, ""), self._types):
            self._argument(value)
            self._buffer, self._step = self._buffer[end + len(marker) :], self._parameter
            return True
        size = len(self._buffer) - (0 if final else possible_start(self._buffer, marker))
        if end < 0 and may_be_json(self._buffer[: min(size, 64)], self._types) and not (final and size):
            self._scanned = max(0, len(self._buffer) - len(marker) + 1)
            return False
        self._argument('"')
        self._step = self._text_value
        return True

    def _text_value(self, final: bool) -> bool:
        syntax = self._parameters()
        text, found = self._take_until(self._marker(syntax.quote or syntax.after_value), final=False)
        self._argument(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if found else ""))
        if found:
            self._step = self._named if syntax.quote else self._parameter
        return found

    def _json_value(self, final: bool) -> bool:
        taken, found = self._json.value(self._buffer, self._marker(self._parameters().after_value))
        self._argument(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        if found:
            self._buffer = self._buffer.removeprefix(self._marker(self._parameters().after_value))
            self._step = self._parameter
        return found

    def _named(self, final: bool) -> bool:
        """The name of a Python-style or quoted argument, or the end of the arguments."""
        text = self._buffer.lstrip()
        if text.startswith(self._marker(self._syntax().after_arguments)):
            self._argument("{}" if self._fresh else "}")
            self._buffer, self._step = text, self._closing
            return True
        name, found, after = text.partition(self._parameters().before_value)
        if not found:
            return False
        name = name.removeprefix("," if not self._fresh else "").strip()
        self._argument(("{" if self._fresh else ", ") + json.dumps(name) + ": ")
        self._buffer, self._fresh, self._step = after, False, self._begin_value
        return True

    def _begin_value(self, final: bool) -> bool:
        """A quoted string is streamed; other values are not."""
        quote = self._marker(self._parameters().quote)
        if quote and self._buffer.startswith(quote):
            self._argument('"')
            self._buffer, self._step = self._buffer[len(quote) :], self._text_value
            return True
        if quote.startswith(self._buffer) and quote:
            return False
        self._scanner = quoted_values.QuotedScanner(quote) if quote else python_literals.PythonScanner()
        self._step = self._whole_value
        return True

    def _whole_value(self, final: bool) -> bool:
        """A value emitted as a whole, as JSON."""
        end = self._scanner.end(self._buffer)
        if end < 0:
            return False
        value, quote = self._buffer[:end], self._marker(self._parameters().quote)
        self._argument(quoted_values.as_json(value, quote) if quote else python_literals.as_json(value))
        self._buffer, self._step = self._buffer[end:], self._named
        return True

    def _closing(self, final: bool) -> bool:
        return self._choose([self._syntax()], lambda way: way.after_arguments, self._after_call)

    def _after_call(self, final: bool) -> bool:
        tools, self._slots = self._syntax(), {}
        taken, may_come = self._match(tools.between + tools.before_name)
        if taken:
            self._buffer, self._step = self._buffer[taken:], self._name
            return True
        end = self._marker(tools.end)
        if may_come or (end.startswith(self._buffer) and end != self._buffer):
            return False  # a reply that was cut: half a marker is nothing
        self._buffer = self._buffer.removeprefix(end)
        self._step = self._rest
        return True

    def _rest(self, final: bool) -> bool:
        """After the last call; nothing, with a grammar."""
        self._emit(self._hold_white(self._buffer, drop=final))
        self._buffer = ""
        return False

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _syntax(self) -> ToolSyntax:
        if self._tools is None:
            raise RuntimeError("a call without a syntax for it")
        return self._tools

    def _parameters(self) -> ParameterSyntax:
        syntax = self._syntax().parameters
        if syntax is None:
            raise RuntimeError("a parameter without a syntax for it")
        return syntax

    def _emit(self, text: str) -> None:
        text = text.replace(SPECIAL, "")
        if text:
            self.events.append(ContentText(text))

    def _argument(self, text: str) -> None:
        if text:
            self.events.append(ToolCallArguments(self._calls - 1, text.replace(SPECIAL, "")))

    def _choose(
        self, ways: Sequence[ToolSyntax], part: Callable[[ToolSyntax], str], then: Callable[[bool], bool]
    ) -> bool:
        """Consume this part of the syntax, which must come next, in one of these ways to write a call."""
        any_may_come = False
        for way in ways:
            taken, may_come = self._match(text := part(way))
            if taken or not text:
                self._tools, self._buffer, self._step = way, self._buffer[taken:], then
                return True
            any_may_come |= may_come
        return False if any_may_come else self._give_up()  # a reply that was cut: half a marker is nothing

    def _match(self, text: str) -> tuple[int, bool]:
        """How many characters of the buffer are this text of the syntax, and if none, whether it may still come."""
        at, slots = 0, {}
        for piece in pieces(text.replace(NAME, self._called)):
            if piece in PLACEHOLDERS:
                found = _SLOTS[piece].match(self._buffer, at)
                end = len(self._buffer) if found is None else found.end()
                if found is None or end == len(self._buffer):
                    return 0, end == at or found is not None
                slots[piece], at = found[0], end
                continue
            literal = self._marker(piece)
            if not self._buffer.startswith(literal, at):
                return 0, literal.startswith(self._buffer[at:])
            at += len(literal)
        self._slots |= slots
        return at, False

    def _give_up(self) -> bool:
        """Malformed input becomes content, unchanged."""
        self._step = self._rest
        return True

    def _hold_white(self, text: str, drop: bool) -> str:
        """A part's next text, without trailing white space, which is kept for the next call or dropped."""
        text = self._white + text
        kept = text.rstrip()
        self._white = "" if drop else text[len(kept) :]
        return kept

    def _marker(self, text: str) -> str:
        """The marker as it appears in the buffer."""
        return _marked(text, self.markers)

    def _take_until(self, marker: str, final: bool) -> tuple[str, bool]:
        """Consume text up to and including a marker, or up to a possible prefix of it."""
        text, found = self._take_until_first([marker], final)
        return text, bool(found)

    def _take_until_first(self, markers: Sequence[str], final: bool) -> tuple[str, str]:
        """Consume text up to and including the marker that comes first, or up to a possible prefix of one; returns the
        text and the marker, if there is one."""
        text = self._buffer
        places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            self._buffer = text[at + len(marker) :]
            return text[:at], marker
        keep = 0 if final else max(possible_start(text, marker) for marker in markers)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep], ""


def _first(header: str) -> str:
    """A header's first marker."""
    return header.partition(">")[0]


class _JsonScanner:
    """Finds the end of a JSON value given in pieces."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def object(self, text: str) -> int:
        """How many of these characters belong to the object; `ended` is set at its end."""
        for index, letter in enumerate(text):
            self._take(letter)
            if letter == "}" and not self._in_string and self._depth == 0:
                self.ended = True
                return index + 1
        return len(text)

    def value(self, text: str, end: str) -> tuple[int, bool]:
        """How many of these characters belong to the value, and whether `end` follows them."""
        for index, letter in enumerate(text):
            if not self._in_string and letter == end[0]:
                rest = text[index : index + len(end)]
                if rest == end:
                    return index, True
                if end.startswith(rest):
                    return index, False
            self._take(letter)
        return len(text), False

    def _take(self, letter: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1


def possible_start(text: str, marker: str) -> int:
    """Length of the text's longest suffix that is a prefix of the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


@functools.lru_cache(maxsize=1024)
def _marked(text: str, markers: frozenset[str]) -> str:
    if not markers:
        return text
    either = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    return re.sub(either, lambda found: SPECIAL + found[0], text)
