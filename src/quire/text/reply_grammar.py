"""The grammar of a whole reply: reasoning, then content or tool calls, in the model's own syntax.

A structural tag (`quire.grammar.structural_tag`) is built from the same `ReplySyntax` that `ReplyParser` uses. With
`auto` the content is unconstrained up to a call's trigger; after it, a call must follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.json_schema import call_schema, check_schema
from quire.grammar.structural_tag import root_format
from quire.text.reply_arguments import QuotedValues, parameter_names, parameters_format, taken_grammars
from quire.text.reply_syntax import NAME, OPTIONAL, PLACEHOLDERS, ReasoningSyntax, ReplyForm, ToolSyntax, pieces
from quire.text.tag_formats import Format, any_text, const, either, optional, sequence, tag

MAX_TOOLS = 256
WHITE = ("\n\n", "\n")
"""White space that templates print before and after reasoning."""
TOOL_CHOICES = (
    '"auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}}'
)
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ReplyRequest(msgspec.Struct, frozen=True):
    """What a request demands of its reply.

    Attributes:
        tools: in OpenAI's format.
        tool_choice: "auto", "none" or "required".
        allowed: names of the tools that may be called; None for all. The prompt has all tools either way.
        parallel: several calls are allowed.
        structured: constraints on the content.
    """

    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True
    structured: StructuredOutputsParams | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        if self.tool_choice == "none":
            return []
        functions = [tool["function"] for tool in self.tools]
        return [one for one in functions if self.allowed is None or one["name"] in self.allowed]


def reply_request(
    tools: Any = None, tool_choice: Any = None, parallel: bool = True, structured: StructuredOutputsParams | None = None
) -> ReplyRequest:
    """Read the fields of a request in OpenAI's format.

    Raises:
        SamplingParamsError: a field is not valid; `param` names it.
    """
    checked = _tools([] if tools is None else tools)
    names = [tool["function"]["name"] for tool in checked]
    choice = ("auto" if names else "none") if tool_choice is None else tool_choice
    allowed: list[Any] | None = None
    match choice:
        case "auto" | "none" | "required":
            pass
        case {"type": "function", "function": {"name": name}}:
            choice, allowed, parallel = "required", [name], False
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as given},
        }:
            choice, allowed = mode, [_called(one) for one in given]
        case _:
            raise _refused("tool_choice", f"is {_shown(choice)}; it must be {TOOL_CHOICES}")
    for name in allowed or ():
        if name not in names:
            raise _refused("tool_choice", f"names {_shown(name)}, which is none of the tools")
    if choice == "required" and not names:
        raise _refused("tool_choice", "is 'required', but there are no tools")
    subset = None if allowed is None else frozenset(allowed)
    return ReplyRequest(checked, choice if names else "none", subset, parallel, structured)


def _called(tool: Any) -> Any:
    """The name of one of the allowed tools."""
    match tool:
        case {"type": "function", "function": {"name": name}}:
            return name
    raise _refused("tool_choice", f"allows {_shown(tool)}, which is no function: give its name as in tools")


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list | tuple):
        raise _refused("tools", f"is a {type(tools).__name__}; it must be a list of functions")
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if (
            not isinstance(tool, Mapping)
            or tool.get("type") != "function"
            or not isinstance(tool.get("function"), dict)
        ):
            raise _refused(where, 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}')
        function = tool["function"]
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise _refused(f"{where}.function.name", f"is {_shown(name)}; it must match {TOOL_NAME.pattern}")
        if name in names:
            raise _refused(where, f"has the name {name!r} a second time")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise _refused(f"{where}.function.description", "must be a string")
        if not isinstance(function.get("parameters"), dict | None):
            raise _refused(f"{where}.function.parameters", "must be a JSON Schema of an object")
        if not isinstance(function.get("strict"), bool | None):
            raise _refused(f"{where}.function.strict", "must be true or false")
    return [dict(tool) for tool in tools]


def _refused(where: str, what: str) -> SamplingParamsError:
    return SamplingParamsError(f"{where} {what}", param=where)


def _shown(value: Any) -> str:
    return repr(value)[:80]


class ReplyGrammar(msgspec.Struct, frozen=True):
    """The grammar of a reply, and how to parse it.

    Attributes:
        structured: the grammar; None if the reply is unconstrained.
        form: how to parse it.
        loosened: tools that are not strict and of whose schema something cannot be enforced, and what and why.
    """

    structured: StructuredOutputsParams | None
    form: ReplyForm
    loosened: dict[str, str] = {}


def reply_grammar(form: ReplyForm, wanted: ReplyRequest) -> ReplyGrammar:
    """The grammar of a request's reply.

    Args:
        form: the model's syntax, and the state in which the prompt ends.

    Raises:
        SamplingParamsError: the model's template does not support tools, or a schema cannot be enforced.
    """
    syntax, functions = form.syntax, wanted.callable
    if not functions:
        content = None if wanted.structured is None else _content(wanted.structured)
        if content is None or (syntax.reasoning is None and syntax.content is None) or form.reasoned:
            return ReplyGrammar(wanted.structured, form)
        return ReplyGrammar(_structured(_reply(form, content)), form)
    if syntax.tools is None:
        raise SamplingParamsError(
            "no way to call tools could be found in this model's chat template; name one with --tool-format, or leave "
            "tools out",
            param="tools",
        )
    loosened: dict[str, str] = {}
    arguments = {function["name"]: _arguments(syntax.tools, function, loosened) for function in functions}
    texts = {name: texts for name, (_, texts) in arguments.items()}
    form = msgspec.structs.replace(form, tools=texts)
    parallel = wanted.parallel and not syntax.tools.single
    calls = _Calls(syntax.tools, {name: one for name, (one, _) in arguments.items()}, parallel)
    if wanted.tool_choice != "auto":
        return ReplyGrammar(_structured(_reply(form, None, calls), calls.arguments), form, loosened)
    content = {"type": "any_text"} if wanted.structured is None else _content(wanted.structured)
    return ReplyGrammar(_structured(_reply(form, content, calls), calls.arguments), form, loosened)


class _Calls:
    """The formats of calls. A tool's arguments are large and stand in several places, so they are rules by its name."""

    def __init__(self, tools: ToolSyntax, arguments: Mapping[str, Format], parallel: bool) -> None:
        self.tools, self.arguments, self._parallel = tools.as_written(), arguments, parallel
        self.openings = self.tools.openings(arguments)

    def first(self) -> list[Format]:
        """The first call, a tag per tool and way."""
        return self._each(self.tools.begin)

    def then(self) -> Format:
        """Calls after the first one."""
        more = {"type": "star", "content": either(self._each(self.tools.between))}
        return sequence(*([more] if self._parallel else []), const(self.tools.end))

    def _each(self, before: str) -> list[Format]:
        return [self._call(way, before + way.before_name, name) for way in self.tools.ways for name in self.arguments]

    def _call(self, tools: ToolSyntax, opening: str, name: str) -> Format:
        after = pieces(tools.after_arguments.replace(NAME, name))
        arguments: Format = {"type": "rule", "name": name}
        if any(one in opening for one in OPTIONAL):  # as one piece, by which the library tells it from free text
            begun: Format = {"type": "regex", "pattern": tools.openings([name])}
            rest = pieces(tools.before_arguments[1:])
            return sequence(begun, *map(_piece, rest), arguments, *map(_piece, after))
        begin, *rest = pieces((opening + name + tools.before_arguments).replace(NAME, name))
        return tag(begin, sequence(*map(_piece, rest), arguments, *map(_piece, after)))


