"""Finds the syntax of a model's replies by rendering its chat template with messages that contain marker words.

The text around these words is the syntax. It is accepted if the parser reads back what was rendered. Formats that
cannot be found in this way, since templates print calls differently from how models write them, are data (`KNOWN`),
chosen by a mark in the rendered text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ChatTemplateError
from quire.text.chat_template import ChatTemplate
from quire.text.reply import Reply, ToolCall
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import (
    ID,
    ContentSyntax,
    ParameterSyntax,
    ReasoningSyntax,
    ReplyForm,
    ReplySyntax,
    ToolSyntax,
)

REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""Delimiters of reasoning that a template need not print: many drop the reasoning of earlier turns."""

_THINK = ReasoningSyntax(*REASONING[0])

KNOWN: dict[str, ReplySyntax] = {
    "hermes": ReplySyntax(
        "hermes",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name='<tool_call>\n{"name": "',
            before_arguments='", "arguments": ',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
        reasoning=_THINK,
    ),
    "qwen3_coder": ReplySyntax(
        "qwen3_coder",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name="<tool_call>\n<function=",
            before_arguments=">\n",
            after_arguments="</function>\n</tool_call>",
            between="\n",
            parameters=ParameterSyntax("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        reasoning=_THINK,
    ),
    "llama3_json": ReplySyntax(
        "llama3_json",
        tools=ToolSyntax(
            trigger='{"name": "',
            before_name='{"name": "',
            before_arguments='", "parameters": ',
            after_arguments="}",
            anchored=True,
            single=True,
        ),
    ),
    "mistral": ReplySyntax(
        "mistral",
        tools=ToolSyntax(
            trigger="[TOOL_CALLS]",
            begin="[TOOL_CALLS] [",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after_arguments=f', "id": "{ID}"}}',
            between=", ",
            end="]",
        ),
        reasoning=ReasoningSyntax(*REASONING[1]),
    ),
    "deepseek_v3": ReplySyntax(
        "deepseek_v3",
        tools=ToolSyntax(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            before_arguments="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
        reasoning=_THINK,
    ),
    "deepseek_v31": ReplySyntax(
        "deepseek_v31",
        tools=ToolSyntax(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>",
            before_arguments="<｜tool▁sep｜>",
            after_arguments="<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        reasoning=_THINK,
    ),
    "glm45": ReplySyntax(
        "glm45",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name="<tool_call>",
            before_arguments="\n",
            after_arguments="</tool_call>",
            between="\n",
            parameters=ParameterSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        reasoning=_THINK,
    ),
    "deepseek_v32": ReplySyntax(
        "deepseek_v32",
        tools=ToolSyntax(
            trigger="<｜DSML｜function_calls>",
            begin="<｜DSML｜function_calls>",
            before_name='\n<｜DSML｜invoke name="',
            before_arguments='">\n',
            after_arguments="</｜DSML｜invoke>",
            end="\n</｜DSML｜function_calls>",
            parameters=ParameterSyntax(
                '<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n", '" string="false">'
            ),
        ),
        reasoning=_THINK,
    ),
    "minimax_m2": ReplySyntax(
        "minimax_m2",
        tools=ToolSyntax(
            trigger="<minimax:tool_call>",
            begin="<minimax:tool_call>",
            before_name='\n<invoke name="',
            before_arguments='">\n',
            after_arguments="</invoke>",
            end="\n</minimax:tool_call>",
            parameters=ParameterSyntax('<parameter name="', '">', "</parameter>\n"),
        ),
        reasoning=_THINK,
    ),
    "kimi_k2": ReplySyntax(
        "kimi_k2",
        tools=ToolSyntax(
            trigger="<|tool_calls_section_begin|>",
            begin="<|tool_calls_section_begin|>",
            before_name="<|tool_call_begin|>",
            before_arguments="<|tool_call_argument_begin|>",
            after_arguments="<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
            numbered=True,
        ),
        reasoning=_THINK,
    ),
    "lfm2": ReplySyntax(
        "lfm2",
        tools=ToolSyntax(
            trigger="<|tool_call_start|>",
            begin="<|tool_call_start|>[",
            before_name="",
            before_arguments="(",
            after_arguments=")",
            between=", ",
            end="]<|tool_call_end|>",
            parameters=ParameterSyntax("", "=", "", python=True),
        ),
    ),
    "gemma4": ReplySyntax(
        "gemma4",
        tools=ToolSyntax(
            trigger="<|tool_call>",
            before_name="<|tool_call>call:",
            before_arguments="{",
            after_arguments="}<tool_call|>",
            parameters=ParameterSyntax("", ":", "", quote='<|"|>'),
        ),
        reasoning=ReasoningSyntax(*REASONING[3]),
    ),
    "harmony": ReplySyntax(
        "harmony",
        reasoning=ReasoningSyntax("<|channel|>analysis<|message|>", "<|end|>"),
        tools=ToolSyntax(
            trigger="<|channel|>commentary to=functions.",
            before_name="<|channel|>commentary to=functions.",
            before_arguments=" <|constrain|>json<|message|>",
            single=True,
        ),
        content=ContentSyntax(
            ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"), "<|end|>", "<|start|>assistant"
        ),
    ),
}
"""Published formats, by the names of vLLM's parsers."""

MARKS = {
    "harmony": ("<|channel|>", "to=functions.qzname"),
    "gemma4": ("<|tool_call>call:qzname{", ':<|"|>qzone<|"|>'),
}
"""Marks in a rendered call of formats that cannot be found by rendering."""

SOURCE_MARKS = {"lfm2": ("<|tool_list_start|>", "<|tool_call_start|>")}
"""Marks (any of them) in the source of templates that often do not print calls at all."""

_NAME, _KEYS, _VALUES = "qzname", ("qzfirst", "qzsecond"), ("qzone", "qztwo")
_IDS = ("qzcall001", "qzcall002")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "qzdescription",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}},
    },
}
_UNIT = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|.", re.DOTALL)
"""A marker, or a character."""


