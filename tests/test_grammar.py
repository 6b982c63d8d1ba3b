"""Grammars: what is enforced of a JSON Schema, what is refused, and masks of a vocabulary's tokens."""

from __future__ import annotations

import calendar
import itertools
import json
import os
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from jsonschema_specifications import REGISTRY

from quire.core.structured_outputs import MAX_GRAMMAR_BYTES, ReasoningBudget, StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar import library
from quire.grammar.grammars import MAX_GRAMMARS, Grammars, Matcher, _Masks, append, masks
from quire.grammar.in_use import STEPS_KEPT
from quire.grammar.json_schema import ANNOTATIONS, FORMATS, MAX_DEPTH, RFC_3339, check_schema
from quire.grammar.vocabulary import MAX_FORCED, Vocabulary
from quire.models.hub import ASSETS
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_worker import COMPILED_BYTES
from tests.http_tools import resident_bytes
from tests.tokenizer_builders import byte_level_json, metaspace_json, unigram_json

PADDED = 40
"""Ids that the model has more than the tokenizer."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ASSETS / "demo")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size + PADDED))


def allowed(matcher: Matcher, ahead: list[int] | None = None) -> set[int]:
    bits = np.unpackbits(matcher.mask(ahead or []).view(np.uint8), bitorder="little")
    return {*np.flatnonzero(bits[: matcher.vocab_size]).tolist()}


def accepts(grammars: Grammars, tokenizer: Tokenizer, form: StructuredOutputsParams, text: str) -> bool:
    """Whether the whole text may come, and the end after it."""
    matcher = grammars.matcher(form, [2])
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            # The grammar may spell forced text in another way; letter by letter, it may not.
            return _accepts_letters(grammars, tokenizer, form, text)
        matcher.append(token)
    return 2 in allowed(matcher)


def _accepts_letters(grammars: Grammars, tokenizer: Tokenizer, form: StructuredOutputsParams, text: str) -> bool:
    matcher = grammars.matcher(form, [2])
    tokens = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    return matcher._matcher.validate_tokens([*tokens, matcher.vocab_size]) == len(tokens) + 1


def test_a_matcher_waits_for_a_grammar_that_is_being_compiled(tokenizer: Tokenizer) -> None:
    grammars, form = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size)), StructuredOutputsParams(regex="[ab]")
    real, compiled = library.compiled, []
    began, goes_on = threading.Event(), threading.Event()

    def slow(wanted: StructuredOutputsParams, *given: object) -> object:
        began.set()
        assert goes_on.wait(60)
        compiled.append(wanted)
        return real(wanted, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "compiled", slow)
        grammars.begin(form)
        assert began.wait(60)
        threading.Timer(0.05, goes_on.set).start()
        matcher = grammars.matcher(form, [2])
    assert compiled == [form] and len(allowed(matcher)) == 2
    grammars.close()


TEXT_FORMS: list[Any] = [
    {"type": "string"},
    {"type": "string", "maxLength": 9},
    {"properties": {"a": {"pattern": "^(x|[a-z.-]+)$"}}, "type": ["string", "object"]},
    True,
]


@pytest.mark.scale
@pytest.mark.parametrize("schema", TEXT_FORMS, ids=str)
@pytest.mark.parametrize("inside", [r"S\u00e3o", r"\u0041\u002F", r"\ud83d\ude00", r"a\u0007\"\\b", r"\uFFFF"])
def test_every_character_may_be_escaped(grammars: Grammars, tokenizer: Tokenizer, schema: Any, inside: str) -> None:
    json.loads(f'"{inside}"')
    assert accepts(grammars, tokenizer, StructuredOutputsParams(json=schema), f'"{inside}"')
    tag = {
        "format": {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    }
    assert accepts(grammars, tokenizer, StructuredOutputsParams(structural_tag=tag), f'<"{inside}">')


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83dx", r"\ud83d\u0041"])
def test_half_a_surrogate_pair_is_not_written(grammars: Grammars, tokenizer: Tokenizer, half: str) -> None:
    assert not accepts(grammars, tokenizer, StructuredOutputsParams(json=TEXT_FORMS[0]), f'"{half}"')


@pytest.mark.parametrize("pattern", [".", "\\S", "^.+$", "^a|b$", "^[^x]*$", "^\\s?$"])
def test_an_escape_is_not_begun_where_only_control_characters_could_follow(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str
) -> None:
    form = StructuredOutputsParams(json={"type": "string", "pattern": pattern})
    matcher = grammars.matcher(form, [2])
    for letter in '"\\':
        [token] = tokenizer.encode(letter, add_special_tokens=False)
        matcher.append(token)
    [token] = tokenizer.encode("u", add_special_tokens=False)
    assert token not in allowed(matcher)
    assert accepts(grammars, tokenizer, form, '"b"') or pattern == "^\\s?$"


# -- every keyword ---------------------------------------------------------------------------------------------


def keywords(draft: str) -> set[str]:
    """All keywords of a draft, from its own meta-schemas."""
    found: set[str] = set()
    for uri in REGISTRY:
        if draft in uri:
            found |= {*REGISTRY.contents(uri).get("properties", {})}
    return found


EVERY = keywords("draft-07") | keywords("draft/2020-12")

ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "$ref": ({"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}, [1], [2]),
    "$defs": ({"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}, [1], [2]),
    "definitions": ({"$ref": "#/definitions/x", "definitions": {"x": {"const": 1}}}, [1], [2]),
    "const": ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    "enum": ({"enum": [1, "a", None]}, [1, "a", None], [2, "b", True]),
    "type": ({"type": ["integer", "null"]}, [5, None], ["5", 1.5, True]),
    "allOf": ({"allOf": [{"minimum": 2, "type": "integer"}, {"maximum": 4}]}, [2, 4], [1, 5]),
    "anyOf": ({"anyOf": [{"const": 1}, {"type": "string"}]}, [1, "a"], [2, None]),
    "oneOf": ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]}, ["a", "b", None], ["c", 3]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    "additionalItems": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}],
         "additionalItems": False},
        [[1]], [[1, 2], [2]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1}, [[1]], [[2], [1, 1]]
    ),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2]], [[], [1]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    "properties": ({"type": "object", "properties": {"a": {"const": 1}}}, [{"a": 1}, {"b": 2}], [{"a": 2}]),
    "required": ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "integer"}},
        [{"a": "x", "b": 1}], [{"b": "x"}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        [{"xa": 1}, {}], [{"xa": "s"}, {"a": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "éü"], ["", "a", "é"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "ab", "😀é"], ["abc"]),
    "pattern": ({"type": "string", "pattern": "b[0-9]"}, ["ab1c", "b0"], ["ab", "1b"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
    "minimum": ({"type": "number", "minimum": 2.5}, [2.5, 30], [2.4, -3]),
    "maximum": ({"type": "integer", "maximum": 12}, [12, -99], [13, 120]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 2}, [2.01, 3], [2, 1.9]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 12}, [11], [12]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 7, 77], [1, 8]),
}  # fmt: skip
"""A schema that needs the keyword, values that meet it, and values that do not."""

REFUSED = EVERY - ENFORCED.keys() - ANNOTATIONS


def test_every_keyword_is_enforced_an_annotation_or_refused() -> None:
    assert {"not", "if", "contains", "uniqueItems", "dependentRequired", "unevaluatedProperties"} <= REFUSED
    assert not ENFORCED.keys() & ANNOTATIONS
    for name in REFUSED:
        for schema in ({name: {"minLength": 1}}, {"type": "object", "properties": {"a": {"anyOf": [{name: 1}]}}}):
            with pytest.raises(SamplingParamsError, match="which is not enforced") as caught:
                check_schema(json.dumps(schema))
            assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ENFORCED)
def test_a_keyword_is_enforced(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    schema, good, bad = ENFORCED[name]
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    for value, valid in [*((value, True) for value in good), *((value, False) for value in bad)]:
        assert jsonschema.validators.validator_for(schema)(
            schema, format_checker=jsonschema.FormatChecker()
        ).is_valid(value) == valid  # fmt: skip
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        assert accepts(grammars, tokenizer, form, text) == valid, (schema, value)


@pytest.mark.parametrize("name", sorted(ANNOTATIONS))
def test_an_annotation_changes_nothing(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x.org/y", "id": "z"}.get(
        name, "x"
    )
    form = StructuredOutputsParams(json={name: value, "type": "integer"})
    assert accepts(grammars, tokenizer, form, "12") and not accepts(grammars, tokenizer, form, '"x"')


def test_what_the_drafts_do_not_know_is_refused(grammars: Grammars) -> None:
    for name in ("x-nullable", "x-guidance", "minimun", "typ"):
        with pytest.raises(SamplingParamsError, match=name):
            grammars.compile(StructuredOutputsParams(json={name: True, "type": "object"}))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_each_format_that_is_taken_is_enforced(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    form = StructuredOutputsParams(json={"type": "string", "format": name})
    assert not accepts(grammars, tokenizer, form, '"  ? "')


DATES = {
    "date": (
        ["0000-01-01", "0000-02-29", "9999-12-31", "2024-02-29", "2000-02-29", "1900-02-28"],
        ["10000-01-01", "999-01-01", "2023-02-29", "1900-02-29", "2023-04-31", "2023-1-1", "2023-00-10"],
    ),
    "time": (
        ["23:59:59Z", "00:00:00.25z", "12:00:00+23:59", "23:59:60Z", "23:59:60.5-00:00"],
        ["24:00:00Z", "00:00:00", "12:00:60Z", "22:59:60Z", "00:60:00Z", "12:00:00+24:00", "12:00Z", "12:00:00.Z"],
    ),
    "date-time": (
        ["0000-01-01T00:00:00Z", "2024-02-29t12:00:00-08:00", "1998-12-31T23:59:60Z"],
        ["10000-01-01T00:00:00Z", "2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00", "2024-01-01"],
    ),
}  # fmt: skip
"""Texts that are of a format as RFC 3339 has it, and texts that are not."""


@pytest.mark.parametrize("name", DATES)
def test_dates_and_times_are_those_of_rfc_3339(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    good, bad = DATES[name]
    form = StructuredOutputsParams(json={"type": ["string", "null"], "format": name})
    for text, valid in [*((text, True) for text in good), *((text, False) for text in bad)]:
        assert accepts(grammars, tokenizer, form, json.dumps(text, ensure_ascii=False)) == valid, text


def test_every_day_of_the_calendar_is_a_date_and_no_other() -> None:
    years = {0, 1, 4, 100, 400, 1582, 1900, 1999, 2000, 2023, 2024, 2100, 9996, 9999}
    for year, month, day in itertools.product(years, range(14), range(33)):
        real = 1 <= month <= 12 and 1 <= day <= (29 if month == 2 and calendar.isleap(year) else calendar.mdays[month])
        assert bool(re.search(RFC_3339["date"], f"{year:04}-{month:02}-{day:02}")) == real, (year, month, day)


def test_a_date_may_have_a_pattern_and_stand_anywhere(grammars: Grammars, tokenizer: Tokenizer) -> None:
    day = {"type": "string", "format": "date", "pattern": "^2024", "allOf": [{"pattern": "-02-"}]}
    schema = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/day"}, {"const": {"format": "date"}}]}}
    form = StructuredOutputsParams(json={**schema, "$defs": {"day": day}}, disable_any_whitespace=True)
    assert accepts(grammars, tokenizer, form, '["2024-02-29",{"format":"date"}]')
    assert not accepts(grammars, tokenizer, form, '["2023-02-28"]') and not accepts(
        grammars, tokenizer, form, '["2024-02-30"]'
    )


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ("{", "not valid JSON"), ("[]", "it must be an object"), ("1", "it must be an object"),
    ('{"const": NaN}', "no number of JSON"), ('{"type": "null", "type": "string"}', "twice"),
    ({"properties": []}, "must be an object of schemas"), ({"anyOf": {}}, "must be a list"),
    ({"items": 5}, "a schema is an object"), ({"format": "regex"}, "the format 'regex'"),
    ({"format": {"a": 1}}, "at #/format is"), ({"type": {}}, "at #/type is"), ({"type": [1]}, "at #/type is"),
    ({"type": "array", "minItems": [5]}, "at #/minItems is"), ({"type": "array", "maxItems": "a"}, "at #/maxItems is"),
    ({"$ref": "#/$defs/none"}, "no schema"), ({"$ref": "other.json#/a"}, "within the schema"),
    ({"$ref": 5}, "no string"), ({"$ref": "#here"}, "anchors"), ({"$ref": "#/default", "default": {}}, "no schema"),
    ({"$ref": "#"}, "leads back"),
    ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "type": "null"}, "leads back"),
    ({"properties": {"a": {"$id": "x"}}}, "only stand at the root"), ({"$schema": "my own"}, "\\$schema"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties 3"),
    ({"type": "string", "pattern": "(?=a)"}, "looks ahead"), ({"type": "string", "pattern": "("}, "cannot be used"),
    ({"type": "strange"}, "cannot be used"), ({"minimum": "a"}, "cannot be used"),
    ({"required": "a"}, "at #/required is 'a'; it must be a list of names"),
    (False, "nothing meets"), ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, "write anyOf"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "cannot be used"),
    ({"enum": [1, 1234567890123456789]}, "at #/enum has the number 1234567890123456789, which cannot be enforced to"),
    ({"const": {"a": [2**53 + 1]}}, "at #/const has the number 9007199254740993"), ({"const": 1e30}, "number 1e\\+30"),
    ({"const": 10**400}, "number of 1329 bits"), ({"type": "integer", "minimum": 10**25}, "at #/minimum"),
    ({"type": "integer", "maximum": -(2**63) - 1}, "at #/maximum"), ({"multipleOf": 2**53 + 1}, "at #/multipleOf"),
    ({"exclusiveMaximum": -1e300}, "at #/exclusiveMaximum"), ({"exclusiveMinimum": 2**53 + 1}, "at #/exclusiveM"),
    ('{"minLength": 1e400}', "larger than any double"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "says"), BAD_SCHEMAS, ids=[says for _, says in BAD_SCHEMAS])
def test_a_schema_that_is_not_valid_is_refused_with_the_reason(grammars: Grammars, schema: Any, says: str) -> None:
    with pytest.raises(SamplingParamsError, match=says):
        grammars.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("schema", "met", "unmet"),
    [
        ({"enum": [2**53, -(2**53) - 2]}, [2**53, -(2**53) - 2], [2**53 + 1]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [2**53 + 1, -5], [1.5]),
        ({"type": "number", "minimum": -1e300, "exclusiveMaximum": 1e300}, [10**18, -0.5], ["a"]),
        ({"$defs": {"a": {"minimum": -(10**400)}}, "$ref": "#/$defs/a", "type": "integer"}, [0], ["a"]),
        ({"type": "integer", "minimum": 2**53 - 1}, [2**53 - 1], [2**53 - 2]),
    ],
)
def test_numbers_as_large_as_the_library_holds_them_are_enforced(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, met: list[Any], unmet: list[Any]
) -> None:
    form = StructuredOutputsParams(json=schema)
    assert all(accepts(grammars, tokenizer, form, json.dumps(value)) for value in met)
    assert not any(accepts(grammars, tokenizer, form, json.dumps(value)) for value in unmet)


def nested(depth: int, more: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = more(schema)
    return schema


def test_schemas_have_a_depth_and_a_size(grammars: Grammars) -> None:
    grammars.compile(StructuredOutputsParams(json=nested(MAX_DEPTH, lambda inner: {"type": "array", "items": inner})))
    for depth in (MAX_DEPTH + 1, 2000):
        text = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(SamplingParamsError, match="nests deeper"):
            grammars.compile(StructuredOutputsParams(json=text))
    with pytest.raises(SamplingParamsError, match="nests deeper"):
        grammars.compile(StructuredOutputsParams(json={"const": nested(MAX_DEPTH + 1, lambda inner: [inner])}))
    with pytest.raises(SamplingParamsError, match="at most"):
        StructuredOutputsParams(json={"title": "x" * MAX_GRAMMAR_BYTES})


@pytest.mark.scale
def test_schemas_that_explode_are_refused(grammars: Grammars) -> None:
    def option(i: int, j: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"{i}_{j}": {"type": "null"}}, "required": [f"{i}_{j}"]}

    product = {"allOf": [{"anyOf": [option(i, j) for j in range(8)]} for i in range(10)]}
    with pytest.raises(SamplingParamsError, match="too large"):
        grammars.compile(StructuredOutputsParams(json=product))
    with pytest.raises(SamplingParamsError, match="too big"):
        grammars.compile(StructuredOutputsParams(json={"enum": [f"x{i}" for i in range(100_000)]}))


@pytest.mark.scale
def test_references_have_a_depth(grammars: Grammars) -> None:
    """The library follows them one within another, and would end the process."""

    def chain(length: int, kind: str) -> dict[str, Any]:
        def link(index: int) -> dict[str, Any]:
            to = {"$ref": f"#/$defs/a{(index + 1) % length}"}
            if kind == "objects":
                return {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, to]}}}
            return {"type": "array", "items": to}

        return {"$defs": {f"a{index}": link(index) for index in range(length)}, "$ref": "#/$defs/a0"}

    for kind, works, fails in (("objects", 300, 400), ("arrays", 450, 2000)):
        grammars.compile(StructuredOutputsParams(json=chain(works, kind)))
        with pytest.raises(SamplingParamsError, match="leads on; at most"):
            grammars.compile(StructuredOutputsParams(json=chain(fails, kind)))


@pytest.mark.parametrize("allowed", [200, pytest.param(900, marks=pytest.mark.slow)])
def test_rules_have_a_depth(grammars: Grammars, allowed: int) -> None:
    """As references do."""

    def chain(rules: int) -> str:
        links = "\n".join(f'r{index}: "x" (r{index + 1} | "y")*' for index in range(rules))
        return f'start: r0\n{links}\nr{rules}: "a"'

    grammars.compile(StructuredOutputsParams(grammar=chain(allowed)))
    gbnf = "root ::= r0\n" + "\n".join(f"r{index} ::= r{index + 1}" for index in range(10_000)) + '\nr10000 ::= "a"'
    for grammar in (chain(1100), gbnf):
        with pytest.raises(SamplingParamsError, match="rules and groups"):
            grammars.compile(StructuredOutputsParams(grammar=grammar))


def test_what_takes_long_to_compile_is_refused_where_that_is_bounded(tokenizer: Tokenizer) -> None:
    form = StructuredOutputsParams(json={"type": "string"})
    hurried = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size), most_seconds=0.0)
    with pytest.raises(SamplingParamsError, match=r"structured_outputs.json takes .* s to compile; at most 0 s"):
        hurried.compile(form)
    assert form not in hurried


def test_what_takes_much_memory_is_refused_where_that_is_bounded_and_not_kept(tokenizer: Tokenizer) -> None:
    """Each of the running requests may have its own."""
    tight = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size), most_bytes=COMPILED_BYTES)
    huge, nested = StructuredOutputsParams(regex="(a{400}){1000}"), dict[str, Any](properties={})
    for number in range(60):
        nested["properties"][f"name{number}"] = {"type": "array", "items": {"enum": [f"{number}", "x"]}}
    with pytest.raises(SamplingParamsError, match=r"structured_outputs.regex takes \d+ MiB .* at most 64 MiB"):
        tight.compile(huge)
    tight.compile(StructuredOutputsParams(json=nested))
    assert huge not in tight and tight._kept_bytes < COMPILED_BYTES


@pytest.mark.scale
def test_names_are_no_way_around_the_bounds_of_a_schema() -> None:
    inner = {"properties": {str(number): {} for number in range(9000)}}
    with pytest.raises(SamplingParamsError, match="make the names shorter"):
        check_schema(json.dumps({"properties": {"x" * 300_000: inner}}))
    with pytest.raises(SamplingParamsError, match="the key 'k49999' twice"):
        check_schema("{" + ",".join(f'"k{number}":1' for number in range(50_000)) + ',"k49999":2}')
    links = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(9000)}
    with pytest.raises(SamplingParamsError, match="leads on; at most"):
        check_schema(json.dumps({"$defs": {**links, "9000": {}}, "$ref": "#/$defs/0"}))
    wide = {"$defs": {str(number): {"type": "null"} for number in range(9000)}}
    check_schema(json.dumps({**wide, "anyOf": [{"$ref": f"#/$defs/{number}"} for number in range(9000)]}))


def test_a_form_that_nothing_meets_is_refused(grammars: Grammars) -> None:
    with pytest.raises(SamplingParamsError, match=r"structured_outputs.regex cannot be used: no text meets it that"):
        grammars.compile(StructuredOutputsParams(regex="[^\\s\\S]"))


@pytest.mark.scale
def test_where_the_library_gives_up_not_even_the_end_may_come(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="((((a{100}){100}){100}){100})"), [2])
    for _ in range(64):
        mask = matcher.mask()
        if matcher.error:
            break
        matcher.append(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
    assert matcher.error and not mask.any()


def test_a_recursive_schema_works(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=tree, disable_any_whitespace=True)
    assert accepts(grammars, tokenizer, form, '{"left":{"right":{}},"right":{}}')
    assert not accepts(grammars, tokenizer, form, '{"left":1}')


# -- other languages -------------------------------------------------------------------------------------------


def test_choices_are_taken_by_the_letter(grammars: Grammars, tokenizer: Tokenizer) -> None:
    choices = ["a", "ab", ".*", 'say "x\\n"', "  two\nlines ", "ünï😀", "a|b", "[/]"]
    form = StructuredOutputsParams(choice=choices)
    assert all(accepts(grammars, tokenizer, form, choice) for choice in choices)
    assert not any(accepts(grammars, tokenizer, form, text) for text in ("b", "", "x", "abab", "aa"))
    many = StructuredOutputsParams(choice=[f"choice {i}" for i in range(10_000)])
    assert accepts(grammars, tokenizer, many, "choice 9999")


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"), ({"regex": "a", "grammar": "b"}, "regex and grammar"),
    ({"json_object": False}, "none of them"),
    ({"regex": ""}, "not empty"), ({"regex": 5}, "text"),
    ({"choice": "a"}, "list of strings"), ({"choice": []}, "list"),
    ({"choice": [""]}, "not empty"), ({"choice": ["\ud800"]}, "Unicode"), ({"json": 5}, "JSON Schema"),
    ({"json": {"a": {1, 2}}}, "written as JSON"), ({"json": {"a": float("nan")}}, "written as JSON"),
    ({"structural_tag": 5}, "structural_tag must be an object"),
    ({"json": {}, "disable_fallback": 1}, "disable_fallback"),
    ({"json": {}, "disable_additional_properties": True}, "additionalProperties: false"),
    ({"regex": "a", "whitespace_pattern": " "}, "is for json and json_object"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict"),
    ({"choice": ["a"] * 10_001}, "at most"), ({"json_object": "yes"}, "json_object"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), BAD_FORMS, ids=[f"{i}-{says}" for i, (_, says) in enumerate(BAD_FORMS)])
def test_a_form_that_is_not_valid_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SamplingParamsError, match=says):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    "text", ['root ::= "a', "start: (", "root ::= other", "%json {}", "(" * 9000, "start: <|nope|>"]
)
def test_a_grammar_that_is_not_valid_is_refused(grammars: Grammars, text: str) -> None:
    with pytest.raises(SamplingParamsError):
        grammars.compile(StructuredOutputsParams(grammar=text))


# -- masks -----------------------------------------------------------------------------------------------------


def test_a_mask_depends_on_the_tokens_alone(grammars: Grammars, tokenizer: Tokenizer) -> None:
    form = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["red", "green"]}})
    tokens = tokenizer.encode('["red","gre', add_special_tokens=False)
    one = grammars.matcher(form, [2])
    masks = []
    for token in tokens:
        masks.append(one.mask())
        one.append(token)
    for count in range(len(tokens)):
        fresh = grammars.matcher(form, [2], tokens[:count])
        assert (fresh.mask() == masks[count]).all()
        first = grammars.matcher(form, [2])
        assert (first.mask(tokens[:count]) == masks[count]).all()  # as drafts
        assert (first.mask() == masks[0]).all()  # which change nothing


def test_after_drafts_that_may_not_stand_there_all_may_come(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="ab"), [2])
    before = matcher.mask()
    wrong = tokenizer.encode("x", add_special_tokens=False)
    assert allowed(matcher, wrong) >= {*range(tokenizer.vocab_size)} and allowed(matcher, [2, 5])
    assert (matcher.mask() == before).all() and matcher.error is None


def test_neither_special_tokens_nor_padding_may_come_and_ends_only_at_the_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="(?s:.){2,}"), [2, tokenizer.vocab_size + PADDED - 1])
    ends = {2, tokenizer.vocab_size + PADDED - 1}
    for _ in range(2):
        now = allowed(matcher)
        assert not now & ({*tokenizer.special_ids} | {*range(tokenizer.vocab_size, tokenizer.vocab_size + PADDED)})
        matcher.append(tokenizer.encode("a", add_special_tokens=False)[0])
    assert allowed(matcher) & {*range(tokenizer.vocab_size, 10**5), *tokenizer.special_ids} >= ends


@pytest.mark.scale
def test_grammars_are_kept_as_long_as_there_is_room(tokenizer: Tokenizer) -> None:
    grammars = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))
    forms = [StructuredOutputsParams(regex=f"a{i}") for i in range(MAX_GRAMMARS + 3)]
    for form in forms:
        grammars.compile(form)
    assert [form in grammars for form in forms[:4]] == [False, False, False, True]
    grammars.compile(forms[3])
    grammars.compile(forms[0])
    assert forms[3] in grammars and forms[4] not in grammars


@pytest.mark.scale
def test_grammars_are_kept_by_what_they_take_and_not_by_their_text(tokenizer: Tokenizer) -> None:
    """A text of 16 characters may compile to 180 MB, a schema of 60 properties to less than 1."""
    grammars = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))
    nested = {
        f"p{i}": {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(8)}} for i in range(8)
    }
    ordinary = [StructuredOutputsParams(json={"properties": nested, "title": str(i)}) for i in range(60)]
    huge = [StructuredOutputsParams(regex=f"(a{{{400 + i}}}){{1000}}") for i in range(4)]
    for form in ordinary:
        grammars.compile(form)
    assert all(form in grammars for form in ordinary) and grammars._kept_bytes < 64 << 20
    before = resident_bytes(os.getpid())
    for form in huge:
        grammars.begin_step()
        grammars.compile(form)
    assert huge[-1] in grammars and huge[0] not in grammars and grammars._kept_bytes <= 256 << 20
    assert resident_bytes(os.getpid()) - before < 400 << 20


def test_a_grammar_that_a_request_was_admitted_with_is_there_for_its_first_step(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.grammar.grammars.MAX_GRAMMARS", 2)
    grammars = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))
    mine, *others = (StructuredOutputsParams(regex=f"b{i}") for i in range(40))
    grammars.compile(mine)
    assert mine in grammars  # a request is admitted
    for number, other in enumerate(others):
        grammars.begin_step()
        grammars.compile(other)
        assert (mine in grammars._kept) == (number < STEPS_KEPT - 1)
        assert len(grammars._kept) == 2


def test_grammars_in_use_have_a_bound_together(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))
    forms = [StructuredOutputsParams(regex=f"c{i}{{1,9}}") for i in range(3)]
    for form in forms:
        grammars.compile(form)
    sizes = [grammars._kept[form][1] for form in forms]
    monkeypatch.setattr("quire.grammar.in_use.MAX_USED_BYTES", sizes[0] + max(sizes[1:]))
    assert [grammars.take(form) for form in forms] == ["ready", "ready", "full"]
    matchers = [grammars.matcher(form, [2]) for form in (*forms[:2], forms[1])]
    for _ in range(STEPS_KEPT):
        grammars.begin_step()
    assert grammars.used_bytes == sizes[0] + sizes[1], "as long as there are matchers"
    assert [grammars.take(form) for form in (forms[2], forms[1])] == ["full", "ready"], "once for all that have it"
    del matchers[1:]
    assert grammars.take(forms[2]) == "full", "a request that was just admitted will have one"
    grammars.settle()
    assert grammars.used_bytes == sizes[0] and grammars.take(forms[2]) == "ready"
    monkeypatch.setattr("quire.grammar.in_use.MAX_USED_BYTES", 1)
    del matchers[:]
    grammars.settle()
    assert not grammars.used_bytes and grammars.take(forms[0]) == "ready", "one alone always may"


# -- vocabularies ----------------------------------------------------------------------------------------------


def byte_fallback() -> Tokenizer:
    """A tokenizer as sentencepiece's: spaces are ▁, and letters that it does not know are bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "{",
        "}",
        "▁{",
        '"',
    ]
    model = tokenizers.models.BPE(
        {piece: id for id, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "{")], byte_fallback=True
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(made.to_str())


