"""What a reply must look like: `StructuredOutputsParams`, and `ReasoningBudget`. A leaf: anyone may import it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from quire.errors import SamplingParamsError

MAX_GRAMMAR_BYTES = 1 << 20
"""Of a schema, an expression, a grammar, or all choices together, in UTF-8."""

MAX_CHOICES = 10_000
KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a reply must look like, as vLLM spells it: exactly one of `json`, `regex`, `choice`, `grammar`,
    `json_object` and `structural_tag`. A reply that ends by itself is in that language; one that is cut
    (`max_tokens`, a stop string) is the beginning of one that is.

    Attributes:
        json: a JSON Schema, as an object or its text; it is kept as text. Properties come in the order in which the
            schema has them. What is not enforced is refused (`quire.grammar.json_schema`).
        regex: a regular expression that the whole reply matches, in the syntax of Rust's `regex`, without look-around.
        choice: the reply is one of these strings.
        grammar: a context-free grammar: Lark, or llama.cpp's GBNF.
        json_object: any JSON object.
        structural_tag: text with tags whose content is of a form of its own (`quire.grammar.structural_tag`), as an
            object or its text; it is kept as text.
        whitespace_pattern: a regular expression for the white space of JSON, which may stand wherever JSON has it.
        disable_any_whitespace: JSON has none.
        disable_additional_properties, disable_fallback: vLLM's. The former is refused (say it in the schema), and the
            latter means nothing: there is no fallback.

    Raises:
        SamplingParamsError: see above, or one is of the wrong type or too long.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        if self.json is not None:
            force_setattr(self, "json", _json_text("json", self.json, "a JSON Schema: an object, or its text"))
        if self.structural_tag is not None:
            text = _json_text("structural_tag", self.structural_tag, "an object, or its text")
            force_setattr(self, "structural_tag", text)
        if self.choice is not None:
            force_setattr(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, "True or False")
        if self.json_object not in (None, True, False):
            raise _refuse("json_object", "True or None")
        if self.disable_additional_properties:
            raise SamplingParamsError(
                "disable_additional_properties is not supported; write additionalProperties: false into the schema"
            )
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise SamplingParamsError(f"structured_outputs has {found}; it must have exactly one of {', '.join(KINDS)}")
        spaced = self.whitespace_pattern is not None or self.disable_any_whitespace
        if spaced and given[0] not in ("json", "json_object"):
            raise SamplingParamsError(f"white space is said of JSON, but structured_outputs has {given[0]}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise SamplingParamsError("whitespace_pattern and disable_any_whitespace contradict each other; give one")

    @property
    def kind(self) -> str:
        """Which of `KINDS` it has."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def size(self) -> int:
        """Bytes of text, about."""
        return sum(
            len(part) for part in (self.json, self.regex, self.grammar, self.structural_tag) if isinstance(part, str)
        ) + sum(map(len, self.choice or ()))


class ReasoningBudget(msgspec.Struct, frozen=True):
    """How many tokens a reply may reason, and how it can be told that it does.

    Attributes:
        tokens: of reasoning, without its markers. After so many, the end marker must come.
        start, end: the markers; where one holds the text of a special token, that token stands there.
        begun: the prompt ends within reasoning; else it begins where the reply begins with `start`, white space left
            out.
        again: reasoning may begin anywhere in the reply, and more than once (Harmony's messages); all of it counts.
    """

    tokens: int
    start: str
    end: str
    begun: bool = False
    again: bool = False


def structured_outputs(value: Any) -> StructuredOutputsParams:
    """From the struct itself, or a mapping of its fields.

    Raises:
        SamplingParamsError: it is neither, or not valid.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise SamplingParamsError(
            f"structured_outputs is a {type(value).__name__}; it must be StructuredOutputsParams, or an object with "
            f"one of {', '.join(KINDS)}"
        )
    known = StructuredOutputsParams.__struct_fields__
    for name in value:
        if name not in known:
            raise SamplingParamsError(f"structured_outputs has no field {str(name)[:80]!r}; it has {', '.join(known)}")
    return StructuredOutputsParams(**value)


def _refuse(name: str, allowed: str) -> SamplingParamsError:
    return SamplingParamsError(f"structured_outputs.{name} must be {allowed}")


def _json_text(name: str, value: Any, allowed: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool) or (name != "json" and isinstance(value, bool)):
        raise _refuse(name, allowed)
    try:
        return json_text.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(f"structured_outputs.{name} cannot be written as JSON: {error}") from None


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise _refuse("choice", "a list of strings that are not empty")
    if len(value) > MAX_CHOICES:
        raise SamplingParamsError(
            f"structured_outputs.choice has {len(value)} entries; at most {MAX_CHOICES} are allowed"
        )
    _check_text("choice", "".join(value))
    return tuple(value)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise _refuse(name, "text that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _refuse(name, "valid Unicode (it holds half of a surrogate pair)") from None
    if size > MAX_GRAMMAR_BYTES:
        raise SamplingParamsError(
            f"structured_outputs.{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed: make it smaller"
        )
