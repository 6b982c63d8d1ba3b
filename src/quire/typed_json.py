"""What is wrong with JSON or YAML of the wrong type: where it is, what is there, and what is allowed.

msgspec's own messages have the place and Python's names of the types; these are for people who wrote the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, inspect

BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What `msgspec.json.decode` raises for bytes that are not valid JSON, not of the type, or nested too deeply."""

_PATH = re.compile(r"at `(?:key` in `)?\$([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_NAMES: dict[type[inspect.Type], str] = {
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.BoolType: "true or false",
    inspect.ListType: "a list",
    inspect.StructType: "an object",
    inspect.DictType: "an object",
}


class Mismatch(NamedTuple):
    """One value of the wrong type.

    Attributes:
        path: where it is, as in "tools[0].type"; empty: it is the whole document.
        value: what is there; UNSET if nothing is, or if it was not looked for.
        missing: whether nothing is there.
        allowed: what may be there, as in "a string or a list".
    """

    path: str
    value: Any
    missing: bool
    allowed: str


def mismatch(error: msgspec.ValidationError, kind: Any, document: Any = UNSET) -> Mismatch:
    """What msgspec refused.

    Args:
        kind: the type that was asked for.
        document: the plain values; UNSET: do not say which value was found.
    """
    found, missing = _PATH.search(str(error)), _MISSING.search(str(error))
    path = (found[1] if found else "") + (f".{missing[1]}" if missing else "")
    nodes, value = [inspect.type_info(kind)], document
    for name, index in _STEP.findall(path):
        nodes, value = _step(nodes, name), _inside(value, name, index)
    return Mismatch(path.removeprefix("."), UNSET if missing else value, missing is not None, _described(nodes))


def _flat(nodes: Sequence[inspect.Type]) -> list[inspect.Type]:
    """The nodes, with unions taken apart."""
    return [each for node in nodes for each in (_flat(node.types) if isinstance(node, inspect.UnionType) else [node])]


def _step(nodes: Sequence[inspect.Type], name: str) -> list[inspect.Type]:
    """The types of a field of this name; of the items where there is no name."""
    found: list[inspect.Type] = []
    for node in _flat(nodes):
        if isinstance(node, inspect.ListType) and not name:
            found.append(node.item_type)
        elif isinstance(node, inspect.DictType):
            found.append(node.value_type)
        elif isinstance(node, inspect.StructType) and name:
            if name == node.tag_field:
                found.append(inspect.LiteralType((node.tag,)))
            found += [field.type for field in node.fields if field.encode_name == name]
    return found


def _inside(value: Any, name: str, index: str) -> Any:
    try:
        return value[name or int(index)]
    except (TypeError, LookupError, ValueError):
        return UNSET


def _described(nodes: Sequence[inspect.Type]) -> str:
    """Types in words. Null is left out, since it is the same as nothing."""
    words: dict[str, None] = {}
    for node in _flat(nodes):
        if isinstance(node, inspect.LiteralType):
            words.update((msgspec.json.encode(value).decode(), None) for value in node.values)
        elif type(node) in _NAMES:
            words[_NAMES[type(node)]] = None
    first, last = [*words][:-1], [*words][-1:]
    if "an integer" in words and "a number" in words:
        return "an integer" if len(words) == 2 else "a number"
    return " or ".join([", ".join(first), *last] if first else last) or "something else"
