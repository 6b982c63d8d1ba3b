"""How a chat's reply should reason: the template's variables, and the fields that mean the same in other words.

OpenAI says `reasoning_effort`, OpenRouter and the Responses interface `reasoning`, Anthropic and hosted models
`thinking`. Clients send them to every model, so one that the model's template has no use for is ignored by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.core.sampling_params import MAX_INT32
from quire.server.body import BodyFields, Shape, shorten, wrong_type, wrong_value
from quire.server.errors import invalid
from quire.server.limits import (
    MAX_NAME_LENGTH,
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TEMPLATE_KWARGS_DEPTH,
    REASONING_EFFORTS,
)

RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
"""Template variables that a request must not set. Names of special tokens are refused by the template itself."""
TYPES = ("enabled", "disabled", "adaptive", "auto")
BUDGET = "thinking_token_budget"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_REASONING = Shape(["effort", "enabled", "exclude", "max_tokens", "summary", "generate_summary"], "reasoning")
_THINKING = Shape(["type", "budget_tokens"], "thinking")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"summary": ("auto",), "generate_summary": ("auto",)}


class Thinking:
    """What all of these fields say.

    Attributes:
        variables: the template's.
        budget: most tokens of reasoning, if it was given within `reasoning` or `thinking`.
        hints: the field that each variable comes from, and the budget, as `BUDGET`; what is not in it comes from
            `chat_template_kwargs`.
        ignored: fields without effect.

    Raises:
        ApiError: one is not valid, or two disagree.
    """

    def __init__(self, given: BodyFields) -> None:
        self.variables = _template_kwargs(given)
        self.budget: int | None = None
        self.hints: dict[str, str] = {}
        reasoning = _object(given, "reasoning", _REASONING)
        thinking = _object(given, "thinking", _THINKING)
        if reasoning.boolean("exclude"):
            message = "reasoning.exclude is true, which is not supported here; leave it out, and skip the reasoning"
            raise invalid(message, "reasoning.exclude", "unsupported_parameter")
        kind = _choice(thinking, "type", "thinking.type", TYPES)
        self._set("enable_thinking", "enable_thinking", _switch(given, "enable_thinking"))
        self._set("enable_thinking", "reasoning.enabled", _switch(reasoning, "enabled"))
        if kind in ("enabled", "disabled"):
            self._set("enable_thinking", "thinking", kind == "enabled")
        self._set("reasoning_effort", "reasoning_effort", _effort(given, "reasoning_effort", "reasoning_effort"))
        self._set("reasoning_effort", "reasoning.effort", _effort(reasoning, "effort", "reasoning.effort"))
        self._set_budget("reasoning.max_tokens", reasoning.integer("max_tokens", -1, MAX_INT32))
        budget = thinking.integer("budget_tokens", -1, MAX_INT32)
        self._set_budget("thinking.budget_tokens", budget if kind != "disabled" else None)
        of_given = given.integer(BUDGET, -1, MAX_INT32) if self.budget is not None else None
        if of_given not in (None, self.budget):
            raise _disagree(self.hints[BUDGET], self.budget, BUDGET, of_given)
        self.ignored = [
            *reasoning.without_effect(_WITHOUT_EFFECT),
            *reasoning.unknown(_REASONING.names),
            *thinking.unknown(_THINKING.names),
        ]

    def _set(self, variable: str, field: str, value: bool | str | None) -> None:
        if value is None:
            return
        if self.variables.setdefault(variable, value) != value:
            other = self.hints.get(variable, f"chat_template_kwargs.{variable}")
            raise _disagree(other, self.variables[variable], field, value)
        self.hints.setdefault(variable, field)

    def _set_budget(self, field: str, value: int | None) -> None:
        if value is None:
            return
        if self.budget not in (None, value):
            raise _disagree(self.hints[BUDGET], self.budget, field, value)
        self.budget, self.hints[BUDGET] = value, field


def _disagree(first: str, one: object, second: str, other: object) -> Exception:
    found = f"{first} means {shorten(one)} and {second} means {shorten(other)}"
    return invalid(f"{found}, which disagree; leave one of them out", second)


def _object(given: BodyFields, name: str, shape: Shape) -> BodyFields:
    raw = given.raw(name)
    return BodyFields({} if raw is None else shape.read(raw), f"{name}.")


def _switch(given: BodyFields, name: str) -> bool | None:
    return given.boolean(name) if given.has(name) else None


def _effort(given: BodyFields, name: str, field: str) -> str | None:
    return _choice(given, name, field, REASONING_EFFORTS)


def _choice(given: BodyFields, name: str, field: str, allowed: Sequence[str]) -> str | None:
    value = given.text(name, MAX_NAME_LENGTH)
    if value is not None and value not in allowed:
        raise wrong_value(field, value, "one of " + ", ".join(allowed))
    return value


def _template_kwargs(given: BodyFields) -> dict[str, Any]:
    """Template variables: their number, names and depth are limited; values are plain JSON."""
    name = "chat_template_kwargs"
    values = given.get(name, MAX_TEMPLATE_KWARGS_BYTES)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise wrong_type(name, values, "an object")
    if len(values) > MAX_TEMPLATE_KWARGS:
        raise invalid(f"{name} has {len(values)} entries; at most {MAX_TEMPLATE_KWARGS} are allowed", name)
    for key in values:
        if key in RESERVED_KWARGS:
            raise invalid(f"{name} must not set {key!r}; the request has a field for it, or it is not supported", name)
        if not _VARIABLE.fullmatch(key):
            message = f"{name} has the key {shorten(key)}; keys are variables' names: letters, digits and underscores"
            raise invalid(message, name)
    if _depth(values, MAX_TEMPLATE_KWARGS_DEPTH + 1) > MAX_TEMPLATE_KWARGS_DEPTH:
        raise invalid(f"{name} nests deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels", name)
    return values


def _depth(value: Any, most: int) -> int:
    """Levels of lists and objects, counted up to `most`."""
    if most == 0 or not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, most - 1) for item in items), default=0)
