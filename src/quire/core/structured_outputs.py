"""Constraints on a reply: `StructuredOutputsParams` and `ReasoningBudget`. Imports nothing above it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from quire.errors import SamplingParamsError

MAX_GRAMMAR_BYTES = 1 << 20
"""Largest schema, expression, grammar, or sum of all choices, in UTF-8."""

MAX_CHOICES = 10_000
KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that a reply must have, in vLLM's spelling: exactly one of `json`, `regex`, `choice`, `grammar`,
    `json_object` and `structural_tag`. A reply that ends by itself conforms; one that is cut off (by `max_tokens` or a
    stop string) is a prefix of one that does.

    Attributes:
        json: a JSON Schema, as an object or its text (stored as text). Properties come in the schema's order. Keywords
            that cannot be enforced are refused (`quire.grammar.json_schema`).
        regex: a regular expression that the whole reply matches: Rust's `regex` syntax, without look-around.
        choice: the reply is one of these strings, at most 10,000.
        grammar: a context-free grammar: Lark, or llama.cpp's GBNF.
        json_object: True: any JSON object.
        structural_tag: text with tags whose content has a form of its own (`quire.grammar.structural_tag`), as an
            object or its text (stored as text).
        whitespace_pattern: for JSON, a regular expression for white space, allowed wherever JSON allows it.
        disable_any_whitespace: for JSON, no white space.
        disable_additional_properties: vLLM's; refused: write `additionalProperties: false` into the schema.
        disable_fallback: vLLM's; has no effect, since there is no fallback.

    Raises:
        SamplingParamsError: none or several of the six are given, one has the wrong type, or is larger than 1 MiB.
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
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise SamplingParamsError(f"{name} is for json and json_object, not for {given[0]}; leave it out")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise SamplingParamsError("whitespace_pattern and disable_any_whitespace contradict each other; give one")

    @property
    def kind(self) -> str:
        """Which of `KINDS` is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def size(self) -> int:
        """The approximate size of its text, in bytes."""
        return sum(
            len(part) for part in (self.json, self.regex, self.grammar, self.structural_tag) if isinstance(part, str)
        ) + sum(map(len, self.choice or ()))


class ReasoningBudget(msgspec.Struct, frozen=True):
    """A limit on the reasoning tokens of a reply, and the markers by which reasoning is recognized.

    Attributes:
        tokens: most reasoning tokens, not counting the markers; after them the end marker must follow.
        start: the start marker; text of a special token in it stands for that token.
        end: the end marker, likewise.
        begun: the prompt ends within reasoning; otherwise reasoning begins if the reply begins with `start`, ignoring
            white space.
        again: reasoning may begin anywhere in the reply, and more than once (Harmony's messages); all of it counts.
        call: begins a call within reasoning, which ends it, too; empty if nothing does.
    """

    tokens: int
    start: str
    end: str
    begun: bool = False
    again: bool = False
    call: str = ""


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
