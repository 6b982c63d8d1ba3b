"""What an answer must look like, asked of a server: every spelling, bad ones, and plain requests beside them."""

from __future__ import annotations

import concurrent.futures
import json
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.http_tools import CHECKED, ServeProcess, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= "a" ("b" | "c") "d"'


@pytest.fixture(scope="module")
def server():
    with ServeProcess(*CHECKED, "--tokenizer-deadline", "20", "--tool-format", "hermes") as process:
        yield process


def completion(server: ServeProcess, **fields: Any) -> tuple[int, Any]:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 200, "seed": 5, "temperature": 1.5, **fields}
    status, _, data = server.post("/v1/completions", body)
    return status, json.loads(data)


def text_of(server: ServeProcess, **fields: Any) -> str:
    status, answer = completion(server, **fields)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer["choices"][0]["text"]


def is_person(text: str) -> bool:
    value = json.loads(text)
    return [*value] == ["name", "age"] and value["name"] in ("Ada", "Grace") and 10 <= value["age"] <= 99


def test_every_spelling_of_a_schema_gives_the_same_answer(server):
    spellings = [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
    ]
    texts = {text_of(server, **spelling) for spelling in spellings}
    assert len(texts) == 1 and is_person(texts.pop())


def test_other_languages_are_enforced(server):
    assert text_of(server, guided_choice=["yes", "no"]) in ("yes", "no")
    assert text_of(server, structured_outputs={"regex": "[ab]{3}"}).strip("ab") == ""
    assert {text_of(server, **{name: GBNF}) for name in ("guided_grammar", "ebnf", "grammar")} <= {"abd", "acd"}
    assert isinstance(json.loads(text_of(server, response_format={"type": "json_object"}, temperature=0)), dict)


def test_the_official_client_gets_documents_whole_and_in_pieces(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Who?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            "seed": 3,
            "max_tokens": 200,
        }
        whole = client.chat.completions.create(**options, n=2)
        assert all(is_person(choice.message.content or "") for choice in whole.choices)
        parts = client.chat.completions.create(**options, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"type": "object", "uniqueItems": True}}, "structured_outputs", "uniqueItems"),
    ({"guided_json": {"$ref": "http://example.org/schema"}}, "structured_outputs", "references within the schema"),
    ({"guided_json": {"$ref": "#"}}, "structured_outputs", "leads back to itself"),
    ({"guided_json": {"enum": [f"x{i}" for i in range(100_000)]}}, "structured_outputs", "cannot be used"),
    ({"guided_json": '{"type": "object"'}, "structured_outputs", "not valid JSON"),
    ({"guided_json": {"enum": ["x" * 1_100_000]}}, "guided_json", "bytes"),
    ({"guided_regex": "(" * 2000 + "a" + ")" * 2000}, "structured_outputs", "cannot be used"),
    ({"guided_regex": "(?<=a)b"}, "structured_outputs", "look-around"),
    ({"grammar": 'root ::= "a'}, "structured_outputs", "grammar"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "give one of them"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "JSON Schema"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural tag"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "leave one of them out"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD, ids=[f"{i}-{case[2]}" for i, case in enumerate(BAD)])
def test_what_cannot_be_enforced_is_refused_with_the_reason(server, fields, param, says):
    status, answer = completion(server, **fields)
    assert status == 400, answer
    assert says in answer["error"]["message"] and answer["error"]["param"].startswith(param)
    assert text_of(server, guided_choice=["still", "here"]) in ("still", "here")


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(?:a?){5000}a{5000}"}, "too many expressions"),
    ({"guided_choice": ["yes"], "min_tokens": 9}, "no token is left"),
    ({"grammar": "start: <|im_end|>"}, "no token is left"),
]