@pytest.mark.parametrize("which", ["demo", "byte fallback"])
def test_a_vocabularys_bytes_are_what_tokens_add_to_a_text(tokenizer: Tokenizer, which: str) -> None:
    own = tokenizer if which == "demo" else byte_fallback()
    vocabulary: Vocabulary = own.vocabulary(own.vocab_size)
    for text in ("a b {é😀}\n\t", "ab  a", '{"ü": "日本"}'):
        ids = own.encode(text, add_special_tokens=False)
        spelled = b"".join(vocabulary.tokens[token] for token in [*own.anchor, *ids])
        assert spelled.decode().removeprefix(" ") == own.decode([*own.anchor, *ids], skip_special_tokens=False)
        assert b"".join(vocabulary.tokens[token] for token in vocabulary(text)) == text.encode()
    assert all(vocabulary.tokens[byte] for byte in own.byte_ids)


def test_a_vocabulary_of_byte_fallback_spells_any_text(tokenizer: Tokenizer) -> None:
    own = byte_fallback()
    grammars = Grammars(lambda: own.vocabulary(own.vocab_size))
    matcher = grammars.matcher(StructuredOutputsParams(choice=["{é a}"]), [2])
    made: list[int] = []
    while 2 not in (now := allowed(matcher)):
        made.append(max(now, key=lambda token: len(own.vocabulary(own.vocab_size).tokens[token])))
        matcher.append(made[-1])
    spelled = own.vocabulary(own.vocab_size).tokens
    assert b"".join(spelled[token] for token in made).decode() == "{é a}"
    assert own.decode([*own.anchor, *made]).endswith("{é a}")