def find_syntax(template: ChatTemplate) -> ReplySyntax:
    """The syntax of replies of this template's model, as far as it can be found."""
    reasoning = _find_reasoning(template)
    rendered = _render_call(template, _IDS[:1]) or _render_call(template, _numbered_ids(1))
    for name, marks in MARKS.items():
        if rendered is not None and all(mark in rendered for mark in marks):
            return in_format(ReplySyntax(reasoning=reasoning), name)
    for name, marks in SOURCE_MARKS.items():
        if any(mark in template.source for mark in marks):
            return in_format(ReplySyntax(reasoning=reasoning), name)
    tools = _find_tools(template, reasoning)
    if tools is None:
        return ReplySyntax(reasoning=reasoning)
    name = next((name for name, known in KNOWN.items() if known.tools == tools), "derived")
    return ReplySyntax(name, reasoning=reasoning, tools=tools)


def in_format(found: ReplySyntax, tool_format: str) -> ReplySyntax:
    """The syntax with calls in this format of `KNOWN`, or without calls ("off"); unchanged for "auto"."""
    if tool_format == "auto":
        return found
    if tool_format == "off":
        return ReplySyntax("off", found.reasoning)
    known = KNOWN[tool_format]
    return known if known.content is not None else ReplySyntax(known.name, found.reasoning, known.tools)


def takes_argument_objects(template: ChatTemplate) -> bool:
    """Whether the template takes arguments in messages as objects rather than JSON text."""
    return _render(template, [_call(_IDS[:1], as_text=False)]) is not None


# -- reasoning -----------------------------------------------------------------------------------------------------


def _find_reasoning(template: ChatTemplate) -> ReasoningSyntax | None:
    for start, end in REASONING:
        if end in template.source:
            return ReasoningSyntax(start, end)
    message = {
        "role": "assistant",
        "content": "qzcontent",
        "reasoning_content": "qzreasoning",
        "reasoning": "qzreasoning",
    }
    text = _print(template, [message])
    if text is None or "qzreasoning" not in text:
        return None
    before, _, after = text.partition("qzreasoning")
    start = _last_marker(before)
    end = after.partition("qzcontent")[0].strip()
    return ReasoningSyntax(start, end) if start and end else None


def _last_marker(text: str) -> str:
    units = _UNIT.findall(text.rstrip())
    return units[-1] if units and len(units[-1]) > 1 else ""


# -- tools ---------------------------------------------------------------------------------------------------------


def _find_tools(template: ChatTemplate, reasoning: ReasoningSyntax | None) -> ToolSyntax | None:
    for ids in (_IDS, _numbered_ids(2)):
        one = _render_call(template, ids[:1])
        if one is None or _NAME not in one:
            continue
        two = _render_call(template, ids)
        first = _body(template, one, reasoning)
        both = None if two is None else _body(template, two, reasoning)
        tools = _cut(first, both, numbered=ids is not _IDS)
        if tools is not None and _reads_back(tools, first, 1) and (both is None or _reads_back(tools, both, 2)):
            return tools
    return None