@pytest.mark.parametrize(("fields", "says"), FAILING, ids=["mask too large", "min_tokens", "special token"])
def test_what_fails_while_it_is_generated_is_the_requests_fault_too(server, fields, says):
    status, answer = completion(server, **fields)
    assert status == 400 and says in answer["error"]["message"], answer
    assert (answer["error"]["param"], answer["error"]["code"]) == ("structured_outputs", "generation_failed")
    with server.stream("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 200, **fields}) as stream:
        assert says in [*stream.chunks()][-1]["error"]["message"]


def test_plain_requests_beside_constrained_ones_get_the_tokens_that_they_get_alone(server):
    with LLM("demo", threads=1) as llm:
        [alone] = llm.generate("def fib(n):\n", SamplingParams(max_tokens=40, temperature=0.8, seed=11))

    def plain(_: int) -> str:
        return completion(server, prompt="def fib(n):\n", max_tokens=40, temperature=0.8, seed=11)[1]["choices"][0][
            "text"
        ]

    def person(number: int) -> bool:
        schema = {**SCHEMA, "title": f"schema {number}"}  # another one to compile, each time
        return is_person(text_of(server, structured_outputs={"json": schema}, seed=number))

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts, persons = threads.map(plain, range(8)), threads.map(person, range(8))
        assert set(texts) == {alone.outputs[0].text}
        assert all(persons)


@pytest.mark.slow
def test_requests_with_a_schema_survive_the_engine(server):
    """It kills the engine under a stream, which goes on where it was."""
    fields = {"structured_outputs": {"regex": "([a-z]{5} ){60}"}, "temperature": 1, "max_tokens": 600}
    expected = text_of(server, **fields)
    body = {"model": "demo", "prompt": "Once", "seed": 5, **fields}
    with server.stream("/v1/completions", body) as stream:
        pieces = stream.chunks()
        text = next(pieces)["choices"][0]["text"]
        server.kill("engine")
        for piece in pieces:
            text += piece["choices"][0]["text"]
    assert text == expected


def test_structural_tags_come_through_every_door(server):
    tag = {"type": "tag", "begin": "<p>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</p>"}
    new = {"type": "structural_tag", "format": {**tag, "content": {"type": "json_schema", "json_schema": SCHEMA}}}
    texts = {
        text_of(server, response_format=new),
        text_of(server, structured_outputs={"structural_tag": new}),
        text_of(server, structured_outputs={"structural_tag": json.dumps(new)}),
        text_of(server, structural_tag=json.dumps(new)),
    }
    assert len(texts) == 1 and is_person(texts.pop().removeprefix("<p>").removesuffix("</p>"))
    old = {"structures": [{"begin": "<p>", "schema": SCHEMA, "end": "</p>"}], "triggers": ["<p>"]}
    status, answer = completion(server, response_format={"type": "structural_tag", **old}, max_tokens=5)
    assert status == 200, answer
    status, answer = completion(server, response_format={"type": "structural_tag", "format": {"type": "token"}})
    assert status == 400 and "'token'" in answer["error"]["message"]


# -- tools ---------------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "person", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


def test_the_official_client_gets_calls_whole_and_in_pieces(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        said: list[Any] = [{"role": "user", "content": "Who?"}]
        named: Any = {"type": "function", "function": {"name": "person"}}
        options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "tool_choice": named, "seed": 3, "max_tokens": 200}
        [whole] = client.chat.completions.create(messages=said, **options).choices
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        [call] = whole.message.tool_calls
        assert call.function.name == "person" and is_person(call.function.arguments) and len(call.id) == 9

        def streamed() -> tuple[list[Any], list[Any]] | None:
            """The chunks, and what they have of calls; a busy machine may send several steps' in one."""
            chunks = [*client.chat.completions.create(messages=said, stream=True, **options)]
            pieces = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
            return (chunks, pieces) if len(pieces) > 2 else None

        chunks, pieces = wait_until(streamed, what="a call in pieces")
        assert {piece.index for piece in pieces} == {0}
        assert (pieces[0].id, pieces[0].function.name) == (call.id, "person")
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # The call and its result go back, and the model answers.
        said += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "Nobody."}]
        again = client.chat.completions.create(messages=said, **{**options, "tool_choice": "none", "max_tokens": 5})
        assert again.choices[0].message.tool_calls is None and again.usage.completion_tokens == 5
        assert again.usage.completion_tokens_details.reasoning_tokens == 0


