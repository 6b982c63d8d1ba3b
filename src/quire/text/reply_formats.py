"""Finds the syntax of a model's replies by rendering its chat template with messages that contain marker words.

The text around these words is the syntax. It is accepted if the parser reads back what was rendered. Formats that
cannot be found in this way, since templates print calls differently from how models write them, are those of
`known_formats.py`, chosen by a mark in the rendered text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from quire.errors import ChatTemplateError
from quire.text.known_formats import KNOWN, REASONING
from quire.text.reply import Reply, ToolCall
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import (
    ID,
    NAME,
    NINE,
    NUMBER,
    ContentSyntax,
    ParameterSyntax,
    ReasoningSyntax,
    ReplyForm,
    ReplySyntax,
    ToolSyntax,
    pieces,
)

Found = TypeVar("Found")

ID_ALONE = "\0ALONE\0"
"""An id that is printed in place of the name, while a template is looked at."""

MARKS = {
    "harmony": ("<|channel|>", "to=functions.qzname"),
    "gemma4": ("<|tool_call>call:qzname{", ':<|"|>qzone<|"|>'),
}
"""Marks in a rendered call of formats that cannot be found by rendering."""

TOLD = {
    "lfm2": ("List of tools: ",),
    "granite": ("<|tool_call|>", "JSON list of tools"),
    "hermes": ('<tool_call>\n{"name": ',),
}
"""Marks (all of them) of what templates that print no calls tell the model of tools."""

ANSWERS = ("<response>", "</response>"), ("<answer>", "</answer>")
"""Tags in which content after reasoning stands, where a template names them."""

_NAMES = "qzname", "qzother"
_KEYS = "qzfirst", "qzsecond"
_VALUES = ("qzone", "qztwo"), ("qzthree", "qzfour")
_ARGUMENTS = [dict(zip(_KEYS, values, strict=True)) for values in _VALUES]
_IDS = "qzcall4a7", "qzcall9b3"
_LONG_IDS = "qzcall4a7xyz", "qzcall9b3xyz"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "qzdescription",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "qzkey"} for key in _KEYS},
            },
        },
    }
    for name in _NAMES
]
_UNIT = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|\0[A-Z]+\0|.", re.DOTALL)
"""A marker, a placeholder, or a character."""


class Template(Protocol):
    """What is asked of a chat template, whose source may name what cannot be found by printing."""

    @property
    def source(self) -> str:
        """Its text."""

    def special(self, name: str) -> str:
        """The text of a special token."""

    def print_as_given(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages as they are."""


def find_syntax(template: Template) -> ReplySyntax:
    """The syntax of replies of this template's model, as far as it can be found. What fails costs itself only."""
    lost: list[str] = []
    reasoning = _unless_it_fails("reasoning", lambda: _find_reasoning(template), lost)
    found = _unless_it_fails("tool calls", lambda: _find_calls(template, reasoning), lost)
    found = found or ReplySyntax(reasoning=reasoning)
    headed = _unless_it_fails("headers of content", lambda: _with_headers(found, template), lost)
    answers = tuple(tags for tags in ANSWERS if reasoning is not None and all(tag in template.source for tag in tags))
    return msgspec.structs.replace(headed or found, answers=answers, lost="; ".join(lost))


def _unless_it_fails(what: str, find: Callable[[], Found], lost: list[str]) -> Found | None:
    try:
        return find()
    except Exception as error:  # templates are programs of others, and no chat needs what is found here
        lost.append(f"{what} are off: looking for them in the chat template failed ({type(error).__name__}: {error})")
        return None


def _find_calls(template: Template, reasoning: ReasoningSyntax | None) -> ReplySyntax:
    plain = ReplySyntax(reasoning=reasoning)
    rendered = _render_calls(template, _IDS[:1])
    if rendered is None:
        told = _print(template, []) or ""
        name = next((name for name, marks in TOLD.items() if all(mark in told for mark in marks)), None)
        return plain if name is None else in_format(plain, name)
    for name, marks in MARKS.items():
        if all(mark in rendered for mark in marks):
            return in_format(plain, name)
    tools = _find_tools(template, reasoning)
    if tools is None:
        return plain
    name = next((name for name, known in KNOWN.items() if known.tools == tools), "derived")
    return ReplySyntax(name, reasoning=reasoning, tools=tools)