def _cut(first: str, both: str | None, numbered: bool) -> ToolSyntax | None:
    """The syntax around one call and between two, from one (`first`) and two (`both`) rendered calls."""
    name = f"functions.{_NAME}:0" if numbered else _NAME
    opening, found, rest = first.partition(name)
    if not found:
        return None
    cut = _cut_json(rest) or _cut_parameters(rest)
    if cut is None:
        return None
    before_arguments, parameters, closing = cut
    begin, before_name, after, between, end = "", opening, closing, "", ""
    if both is not None:
        last = _VALUES[1]
        middle = both.partition(last)[2].partition(name.replace(":0", ":1"))[0]
        inner = first.partition(last)[2]
        skipped = len(inner) - len(closing)  # the end of the arguments themselves
        middle = middle[skipped:]
        before_name = _common_end(opening, middle)
        after = _common_start(closing, middle.removesuffix(before_name))
        begin, end = opening.removesuffix(before_name), closing.removeprefix(after)
        between = middle.removesuffix(before_name).removeprefix(after)
    units = _UNIT.findall(begin + before_name)
    marked = bool(units) and len(units[0]) > 1
    return ToolSyntax(
        trigger=units[0] if marked else begin + before_name,
        begin=begin,
        before_name=before_name,
        before_arguments=before_arguments,
        after_arguments=after.replace(_IDS[0], ID),
        between=between,
        end=end.replace(_IDS[0], ID),
        parameters=parameters,
        anchored=not marked and not (begin + before_name).startswith("<"),
        numbered=numbered,
        single=both is None,
    )


def _cut_json(rest: str) -> tuple[str, None, str] | None:
    for separators in ((", ", ": "), (",", ":")):
        before, found, after = rest.partition(json.dumps(_ARGUMENTS, separators=separators))
        if found and before:
            return before, None, after
    return None


def _cut_parameters(rest: str) -> tuple[str, ParameterSyntax, str] | None:
    words = [_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1]]
    parts = []
    for word in words:
        before, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(before)
    opening, before_value, middle, _ = parts
    after_value = _common_start(middle, rest)
    before_name = middle.removeprefix(after_value)
    if not (after_value and before_value and before_name and opening.endswith(before_name)):
        return None
    other = before_value.replace('string="true"', 'string="false"')  # DeepSeek V3.2 marks each value
    syntax = ParameterSyntax(before_name, before_value, after_value, other if other != before_value else "")
    return opening.removesuffix(before_name), syntax, rest.removeprefix(after_value)


def _reads_back(tools: ToolSyntax, text: str, count: int) -> bool:
    parser = ReplyParser(ReplyForm(ReplySyntax(tools=tools), tools={_NAME: dict.fromkeys(_KEYS, ())}))
    parser.text(text)
    parser.finish()
    reply = Reply.of(parser.events)
    return not reply.content and len(reply.tool_calls) == count and all(_is_call(call) for call in reply.tool_calls)


def _is_call(call: ToolCall) -> bool:
    with contextlib.suppress(ValueError):
        return call.name == _NAME and json.loads(call.arguments) == _ARGUMENTS
    return False


# -- rendering -----------------------------------------------------------------------------------------------------


def _numbered_ids(count: int) -> tuple[str, ...]:
    return tuple(f"functions.{_NAME}:{index}" for index in range(count))


def _call(ids: Sequence[str], as_text: bool) -> dict[str, Any]:
    arguments: Any = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    function = {"name": _NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": id, "type": "function", "function": function} for id in ids],
    }


def _render_call(template: ChatTemplate, ids: Sequence[str]) -> str | None:
    """A chat with an assistant's message that calls tools; None if the template refuses or drops it."""
    for as_text in (False, True):
        text = _render(template, [_call(ids, as_text)])
        if text is not None:
            return text
    return None


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str | None:
    text = _print(template, messages)
    if text is None or not all(word in text for word in (*_KEYS, *_VALUES)):
        return None
    return None if "{'" + _KEYS[0] in text or '"{\\"' in text else text  # neither Python's repr, nor JSON in JSON


def _print(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    said = [{"role": "user", "content": "qzuser"}, *messages]
    try:
        return template.render(said, tools=[_TOOL], **{"add_generation_prompt": False, **options})
    except ChatTemplateError:
        return None


def _body(template: ChatTemplate, text: str, reasoning: ReasoningSyntax | None) -> str:
    """The part of a rendered chat that the model would generate."""
    prompt = _print(template, [], add_generation_prompt=True) or ""
    plain = _print(template, [{"role": "assistant", "content": "qzcontent"}]) or ""
    body = text.removeprefix(_common_start(prompt, text))
    if reasoning is not None and reasoning.end in body:
        body = body.rpartition(reasoning.end)[2]
    ends = [plain.partition("qzcontent")[2].strip(), template.special("eos_token"), "<|eot_id|>", "<|eom_id|>"]
    after = body.rfind(_VALUES[1])
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
    common: list[str] = []
    for one, other in zip(reversed(_UNIT.findall(a)), reversed(_UNIT.findall(b)), strict=False):
        if one != other:
            break
        common.insert(0, one)
    return "".join(common)