def test_only_allowed_tools_are_called_and_the_prompt_has_all(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        said: list[Any] = [{"role": "user", "content": "Who?"}]
        ask: Any = partial(client.chat.completions.create, model="demo", messages=said, tools=TOOLS, max_tokens=80)
        now: Any = {"type": "function", "function": {"name": "now"}}
        some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}
        for seed in range(4):
            answer = ask(tool_choice=some, seed=seed)
            assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"now"}
        assert answer.usage.prompt_tokens == ask(tool_choice="auto", max_tokens=1).usage.prompt_tokens
        flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        response = client.responses.create(
            model="demo", input="Who?", tools=flat, tool_choice=choice, max_output_tokens=80
        )
        assert {item.name for item in response.output if item.type == "function_call"} == {"now"}
        assert response.tool_choice.to_dict() == choice


def test_what_was_found_is_told_and_bad_tools_are_refused(server):
    status, _, data = server.get("/server_info")
    assert status == 200 and "hermes" in json.loads(data)["replies"]
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 5}
    odd = {"name": "odd", "parameters": {"type": "object", "uniqueItems": True}}
    for strict in (True, False):
        tools = [{"type": "function", "function": {**odd, "strict": strict}}]
        status, headers, data = server.post("/v1/chat/completions", {**body, "tools": tools})
        if strict:
            assert status == 400 and "uniqueItems" in json.loads(data)["error"]["message"]
        else:
            assert status == 200 and "odd" in headers["x-quire-loosened"]


@pytest.mark.slow
def test_a_call_goes_on_where_it_was_when_the_engine_dies(server):
    words = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{5}$"}, "minItems": 40, "maxItems": 40}
    parameters = {"type": "object", "properties": {"words": words}, "required": ["words"]}
    tool = {
        "type": "function",
        "function": {"name": "say", "parameters": {**parameters, "additionalProperties": False}},
    }
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Who?"}], "seed": 5, "max_tokens": 900,
        "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    status, _, data = server.post("/v1/chat/completions", body)
    [whole] = json.loads(data)["choices"]
    assert status == 200 and whole["finish_reason"] == "tool_calls"
    [call] = whole["message"]["tool_calls"]
    assert len(json.loads(call["function"]["arguments"])["words"]) == 40
    ids, arguments = [], ""
    with server.stream("/v1/chat/completions", body) as stream:
        for number, chunk in enumerate(stream.chunks()):
            if number == 8:
                server.kill("engine")
            for piece in chunk["choices"][0]["delta"].get("tool_calls", ()):
                ids += [piece["id"]] if "id" in piece else []
                arguments += piece["function"]["arguments"]
    assert (ids, arguments) == ([call["id"]], call["function"]["arguments"])


# -- the documentation -----------------------------------------------------------------------------------------------


def test_the_examples_with_clients_run(server, tmp_path, capsys):
    text = (Path(__file__).resolve().parents[1] / "docs" / "agents.md").read_text("utf-8")
    examples = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "base_url" in one]
    assert ["anthropic" in one for one in examples] == [False, True, False]
    for example in examples:
        assert "http://127.0.0.1:8000" in example
        (tmp_path / "example.py").write_text(example.replace("http://127.0.0.1:8000", server.url))
        runpy.run_path(str(tmp_path / "example.py"), {"schema": SCHEMA})
    out = capsys.readouterr().out
    person, end = json.JSONDecoder().raw_decode(out)
    assert is_person(json.dumps(person)) and out[end:].strip()
