"""Files of a checkpoint, damaged at random but always in the same way for the same seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 255, 2**31, 2**32, 2**63, 2**64, 10**30),
    *(0.0, 0.5, -0.5, 1e-300, 1e308, float("inf"), float("nan")),
    *("", "a", "\ud800", "\x00", "<s>", "▁", "(((", "(a+)+$", "[", "x" * 5000, "Replace", "Sequence", "Unigram"),
    *([], {}, [[]], ["a"], [0], [None], {"String": ""}, {"Regex": "("}, {"Regex": "(a*)*b"}, {"type": "Fuse"}),
    {"type": "Strip", "content": "l", "start": 1, "stop": 1},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 4000},
]

SNIPPETS = [
    "{{ 1 // 0 }}", "{% if %}", "{% endfor %}", "{{ 'a' * 99999999 }}", "{{ [].__class__ }}", "{{ none.x.y }}",
    "{{ x | nofilter }}", "{% break %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "\ud800", "\x00",
    "{% set a = a ~ a %}" * 50, "{{" + "(" * 500 + "1" + ")" * 500 + "}}", "{% if x %}" * 120 + "{% endif %}" * 120,
    "{% for i in range(9) %}" * 25 + "{% endfor %}" * 25, "{{ " + "-" * 5000 + "1 }}", "{{ " + "1+" * 9000 + "1 }}",
    "{% import 'x' as y %}", "{% extends 'x' %}", "{% generation %}", "{% block a %}{% block a %}", "{# ", "{% raw %}",
]  # fmt: skip


def mutate_json(text: str, draw: random.Random) -> str:
    """A JSON document with a few of its values replaced, removed, repeated or moved; now and then with bad letters."""
    if draw.random() < 0.15:
        return mutate_text(text, draw)
    value = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        holder, key = _place(value, draw)
        if holder is None:
            return json.dumps(draw.choice(HOSTILE))
        _change(holder, key, value, draw)
    return json.dumps(value)


def mutate_text(text: str, draw: random.Random, inserted: list[str] | None = None) -> str:
    """A text with a stretch of it removed, repeated, or replaced."""
    start = draw.randrange(len(text) + 1)
    end = min(len(text), start + draw.choice([0, 1, 5, 50, 5000]))
    kind = draw.randrange(4)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:end] * draw.choice([1, 100]) + text[end:]
    if kind == 2 and inserted is None:
        return text[:start]
    return text[:start] + draw.choice(inserted or ["{", "]", '"', "\\", ",", "1e999", "\x00", "é"]) + text[end:]


def _place(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """Some place in a value, as its holder and key; each depth is about as likely."""
    holder, key = None, None
    while isinstance(value, dict | list) and value and (holder is None or draw.random() < 0.7):
        holder = value
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        value = value[key]
    return holder, key


def _change(holder: Any, key: Any, whole: Any, draw: random.Random) -> None:
    kind = draw.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, place = _place(whole, draw)
        holder[key] = copy.deepcopy(other[place]) if other is not None else None
    elif kind == 2 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * draw.choice([1, 30, 1000])
    elif kind == 3 and isinstance(holder, dict):
        holder[str(draw.choice(HOSTILE))] = holder.pop(key)
    elif kind == 4 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * draw.choice([-1, 2, 1000, 10**12]) + draw.choice([0, 1])
    else:
        holder[key] = copy.deepcopy(draw.choice(HOSTILE))
