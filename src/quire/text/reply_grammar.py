"""The grammar of a whole reply: reasoning, then content or tool calls, in the model's own syntax.

It is written as a structural tag (`quire.grammar.structural_tag`), from the same `ReplySyntax` by which `ReplyParser`
reads the reply. In `auto` the content is free until a call's trigger stands there; from then on it is a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.json_schema import ANNOTATIONS, check_schema
from quire.grammar.structural_tag import root_format
from quire.text.reply_syntax import ID, ParameterSyntax, ReplyForm, ToolSyntax

MAX_TOOLS = 256
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Format = dict[str, Any]


class ReplyRequest(msgspec.Struct, frozen=True):
    """What a request says of its reply.

    Attributes:
        tools: as OpenAI spells them.
        tool_choice: "auto", "none", "required", or {"name": ...}.
        parallel: several calls may come.
        structured: what content must look like.
    """

    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, str] = "auto"
    parallel: bool = True
    structured: StructuredOutputsParams | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        if self.tool_choice == "none":
            return []
        functions = [tool["function"] for tool in self.tools]
        if isinstance(self.tool_choice, dict):
            return [function for function in functions if function["name"] == self.tool_choice["name"]]
        return functions


def reply_request(
    tools: Any = None, tool_choice: Any = None, parallel: bool = True, structured: StructuredOutputsParams | None = None
) -> ReplyRequest:
    """From the fields of a request, as OpenAI spells them.

    Raises:
        SamplingParamsError: one is not valid; `param` says which.
    """
    checked = _tools([] if tools is None else tools)
    names = [tool["function"]["name"] for tool in checked]
    choice = ("auto" if names else "none") if tool_choice is None else tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("function"), Mapping):
        choice = {"name": choice["function"].get("name")}
        if choice["name"] not in names:
            raise _refused("tool_choice", f"names {_shown(choice['name'])}, which is none of the tools")
    elif not (isinstance(choice, str) and choice in ("auto", "none", "required")):
        allowed = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise _refused("tool_choice", f"is {_shown(choice)}; it must be {allowed}")
    if choice == "required" and not names:
        raise _refused("tool_choice", "is 'required', but there are no tools")
    return ReplyRequest(checked, choice if names else "none", parallel, structured)


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
    """What is made of it.

    Attributes:
        structured: the grammar; None: the reply is free.
        form: how it is read.
        loosened: tools that are not strict, and whose arguments are any JSON object, since not all of their schema can
            be enforced; and why.
    """

    structured: StructuredOutputsParams | None
    form: ReplyForm
    loosened: dict[str, str] = {}


def reply_grammar(form: ReplyForm, wanted: ReplyRequest) -> ReplyGrammar:
    """The grammar of a request's reply.

    Args:
        form: the model's syntax, and where in it the prompt ends.

    Raises:
        SamplingParamsError: the model's template shows no way to call tools, or a schema cannot be enforced.
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
    calls = _Calls(syntax.tools, {name: one for name, (one, _) in arguments.items()}, _parallel(wanted, syntax.tools))
    if wanted.tool_choice != "auto":
        return ReplyGrammar(_structured(_reply(form, None, calls)), form, loosened)
    content = {"type": "any_text"} if wanted.structured is None else _content(wanted.structured)
    return ReplyGrammar(_structured(_reply(form, content, calls)), form, loosened)


def _parallel(wanted: ReplyRequest, tools: ToolSyntax) -> bool:
    return wanted.parallel and not tools.single and not isinstance(wanted.tool_choice, dict)


class _Calls:
    """Formats of calls."""

    def __init__(self, tools: ToolSyntax, arguments: Mapping[str, Format], parallel: bool) -> None:
        self.tools, self._arguments, self._parallel = tools, arguments, parallel

    def first(self) -> list[Format]:
        """The beginning of what calls tools, a tag for each of them."""
        return self._each(self.tools.begin)

    def then(self) -> Format:
        """What may follow the first call."""
        more = {"type": "star", "content": _either(self._each(self.tools.between))}
        return _sequence(*([more] if self._parallel else []), _text(self.tools.end))

    def _each(self, before: str) -> list[Format]:
        return [self._call(before + self.tools.before_name, name) for name in self._arguments]

    def _call(self, opening: str, name: str) -> Format:
        tools, arguments = self.tools, self._arguments[name]
        before, with_id, after = tools.after_arguments.partition(ID)
        closing = [_text(before), {"type": "regex", "pattern": "[A-Za-z0-9]{9}"}, _text(after)]
        rest = [arguments, *(closing if with_id else [_text(before)])]
        if tools.numbered:
            number = {"type": "regex", "pattern": "0|[1-9][0-9]{0,2}"}
            return _tag(f"{opening}functions.{name}:", _sequence(number, _text(tools.before_arguments), *rest))
        return _tag(opening + name + tools.before_arguments, _sequence(*rest))


