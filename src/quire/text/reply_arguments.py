"""The grammar of a call's arguments that are not a JSON object: see `ParameterSyntax`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import SamplingParamsError
from quire.grammar.json_schema import ANNOTATIONS
from quire.grammar.structural_tag import MAX_TIMES
from quire.text import quoted_values
from quire.text.parameter_values import PATTERNS, ParameterValue, parameter_value, resolved, text_format, value_of_type
from quire.text.reply_syntax import ParameterSyntax
from quire.text.tag_formats import Format, any_text, const, either, optional, sequence, tag

LARK = "lark"
"""A keyword of ours: the grammar of a text."""


def taken_grammars(syntax: ParameterSyntax | None, schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A schema of arguments without the grammars of its texts, and these, by the parameters' names. They are enforced
    where text is bare alone.
    """
    properties, grammars = schema.get("properties"), {}
    if isinstance(properties, dict) and syntax is not None and not (syntax.python or syntax.quote):
        for key, each in properties.items():
            if isinstance(each, dict) and each.get("type") == "string" and isinstance(each.get(LARK), str):
                grammars[key] = each[LARK]
        properties = {key: {"type": "string"} if key in grammars else each for key, each in properties.items()}
    return {**schema, **({"properties": properties} if grammars else {})}, grammars


def parameters_format(
    syntax: ParameterSyntax,
    schema: Mapping[str, Any],
    loosened: list[str] | None = None,
    grammars: Mapping[str, str] | None = None,
) -> tuple[Format, dict[str, tuple[str, ...]]]:
    """Arguments written one by one, in the order of the schema.

    Args:
        schema: of the arguments; an object's.
        loosened: takes what is not enforced, and why; None: then it is refused.
        grammars: see `taken_grammars`.

    Returns:
        The format, and the parameters that may be bare text: see `ReplyForm.tools`.

    Raises:
        SamplingParamsError: something cannot be enforced, and `loosened` is None.
    """
    try:
        schema = resolved(schema, schema)
    except SamplingParamsError as error:
        _loosen(loosened, str(error))
        schema = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    odd = schema.keys() - {"type", "properties", "required", "additionalProperties", *shared} - ANNOTATIONS
    for keyword in sorted(odd):
        _loosen(loosened, f"{keyword!r} cannot be enforced where parameters are written one by one")
    properties, required = dict(schema.get("properties", {})), schema.get("required", [])
    properties |= {key: schema.get("additionalProperties", {}) for key in required if key not in properties}
    for key in [key for key in properties if not parameter_names(syntax).fullmatch(key)]:
        _loosen(loosened, f"the parameter {key[:80]!r} cannot be written in this model's syntax")
        del properties[key]
    if syntax.quote:
        return _quoted_arguments(syntax.quote, shared, properties, required, loosened), {}
    if syntax.python:
        named = [tag(key + syntax.before_value, _python_value(each, shared)) for key, each in properties.items()]
        return _listed(named, [key in required for key in properties], ", "), {}
    formats: list[Format] = []
    bare: dict[str, tuple[str, ...]] = {}
    for key, each in properties.items():
        try:
            value = parameter_value(each, schema)
        except SamplingParamsError as error:
            _loosen(loosened, f"the parameter {key!r}: {error}")
            value = value_of_type(each, schema)
        if grammars and key in grammars:
            value = ParameterValue({"type": "grammar", "grammar": grammars[key]})
        if value.text is not None:
            bare[key] = value.types
        one = _parameter(syntax, key, value, shared)
        formats.append(one if key in required else optional(one))
    return sequence(*formats), bare


def _loosen(loosened: list[str] | None, why: str) -> None:
    if loosened is None:
        raise SamplingParamsError(why)
    loosened.append(why)


def _parameter(syntax: ParameterSyntax, key: str, value: ParameterValue, shared: Mapping[str, Any]) -> Format:
    options: list[Format] = []
    schema = value.json
    as_json: Format = {
        "type": "json_schema",
        "json_schema": {**schema, **shared} if isinstance(schema, dict) else schema,
    }
    if not syntax.before_json:
        content = [*([] if value.text is None else [value.text]), *([as_json] if schema is not None else [])]
        return tag(syntax.before_name + key + syntax.before_value, either(content), syntax.after_value)
    if value.text is not None:
        options.append(tag(syntax.before_name + key + syntax.before_value, value.text, syntax.after_value))
    if (schema := value.marked if value.text is not None else value.json) is not None:
        as_json["json_schema"] = {**schema, **shared} if isinstance(schema, dict) else schema
        options.append(tag(syntax.before_name + key + syntax.before_json, as_json, syntax.after_value))
    return either(options)


def _quoted_arguments(
    quote: str,
    shared: Mapping[str, Any],
    properties: dict[str, Any],
    required: Sequence[str],
    loosened: list[str] | None,
) -> Format:
    for key, each in properties.items():
        try:
            QuotedValues(quote, shared).arguments({key: each}, required)
        except SamplingParamsError as error:
            _loosen(loosened, f"the parameter {key!r}: {error}")
            properties[key] = True
    return QuotedValues(quote, shared).arguments(properties, required)


