"""Formats of structural tags (`quire.grammar.structural_tag`), as Python writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Format = dict[str, Any]


def any_text() -> Format:
    return {"type": "any_text"}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Format, end: str = "") -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [one for one in elements if one != const("")]}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": [*elements]}