def _reply(form: ReplyForm, content: Format | None, calls: _Calls | None = None) -> Format:
    """A whole reply from where the prompt ends.

    Args:
        content: None: there must be calls.
    """
    syntax, reasoning = form.syntax, form.syntax.reasoning
    if syntax.content is not None:
        return _messages(form, content, calls)
    rest = _rest(content, calls, [])
    if reasoning is None or form.reasoned:
        return rest
    free = content is not None and content["type"] == "any_text"
    after = rest if free else _sequence(_white(), rest)
    if form.in_reasoning:
        return _sequence(_tag("", _any_text(), reasoning.end), after)
    thought = _sequence(_white(), _tag(reasoning.start, _any_text(), reasoning.end), after)
    return _either([thought, _rest(content, calls, [reasoning.start])])


def _rest(content: Format | None, calls: _Calls | None, not_first: Sequence[str]) -> Format:
    """Content or calls; free content does not begin with any of `not_first`."""
    if calls is None:
        return {**(content or _any_text()), **({"not_first": [*not_first]} if content == _any_text() else {})}
    if content != _any_text():
        called = _sequence(_white(), _either(calls.first()), calls.then())
        return called if content is None else _either([called, content])
    if calls.tools.anchored:
        called = _sequence(_either(calls.first()), calls.then())
        return _either([called, {**content, "not_first": [*not_first, calls.tools.trigger]}])
    return {
        "type": "triggered_tags",
        "triggers": [calls.tools.trigger],
        "tags": calls.first(),
        "stop_after_first": True,
        "then": calls.then(),
        "not_first": [*not_first],
    }


def _messages(form: ReplyForm, content: Format | None, calls: _Calls | None) -> Format:
    """A reply of messages with headers (Harmony): reasoning, a preamble, and content or calls."""
    headed, reasoning = form.syntax.content, form.syntax.reasoning
    if headed is None or reasoning is None:
        raise RuntimeError("messages without a syntax for them")
    last: list[Format] = []
    if content is not None:
        last.append(_tag(headed.starts[0], content))
    if calls is not None:
        last.append(_sequence(_either(calls.first()), calls.then()))
    glue, end = headed.glue, _either(last)
    if calls is not None:
        preambles = [_tag(start, _any_text(), headed.end + glue) for start in headed.starts[1:]]
        end = _either([end, *[_sequence(preamble, end) for preamble in preambles]])
    if form.in_reasoning:
        return _sequence(_tag("", _any_text(), reasoning.end + glue), end)
    return _either([end, _sequence(_tag(reasoning.start, _any_text(), reasoning.end + glue), end)])


def _content(wanted: StructuredOutputsParams) -> Format:
    """A form of content, as a format."""
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
            return _either([_text(one) for one in wanted.choice or ()])
        case "grammar":
            return {"type": "grammar", "grammar": wanted.grammar}
    format = root_format(str(wanted.structural_tag))
    if not isinstance(format, dict):
        raise SamplingParamsError("the structural tag's format must be an object", param="structured_outputs")
    return format


def _schema(text: str) -> Any:
    check_schema(text)
    return json.loads(text)


# -- arguments -----------------------------------------------------------------------------------------------------


def _arguments(
    tools: ToolSyntax, function: Mapping[str, Any], loosened: dict[str, str]
) -> tuple[Format, frozenset[str]]:
    """The format of a tool's arguments, and those of its parameters that are written as texts."""
    name, schema = function["name"], function.get("parameters")
    schema = {"type": "object", "properties": {}} if schema is None else {"type": "object", **schema}
    try:
        check_schema(json.dumps(schema))
        if schema["type"] != "object":
            raise SamplingParamsError(f"its type is {str(schema['type'])[:80]!r}; arguments are an object")
        if tools.parameters is not None:
            return _parameters(tools.parameters, schema)
        return {"type": "json_schema", "json_schema": schema}, frozenset()
    except SamplingParamsError as error:
        if function.get("strict"):
            raise SamplingParamsError(f"tool {name!r}: {error}", param="tools") from None
        loosened[name] = str(error)
    if tools.parameters is None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}, frozenset()
    named = schema.get("properties")
    may_stand = PYTHON_NAME.fullmatch if tools.parameters.python else _may_stand
    known: dict[str, Any] = {key: {} for key in named if may_stand(key)} if isinstance(named, dict) else {}
    return _parameters(tools.parameters, {"type": "object", "properties": known})