def _python_value(schema: Any, shared: Mapping[str, Any]) -> Format:
    """JSON, but booleans as in Python, and text in single quotes and None, too."""
    as_json = {"type": "json_schema", "json_schema": {**schema, **shared} if isinstance(schema, dict) else schema}
    if not isinstance(schema, dict):
        return as_json
    told = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    match told:
        case {"anyOf": [*options], **rest} if not rest:
            return either([_python_value(one, shared) for one in options])
        case {"enum": [*values], **rest} if not rest.keys() - {"type"}:
            words = [repr(one) for one in values if isinstance(one, str) and repr(one) == f"'{one}'"]
            return either([as_json, *map(const, words)])
        case {"type": "boolean", **rest} if not rest:
            return either([const("True"), const("False")])
        case {"type": "null", **rest} if not rest:
            return either([const("None"), as_json])
        case {"type": "string", **rest} if not rest:
            return either([as_json, {"type": "regex", "pattern": SINGLE_QUOTED}])
        case {"type": "string", "format": format, **rest} if not rest and format in PATTERNS:
            return either([as_json, tag("'", text_format(told), "'")])
    return as_json


SINGLE_QUOTED = r"'([^'\\\x00-\x1f]|\\['\\nrt])*'"
"""Text in Python's single quotes."""

NAME = re.compile(r"[\w.$@ -]{1,128}")
BARE_NAME = re.compile(r"[\w.$@-]{1,128}")
PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def parameter_names(syntax: ParameterSyntax) -> re.Pattern[str]:
    """Valid names of a parameter."""
    return PYTHON_NAME if syntax.python else BARE_NAME if syntax.quote else NAME


# -- values with their own quotes around strings --------------------------------------------------------------------


MAX_LEVELS, ANY_LEVELS = 9, 3
"""Maximum nesting depth of values: with a schema, and for any value."""

MAX_PARTS = 5_000
"""Maximum formats of a tool's arguments; optional members multiply: each may be the first, followed by all others."""