# -- vocabularies that cannot spell all -------------------------------------------------------------------------


def word_pieces(decoder: tokenizers.decoders.Decoder | None) -> Tokenizer:
    """As BERT has it: a token begins a word, or goes on with one."""
    pieces = ["[UNK]", "hello", *map(chr, range(33, 127)), *(f"##{chr(code)}" for code in range(33, 127))]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({piece: id for id, piece in enumerate(pieces)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if decoder is not None:
        made.decoder = decoder
    return Tokenizer(made.to_str())


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda: word_pieces(None), "has no decoder, so that a space stands between any two"),
        (lambda: word_pieces(tokenizers.decoders.WordPiece()), "has a decoder of type WordPiece"),
        (lambda: word_pieces(tokenizers.decoders.BPEDecoder()), "has a decoder of type BPEDecoder"),
        (lambda: Tokenizer(json.dumps(json.loads(byte_level_json()) | {"decoder": None})), "has no decoder"),
        (lambda: Tokenizer(json.dumps(json.loads(metaspace_json()) | {"decoder": None})), "has no decoder"),
    ],
)
def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused_by_name(
    odd: Callable[[], Tokenizer], said: str
) -> None:
    own = odd()
    grammars = Grammars(lambda: own.vocabulary(own.vocab_size))
    for wanted in (StructuredOutputsParams(choice=["yes"]), StructuredOutputsParams(regex="(?s:.*)"), None):
        with pytest.raises(SamplingParamsError, match=f"this checkpoint's tokenizer.json {said}"):
            grammars.compile(wanted)


