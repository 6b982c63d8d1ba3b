"""Checks JSON Schemas: every keyword must be one that is enforced, or an annotation; others are refused by name.

The library ignores keywords that it does not know, so they are checked here. A `$ref` must point into the same schema,
and must not lead back to itself without a value in between.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from quire.errors import SamplingParamsError

MAX_DEPTH = 64
"""Deepest nesting of schemas, and of arrays and objects in `enum` and `const`."""

MAX_SCHEMAS = 20_000
"""Most schemas within one, in total."""

MAX_LEVELS = 1_000
"""Deepest nesting of schemas if `$ref`s are followed: the library recurses into all of them, and a stack of 8 MiB
overflows at about 2,000."""

MAX_POINTERS = 16 << 20
"""Most characters of the schemas' JSON pointers, in total: each has the names of all properties on its path."""

ONE = frozenset({"additionalProperties", "items", "additionalItems"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold a schema, a list of them, or a mapping to them."""

ASSERTIONS = frozenset(
    {
        *("$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$comment", "title", "description", "default", "deprecated", "readOnly", "writeOnly"),
        *("examples", "contentMediaType", "contentEncoding", "discriminator", "nullable"),
    }
)
"""Keywords that do not affect validity. (`$id` changes the base of references, so it is only allowed at the root. The
last two are OpenAPI's.)"""

HARMLESS: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"})}
"""Values of other keywords that all values meet."""

WIDTHS = frozenset(
    {
        *("int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float", "double"),
        *("path", "file-path", "directory-path", "binary", "password"),
    }
)
"""Formats of OpenAPI and pydantic that say how a value is stored or shown, and are no constraint."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(\.[0-9]+)?([Zz]|[+-]00:00))"
)
RFC_3339 = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Formats enforced as patterns, since the library allows February 29th in every year and a leap second at any time. A
year has four digits, from 0000, and a leap second is only written at an offset of zero."""

_PRINTED = re.compile(
    r"\^(?:[^\\.\[\]^$\x00-\x1f\x7f]|\\[dw!-/:-@\[-`{-~]|\[(?!\^)(?:[ -Z^-~]|\\[dw!-/:-@\[-`{-~])+\])*\$"
)
"""A pattern of the whole text, of parts that match no control character."""

SHORT_ESCAPES = 'nrbtf\\"'
"""The escapes of JSON other than `\\u` and `\\/`."""

IN_PLACE = frozenset({"allOf", "anyOf", "oneOf"})
DRAFTS = "draft-04", "draft-06", "draft-07", "2019-09", "2020-12"


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_exact(value: Any) -> bool:
    """Whether the library has this very number, or the value is none."""
    return not isinstance(value, int | float) or (-FAR <= value <= FAR and float(value) == value)


def _is_far(value: Any, bound: int) -> bool:
    """Whether a number lies beyond a bound, as seen from zero."""
    return isinstance(value, int | float) and (value > bound if bound > 0 else value < bound)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_types(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and _are_names(value))


FAR = 2**63 - 1024
"""The largest number that is both a double and a 64-bit integer: the library holds numbers as doubles, and whole ones
in 64 bits."""

BOUNDS: Mapping[str, int] = {"minimum": -FAR, "exclusiveMinimum": -FAR, "maximum": FAR, "exclusiveMaximum": FAR}
"""What stands for a bound farther out, such as the least of all 64-bit integers, which the library refuses."""

VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "required": (_are_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "minLength": (_is_count, "a count"),
    "maxLength": (_is_count, "a count"),
    "minItems": (_is_count, "a count"),
    "maxItems": (_is_count, "a count"),
    "type": (_are_types, "a type's name, or a list of names"),
    "format": (lambda value: isinstance(value, str), "a format's name"),
}
"""Checks of values that are read here or in `text/reply_arguments.py`; the library checks the others."""


def check_schema(text: str) -> None:
    """Check that all of a schema can be enforced.

    Raises:
        SamplingParamsError: it cannot; the message has the keyword, and its place as a JSON pointer.
    """
    _checked(text)


def enforced_schema(text: str, spaces: Mapping[str, Any]) -> str:
    """The schema for the library, with dates and times as patterns (RFC 3339), and bounds that it can hold.

    Args:
        spaces: the library's options for white space.

    Raises:
        SamplingParamsError: see `check_schema`.
    """
    schema, found = _checked(text)
    for each in found.values():
        if isinstance(each, dict):
            each.update({name: bound for name, bound in BOUNDS.items() if _is_far(each.get(name), bound)})
            for name in (*HARMLESS, *(["format"] if each.get("format") in WIDTHS else [])):
                each.pop(name, None)
            if each.get("format") in RFC_3339:
                pattern = {"pattern": RFC_3339[each.pop("format")]}
                each.update(pattern if "pattern" not in each else {"allOf": [*each.get("allOf", ()), pattern]})
    options = {**spaces, **_escapes(found.values())}
    return json.dumps({**({} if schema is True else schema), "x-guidance": options})


def call_schema(schema: Mapping[str, Any], dropped: list[str] | None) -> dict[str, Any]:
    """The schema of a call's arguments, without annotations. An object for which it lists properties has no others,
    unless it says so: models invent arguments otherwise.

    Args:
        dropped: what cannot be enforced is removed from its own place, and why is added here; None: it is refused.

    Raises:
        SamplingParamsError: see `check_schema`.
    """
    made, found = _checked(json.dumps(schema), dropped)
    schemas = {pointer: each for pointer, each in found.items() if isinstance(each, dict)}
    for each in schemas.values():
        for name in ANNOTATIONS & each.keys() - {"$schema"}:
            del each[name]
        if dropped and "oneOf" in each and "anyOf" not in each:
            each["anyOf"] = each.pop("oneOf")  # options that were told apart by what was removed
    closable = schemas if not any(map(_is_composed, schemas.values())) else {"": made}
    for each in closable.values():
        listed = each.get("properties", {})
        open_ones = IN_PLACE | {"$ref", "additionalProperties", "patternProperties"}
        if "properties" in each and not open_ones & each.keys() and {*each.get("required", ())} <= listed.keys():
            each["additionalProperties"] = False
    return dict(made)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas must hold of an object, so that none of them lists all of its properties."""
    within = [*schema.get("allOf", ()), *(["$ref"] if "$ref" in schema else [])]
    beside = {"properties", "required"} & schema.keys()
    return len(within) > 1 or bool(beside and (IN_PLACE | {"$ref"}) & schema.keys())


def _escapes(schemas: Iterable[Any]) -> dict[str, Any]:
    """The library's options for escapes in strings: all of JSON's but `\\/`, which it does not know.

    In a string with a pattern it knows `\\u` for control characters alone, so that `\\u00e9` would become one. If a
    pattern may match any, `\\u` is not written at all.
    """
    patterns = [pattern for each in schemas if isinstance(each, dict) for pattern in _patterns(each)]
    if all(map(_is_printed, patterns)):
        return {"json_allow_general_unicode_escapes": True}
    return {"json_allow_general_unicode_escapes": True, "json_allowed_escapes": SHORT_ESCAPES}


def _is_printed(pattern: str) -> bool:
    """Whether a pattern certainly matches no text with control characters."""
    if _PRINTED.fullmatch(pattern) is None:
        return False
    depth = 0
    for part in re.findall(r"\\.|\[(?:\\.|[^]])*\]|[()|]", pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return False  # the ends of the text are those of single options
    return True


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    return [*([schema["pattern"]] if "pattern" in schema else []), *schema.get("patternProperties", ())]


def _checked(text: str, dropped: list[str] | None = None) -> tuple[Any, dict[str, Any]]:
    """Parse and check a schema; returns it, and all schemas within it by JSON pointer. `dropped`: see `_walk`."""
    try:
        schema = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise SamplingParamsError(f"the JSON Schema nests deeper than {MAX_DEPTH} levels; flatten it") from None
    except ValueError as error:
        raise SamplingParamsError(f"the JSON Schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise SamplingParamsError(f"the JSON Schema is a {type(schema).__name__}; it must be an object")
    if schema is False:
        raise SamplingParamsError("nothing meets the JSON Schema false")
    found: dict[str, Any] = {}
    parents = _walk(schema, found, dropped)
    referring = ((pointer, each) for pointer, each in found.items() if isinstance(each, dict) and "$ref" in each)
    targets = {_target(each["$ref"], pointer, found) for pointer, each in referring}
    _check_cycles(found)
    _check_levels(found, parents, targets)
    return schema, found


def _check_levels(found: Mapping[str, Any], parents: dict[str, str], targets: set[str]) -> None:
    """Bound the depth of nesting with references followed: the library enters each schema with references at most once
    along a path, and one without references last."""
    heights = dict.fromkeys(found, 1)
    leads_on = {pointer: isinstance(each, dict) and "$ref" in each for pointer, each in found.items()}
    for pointer in reversed(parents):  # children before parents
        above = parents[pointer]
        heights[above] = max(heights[above], heights[pointer] + 1)
        leads_on[above] |= leads_on[pointer]
    leading = [heights[target] for target in targets if leads_on[target]]
    levels = heights[""] + sum(leading) + max((heights[one] for one in targets if not leads_on[one]), default=0)
    if levels > MAX_LEVELS:
        raise SamplingParamsError(
            f"the JSON Schema has {levels} levels, in {len(leading)} schemas from which $ref leads on; at most "
            f"{MAX_LEVELS} are allowed: make it smaller"
        )


def _drop(schema: dict[str, Any], name: str) -> None:
    """Remove a keyword, so that no value is refused that was allowed."""
    schema.pop(name, None)
    if name in ("patternProperties", "properties"):
        schema.pop("additionalProperties", None)


def _walk(root: Any, found: dict[str, Any], dropped: list[str] | None) -> dict[str, str]:
    """Find all schemas in a schema, by JSON pointer; returns the pointer of each one's parent.

    Args:
        dropped: keywords that cannot be enforced are removed, and why is added here; None: they are refused.
    """
    waiting, size = [("", root, 0)], 0
    parents: dict[str, str] = {}
    while waiting:
        pointer, schema, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SamplingParamsError(f"the JSON Schema nests deeper than {MAX_DEPTH} levels; flatten it")
        found[pointer] = schema
        if len(found) > MAX_SCHEMAS:
            raise SamplingParamsError(f"the JSON Schema holds more than {MAX_SCHEMAS} schemas; make it smaller")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise _refused(pointer, f"is a {type(schema).__name__}; a schema is an object, true or false")
        for name, error in [*_problems(schema, pointer)]:
            if dropped is None:
                raise error
            _drop(schema, name)
            dropped.append(str(error))
        for place, each in _schemas_in(schema, pointer):
            size += len(pointer) + len(place) + 1
            if size > MAX_POINTERS:
                raise _refused(pointer, "has many schemas below properties with long names; make the names shorter")
            waiting.append((f"{pointer}/{place}", each, depth + 1))
            parents[f"{pointer}/{place}"] = pointer
    return parents


def _problems(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, SamplingParamsError]]:
    """The keywords of a schema that cannot be enforced, and why."""
    for name, value in schema.items():
        if any(value == one and type(value) is type(one) for one in HARMLESS.get(name, ())):
            continue
        if name not in ONE | LISTS | MAPS | ASSERTIONS | ANNOTATIONS:
            what = f"has {name[:80]!r}, which is not enforced; remove it, or say it in another way"
            yield name, _refused(pointer, what)
            continue
        try:
            _check_value(name, value, pointer)
        except SamplingParamsError as error:
            yield name, error
    if pointer:
        for name in {"$id", "id"} & schema.keys():
            yield name, _refused(pointer, "has an $id, which may only stand at the root; remove it")
    least = schema.get("minProperties", 0)
    certain = schema.get("required", ())
    if isinstance(least, int) and isinstance(certain, list) and least > max(1, len(set(map(str, certain)))):
        # A key that the schema does not name may be generated twice, and then counts once.
        what = f"has minProperties {least}, but requires fewer properties by name; name more in required"
        yield "minProperties", _refused(pointer, what)


def _check_value(name: str, value: Any, pointer: str) -> None:
    """Check the value of a keyword that is known."""
    if name in ("const", "enum"):
        _check_constant(value, f"{pointer}/{name}")
    held = _is_exact(value) or (name in BOUNDS and _is_far(value, BOUNDS[name]))
    if name in (*BOUNDS, "multipleOf") and not held:
        raise _inexact(f"{pointer}/{name}", value)
    if name in VALUES and not VALUES[name][0](value):
        raise _refused(f"{pointer}/{name}", f"is {repr(value)[:80]}; it must be {VALUES[name][1]}")
    known = isinstance(value, str) and any(draft in value for draft in DRAFTS)
    if name == "$schema" and value is not None and not known:
        raise _refused(pointer, "has a $schema that is not JSON Schema's draft 4, 6, 7, 2019-09 or 2020-12")
    if name == "format" and value not in FORMATS | WIDTHS:
        shown = f"has the format {str(value)[:80]!r}; enforced are {', '.join(sorted(FORMATS))}"
        raise _refused(pointer, shown)
    patterns = [value] if name == "pattern" else value if name == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
        if any(part[0] != "\\" and part[0] != "[" for part in _LOOKS.findall(pattern)):
            raise _refused(pointer, "has a pattern that looks ahead or behind, which is not enforced")


_LOOKS = re.compile(r"\\.|\[(?:\\.|[^]\\])*\]|\(\?<?[=!]", re.DOTALL)
"""What looks ahead or behind in a pattern, apart from escapes and classes."""


def _schemas_in(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly within one, with their paths in it."""
    for name, value in schema.items():
        if name in MAPS:
            if not isinstance(value, dict):
                raise _refused(f"{pointer}/{name}", f"is a {type(value).__name__}; it must be an object of schemas")
            yield from ((f"{name}/{_escaped(key)}", each) for key, each in value.items())
        elif name in LISTS or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise _refused(f"{pointer}/{name}", f"is a {type(value).__name__}; it must be a list of schemas")
            yield from ((f"{name}/{index}", each) for index, each in enumerate(value))
        elif name in ONE:
            yield name, value


def _check_constant(value: Any, pointer: str) -> None:
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _refused(pointer, f"nests deeper than {MAX_DEPTH} levels; flatten it")
        if not _is_exact(each):
            raise _inexact(pointer, each)
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += [(one, depth + 1) for one in inner]


def _target(reference: Any, pointer: str, found: Mapping[str, Any]) -> str:
    """The JSON pointer of a reference's target."""
    if not isinstance(reference, str):
        raise _refused(pointer, "has a $ref that is no string")
    shown = repr(reference[:80])
    if not reference.startswith("#"):
        raise _refused(pointer, f"has the $ref {shown}; only references within the schema (#/...) are followed")
    target = unquote(reference[1:])
    if target and not target.startswith("/"):
        raise _refused(pointer, f"has the $ref {shown}; anchors are not followed: write #/$defs/...")
    if target not in found:
        raise _refused(pointer, f"has the $ref {shown}, where there is no schema")
    return target


def _check_cycles(found: Mapping[str, Any]) -> None:
    """Check that no schema refers to itself through `$ref`, `allOf`, `anyOf` and `oneOf` alone, which says nothing."""
    done: set[str] = set()
    for start in found:
        path: dict[str, None] = {}  # in order
        waiting = [(start, True)]
        while waiting:
            pointer, enters = waiting.pop()
            if not enters:
                done.add(path.popitem()[0])
            elif pointer in path:
                raise _refused(pointer, "leads back to itself through $ref, with no value in between")
            elif pointer not in done:
                path[pointer] = None
                waiting.append((pointer, False))
                waiting += [(each, True) for each in _same_value(pointer, found)]


def _same_value(pointer: str, found: Mapping[str, Any]) -> list[str]:
    """Schemas that apply to the same value as this one."""
    schema = found[pointer]
    if not isinstance(schema, dict):
        return []
    within = [f"{pointer}/{name}/{index}" for name in IN_PLACE & schema.keys() for index in range(len(schema[name]))]
    return [*within, *([_target(schema["$ref"], pointer, found)] if "$ref" in schema else [])]


def _escaped(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _refused(pointer: str, what: str) -> SamplingParamsError:
    return SamplingParamsError(f"the JSON Schema at #{pointer[:200]} {what}")


def _inexact(pointer: str, value: float) -> SamplingParamsError:
    shown = str(value) if isinstance(value, float) or value.bit_length() < 100 else f"of {value.bit_length()} bits"
    return _refused(
        pointer,
        f"has the number {shown}, which cannot be enforced to the last digit (the limit is 2^53 = {2**53:,}); use a"
        " smaller number, or a string",
    )


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict; raises ValueError for a duplicate key, since one value would be dropped."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"an object has the key {key[:80]!r} twice")
        made[key] = value
    return made


def _finite(text: str) -> float:
    """The number; raises ValueError if no double is near it."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:80]} is larger than any double")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