def _piece(text: str) -> Format:
    if text not in PLACEHOLDERS:
        return const(text)
    pattern = {"type": "regex", "pattern": PLACEHOLDERS[text]}
    return optional(pattern) if text in OPTIONAL else pattern


def _reply(form: ReplyForm, content: Format | None, calls: _Calls | None = None) -> Format:
    """The whole reply after the prompt.

    Args:
        content: None if there must be calls.
    """
    syntax, reasoning = form.syntax, form.syntax.reasoning
    if syntax.content is not None:
        return _messages(form, content, calls)
    rest = _rest(content, calls, [])
    if reasoning is None or form.reasoned:
        return rest
    free = content is not None and content["type"] == "any_text"
    after = rest if free else sequence(_white(), rest)
    thought = either(_thought(reasoning, after, calls, free))
    if form.in_reasoning:
        return thought
    # The white space before it is written with the marker: alone, it could be the beginning of free text, too.
    begun = either([const(white + reasoning.start) for white in ("", *WHITE)])
    return either([sequence(begun, thought), _rest(content, calls, [reasoning.start])])


def _thought(reasoning: ReasoningSyntax, after: Format, calls: _Calls | None, free: bool) -> list[Format]:
    """Ways to go on within reasoning: to end it; to call without ending it, as Qwen3.5 does; and, where content may be
    anything, to say nothing more: no reply is kept from ending.
    """
    ways = [sequence(tag("", any_text(), reasoning.end), after)]
    if calls is not None and not calls.tools.anchored:
        trigger = calls.tools.trigger
        first = [{**one, "begin": one["begin"].removeprefix(trigger)} for one in calls.first()]
        ways.append(sequence(any_text(), const(trigger), either(first), calls.then()))
    return [*ways, any_text()] if free else ways


def _rest(content: Format | None, calls: _Calls | None, not_first: Sequence[str]) -> Format:
    """Content or calls; unconstrained content does not start with any of `not_first`."""
    if calls is None:
        return {**(content or any_text()), **({"not_first": [*not_first]} if content == any_text() else {})}
    if content != any_text():
        called = sequence(_white(), either(calls.first()), calls.then())
        return called if content is None else either([called, content])
    if calls.tools.anchored:
        called = sequence(either(calls.first()), calls.then())
        return either([called, {**content, "not_first": [*not_first], "unlike": calls.openings}])
    return {
        "type": "triggered_tags",
        "triggers": [calls.tools.trigger],
        "tags": calls.first(),
        "stop_after_first": True,
        "then": calls.then(),
        "not_first": [*not_first],
    }