OF_TYPE = {
    "string": {"pattern", "minLength", "maxLength", "format"},
    "array": {"items", "minItems", "maxItems", "prefixItems", "additionalItems"},
    "object": {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
    },
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
"""Keywords that apply to values of one type only."""


class QuotedValues:
    """Formats of values as read by `quoted_values.py`; members are sorted by name, as in templates.

    Args:
        shared: `$defs` and `definitions` of the schema.
    """

    def __init__(self, quote: str, shared: Mapping[str, Any]) -> None:
        self._quote, self._shared, self._parts = quote, shared, 0

    def arguments(self, properties: Mapping[str, Any], required: Sequence[str]) -> Format:
        try:
            made = self._members(properties, required, 0)
        except RecursionError:  # a long chain of references
            raise self._too_large() from None
        if _size(made, {}) > MAX_PARTS:
            raise self._too_large()
        return made

    def any_members(self) -> Format:
        return self._map(True, 0)

    def _members(self, properties: Mapping[str, Any], required: Sequence[str], level: int) -> Format:
        if not all(BARE_NAME.fullmatch(name) for name in properties):
            odd = next(name for name in properties if not BARE_NAME.fullmatch(name))
            raise SamplingParamsError(f"the member {odd[:80]!r} cannot be written in this model's syntax")
        names = sorted(properties, key=str.lower)
        members = [tag(name + ":", self._value(properties[name], level + 1)) for name in names]
        return _listed(members, [name in required for name in names], ",")

    def _map(self, schema: Any, level: int) -> Format:
        """A map with any names."""
        return self._separated(self._named(self._value(schema, level + 1)))

    def _separated(self, one: Format) -> Format:
        return {"type": "tags_with_separator", "tags": [tag("", one)], "separator": ","}

    def _value(self, schema: Any, level: int) -> Format:
        self._parts += 1
        if self._parts > MAX_PARTS or level > MAX_LEVELS:
            raise self._too_large()
        if schema is True:
            return self._any(min(ANY_LEVELS, MAX_LEVELS - level))
        if schema is False:
            raise SamplingParamsError("a schema that nothing meets cannot be enforced in this model's syntax")
        told = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if not told:
            return self._value(True, level)
        if "$ref" in told:
            return self._value(self._target(self._only(told, "$ref")), level)
        if "anyOf" in told:
            return either([self._value(one, level) for one in self._only(told, "anyOf")])
        types = told.pop("type", [])
        types = [types] if isinstance(types, str) else types
        if "const" in told:
            return self._constants([self._only(told, "const")], types)
        if "enum" in told:
            return self._constants(self._only(told, "enum"), types)
        if not types:
            raise SamplingParamsError(f"{sorted(told)[0]!r} without a type cannot be enforced in this model's syntax")
        return either([self._typed(one, told, level) for one in types])

    def _typed(self, type: str, told: Mapping[str, Any], level: int) -> Format:
        of = "number" if type == "integer" else type
        others = {key for other, keys in OF_TYPE.items() if other != of for key in keys}
        own = {key: value for key, value in told.items() if key not in others}
        match type:
            case "string":
                return tag(self._quote, text_format({"type": "string", **own}), self._quote)
            case "array":
                self._check(own, {"items", "minItems", "maxItems"})
                if isinstance(own.get("items"), list):
                    raise SamplingParamsError("a list in 'items' cannot be enforced in this model's syntax")
                return self._list(own.get("items", True), own.get("minItems", 0), own.get("maxItems"), level)
            case "object":
                self._check(own, {"properties", "required", "additionalProperties"})
                return sequence(const("{"), self._object(own, level), const("}"))
            case _:
                return {"type": "json_schema", "json_schema": {"type": type, **own}}

    def _object(self, told: Mapping[str, Any], level: int) -> Format:
        """An object, without its braces."""
        more, required = told.get("additionalProperties", True), told.get("required", [])
        properties = {**told.get("properties", {})}
        properties |= {name: more for name in required if name not in properties}
        if properties or more is False:
            return self._members(properties, required, level)
        return self._map(more, level)

    def _list(self, items: Any, least: int, most: int | None, level: int) -> Format:
        if most == 0:
            return const("[]")
        if max(least, most or 0) > MAX_TIMES:
            raise self._too_large()
        one = self._value(items, level + 1)
        if most is None and least <= 1:
            return sequence(const("["), {**self._separated(one), "at_least_one": least == 1}, const("]"))
        behind = -1 if most is None else int(most) - 1
        more = {"type": "repeat", "min": max(int(least) - 1, 0), "max": behind, "content": sequence(const(","), one)}
        listed = sequence(one, *([] if behind == 0 else [more]))
        return sequence(const("["), listed if least else optional(listed), const("]"))

    def _constants(self, values: Sequence[Any], types: Sequence[str]) -> Format:
        fitting = [one for one in values if not types or _is_of(one, types)]
        texts = [quoted_values.written(one, self._quote) for one in fitting]
        if not texts or [_read(text, self._quote) for text in texts] != fitting:
            raise SamplingParamsError("'enum' or 'const' has nothing, or what this model's syntax cannot write")
        return either([const(text) for text in texts])

    def _any(self, levels: int) -> Format:
        plain = {"type": "json_schema", "json_schema": {"type": ["number", "boolean", "null"]}}
        options = [tag(self._quote, any_text(), self._quote), plain]
        if levels > 0:
            one = self._any(levels - 1)
            options.append(sequence(const("["), self._separated(one), const("]")))
            options.append(sequence(const("{"), self._separated(self._named(one)), const("}")))
        return either(options)

    def _named(self, one: Format) -> Format:
        return sequence({"type": "regex", "pattern": BARE_NAME.pattern}, const(":"), one)

    def _target(self, reference: str) -> Any:
        found = re.fullmatch(r"#/(\$defs|definitions)/([\w.-]+)", reference)
        if found is None or found[2] not in self._shared.get(found[1], {}):
            raise SamplingParamsError(f"the reference {reference[:80]!r} cannot be followed in this model's syntax")
        return self._shared[found[1]][found[2]]

    def _only(self, told: Mapping[str, Any], key: str) -> Any:
        """The value of this keyword; other keywords are refused."""
        self._check(told, {key})
        return told[key]

    @staticmethod
    def _check(told: Mapping[str, Any], may: set[str]) -> None:
        if odd := told.keys() - may:
            raise SamplingParamsError(f"{sorted(odd)[0]!r} cannot be enforced there in this model's syntax")

    @staticmethod
    def _too_large() -> SamplingParamsError:
        return SamplingParamsError(
            f"this model's syntax is enforced to {MAX_LEVELS} levels and {MAX_PARTS} parts, and without recursion"
        )


def _listed(formats: Sequence[Format], required: Sequence[bool], comma: str) -> Format:
    """A comma-separated sequence of formats; those not required may be missing."""
    behind = [sequence(const(comma), one) for one in formats]
    behind = [one if must else optional(one) for one, must in zip(behind, required, strict=True)]
    firsts = required.index(True) + 1 if True in required else len(formats)
    options = [sequence(formats[index], *behind[index + 1 :]) for index in range(firsts)]
    if True in required:
        return either(options)
    return optional(either(options)) if options else sequence()


def _size(format: Format, known: dict[int, int]) -> int:
    """Number of formats when fully expanded."""
    if id(format) not in known:
        inner = [
            *format.get("elements", ()),
            *format.get("tags", ()),
            *([format["content"]] if "content" in format else []),
        ]
        known[id(format)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(format)]


def _is_of(value: Any, types: Sequence[str]) -> bool:
    named: dict[str, type] = {"string": str, "array": list, "object": dict, "null": type(None), "boolean": bool}
    return any(
        isinstance(value, named[one])
        if one in named
        else isinstance(value, int | float)
        and not isinstance(value, bool)
        and (one == "number" or isinstance(value, int) or value.is_integer())
        for one in types
    )


def _read(text: str, quote: str) -> Any:
    try:
        return json.loads(quoted_values.as_json(text, quote))
    except ValueError:
        return None