def in_format(found: ReplySyntax, tool_format: str) -> ReplySyntax:
    """The syntax with calls in this format of `KNOWN`, or without calls ("off"); unchanged for "auto"."""
    if tool_format == "auto":
        return found
    if tool_format == "off":
        return ReplySyntax("off", found.reasoning, answers=found.answers)
    known = KNOWN[tool_format]
    if known.content is not None:
        return known
    return ReplySyntax(known.name, found.reasoning, known.tools, answers=found.answers)


def takes_argument_objects(template: Template) -> bool:
    """Whether the template takes arguments in messages as objects rather than JSON text."""
    return any(_render(template, [_call(_IDS[:1], False, content)]) is not None for content in _CONTENTS)


def content_of_calls(template: Template) -> frozenset[str | None]:
    """Contents of a message that only calls tools with which the template prints the calls, and nothing else."""
    result = {"role": "tool", "tool_call_id": _IDS[0], "name": _NAMES[0], "content": "qzresult"}
    alone, answered = (_contents_printed(template, behind) for behind in ([], [result]))
    return alone & answered or answered or alone  # some take other contents once a message is not the last one


def _contents_printed(template: Template, behind: Sequence[Mapping[str, Any]]) -> frozenset[str | None]:
    """Contents of a message that calls a tool with which the template prints the call before these messages."""
    printed = {}
    for content in _CONTENTS:
        texts = [_render(template, [_call(_IDS[:1], as_text, content), *behind]) for as_text in (False, True)]
        printed[content] = next((text for text in texts if text is not None), None)
    odd = (printed[None] or "").partition(_USER)[2]
    if "None" in odd or "null" in odd:
        del printed[None]
    return frozenset(content for content, text in printed.items() if text is not None)


def takes_parts(template: Template, role: str) -> bool:
    """Whether the template takes the content of such messages as a list of parts, and joins their texts itself."""
    parts = [{"type": "text", "text": text} for text in ("qzpart", "qzpiece")]
    said: list[dict[str, Any]] = [{"role": role, "content": parts}]
    if role == "tool":
        said = [_call(_IDS[:1], not takes_argument_objects(template), None), {**said[0], "tool_call_id": _IDS[0]}]
    if role in ("user", "system", "developer"):
        text = _print(template, said if role == "user" else [*said, {"role": "user", "content": "qzasked"}], begin=[])
    else:
        text = _print(template, [*said, {"role": "user", "content": "qzasked"}])
    if text is None or not ("qzpart" in text and "qzpiece" in text):
        return False
    return "type" not in text[max(text.index("qzpart") - 40, 0) : text.index("qzpiece")]  # nor as Python or JSON


# -- reasoning -----------------------------------------------------------------------------------------------------


def _find_reasoning(template: Template) -> ReasoningSyntax | None:
    for start, end in REASONING:
        if end in template.source:
            return ReasoningSyntax(start, end)
    message = {
        "role": "assistant",
        "content": "qzcontent",
        "reasoning_content": "qzreasoning",
        "reasoning": "qzreasoning",
    }
    called = {**message, **_call(_IDS[:1], not takes_argument_objects(template), "")}
    texts = [_print(template, [one]) or "" for one in (message, called)]
    begun = (_print(template, [], add_generation_prompt=True) or "").rstrip()
    shown = [text.partition("qzreasoning") for text in texts if "qzreasoning" in text]
    if not shown:
        return None
    before, _, after = shown[0]
    plain = _print(template, [{"role": "assistant", "content": "qzcontent"}]) or ""
    start = _opening(before.rstrip(), plain.partition("qzcontent")[0].rstrip(), begun)
    if "qzcontent" not in after:  # printed before calls alone
        end = _UNIT.findall(after.strip())[0]
        return ReasoningSyntax(start, end) if start and len(end) > 1 else None
    whole = end = after.partition("qzcontent")[0].strip()
    if len(shown) > 1:  # what precedes content alone is not the end
        shared = _common_start(end, shown[1][2]).strip()
        end = end if begun.endswith(shared) else shared  # every prompt would end after reasoning
    odd = len(_UNIT.findall(whole.removeprefix(end).strip())) > 1  # content would have more than a header
    return ReasoningSyntax(start, end) if start and end and not odd else None


