"""Hostile forms, tools and messages, each sent to a server: a 400 with a reason, or an answer; never a 5xx, and the
same engine afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_tools import CHECKED, ServeProcess

ODD: list[Any] = [None, 5, -1, 10**30, 1.5, True, "x", "", [], [5], {}, {"a": 1}, "\0"]
"""Put into every field."""

HI = [{"role": "user", "content": "hi"}]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


CALL = function(name="a", parameters={"type": "object", "properties": {"x": {"type": "integer"}}})


def nested(around: str, inner: str, end: str, times: int) -> str:
    return around * times + inner + end * times


def odd_fields() -> Iterator[dict[str, Any]]:
    """Every field that says what a reply must look like, or may call, with every odd value."""
    forms = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
    forms += ["whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback"]
    plain = ["structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"]
    plain += ["guided_whitespace_pattern", "ebnf", "grammar", "json_schema", "regex", "structural_tag"]
    chats = ["tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "reasoning_effort"]
    chats += ["thinking_token_budget", "chat_template_kwargs", "response_format"]
    for value in ODD:
        yield from ({"structured_outputs": {name: value}} for name in forms)
        yield from ({"structured_outputs": {"json": {"type": "string"}, name: value}} for name in forms[1:])
        yield from ({name: value} for name in plain)
        yield from ({"messages": HI, name: value} for name in chats)
        yield {"messages": HI, "tools": [CALL], "tool_choice": value}
        yield from (
            {"messages": HI, "tools": [function(name="a", **{name: value})]} for name in ("parameters", "strict")
        )
        yield {"messages": [*HI, {"role": "assistant", "content": "x", "tool_calls": value}]}
        called = {"id": "1", "type": "function", "function": {"name": "a", "arguments": value}}
        yield {"messages": [*HI, {"role": "assistant", "tool_calls": [called]}], "tools": [CALL]}


def heavy() -> Iterator[dict[str, Any]]:
    """What is large, deep, or explodes."""
    patterns = [
        "(a{1,1000}){1,1000}",
        "((a{1,100}){1,100}){1,100}",
        "(.*a){20}",
        ".*" * 500,
        "(?i)" + "a|" * 5000 + "b",
    ]
    patterns += [
        "(?:a?){5000}a{5000}",
        "(.{0,50}x){0,50}",
        "(a*)*b",
        "a{5,2}",
        "[z-a]",
        "\\",
        "(?P<n>a)\\k<n>",
        "[^\\x00-\\x{10FFFF}]",
    ]
    for pattern in patterns:
        yield {"structured_outputs": {"regex": pattern}}
        yield {"structured_outputs": {"json": {"type": "string", "pattern": pattern}}}
        yield {"structured_outputs": {"json": {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}}}
    schemas: list[Any] = [
        nested('{"type":"array","items":', "true", "}", 5000),
        nested('{"properties":{"a":', "{}", "}}", 3000),
        {"enum": [f"v{i}" for i in range(9000)]},
        {"const": json.loads(nested("[", "", "]", 900))},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {}, "minItems": 10**9},
        {"type": "integer", "multipleOf": 10**40},
        {"type": "integer", "minimum": 10**400},
        {"required": ["x"] * 10_000},
        {"oneOf": [{"const": i} for i in range(300)]},
        {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(12)]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "file:///etc/passwd"},
        {"$defs": {"d": {"properties": {f"x{i}": {"$ref": "#/$defs/d"} for i in range(50)}}}, "$ref": "#/$defs/d"},
        {"x-guidance": {"lenient": True}, "type": "string"},
        {"properties": {"__proto__": {}, "": {}, "\0": {}}},
    ]
    yield from ({"structured_outputs": {"json": schema}} for schema in schemas)
    grammars = ["root ::= root", 'root ::= root root | "a"', "root ::= " + nested("(", '"a"', ")", 1500)]
    grammars += ['start: A{100000}\nA: "a"', "start: <[99999999]>", "start: @x", "start: a\na: b\nb: a", "\0"]
    yield from ({"structured_outputs": {"grammar": grammar}} for grammar in grammars)
    text, star = {"type": "const_string", "value": "a"}, {"type": "star", "content": {"type": "any_text"}}
    many = {"type": "repeat", "min": 0, "max": 10_000, "content": text}
    tags: list[Any] = [
        {**many, "content": many},
        {**many, "min": 9000, "content": {"type": "regex", "pattern": "(a|b)*c"}},
        {"type": "star", "content": star},
        {"type": "plus", "content": {**text, "value": ""}},
        {"type": "any_text", "excludes": [f"w{i}" for i in range(300)]},
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": [f"e{i}" for i in range(300)]},
    ]
    yield from ({"structured_outputs": {"structural_tag": {"format": tag}}} for tag in tags)
    deep = nested('{"type":"optional","content":', '{"type":"any_text"}', "}", 5000)
    yield {"structured_outputs": {"structural_tag": f'{{"format":{deep}}}'}}
    tools: list[Any] = [
        [function(name=f"t{i}") for i in range(2000)],
        [function(name="x" * 10_000)],
        [function(name=name) for name in ("<tool_call>", '"}', "a b", "\0", "\U0001f600")],
        [function(name="a", parameters={"properties": {"x": {"pattern": "(a{1,1000}){1,1000}"}}})],
        [function(name="a", parameters=json.loads(nested('{"items":', "true", "}", 900)))],
        [CALL, CALL],
    ]
    for each in tools:
        yield from ({"messages": HI, "tools": each, "tool_choice": choice} for choice in ("auto", "required"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess(*CHECKED, "--tool-format", "hermes", "--max-model-len", "512") as process:
        yield process


@pytest.mark.parametrize("bodies", [odd_fields, pytest.param(heavy, marks=pytest.mark.slow)])
def test_no_form_tool_or_message_breaks_the_server(server: ServeProcess, bodies: Any) -> None:
    engine, statuses = server.pids("engine"), []
    for fields in bodies():
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        prompt = {} if "messages" in fields else {"prompt": "Once"}
        status, _, data = server.post(path, {"model": "demo", "max_tokens": 4, "seed": 1, **prompt, **fields})
        assert status in (200, 400), (fields, status, data)
        assert status == 200 or json.loads(data)["error"]["message"], fields
        statuses.append(status)
    assert {200, 400} == set(statuses)
    assert server.pids("engine") == engine
    assert server.json("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})["choices"]