def _parameters(syntax: ParameterSyntax, schema: Mapping[str, Any]) -> tuple[Format, frozenset[str]]:
    """Arguments that are written one by one, in the order of the schema."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    odd = schema.keys() - {"type", "properties", "required", "additionalProperties", *shared} - ANNOTATIONS
    if odd:
        raise SamplingParamsError(f"{sorted(odd)[0]!r} cannot be enforced where parameters are written one by one")
    properties, required = dict(schema.get("properties", {})), schema.get("required", [])
    properties |= {key: schema.get("additionalProperties", {}) for key in required if key not in properties}
    formats: list[Format] = []
    texts = set()
    for key in properties:
        if not (PYTHON_NAME.fullmatch(key) if syntax.python else _may_stand(key)):
            raise SamplingParamsError(f"the parameter {key[:80]!r} cannot be written in this model's syntax")
    if syntax.python:
        named = [_tag(key + syntax.before_value, _python_value(each, shared)) for key, each in properties.items()]
        return _listed(named, [key in required for key in properties]), frozenset()
    for key, each in properties.items():
        if _is_text(each):
            texts.add(key)
        one = _tag(syntax.before_name + key + syntax.before_value, _value(each, shared), syntax.after_value)
        formats.append(one if key in required else _optional(one))
    return _sequence(*formats), frozenset(texts)


PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _listed(formats: Sequence[Format], required: Sequence[bool]) -> Format:
    """These in their order, a comma between two; those that are not required may be left out."""
    following, listed = _sequence(), _sequence()  # what may come behind another one, and at first
    for one, must in zip(reversed(formats), reversed(required), strict=True):
        first, then = _sequence(one, following), _sequence(_text(", "), one)
        listed = first if must else _either([first, listed]) if listed != _sequence() else _optional(first)
        following = _sequence(then if must else _optional(then), following)
    return listed


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _python_value(schema: Any, shared: Mapping[str, Any]) -> Format:
    """As JSON, but for a truth value, which has Python's names."""
    if isinstance(schema, dict) and schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
        return _either([_text("True"), _text("False")])
    return {"type": "json_schema", "json_schema": {**schema, **shared} if isinstance(schema, dict) else schema}


def _may_stand(key: str) -> bool:
    return bool(re.fullmatch(r"[\w.$@ -]{1,128}", key))


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    return bool(values) and all(isinstance(value, str) for value in values)


def _value(schema: Any, shared: Mapping[str, Any]) -> Format:
    if not _is_text(schema):
        return {"type": "json_schema", "json_schema": {**schema, **shared} if isinstance(schema, dict) else schema}
    odd = schema.keys() - {"type", "enum", "const", "pattern", "minLength", "maxLength"} - ANNOTATIONS
    bounds = {"pattern", "minLength", "maxLength"} & schema.keys()
    if odd or ("enum" in schema) + ("const" in schema) + bool(bounds) > 1:
        what = sorted(odd or bounds)[0]
        raise SamplingParamsError(f"{what!r} of a text cannot be enforced where parameters are written one by one")
    if "enum" in schema or "const" in schema:
        return _either([_text(one) for one in schema.get("enum", [schema.get("const")]) if isinstance(one, str)])
    if "pattern" in bounds and len(bounds) > 1:
        raise SamplingParamsError(
            "'pattern' beside a length cannot be enforced where parameters are written one by one"
        )
    if "pattern" in bounds:
        return {"type": "regex", "pattern": _whole(schema["pattern"])}
    if bounds:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        return {"type": "regex", "pattern": f"(?s:.{{{int(schema.get('minLength', 0))},{most}}})"}
    return _any_text()


ASCII = {"d": "0-9", "w": "0-9A-Za-z_"}
"""What digits and letters are to JSON Schema's regular expressions, those of ECMA-262; to Rust's they are Unicode's."""


def _whole(pattern: str) -> str:
    """What JSON Schema finds anywhere in a text, as a regular expression of the whole text."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    made, in_class = [], False
    for part in re.findall(r"\\?.", pattern[begins : len(pattern) - ends], re.DOTALL):
        characters = ASCII.get(part[1:].lower()) if len(part) > 1 else None
        if characters is not None and in_class and part[1].isupper():
            raise SamplingParamsError(
                f"{part} between brackets cannot be enforced where parameters are written one by one"
            )
        if characters is not None:
            part = characters if in_class else f"[{'^' if part[1].isupper() else ''}{characters}]"
        elif part == "[" or part == "]":
            in_class = part == "["
        made.append(part)
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{''.join(made)}){'' if ends else anything}"


# -- formats -------------------------------------------------------------------------------------------------------


def _structured(format: Format) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})


def _any_text() -> Format:
    return {"type": "any_text"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str = "") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [one for one in elements if one != _text("")]}


def _either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": [*elements]}


def _white() -> Format:
    """What templates have between reasoning and what follows."""
    return {"type": "optional", "content": _either([_text("\n\n"), _text("\n")])}