def without(*gone: str) -> Tokenizer:
    """The byte-level tokenizer, but for all tokens with one of these letters."""
    content = json.loads(byte_level_json())
    model = content["model"]
    kept = [piece for piece in model["vocab"] if not set(piece) & {*gone}]
    model["vocab"] = {piece: id for id, piece in enumerate(kept)}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if not {*"".join(merge)} & {*gone}]
    for added in content["added_tokens"]:
        added["id"] = model["vocab"].get(added["content"], len(kept))
    return Tokenizer(json.dumps(content))


SPARSE: dict[str, Callable[[], Tokenizer]] = {
    "unigram": lambda: Tokenizer(unigram_json()),  # no newline, and nothing but ASCII
    "bytes": lambda: without("{", "\u00c3", "\u010a"),  # which also begins "é", and the newline
}

NEEDY: list[tuple[StructuredOutputsParams, str | None]] = [
    (StructuredOutputsParams(choice=["{é}"]), "{"),
    (StructuredOutputsParams(regex="é+"), None),
    (StructuredOutputsParams(regex="[éü]x"), None),
    (StructuredOutputsParams(regex=r"\n[a-z]"), None),
    (StructuredOutputsParams(grammar='root ::= "é" [a-z]+'), None),
    (StructuredOutputsParams(json='{"type":"object"}'), "{"),
]
"""Forms that begin with a text that at least one of these cannot spell: with this alone the first one can."""


