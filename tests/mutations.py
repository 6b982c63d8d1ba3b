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

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ENDLESS = {"Regex": "(x+x+)+y"}
PARTS: dict[str, list[Any]] = {
    "normalizer": [
        *({"type": "Sequence", "normalizers": [DOUBLE] * count} for count in (4, 12, 34)),
        {"type": "Replace", "pattern": ENDLESS, "content": "x"},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 999},
        *({"type": "Precompiled", "precompiled_charsmap": text} for text in ("", "AAAA", "/////wAAAAAAAAAA")),
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"},
        {"type": "Prepend", "prepend": "x" * 90000},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "ByteLevel"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(?=a)|$"}, "behavior": "MergedWithNext", "invert": True},
        {"type": "Split", "pattern": ENDLESS, "behavior": "Removed", "invert": False},
        *({"type": "FixedLength", "length": length} for length in (0, 1, 2**62)),
        {"type": "Metaspace", "replacement": "▁▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True}] * 20},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "UnicodeScripts"},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000, "pair": [],
         "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
         "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
         "special_tokens": {"<x>": {"id": "<x>", "ids": [4_000_000_000], "tokens": []}}},
        {"type": "RobertaProcessing", "sep": ["", 2**31], "cls": ["", 2**31], "trim_offsets": True,
         "add_prefix_space": False},
    ],
    "decoder": [
        DOUBLE,
        {"type": "Sequence", "decoders": [DOUBLE] * 34},
        {"type": "Replace", "pattern": ENDLESS, "content": ""},
        *({"type": "Strip", "content": "e", "start": start, "stop": stop} for start, stop in ((1, 1), (0, 9))),
        {"type": "Strip", "content": "e", "start": 2**62, "stop": 2**62},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Unheard"},
    ],
    "model": [
        {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]], "byte_fallback": False},
        {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": True},
        {"type": "Unigram", "unk_id": 0, "vocab": [["", -1.0], ["a", -1e308], ["a", 1e308]], "byte_fallback": True},
        {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "?"},
        {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "", "max_input_chars_per_word": 0,
         "vocab": {"a": 0}},
        {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 7}, "merges": ["a b"], "dropout": 1.5},
        {"type": "BPE", "vocab": {"": 0}, "merges": [], "unk_token": "", "fuse_unk": True, "byte_fallback": True},
        {"type": "BPE", "vocab": {"a": 0, "ab": 1}, "merges": [["a", "ab"]], "continuing_subword_prefix": "▁▁▁"},
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}],
    "padding": [
        {"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
         "pad_token": ""},
    ],
}  # fmt: skip
"""Parts of a tokenizer.json that are well-formed, and odd."""

SNIPPETS = [
    "{{ 1 // 0 }}", "{% if %}", "{% endfor %}", "{{ 'a' * 99999999 }}", "{{ [].__class__ }}", "{{ none.x.y }}",
    "{{ x | nofilter }}", "{% break %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "\ud800", "\x00",
    "{% set a = a ~ a %}" * 50, "{{" + "(" * 500 + "1" + ")" * 500 + "}}", "{% if x %}" * 120 + "{% endif %}" * 120,
    "{% for i in range(9) %}" * 25 + "{% endfor %}" * 25, "{{ " + "-" * 5000 + "1 }}", "{{ " + "1+" * 9000 + "1 }}",
    "{% import 'x' as y %}", "{% extends 'x' %}", "{% generation %}", "{% block a %}{% block a %}", "{# ", "{% raw %}",
]  # fmt: skip


def mutate_json(text: str, draw: random.Random) -> str:
    """A JSON document with a few of its values replaced, removed, repeated or moved, or with bad letters.

    Of a tokenizer.json, every other time one part is replaced by an odd one.
    """
    if draw.random() < 0.15:
        return mutate_text(text, draw)
    value = json.loads(text)
    if draw.random() < 0.5 and "model" in value:
        part = draw.choice(list(PARTS))
        value[part] = draw.choice(PARTS[part])
        return json.dumps(value)
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