def _messages(form: ReplyForm, content: Format | None, calls: _Calls | None) -> Format:
    """A reply of messages with headers (Harmony): any number of reasoning and preambles, and content or calls."""
    headed, reasoning = form.syntax.content, form.syntax.reasoning
    if headed is None:
        raise RuntimeError("messages without a syntax for them")
    last: list[Format] = []
    if content is not None:
        last.append(tag(headed.starts[0], content))
        if not headed.glue:  # one part is one message: its end is not yet the end of the turn
            last.append(tag(headed.starts[0], content, headed.end))
    if calls is not None:
        last.append(sequence(either(calls.first()), calls.then()))
    end, early = headed.end + headed.glue, []
    if reasoning is not None:
        early.append(tag(reasoning.start, any_text(), reasoning.end + headed.glue))
    if calls is not None:
        early += [tag(start, any_text(), end) for start in headed.starts[1:]]
    begun = [tag("", any_text(), reasoning.end + headed.glue)] if reasoning is not None and form.in_reasoning else []
    more: list[Format] = [{"type": "star", "content": either(early)}] if early else []
    return sequence(*begun, *more, either(last))


def _content(wanted: StructuredOutputsParams) -> Format:
    """The format of constrained content."""
    match wanted.kind:
        case "json" | "json_object":
            schema = {"type": "object"} if wanted.json is None else _schema(str(wanted.json))
            spaces: Format = {"disable_any_whitespace": True} if wanted.disable_any_whitespace else {}
            if wanted.whitespace_pattern is not None:
                spaces = {"whitespace_pattern": wanted.whitespace_pattern}
            return {"type": "json_schema", "json_schema": schema, **spaces}
        case "regex":
            return {"type": "regex", "pattern": wanted.regex}
        case "choice":
            return either([const(one) for one in wanted.choice or ()])
        case "grammar":
            return {"type": "grammar", "grammar": wanted.grammar}
    format = root_format(str(wanted.structural_tag))
    if not isinstance(format, dict):
        raise SamplingParamsError("the structural tag's format must be an object", param="structured_outputs")
    return format


def _schema(text: str) -> Any:
    try:
        check_schema(text)
    except SamplingParamsError as error:
        error.param = "structured_outputs"
        raise
    return json.loads(text)


# -- arguments -----------------------------------------------------------------------------------------------------


def _arguments(
    tools: ToolSyntax, function: Mapping[str, Any], loosened: dict[str, str]
) -> tuple[Format, dict[str, tuple[str, ...]]]:
    """The format of a tool's arguments, and its parameters that are bare text: see `ReplyForm.tools`."""
    name, schema = function["name"], function.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else {"type": "object", **schema}
    dropped: list[str] | None = None if function.get("strict") else []
    try:
        if schema["type"] != "object":
            raise SamplingParamsError(f"its type is {str(schema['type'])[:80]!r}; arguments are an object")
        schema, grammars = taken_grammars(tools.parameters, schema)
        schema = call_schema(schema, dropped)
        if tools.parameters is not None:
            made = parameters_format(tools.parameters, schema, dropped, grammars)
        else:
            made = {"type": "json_schema", "json_schema": schema}, {}
    except SamplingParamsError as error:
        if dropped is None:
            raise SamplingParamsError(f"tool {name!r}: {error}", param="tools") from None
        loosened[name] = f"{ANY_OBJECT}: {error}"
        return _any_object(tools, schema)
    if dropped:
        loosened[name] = "; ".join(dropped)
    return made


ANY_OBJECT = "any JSON object"


def _any_object(tools: ToolSyntax, schema: Mapping[str, Any]) -> tuple[Format, dict[str, tuple[str, ...]]]:
    """Arguments of a schema that is not enforced."""
    if tools.parameters is None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}, {}
    if tools.parameters.quote:
        return QuotedValues(tools.parameters.quote, {}).any_members(), {}
    named = schema.get("properties")
    names = parameter_names(tools.parameters)
    known: dict[str, Any] = {key: {} for key in named if names.fullmatch(key)} if isinstance(named, dict) else {}
    return parameters_format(tools.parameters, {"type": "object", "properties": known})


# -- formats -------------------------------------------------------------------------------------------------------


def _structured(format: Format, rules: Mapping[str, Format] | None = None) -> StructuredOutputsParams:
    tag = {"type": "structural_tag", "format": format, **({"rules": dict(rules)} if rules else {})}
    return StructuredOutputsParams(structural_tag=tag)


def _white() -> Format:
    """White space that templates print between reasoning and the next part."""
    return {"type": "optional", "content": either([const(white) for white in WHITE])}
