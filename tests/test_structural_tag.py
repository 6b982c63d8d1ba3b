"""Structural tags as users spell them: which texts are of one, which spellings there are, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.grammars import Grammars
from quire.models.hub import ASSETS
from quire.text.known_formats import KNOWN
from quire.text.reply_grammar import ReplyRequest, reply_grammar
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import Tokenizer

AGE: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
ANY = {"type": "any_text"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(name: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}


JSON = {"type": "json_schema", "json_schema": AGE}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("f=a", JSON), tag("f=b", text("x"))]}
A, B = '<f=a>{"age": 3}</f=a>', "<f=b>x</f=b>"
SEPARATED = {"type": "tags_with_separator", "tags": TRIGGERED["tags"], "separator": ", "}
OLD = {"structures": [{"begin": "<f=a>", "schema": AGE, "end": "</f=a>"}], "triggers": ["<f="]}

# A format, texts that are of it, and texts that are not even the beginning of one, or end too early. XGrammar 0.2.8
# says the same of each, but that it takes more where free text holds what ends it ("yy").
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (text("abc"), ["abc"], ["ab", "abd", "abcd"]),
    (JSON, ['{"age": -5}'], ['{"age": "x"}', "{}", '{"age": 5']),
    ({"type": "regex", "pattern": "[a-c]{2}"}, ["ab"], ["a", "ad", "abc"]),
    ({"type": "grammar", "grammar": 'root ::= "x" ("y" | "z")'}, ["xy", "xz"], ["x", "xx"]),
    (ANY, ["", "anything <at> all"], []),
    ({**ANY, "excludes": ["<", "no"]}, ["yes > n o"], ["a < b", "oh no"]),
    ({"type": "sequence", "elements": [text("a"), ANY]}, ["a", "abc"], ["b"]),
    ({"type": "or", "elements": [text("a"), text("bc")]}, ["a", "bc"], ["b", "abc"]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "star", "content": text("a")}, ["", "aaa"], ["b"]),
    ({"type": "plus", "content": text("a")}, ["a", "aa"], [""]),
    (tag("t", ANY), ["<t>hm</t>", "<t></t>"], ["<t>hm", "<t>hm</t>more", "hm"]),
    (TRIGGERED, ["", "well", A, f"so {A} and {B}!", f"{A}{A}"], ["<f=c>", "so <f=a>{}", f"{A}<f=b>y"]),
    ({**TRIGGERED, "at_least_one": True}, [A, f"{A} and {B}!"], ["", "well", f"so {A}"]),
    ({**TRIGGERED, "stop_after_first": True}, ["", "well", f"so {A}"], [f"so {A} and"]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [A, B], ["", "well", f"so {A}", f"{A}{B}"]),
    ({**TRIGGERED, "excludes": ["!"]}, [f"so {A} and"], ["so!", f"{A} and!"]),
    (
        SEPARATED,
        ["", A, f"{A}, {B}, {A}"],
        [f"{A}{B}", "well", f"{A}, "],
    ),
    (
        {**SEPARATED, "at_least_one": True, "stop_after_first": True},
        [A, B],
        ["", f"{A}, {B}"],
    ),
    # Several ends
    ({**tag("t", ANY), "end": ["</t>", "</u>"]}, ["<t>a</v></t>", "<t></u>"], ["<t>a", "<t>a</t>b", "<t></t></u>"]),
    ({**tag("t", {"type": "regex", "pattern": "[ab]+"}), "end": [";", "."]}, ["<t>ab;", "<t>b."], ["<t>;", "<t>ab"]),
    ({**tag("t", text("x")), "end": [";", "."]}, ["<t>x;", "<t>x."], ["<t>x", "<t>x;."]),
    (
        {"type": "sequence", "elements": [{**tag("t", ANY), "end": [";", "."]}, text("!")]},
        ["<t>;!", "<t>a.!"],
        ["<t>!", "<t>;"],
    ),
    (
        {**tag("t", {"type": "or", "elements": [{"type": "regex", "pattern": "[ab]+"}, text("x")]}), "end": [";", "."]},
        ["<t>x.", "<t>a;"],
        ["<t>x", "<t>c;"],
    ),
    # Free text ends where something else begins.
    (tag("t", TRIGGERED), ["<t></t>", "<t>hm</t>", f"<t>so {A} and</t>"], ["<t>hm", "<t>hm</t>more", f"<t>{A}"]),
    (tag("t", {**TRIGGERED, "at_least_one": True}), [f"<t>{A}</t>", f"<t>{A} and</t>"], ["<t></t>", f"<t>so {A}</t>"]),
    ({"type": "sequence", "elements": [ANY, text("y")]}, ["y", "a<e>y"], ["a", "", "yy"]),
    ({"type": "sequence", "elements": [ANY, tag("t", ANY), text("!")]}, ["hm<t>a</t>!"], ["hm", "hm<t>a</t>"]),
    ({"type": "sequence", "elements": [TRIGGERED, text("END")]}, [f"so {A} END", "END"], [f"so {A}", "END."]),
    # So many times
    ({"type": "repeat", "min": 2, "max": 3, "content": text("x;")}, ["x;x;", "x;x;x;"], ["x;", "x;x;x;x;"]),
    ({"type": "repeat", "min": 0, "max": 1, "content": text("x;")}, ["", "x;"], ["x;x;"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": text("x;")}, ["x;x;", "x;" * 9], ["", "x;"]),
    # What means nothing, as XGrammar's classes write it
    ({**JSON, "style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}, ['{"age": 1}'], []),
    ({**ANY, "excludes": [], "max_tokens": None, "max_chars": None}, ["a"], []),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ASSETS / "demo")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))


def is_of(grammars: Grammars, tokenizer: Tokenizer, form: StructuredOutputsParams, output: str) -> bool:
    """Whether a reply may be this text, and end there."""
    matcher = grammars.matcher(form, [0])
    ids = tokenizer.encode(output, add_special_tokens=False)
    for token in ids:
        if not matcher.mask()[token >> 5] >> (token & 31) & 1:
            return False
        matcher.append(token)
    return bool(matcher.mask()[0] & 1)


@pytest.mark.parametrize(
    ("format", "good", "bad"), CASES, ids=[f"{i}-{case[0]['type']}" for i, case in enumerate(CASES)]
)
def test_each_format_takes_its_texts_and_no_others(
    grammars: Grammars, tokenizer: Tokenizer, format: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    form = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})
    assert [one for one in good if not is_of(grammars, tokenizer, form, one)] == []
    assert [one for one in bad if is_of(grammars, tokenizer, form, one)] == []


def test_the_older_spelling_means_the_same(grammars: Grammars, tokenizer: Tokenizer) -> None:
    as_text = {**OLD, "structures": [{**OLD["structures"][0], "schema": json.dumps(AGE)}]}
    for told in (OLD, {"type": "structural_tag", **OLD}, as_text, json.dumps(OLD)):
        form = StructuredOutputsParams(structural_tag=told)  # type: ignore[arg-type]
        assert is_of(grammars, tokenizer, form, f"so {A} and {A}")
        assert not is_of(grammars, tokenizer, form, "so <f=a>{}</f=a>") and not is_of(
            grammars, tokenizer, form, "<f=b>"
        )


@pytest.mark.parametrize("told", [OLD, {"type": "structural_tag", "format": TRIGGERED}], ids=["older", "format"])
def test_beside_reasoning_it_means_what_comes_after(grammars: Grammars, tokenizer: Tokenizer, told: Any) -> None:
    wanted = ReplyRequest(structured=StructuredOutputsParams(structural_tag=told))
    form = reply_grammar(ReplyForm(KNOWN["hermes"], in_reasoning=True), wanted).structured
    assert form is not None
    assert is_of(grammars, tokenizer, form, f"<f=c> hm</think>\n\nso {A}")
    assert not is_of(grammars, tokenizer, form, "hm</think>\n\n<f=c>")


def test_what_stands_in_several_places_is_written_once(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a = {"type": "rule", "name": "a"}
    told = {"format": {"type": "sequence", "elements": [a, text(", "), a]}, "rules": {"a": TRIGGERED["tags"][0]}}
    form = StructuredOutputsParams(structural_tag=told)
    assert is_of(grammars, tokenizer, form, f"{A}, {A}") and not is_of(grammars, tokenizer, form, f"{A}, {B}")
    wanted = ReplyRequest(structured=form)
    with pytest.raises(SamplingParamsError, match="unknown field 'rules'"):
        reply_grammar(ReplyForm(KNOWN["hermes"]), wanted)


REFUSED: list[tuple[Any, str]] = [
    ({"format": {"type": "rule", "name": "b"}, "rules": {"a": ANY}}, "the rule 'b', which is not there"),
    ({"format": {"type": "rule", "name": "a"}, "rules": {"a": {"type": "rule", "name": "a"}}}, "back to itself"),
    ({"format": ANY, "rules": [ANY]}, "rules must be"),
    ({"type": "other", "format": ANY}, "must be"),
    ({"type": "structural_tag"}, "must be"),
    ({"format": ANY, "triggers": []}, "unknown field 'triggers'"),
    ({**OLD, "at_least_one": True}, "unknown field 'at_least_one'"),
    ({"structures": [{"begin": "<a>", "end": "</a>", "other": 1}], "triggers": ["<"]}, r"structures\[0\]"),
    ({"structures": [{"begin": "<a>", "end": "</a>", "schema": "{"}], "triggers": ["<"]}, "not valid JSON"),
    ({"structures": [], "triggers": ["<"]}, "tags is empty"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": AGE}}, "type 'qwen_xml_parameter'"),
    ({"format": {"type": "token", "token": 5}}, "type 'token'"),
    ({"format": {**JSON, "style": "qwen_xml"}}, "style 'qwen_xml'"),
    ({"format": {**tag("t", ANY), "end": []}}, "end must be a text, or a list"),
    ({"format": {**tag("t", ANY), "end": ["</t>", ""]}}, "end must be a text, or a list"),
    ({"format": {**tag("t", ANY), "begin": {"type": "token", "token": 5}}}, "has 'begin'"),
    ({"format": {"type": "sequence", "elements": [ANY, JSON]}}, r"elements\[0\] is free text"),
    ({"format": {"type": "repeat", "min": 3, "max": 2, "content": ANY}}, "max 2"),
    ({"format": {"type": "repeat", "min": True, "max": 2, "content": ANY}}, "min True"),
    ({"format": {"type": "repeat", "min": 0, "max": 10**9, "content": ANY}}, "max 1000000000"),
    ({"format": {**JSON, "any_order": True}}, "has 'any_order'"),
    ({"format": {**JSON, "any_order": 0}}, "has 'any_order'"),
    ({"format": {**ANY, "max_tokens": 5}}, "has 'max_tokens'"),
    ({"format": {**ANY, "excludes": [""]}}, "excludes must be"),
    ({"format": {**TRIGGERED, "triggers": []}}, "triggers must be"),
    ({"format": {**TRIGGERED, "triggers": ["<g"]}}, "begins with none of the triggers"),
    ({"format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}, "uniqueItems"),
    ({"format": {"type": "or", "elements": []}}, "choice of nothing"),
]


@pytest.mark.parametrize(("told", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_not_honoured_is_refused_by_name(grammars: Grammars, told: Any, says: str) -> None:
    with pytest.raises(SamplingParamsError, match=says):
        grammars.compile(StructuredOutputsParams(structural_tag=told))


def test_what_has_too_many_parts_for_the_library_is_told_so(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "abcd"}}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"type": "tag", "begin": f"<{number}>", "content": content, "end": "</>"} for number in range(2400)]
    told = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    with pytest.raises(SamplingParamsError, match="cannot be used: it has too many parts; make it smaller"):
        grammars.compile(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": told}))


def test_many_texts_that_may_not_occur_are_compiled_at_once(tokenizer: Tokenizer) -> None:
    """All of them can be under way at the same place. Each in an expression of its own, they took minutes."""
    grammars = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size), most_seconds=3.0)
    told = {"type": "any_text", "excludes": ["a" * count + "b" for count in range(5, 100)]}
    form = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": told})
    assert is_of(grammars, tokenizer, form, "aaaab, aaaa") and not is_of(grammars, tokenizer, form, "aaaaaab")