@pytest.mark.parametrize("which", SPARSE)
def test_a_form_that_needs_what_no_token_spells_is_refused_by_name(which: str) -> None:
    own = SPARSE[which]()
    grammars = Grammars(lambda: own.vocabulary(own.vocab_size))
    for form, begins in NEEDY:
        if begins == "{" and form.json is not None and which == "unigram":
            assert allowed(grammars.matcher(form, [2]))
            continue
        with pytest.raises(SamplingParamsError, match=r"it needs .*, which the model's tokens cannot spell"):
            grammars.compile(form)


class Bytes:
    """What texts a form allows, told by a vocabulary of single bytes: which bytes may come after others."""

    def __init__(self, form: StructuredOutputsParams) -> None:
        letters = [bytes([byte]) for byte in range(256)]
        self._grammars = Grammars(lambda: Vocabulary(letters, [], lambda text: [*text.encode()]))
        self._form = form

    def begins(self, text: bytes) -> bool:
        """Whether a text that is allowed begins so."""
        matcher = self._grammars.matcher(self._form, [])._matcher
        return bool(matcher.validate_tokens([*text]) == len(text))

    def ends(self, text: bytes) -> bool:
        matcher = self._grammars.matcher(self._form, [])._matcher
        return bool(matcher.validate_tokens([*text, 256]) == len(text) + 1)