def _opening(before: str, otherwise: str, begun: str) -> str:
    """What opens reasoning: the markers before it that do not stand before content, too (`otherwise`). If all of them
    do, every prompt (`begun`) has to open it, in words of its own.
    """
    units = _UNIT.findall(before)
    for at in range(len(units) - 1, -1, -1) if _last_marker(before) else ():
        start = "".join(units[at:])
        if len(units[at]) > 1 and not otherwise.endswith(start):
            return start
    return _last_marker(before) + begun.removeprefix(before) if begun.startswith(before) and begun != before else ""


def _with_headers(found: ReplySyntax, template: Template) -> ReplySyntax:
    """With the marker that this model writes before content, if it does (`<|START_RESPONSE|>`)."""
    begun = _print(template, [], add_generation_prompt=True) or ""
    plain = _print(template, [{"role": "assistant", "content": "qzcontent"}]) or ""
    before, _, after = plain.partition("qzcontent")
    reasoning = found.reasoning
    rest = before.removeprefix(_common_start(begun, plain))
    header, ends = _last_marker(rest), [unit for unit in _UNIT.findall(after) if len(unit) > 1]
    around = () if reasoning is None else (reasoning.start, reasoning.end)
    known = header in around or header in begun.rpartition(_USER)[2]
    if found.content is not None or not header or not ends or known:
        return found
    for marker in around:
        rest = rest.replace(marker, "")
    if rest.strip() not in ("", header):  # the end of reasoning may have it
        return found
    glue = ""
    if reasoning is not None:
        end = reasoning.end.removesuffix(header)
        if end.startswith(ends[0]):  # reasoning is a message like content
            end, glue = ends[0], end.removeprefix(ends[0])
        reasoning = ReasoningSyntax(reasoning.start, end)
    return msgspec.structs.replace(found, reasoning=reasoning, content=ContentSyntax((header,), ends[0], glue))


def _last_marker(text: str) -> str:
    units = _UNIT.findall(text.rstrip())
    return units[-1] if units and len(units[-1]) > 1 else ""


# -- tools ---------------------------------------------------------------------------------------------------------


def _find_tools(template: Template, reasoning: ReasoningSyntax | None) -> ToolSyntax | None:
    """The syntax of calls, from one and from two calls whose names, ids and arguments differ."""
    one, both = _render_calls(template, _IDS[:1]), _render_calls(template, _IDS)
    if one is None:
        return None
    first = _body(template, one, reasoning, 1)
    second = None if both is None else _body(template, both, reasoning, 2)
    any_id = _render_calls(template, _LONG_IDS[:1]) is not None
    tools = _cut(first, second, ID if any_id else NINE)
    if tools is None or not _begins_a_call(tools, template):
        return None
    fits = _reads_back(tools, first, 1) and (second is None or _reads_back(tools, second, 2))
    return tools if fits else None


def _cut(first: str, second: str | None, id: str) -> ToolSyntax | None:
    """The syntax around one call and between two, from one (`first`) and two (`second`) rendered calls."""
    alone = _cut_call(first, 0, id)
    if alone is None:
        return None
    opening, before_arguments, parameters, closing = alone
    begin, before_name, after, between, end = "", opening, closing, "", ""
    if second is not None:
        last = _cut_call(second, 1, id)
        numbered = None if last is None else _common_end(before_arguments, last[1])
        if last is None or parameters != last[2] or len(_UNIT.findall(numbered or "")) != len(_UNIT.findall(last[1])):
            return None
        before_arguments = numbered or ""
        # What stands between the calls' arguments, without the end of the first one's own
        middle = last[0].rpartition(_VALUES[0][1])[2]
        middle = middle[len(first.rpartition(_VALUES[0][1])[2]) - len(_printed(closing, 0, id)) :]
        middle = middle.replace(_IDS[0], id)
        closing = last[3] if last[3].startswith(closing) else closing  # some end the calls only if there are several
        before_name = _common_end(opening, middle)
        digits = (len(NUMBER) - 1) * before_name.count(NUMBER)
        begin = opening[: len(opening) - len(before_name) + digits]
        middle = middle[: len(middle) - len(before_name) + digits]
        after = _common_start(closing, middle)
        between, end = middle.removeprefix(after), closing.removeprefix(after)
    if before_arguments.startswith(ID_ALONE):  # the model writes the name in the id (Kimi K2)
        before_name += "functions."
        before_arguments = before_arguments.replace(ID_ALONE, f":{NUMBER}")
    units = _UNIT.findall(begin + before_name)
    marked = bool(units) and len(units[0]) > 1
    return ToolSyntax(
        trigger=units[0] if marked else pieces(begin + before_name or " ")[0].strip(),
        begin=begin,
        before_name=before_name,
        before_arguments=before_arguments,
        after_arguments=after,
        between=between,
        end=end,
        parameters=parameters,
        anchored=not marked and not (begin + before_name).startswith("<"),
        numbered=before_name.endswith("functions.") and before_arguments.startswith(f":{NUMBER}"),
        single=second is None,
    )


