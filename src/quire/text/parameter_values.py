"""The values of a call's parameters that are written one by one: text is bare there, other values are JSON.

What is written is read by one rule: a value is JSON if it is, as a whole, JSON of a type that the schema admits beside
text; otherwise it is text. So `null` is null only as the word alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from quire.errors import SamplingParamsError
from quire.grammar.json_schema import ANNOTATIONS, RFC_3339
from quire.grammar.structural_tag import literal_pattern
from quire.text.tag_formats import Format, any_text, const, either

TYPES = ("null", "boolean", "integer", "number", "array", "object")
SCALARS = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(?:0|[1-9][0-9]{0,17})",
    "number": "-?(?:0|[1-9][0-9]{0,17})(?:\\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?",
}
"""JSON of these types, as regular expressions."""

BRACKETS = {"array": "[", "object": "{"}
OF_TEXT = frozenset({"pattern", "minLength", "maxLength", "format"})
"""Keywords that apply to text alone."""

MAX_STEPS = 64
"""Most references that are followed, and options within options."""

UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
PATTERNS = {**RFC_3339, "uuid": UUID}
"""Formats of bare text that are enforced."""


class ParameterValue(msgspec.Struct, frozen=True):
    """How a parameter is written.

    Attributes:
        text: the format of bare text, which may spell values of `types`, too; None if it is never text.
        types: the types of JSON that bare text is read as.
        json: a schema of values that `text` does not spell; None if there are none.
        marked: a schema of all values but text, for a syntax that marks those.
    """

    text: Format | None
    types: tuple[str, ...] = ()
    json: Any = None
    marked: Any = None


def json_value(text: str, types: Collection[str]) -> bool:
    """Whether bare text is JSON of one of these types: the rule by which it is read."""
    opened = text[:1] in ("[", "{")
    if not types or (not opened and text != text.strip()):
        return False
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return type_of(value) in types or (type_of(value) == "integer" and "number" in types)


def may_be_json(text: str, types: Collection[str]) -> bool:
    """Whether this may be the beginning of such a value."""
    words = {"null": ("null",), "boolean": ("true", "false")}
    return (
        any(BRACKETS[one].startswith(text[:1]) for one in types if one in BRACKETS)
        or any(word.startswith(text) for one in types for word in words.get(one, ()))
        or (bool({"integer", "number"} & {*types}) and _NUMBER.fullmatch(text) is not None)
    )


_NUMBER = re.compile(r"-?\d*\.?\d*(?:[eE][+-]?\d*)?")


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parameter_value(schema: Any, root: Mapping[str, Any]) -> ParameterValue:
    """How a parameter of this schema is written.

    Args:
        root: the schema in which references are followed.

    Raises:
        SamplingParamsError: its text cannot be enforced.
    """
    texts: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    if any("string" not in _types(part) for part in _parts(schema, root)):
        return ParameterValue(None, json=schema)
    _take_apart(schema, root, texts, others, 0)
    if not texts:
        return ParameterValue(None, json=schema)
    marked = {"anyOf": others} if others else None
    free = {one for other in others if other.keys() == {"type"} for one in other["type"]}
    if {"type": "string"} in texts:
        return _with_any_text(others, free, marked)
    return _with_bounded_text(texts, others, free, marked)


def value_of_type(schema: Any, root: Mapping[str, Any]) -> ParameterValue:
    """The same of a schema of which nothing is enforced but its type."""
    types = _types({})
    try:
        for part in _parts(schema, root):
            types = [one for one in types if one in _types(part) or (one == "number" and "integer" in _types(part))]
    except SamplingParamsError:
        types = []
    return parameter_value({"type": types} if types else True, root)


def _with_any_text(others: Sequence[dict[str, Any]], free: set[str], marked: Any) -> ParameterValue:
    """Any text is allowed; lists and objects of a certain form are told from it by their first character. A number of a
    certain form is text, since the schema allows that, too."""
    formed = [
        {**other, "type": [one]}
        for other in others
        for one in other.get("type", ())
        if one in BRACKETS and one not in free
    ]
    types = _ordered(free | {one["type"][0] for one in formed})
    brackets = sorted({BRACKETS[one["type"][0]] for one in formed})
    if not formed:
        return ParameterValue(any_text(), types, marked=marked)
    return ParameterValue({**any_text(), "not_first": brackets}, types, {"anyOf": formed}, marked)


def _with_bounded_text(
    texts: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], free: set[str], marked: Any
) -> ParameterValue:
    """Text of a certain form, beside words and numbers, is one regular expression, or a list of constants."""
    listed = [one for other in others for one in other.get("enum", ())]
    types = free | {*map(type_of, listed)}
    constants = [one for text in texts for one in text.get("enum", ())]
    bounded = [text for text in texts if "enum" not in text]
    if types & BRACKETS.keys() or any("enum" not in other and other.keys() != {"type"} for other in others):
        raise SamplingParamsError("text with a form beside other values with one cannot be enforced as bare text")
    if any(json_value(one, types) for one in constants) or (listed and bounded):
        raise SamplingParamsError("text that may read like another of its values cannot be enforced as bare text")
    words = [*(json.dumps(one) for one in listed), *(["null"] if "null" in free else [])]
    words += ["true", "false"] if "boolean" in free else []
    patterns = [_pattern(text) for text in bounded] + [SCALARS[one] for one in SCALARS if one in free]
    if not patterns:
        return ParameterValue(either([const(one) for one in [*constants, *words]]), _ordered(types), marked=marked)
    patterns = [f"(?:{one})" for one in [*patterns, *map(literal_pattern, [*constants, *words])]]
    return ParameterValue({"type": "regex", "pattern": "|".join(patterns)}, _ordered(types), marked=marked)


def _ordered(types: Collection[str]) -> tuple[str, ...]:
    return tuple(one for one in TYPES if one in types)


def _take_apart(
    schema: Any, root: Mapping[str, Any], texts: list[dict[str, Any]], others: list[dict[str, Any]], depth: int
) -> None:
    """Add the schemas of its text, and those of its other values, which have a list of types, or an enum."""
    if depth > MAX_STEPS:
        raise SamplingParamsError(f"its options nest deeper than {MAX_STEPS} levels")
    if schema is False:
        return
    told = {} if schema is True else resolved(schema, root)
    told = {key: value for key, value in told.items() if key not in ANNOTATIONS}
    options = next((key for key in ("anyOf", "oneOf") if key in told), None)
    if options is not None and "string" in _types(told):
        beside = {key: value for key, value in told.items() if key != options}
        for one in told[options]:
            both = one if not beside else {"allOf": [beside, one]}
            _take_apart(both, root, texts, others, depth + 1)
        return
    types = _types(told)
    if "enum" in told or "const" in told:
        values = [
            one for one in told.get("enum", [told.get("const")]) if type_of(one) in types or _is_whole(one, types)
        ]
        odd = told.keys() - {"enum", "const", "type"}
        strings = [one for one in values if isinstance(one, str)]
        if strings and (odd or ("enum" in told and "const" in told)):
            what = sorted(odd or {"const"})[0]
            raise SamplingParamsError(f"{what!r} beside a list of texts cannot be enforced as bare text")
        if not values and "string" in types:
            raise SamplingParamsError("'enum' or 'const' has nothing that its type allows")
        texts += [{"type": "string", "enum": strings}] if strings else []
        rest = [one for one in values if not isinstance(one, str)]
        others += [{**told, "enum": rest, "type": [*types]}] if rest else []
        return
    if "string" in types:
        texts.append({"type": "string", **{key: value for key, value in told.items() if key in OF_TEXT}})
    for one in types:
        if one != "string":
            other_keys = OF_TEXT.union(*OF_TYPE.values()) - OF_TYPE.get(one, frozenset())
            others.append({**{key: value for key, value in told.items() if key not in other_keys}, "type": [one]})


OF_TYPE: dict[str, frozenset[str]] = {
    "array": frozenset({"items", "minItems", "maxItems", "prefixItems", "additionalItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"}
    ),
    **dict.fromkeys(
        ("integer", "number"),
        frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    ),
}
"""Keywords that apply to values of one type only."""


def _types(told: Mapping[str, Any]) -> list[str]:
    given = told.get("type", ["string", *(one for one in TYPES if one != "integer")])
    return [given] if isinstance(given, str) else [*given]


def _is_whole(value: Any, types: Collection[str]) -> bool:
    return type_of(value) == "integer" and "number" in types


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without `$ref` and `allOf` at its top, if what they say can be told by keywords beside one another.

    Raises:
        SamplingParamsError: it cannot.
    """
    made: dict[str, Any] = {}
    for own in _parts(schema, root):
        for key, value in own.items():
            if key == "type" and "type" in made:
                value = [kind for kind in _types(made) if kind in _types(own)]
            elif key in made and made[key] != value and key not in ANNOTATIONS:
                raise SamplingParamsError(f"{key!r} in several parts of it cannot be enforced as bare text")
            made[key] = made[key] if key in made and key in ANNOTATIONS else value
    return made


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that must all hold, without `$ref` and `allOf`."""
    waiting = [schema]
    for _ in range(MAX_STEPS):
        if not waiting:
            return
        one = waiting.pop(0)
        if one is False:
            raise SamplingParamsError("nothing meets it")
        if one is not True:
            yield {key: value for key, value in one.items() if key not in ("$ref", "allOf")}
            waiting = [*([_target(one["$ref"], root)] if "$ref" in one else []), *one.get("allOf", ()), *waiting]
    raise SamplingParamsError(f"it has more than {MAX_STEPS} references and parts")


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


# -- text ----------------------------------------------------------------------------------------------------------


def text_format(schema: Mapping[str, Any]) -> Format:
    """The format of text of a schema, as bare text.

    Raises:
        SamplingParamsError: something of it cannot be enforced.
    """
    told = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if odd := told.keys() - OF_TEXT - {"type"}:
        raise SamplingParamsError(f"{sorted(odd)[0]!r} of a text cannot be enforced where it is bare")
    return any_text() if told.keys() <= {"type"} else {"type": "regex", "pattern": _pattern(told)}


def _pattern(schema: Mapping[str, Any]) -> str:
    """Text with a pattern, a format or a bounded length, as a regular expression of the whole text."""
    bounds = sorted({"pattern", "format"} & schema.keys())
    if {"minLength", "maxLength"} & schema.keys():
        bounds.append("length")
    if len(bounds) > 1:
        raise SamplingParamsError(f"{bounds[0]!r} beside a {bounds[1]} cannot be enforced as bare text")
    if bounds == ["length"]:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        return f"(?s:.{{{int(schema.get('minLength', 0))},{most}}})"
    if bounds == ["format"] and schema["format"] not in PATTERNS:
        raise SamplingParamsError(f"the format {schema['format'][:80]!r} cannot be enforced as bare text")
    return _whole(schema["pattern"] if bounds == ["pattern"] else PATTERNS[schema["format"]])


ASCII = {"d": "0-9", "w": "0-9A-Za-z_"}
"""Character classes in JSON Schema's regular expressions (ECMA-262), which are ASCII; in Rust's they are Unicode."""


def _whole(pattern: str) -> str:
    """An unanchored pattern of JSON Schema as a regular expression of the whole text."""
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