@pytest.mark.scale
@pytest.mark.parametrize("which", SPARSE)
@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json={"type": "object", "properties": {"é": {"type": "integer"}, "b": {}}}),
        StructuredOutputsParams(json={"enum": ["é", "bé", "by", "{"]}),
        StructuredOutputsParams(regex=r"a(é|\n|qu|the|[!-~])[b-é]{1,3}"),
        StructuredOutputsParams(grammar='root ::= "a" ("é" | "b\\n" | "c") [a-zé]+'),
        StructuredOutputsParams(regex="(?s:.){3}"),
    ],
    ids=["object", "enum", "regex", "grammar", "any"],
)
def test_a_mask_has_the_tokens_that_lead_to_what_the_form_allows_and_no_other(
    which: str, form: StructuredOutputsParams
) -> None:
    own, oracle = SPARSE[which](), Bytes(form)
    vocabulary, grammars = own.vocabulary(own.vocab_size), Grammars(lambda: own.vocabulary(own.vocab_size))
    assert vocabulary.unspelled
    try:
        grammars.compile(form)
    except SamplingParamsError as error:
        assert "cannot spell" in str(error)
        assert not any(oracle.begins(token) for id, token in enumerate(vocabulary.tokens) if id in vocabulary.texts)
        return
    ended = set()
    for seed in range(3):
        draw, matcher, text = random.Random(seed), grammars.matcher(form, [2]), b""
        for _ in range(5):
            now = allowed(matcher)
            right = {id for id in vocabulary.texts if oracle.begins(text + vocabulary.tokens[id])}
            assert now - {2} == right and (2 in now) == oracle.ends(text)
            assert [*matcher.forced()] == [] or matcher.forced()[0] in right
            ended.add(matcher.error)
            assert (matcher.error is None) == bool(now)
            if not right:
                break
            token = draw.choice(sorted(right))
            append([(matcher, token)])
            text += vocabulary.tokens[token]
    assert all(error is None or "cannot spell" in error for error in ended)


