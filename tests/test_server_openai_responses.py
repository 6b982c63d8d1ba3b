"""POST /v1/responses with the official client on a real server; how items become messages; what the store keeps."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server.errors import ApiError
from quire.server.openai_responses import ResponseObject, ResponsesResponder
from quire.server.openai_responses_protocol import (
    Item,
    ResponseCall,
    ResponsesBody,
    _chat,
    messages_of,
    parse_response,
)
from quire.server.openai_responses_tools import NamedTool, chat_tools
from quire.server.response_store import ResponseStore, Stored
from quire.text.reply import ToolCallArguments, ToolCallBegin
from tests.http_tools import wait_until
from tests.test_server_messages import EVENTS, JSON

ASKED: dict[str, Any] = {
    "model": "demo",
    "input": "def add(a, b):",
    "instructions": "short",
    "max_output_tokens": 24,
    "extra_body": {"seed": 3},
}


@pytest.fixture
def server(interfaces_server):
    return interfaces_server


@pytest.fixture(scope="module")
def client(interfaces_server):
    with openai.OpenAI(base_url=f"{interfaces_server.url}/v1", api_key="k1", max_retries=0) as client:
        yield client


# -- the official client --------------------------------------------------------------------------------------


def test_a_response_is_what_the_chat_route_answers(server, client):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": ASKED["input"]}]
    chat = server.json("/v1/chat/completions", {"messages": messages, "max_tokens": 24, "seed": 3})
    response = client.responses.create(**ASKED)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert (response.usage.output_tokens, response.usage.total_tokens) == (24, chat["usage"]["total_tokens"])
    assert response.instructions == "short" and response.max_output_tokens == 24


def test_a_stream_has_the_events_of_the_reference_and_the_same_text(client):
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    closing = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:5] == [f"response.{kind}" for kind in opening]
    assert kinds[-5:] == [f"response.{kind}" for kind in closing]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    [begun] = [event.item for event in events if event.type == "response.output_item.added"]
    assert begun.content == []  # clients append the part and the deltas that follow
    last = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == last.output
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(last.id) == last


def test_a_schema_holds(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"enum": [True, False]}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = client.responses.create(**ASKED | {"max_output_tokens": 200}, text={"format": form})
    assert json.loads(response.output_text)["ok"] in (True, False) and response.status == "completed"
    assert response.text.format.name == "answer"


def test_a_response_goes_on_from_another_as_from_all_that_was_said(client):
    first = client.responses.create(**ASKED)
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
    second = client.responses.create(**asked, input="and subtract", previous_response_id=first.id)
    said = [
        {"role": "user", "content": ASKED["input"]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and subtract"},
    ]
    assert client.responses.create(**asked, input=said).output_text == second.output_text
    third = client.responses.create(**asked, input="more", previous_response_id=second.id)
    said += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "more"}]
    assert client.responses.create(**asked, input=said).output_text == third.output_text
    assert [item.content for item in client.responses.input_items.list(third.id).data] == ["more"]


def test_the_input_of_a_stored_response_is_listed_page_by_page(client):
    words = [f"word {number}" for number in range(25)]
    asked = [{"role": "user", "content": word} for word in words]
    made = client.responses.create(model="demo", max_output_tokens=2, input=asked)
    items = client.responses.input_items
    assert [item.content for item in items.list(made.id)] == words[::-1]  # the client asks for page after page
    assert [item.content for item in items.list(made.id, order="asc", limit=3)] == words
    page = items.list(made.id, order="asc", limit=10)
    assert (len(page.data), page.has_more, page.data[0].content) == (10, True, "word 0")
    last = items.list(made.id, order="asc", limit=10, after=items.list(made.id, limit=1).data[0].id)
    assert not last.data and not last.has_more
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
        with pytest.raises(openai.BadRequestError):
            items.list(made.id, **wrong)


def test_items_whose_ids_repeat_are_listed_once_each(client):
    ids = ["a", "a", None, "item_2", "a", "b"]
    asked = [{"role": "user", "content": f"word {at}", **({"id": id} if id else {})} for at, id in enumerate(ids)]
    made = client.responses.create(model="demo", max_output_tokens=2, input=asked)
    listed = [*itertools.islice(client.responses.input_items.list(made.id, order="asc", limit=1), 20)]
    assert [item.content for item in listed] == [f"word {at}" for at in range(6)]
    assert [item.id for item in listed] == ["a", "item_1", "item_2", "item_3", "item_4", "b"]


def test_stored_responses_are_their_tenants_alone(server, client):
    kept = client.responses.create(**ASKED)
    unkept = client.responses.create(**ASKED, store=False)
    assert client.responses.retrieve(kept.id) == kept
    for id in (unkept.id, "resp_0", "x" * 300):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k2", max_retries=0) as other:
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(kept.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**ASKED, previous_response_id=kept.id)
    client.responses.delete(kept.id)
    with pytest.raises(openai.BadRequestError, match="no response with this id is stored") as refused:
        client.responses.create(**ASKED, previous_response_id=kept.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_tokens_of_a_prompt_are_counted(client):
    asked = {name: value for name, value in ASKED.items() if name in ("model", "input", "instructions")}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**ASKED).usage.input_tokens


def test_a_response_in_the_background_is_asked_for_until_it_is_there(client):
    queued = client.responses.create(**ASKED, background=True)
    assert queued.status == "queued" and not queued.output

    def ended() -> Response | None:
        found = client.responses.retrieve(queued.id)
        return None if found.status in ("queued", "in_progress") else found

    assert wait_until(ended).output_text == client.responses.create(**ASKED).output_text
    long = client.responses.create(**ASKED | {"input": "x = 1\n" * 5000}, background=True)
    failed = wait_until(lambda: found if (found := client.responses.retrieve(long.id)).status == "failed" else None)
    assert failed.error.code == "context_length_exceeded"


def test_a_response_can_be_cancelled(server, client):
    asked = ASKED | {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    running = client.responses.create(**asked, background=True)
    wait_until(lambda: server.json("/view")["stats"]["running"])
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"
    waiting = client.responses.create(**asked, background=True)
    client.responses.delete(waiting.id)
    with client.responses.create(**asked, stream=True) as stream:
        id = next(iter(stream)).response.id
        client.responses.cancel(id)
        assert [*stream][-1].response.status == "cancelled"
    with client.responses.create(**asked, stream=True) as left:
        id = next(iter(left)).response.id
    assert wait_until(lambda: client.responses.retrieve(id).status == "cancelled")
    done = client.responses.create(**ASKED)
    assert client.responses.cancel(done.id) == done
    wait_until(lambda: not server.json("/view")["stats"]["running"])
    stats = server.json("/view")["stats"]
    assert not stats["waiting"] and not stats["held_blocks"]


def test_errors_are_openais(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASKED | {"model": "other"})
    with pytest.raises(openai.BadRequestError) as image:
        part = {"type": "input_image", "image_url": "x"}
        client.responses.create(**ASKED | {"input": [{"role": "user", "content": [part]}]})
    assert image.value.code == "unsupported_content"
    with pytest.raises(openai.BadRequestError) as tool:
        client.responses.create(**ASKED, tools=[{"type": "file_search"}])
    assert tool.value.param == "tools[0].type"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**ASKED | {"input": "x = 1\n" * 5000})
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")


# -- bodies ---------------------------------------------------------------------------------------------------


def nothing(response_id: str) -> bytes:
    raise ApiError(404, "none")


def parse(**fields: Any) -> ResponseCall:
    return parse_response(json.dumps({"input": "x", **fields}).encode(), find=nothing)


def items(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for _, message in messages_of(msgspec.convert([*fields], list[Item]))]


def test_null_is_not_given_within_items_too():
    """Clients send back items as their libraries dump them."""
    given = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
        {"role": "assistant", "content": "z"},
    ]
    nulls = dict.fromkeys(("type", "role", "content", "call_id", "name", "arguments", "output", "summary", "id"))
    assert items(*[nulls | item for item in given]) == items(*given)
    form = {"type": "text", "name": None, "schema": None, "strict": None}
    call = parse(input=[nulls | item for item in given], text={"format": form}, tools=None)
    assert len(call.messages) == 4 and "null" not in msgspec.json.encode(call.items).decode()


def test_items_become_the_messages_of_a_chat():
    found = items(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "thanks"},
    )
    weather = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert found == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": weather},
                {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "user", "content": "thanks"},
    ]


def test_fields_mean_what_they_mean_in_a_chat():
    call = parse(max_output_tokens=5, temperature=0.5, top_k=3, seed=7, user="me", stream=True, new_field=1)
    assert (call.params.max_tokens, call.params.temperature, call.params.top_k, call.params.seed) == (5, 0.5, 3, 7)
    assert (call.user, call.stream, call.stores, call.ignored) == ("me", True, True, ("new_field",))
    assert not parse(store=False).stores


def test_tools_are_those_of_a_chat():
    parameters = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "name": "f", "parameters": parameters, "strict": True},
        {"type": "function", "name": "g"},
    ]
    asked = msgspec.json.decode(json.dumps({"input": "x", "tools": tools}), type=ResponsesBody)
    own = chat_tools(asked.tools)
    found = json.loads(msgspec.json.encode(_chat(asked, own)["tools"]))
    assert [tool["function"] for tool in found] == [
        {"name": "f", "parameters": parameters, "strict": True},
        {"name": "g"},
    ]
    named = msgspec.structs.replace(asked, tool_choice=NamedTool("f"))
    function = {"type": "function", "function": {"name": "f"}}
    assert _chat(named, own)["tool_choice"] == function
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    some = msgspec.json.decode(json.dumps({"input": "x", "tools": tools, "tool_choice": choice}), type=ResponsesBody)
    allowed = {"mode": "required", "tools": [function]}
    assert _chat(some, own)["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}
    assert msgspec.to_builtins(some.tool_choice) == choice


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"instructions": "x", "input": ["y", {"role": "robot", "content": "x"}]}, "input[0]"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"messages": [{"role": "user", "content": "y"}]}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"previous_response_id": "x" * 200}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"top_p": "x"}, "top_p"),
    ],
)
def test_a_bad_field_is_named(fields, param):
    with pytest.raises(ApiError) as refused:
        parse(**fields)
    assert refused.value.status == 400 and str(refused.value.param).startswith(param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": {"a": 1}}, 'input is {"a":1}; it must be a string or a list'),
        ({"input": "x" * 70_000, "stream": 5}, "stream must be true or false"),
        ({"max_output_tokens": "5"}, 'max_output_tokens is "5"; it must be an integer'),
        ({"max_output_tokens": 5.5}, "max_output_tokens is 5.5; it must be an integer from -1 to 2147483647"),
        (
            {"tools": [{"type": "file_search"}]},
            'tools[0].type is "file_search"; it must be "function", "custom", "namespace", '
            '"web_search", "local_shell", "image_generation" or "tool_search"',
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing; it must be a string"),
        ({"text": {"verbosity": "loud"}}, 'text.verbosity is "loud"; it must be "high", "low" or "medium"'),
        ({"metadata": {"a": 1}}, "metadata[...] must be a string"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "instructions": "c"},
            'input[1].role is "robot"; it must be one of system, developer, user, assistant, tool',
        ),
    ],
)
def test_the_error_says_what_was_found_and_what_is_allowed(fields, message):
    with pytest.raises(ApiError) as refused:
        parse(**fields)
    assert refused.value.message == message


@pytest.mark.parametrize("body", [b"", b"[]", b'{"input": ', b'{"input": "\xff"}', b'{"input": NaN}'])
def test_a_body_that_is_no_json_object_is_refused_as_elsewhere(body):
    with pytest.raises(ApiError, match=r"the body (is|must be)"):
        parse_response(body, find=nothing)


def test_a_body_nested_too_deeply_is_refused():
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    with pytest.raises(ApiError, match="nested too deeply"):
        parse_response(b'{"input": "x", "new_field": %b}' % deep, find=nothing)


def test_hints_without_effect_are_accepted_and_named():
    call = parse(text={"format": None, "verbosity": "low"}, reasoning={"summary": "concise"}, max_output_tokens=5.0)
    assert call.ignored == ("reasoning.summary", "text.verbosity") and call.params.max_tokens == 5
    plain = parse(text={"verbosity": "medium"}, reasoning={"summary": "auto"}, include=["file_search_call.results"])
    assert plain.ignored == ()


def test_tools_of_openais_servers_are_left_out_and_named():
    function = {"type": "function", "name": "f" * 128, "parameters": {"type": "object"}}
    call = parse(tools=[{"type": "web_search", "external_web_access": False}, function, {"type": "local_shell"}])
    assert [tool["function"]["name"] for tool in call.reply.tools] == ["f" * 128]
    assert call.ignored == ("tools[].web_search", "tools[].local_shell")
    with pytest.raises(ApiError) as refused:
        parse(tools=[{"type": "web_search"}, {**function, "name": "f" * 129}])
    assert refused.value.param == "tools[1].function.name"


TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__git",
        "description": "Of a repository.",
        "tools": [{"type": "function", "name": "log", "description": "Lists."}, {"type": "custom", "name": "grep"}],
    },
]
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TEXT["additionalProperties"] = False


def test_namespaces_and_tools_whose_input_is_text_are_functions_of_the_chat():
    call = parse(tools=TOOLS, tool_choice={"type": "custom", "name": "patch"})
    assert [tool["function"] for tool in call.reply.tools] == [
        {"name": "patch", "description": "Edits.", "parameters": TEXT},
        {"name": "mcp__git__log", "description": "Of a repository.\n\nLists."},
        {"name": "mcp__git__grep", "parameters": TEXT},
    ]
    assert call.ignored == ("tools[].web_search",) and call.reply.allowed == frozenset({"patch"})
    named = {"type": "function", "name": "log", "namespace": "mcp__git"}
    some = parse(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [named]})
    assert some.reply.allowed == frozenset({"mcp__git__log"})
    with pytest.raises(ApiError) as refused:
        parse(tools=[*TOOLS[:2], {**TOOLS[2], "tools": [TOOLS[2]["tools"][0], {"type": "function", "name": "a b"}]}])
    assert refused.value.param == "tools[2].tools[1].function.name"


def test_a_grammar_of_a_tool_s_text_is_a_keyword_of_its_schema():
    def text(**form: str) -> dict[str, Any]:
        tool = {"type": "custom", "name": "f", "format": {"type": "grammar", **form}}
        return parse(tools=[tool]).reply.tools[0]["function"]["parameters"]["properties"]["input"]

    assert text(syntax="regex", definition="a|b") == {"type": "string", "pattern": "^(?:a|b)$"}
    assert text(syntax="lark", definition="start: /a/") == {"type": "string", "lark": "start: /a/"}


def test_calls_of_namespaces_and_with_text_are_history_like_others():
    [said, *results] = items(
        {"type": "function_call", "call_id": "c1", "namespace": "mcp__git__", "name": "log", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a "b"\n\u00e9'},
        {"type": "function_call_output", "call_id": "c1", "output": "none"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    )
    functions = [call["function"] for call in said["tool_calls"]]
    assert functions[0] == {"name": "mcp__git__log", "arguments": "{}"}
    assert json.loads(functions[1]["arguments"]) == {"input": 'a "b"\n\u00e9'}
    assert [(one["tool_call_id"], one["content"]) for one in results] == [("c1", "none"), ("c2", "done")]


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_calls_are_answered_by_the_names_that_the_client_knows(step):
    text = 'a "b"\n\\ \u00e9 \U0001f600'
    written = '{"input": ' + json.dumps(text) + "}"
    events: list[Any] = [ToolCallBegin(0, "a1", "patch"), *(ToolCallArguments(0, letter) for letter in written)]
    events += [ToolCallBegin(1, "a2", "mcp__git__log"), ToolCallArguments(1, "{}")]
    store, call = ResponseStore(), parse(tools=TOOLS)
    made = ResponsesResponder(ResponseObject(call, "resp_1", "m", "qr"), store, Stored("resp_1", "", b""))
    told = []
    for count in [*range(step, len(events), step), len(events)]:
        reason = "stop" if count == len(events) else None
        choice = CompletionOutput(0, token_ids=[1] * count, finish_reason=reason, events=events[:count])
        told += made.chunks(0, RequestOutput("r", None, [1, 2, 3], [choice], seed=0))
    parsed = [TypeAdapter(ResponseStreamEvent).validate_json(chunk) for chunk in told]
    [custom, function] = parsed[-1].response.output
    assert (custom.type, custom.call_id, custom.name, custom.input) == ("custom_tool_call", "a1", "patch", text)
    assert (function.type, function.name, function.namespace) == ("function_call", "log", "mcp__git")
    of_custom = [event for event in parsed if event.type.startswith("response.custom_tool_call_input.")]
    assert "".join(event.delta for event in of_custom[:-1]) == text == of_custom[-1].input
    begun = [event.item for event in parsed if event.type == "response.output_item.added"]
    assert begun[0].input == "" and begun[1].namespace == "mcp__git"
    ((_, said),) = messages_of(msgspec.json.decode(store.find("resp_1", "").items, type=list[Item]), -1)[1:]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"input": text}


def test_several_http_processes_keep_nothing():
    body = json.dumps({"input": "x"}).encode()
    assert not parse_response(body, find=nothing, keeps=False).stores
    for name, value in (("background", True), ("previous_response_id", "resp_1")):
        with pytest.raises(ApiError, match="api-workers"):
            parse_response(json.dumps({"input": "x", name: value}).encode(), find=nothing, keeps=False)


NAMES = st.sampled_from(
    ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "metadata", "previous_response_id"]
)


@settings(max_examples=50)
@given(st.dictionaries(NAMES, JSON, max_size=4) | JSON)
def test_any_body_is_a_call_or_a_refusal(value):
    try:
        parse_response(json.dumps(value).encode(), find=nothing)
    except ApiError as error:
        assert error.status in (400, 404) and "msgspec" not in error.message


# -- replies --------------------------------------------------------------------------------------------------


def output(count: int, reason: str | None) -> RequestOutput:
    choice = CompletionOutput(0, token_ids=[1] * count, finish_reason=reason, events=EVENTS[:count], reasoning_tokens=2)
    return RequestOutput("r", None, [1, 2, 3], [choice], seed=0)


def responder(store: ResponseStore) -> ResponsesResponder:
    call = parse()
    return ResponsesResponder(ResponseObject(call, "resp_1", "m", "qr"), store, Stored("resp_1", "", b""))


@pytest.mark.quick("3")
@pytest.mark.parametrize("step", [1, 3, 8])
def test_reasoning_and_calls_stream_as_the_items_of_the_whole_response(step):
    store = ResponseStore()
    whole = Response.model_validate_json(responder(store).full([output(8, "stop")]))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "so then" and whole.output_text == "I ask."
    assert (whole.output[2].call_id, whole.output[2].name) == ("a1", "weather")
    assert json.loads(whole.output[2].arguments) == {"city": "Oslo"} and whole.status == "completed"
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    streamed, told = responder(store), []
    for count in [*range(step, 8, step), 8]:
        chunks = streamed.chunks(0, output(count, "stop" if count == 8 else None))
        told += [TypeAdapter(ResponseStreamEvent).validate_json(chunk) for chunk in chunks]
    assert told[-1].response.output == whole.output and told[-1].type == "response.completed"
    done = [event.item for event in told if event.type == "response.output_item.done"]
    assert done == whole.output
    arguments: dict[str, str] = {}
    for event in told:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
    assert [*arguments.values()] == [item.arguments for item in whole.output[2:]]
    for event in told:  # clients append what follows
        if event.type == "response.output_item.added":
            assert not getattr(event.item, "arguments", "") and not getattr(event.item, "content", None)
    *_, (_, said) = messages_of(msgspec.json.decode(store.find("resp_1", "").items, type=list[Item]))
    assert said["reasoning_content"] == "so then" and len(said["tool_calls"]) == 2


def test_of_a_reply_that_is_cut_off_the_last_item_alone_is_incomplete():
    told = [json.loads(chunk) for chunk in responder(ResponseStore()).chunks(0, output(8, "length"))]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed"] * 3 + ["incomplete"]
    assert told[-1]["type"] == "response.incomplete" and told[-1]["response"]["output"] == done


def test_the_store_is_bounded_and_drops_what_was_used_least():
    store = ResponseStore(max_responses=3, max_bytes=1000)
    running = Stored("running", "", b"")
    store.add(running)
    for index in range(5):
        store.end(Stored(str(index), "", b""), b"x", b"")
        store.find("1", "") if 0 < index < 4 else None
    assert not running.done.is_set() and store.find("running", "") is running
    assert len(store) == 3
    with pytest.raises(ApiError):
        store.find("0", "")
    assert store.find("1", "").answer == b"x"
    store.end(Stored("large", "", b""), b"x" * 999, b"y" * 10)
    with pytest.raises(ApiError):
        store.find("large", "")
    for _ in range(3):  # what was dropped, deleted or replaced takes no room
        for name in ("a", "b"):
            store.end(Stored(name, "", b""), b"x" * 480, b"")
        assert store.find("a", "") and store.find("b", "")
    store.delete("a", "")
    store.end(Stored("c", "", b""), b"x" * 480, b"")
    assert store.find("b", "") and store.find("c", "")


def test_the_store_keeps_nothing_of_another_tenant():
    store = ResponseStore()
    store.end(Stored("a", "one", b""), b"x", b"")
    for owner in ("", "two"):
        with pytest.raises(ApiError):
            store.delete("a", owner)
    asyncio.run(asyncio.wait_for(store.delete("a", "one").done.wait(), 1))
    assert len(store) == 0


@pytest.mark.quick("assistant")
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_the_time_to_read_a_body_grows_with_its_size_alone(role):
    """Of one turn in many items, and of many messages whose refusal is about one of them."""
    items = [{"role": "user", "content": "a"}] + [{"role": role, "content": "x" * 200}] * 40_000
    body = json.dumps({"input": items, "tool_choice": "required"}).encode()
    began = time.process_time()
    with pytest.raises(ApiError):
        parse_response(body, find=lambda response_id: b"[]")
    assert time.process_time() - began < 4.0  # of 0.6 on an old processor; quadratic time would be minutes