def _cut_call(text: str, number: int, id: str) -> tuple[str, str, ParameterSyntax | None, str] | None:
    """Texts before a call's name and its arguments, the syntax of the arguments, and the text after them, with
    placeholders. Where the id is printed and the name is not, the id stands in the name's place.
    """
    cut = _cut_json(text, number) or _cut_parameters(text, number) or _cut_python(text, number)
    if cut is None:
        return None
    opening, parameters, closing = cut
    at = max(opening.rfind(_VALUES[0][1]), 0)  # behind the call before
    name = opening.find(_NAMES[number], at)
    word = _NAMES[number] if name >= 0 else _IDS[number]
    name = opening.find(word, at)
    if name < 0:
        return None
    before_name, before_arguments = opening[:name], opening[name + len(word) :]
    if word == _IDS[number]:
        before_arguments = ID_ALONE + before_arguments
    texts = [one.replace(_IDS[number], id).replace(_NAMES[number], NAME) for one in (before_arguments, closing)]
    return before_name.replace(_IDS[number], id), texts[0], parameters, texts[1]


def _printed(text: str, number: int, id: str) -> str:
    """A text as it was printed, without placeholders."""
    return text.replace(id, _IDS[number]).replace(NAME, _NAMES[number])


def _begins_a_call(tools: ToolSyntax, template: Template) -> bool:
    """Whether the trigger tells a call from text: it is not empty, and does not stand around text."""
    prompt = _print(template, [], add_generation_prompt=True) or ""
    plain = _print(template, [{"role": "assistant", "content": "qzcontent"}]) or ""
    return bool(tools.trigger) and tools.trigger not in plain.removeprefix(_common_start(prompt, plain))


def _cut_json(text: str, number: int) -> tuple[str, None, str] | None:
    for separators in ((", ", ": "), (",", ":")):
        before, found, after = text.partition(json.dumps(_ARGUMENTS[number], separators=separators))
        if found:
            return before, None, after
    return None


def _cut_parameters(text: str, number: int) -> tuple[str, ParameterSyntax, str] | None:
    words = [_KEYS[0], _VALUES[number][0], _KEYS[1], _VALUES[number][1]]
    start = text.find(_VALUES[0][1]) if number else 0
    parts, rest = [], text[max(start, 0) :]
    for word in words:
        before, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(before)
    opening, before_value, middle, _ = parts
    opening = text[: max(start, 0)] + opening
    after_value = _common_start(middle, rest)
    before_name = middle.removeprefix(after_value)
    if not (after_value and before_value and before_name and opening.endswith(before_name)):
        return None
    other = before_value.replace('string="true"', 'string="false"')  # DeepSeek V3.2 marks each value
    syntax = ParameterSyntax(before_name, before_value, after_value, other if other != before_value else "")
    return opening.removesuffix(before_name), syntax, rest.removeprefix(after_value)


def _cut_python(text: str, number: int) -> tuple[str, ParameterSyntax, str] | None:
    pairs = zip(_KEYS, _VALUES[number], strict=True)
    for quote in "'\"":
        before, found, after = text.partition(", ".join(f"{key}={quote}{value}{quote}" for key, value in pairs))
        if found and before.endswith("(") and after.startswith(")"):
            return before, ParameterSyntax("", "=", "", python=True), after
        pairs = zip(_KEYS, _VALUES[number], strict=True)
    return None