@pytest.mark.scale
def test_a_text_that_must_come_is_tokenized_in_pieces_however_long_it_is(tokenizer: Tokenizer) -> None:
    asked: list[int] = []
    made = tokenizer.vocabulary(tokenizer.vocab_size)

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return tokenizer.encode(text, add_special_tokens=False)

    grammars = Grammars(lambda: Vocabulary(made.tokens[: made.size], [0, 1, 2], encode))
    text = "the quick brown fox " * 5000
    matcher = grammars.matcher(StructuredOutputsParams(choice=[text]), [2])
    tokens: list[int] = []
    for _ in range(400):
        [token] = allowed(matcher)
        assert matcher.forced()[0] == token
        tokens.append(token)
        matcher.append(token)
    assert tokens == tokenizer.encode(text, add_special_tokens=False)[:400]
    assert 0 < max(asked) <= MAX_FORCED


def test_drafts_may_lead_to_the_end_and_beyond_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    form = StructuredOutputsParams(choice=["ab"])
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    [whole] = tokenizer.encode("ab", add_special_tokens=False)
    matcher = grammars.matcher(form, [2])
    before = matcher.mask()
    for ahead in ([whole], [whole, 2], [whole, 2, 2], [whole, whole], [letters[0]] * 2):
        after = allowed(matcher, ahead)
        assert after == {2} if ahead == [whole] else len(after) > tokenizer.vocab_size
        assert matcher.error is None and (matcher.mask() == before).all()
    matcher.append(whole)
    assert allowed(matcher) == {2} and matcher.forced() == []
    assert len(allowed(matcher, [whole])) > tokenizer.vocab_size
    assert allowed(matcher) == {2} and matcher.error is None
    matcher.append(2)


# -- many matchers at once ---------------------------------------------------------------------------------------


def test_tokens_taken_together_lead_where_they_lead_one_by_one(grammars: Grammars) -> None:
    budget = ReasoningBudget(tokens=2, start="<a>", end="</a>", begun=True)
    array: Any = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2, "maxItems": 4}
    cases: list[tuple[StructuredOutputsParams | None, ReasoningBudget | None]] = [
        *((StructuredOutputsParams(json=array), None) for _ in range(3)),
        (StructuredOutputsParams(regex="[ab]{5}"), None),
        (StructuredOutputsParams(choice=["yes", "no, never"]), None),
        (StructuredOutputsParams(regex="(?s:.*)"), budget),
        (None, budget),
    ]
    together, alone = ([grammars.matcher(form, [2], (), bound) for form, bound in cases] for _ in range(2))
    draw = random.Random(4)
    for step in range(40):
        none: list[list[int]] = [[] for _ in cases]
        wanted = masks(alone, none)
        order = draw.sample(range(len(cases)), len(cases))  # those of a step need not be those of the one before
        assert (masks([together[i] for i in order], none) == wanted[order]).all()
        some = [i for i in order[: draw.randint(1, len(order))] if i != 3 or step != 2]
        may = [np.flatnonzero(np.unpackbits(wanted[i].view(np.uint8), bitorder="little")) for i in some]
        tokens = [int(draw.choice(ids)) if len(ids) else 0 for ids in may]
        if step == 2:
            some, tokens = [*some, 3], [*tokens, 0]  # which may not stand there
        append([(together[i], token) for i, token in zip(some, tokens, strict=True)])
        for i, token in zip(some, tokens, strict=True):
            alone[i].append(token)
            if step % 3 == 0:  # what else may be asked at once
                assert [together[i].forced(), together[i].error] == [alone[i].forced(), alone[i].error]
            if step % 5 == 0:
                drafts = [tokens[0], 5]
                assert (together[i].mask(drafts) == alone[i].mask(drafts)).all()
    assert sum(each.error is not None for each in alone) == 1


def test_masks_are_made_beside_their_caller_and_by_it_where_no_thread_has_time(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    held, going = threading.Event(), threading.Event()
    make = _Masks._make

    def slowly(self: _Masks) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            held.set()
            assert going.wait(60)
        make(self)

    monkeypatch.setattr(_Masks, "_make", slowly)
    form = StructuredOutputsParams(regex="[a-z]{9}")
    one, other = grammars.matcher(form, [2]), grammars.matcher(form, [2])
    expected, token = grammars.matcher(form, [2], [70]).mask(), 70
    append([(one, token)])
    assert held.wait(60)  # at work beside
    append([(other, token)])
    assert (other.mask() == expected).all()  # not begun by a thread that is busy
    going.set()
    assert (one.mask() == expected).all()
    assert threads[0].startswith("masks") and threads[1] == threading.current_thread().name