def _reads_back(tools: ToolSyntax, text: str, count: int) -> bool:
    texts: dict[str, tuple[str, ...]] = dict.fromkeys(_KEYS, ())
    parser = ReplyParser(ReplyForm(ReplySyntax(tools=tools), tools=dict.fromkeys(_NAMES, texts)))
    if tools.numbered:
        for index, (id, name) in enumerate(zip(_IDS, _NAMES, strict=True)):
            text = text.replace(id, f"functions.{name}:{index}")
    parser.text(text)
    parser.finish()
    reply = Reply.of(parser.events)
    calls = [(call.name, _read(call)) for call in reply.tool_calls]
    return not reply.content and calls == [*zip(_NAMES, _ARGUMENTS, strict=True)][:count]


def _read(call: ToolCall) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(call.arguments)
    return None


# -- rendering -----------------------------------------------------------------------------------------------------


_USER = "qzuser"
_CONTENTS: tuple[str | None, ...] = ("", None)


def _call(ids: Sequence[str], as_text: bool, content: str | None) -> dict[str, Any]:
    calls = []
    for id, name, arguments in zip(ids, _NAMES, _ARGUMENTS, strict=False):
        function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": id, "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _render_calls(template: Template, ids: Sequence[str]) -> str | None:
    """A chat with an assistant's message that calls tools; None if the template refuses or drops a call."""
    for content in _CONTENTS:
        for as_text in (False, True):
            text = _render(template, [_call(ids, as_text, content)], len(ids))
            if text is not None:
                return text
    return None


def _render(template: Template, messages: Sequence[Mapping[str, Any]], calls: int = 1) -> str | None:
    text = _print(template, messages)
    said = (text or "").rpartition(_USER)[2]
    words = [word for values in _VALUES[:calls] for word in (*_KEYS, *values)]
    if text is None or not all(word in said for word in words):
        return None
    return None if "{'" + _KEYS[0] in said or '"{\\"' in said else text  # neither Python's repr, nor JSON in JSON


def _print(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    begin: Sequence[Mapping[str, Any]] = ({"role": "user", "content": _USER},),
    add_generation_prompt: bool = False,
) -> str | None:
    try:
        given = [*begin, *messages]
        return template.print_as_given(given, tools=_TOOLS, add_generation_prompt=add_generation_prompt)
    except ChatTemplateError:
        return None


def _body(template: Template, text: str, reasoning: ReasoningSyntax | None, calls: int) -> str:
    """The part of a rendered chat that the model would generate."""
    prompt = _print(template, [], add_generation_prompt=True) or ""
    plain = _print(template, [{"role": "assistant", "content": "qzcontent"}]) or ""
    start = len(_common_start(prompt, text))
    body = text[max(start, text.rfind(_USER) + len(_USER)) :]
    if reasoning is not None:
        ended = body.rfind(reasoning.end, 0, body.find(_NAMES[0]))
        body = body[ended + len(reasoning.end) :] if ended >= 0 else body
    tail = plain.partition("qzcontent")[2]
    units = [unit for unit in _UNIT.findall(tail) if len(unit) > 1]
    ends = [tail.strip(), *units, template.special("eos_token"), "<|eot_id|>", "<|eom_id|>"]
    after = body.rfind(_VALUES[calls - 1][1])
    cuts = [at for end in ends if end and (at := body.find(end, after)) >= 0]
    return body[: min(cuts, default=len(body))].strip()


def _common_start(a: str, b: str) -> str:
    common = []
    for one, other in zip(_UNIT.findall(a), _UNIT.findall(b), strict=False):
        if one != other:
            break
        common.append(one)
    return "".join(common)


def _common_end(a: str, b: str) -> str:
    """The common end of what precedes the first call and the second; a number of the call stands as a placeholder."""
    common: list[str] = []
    for one, other in zip(reversed(_UNIT.findall(a)), reversed(_UNIT.findall(b)), strict=False):
        if one != other and (one, other) not in (("0", "1"), ("1", "2")):
            break
        common.insert(0, one if one == other else NUMBER)
    return "".join(common)
