"""Anthropic's interface, with its official client, on a real server; and how its bodies become chats."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server.errors import ApiError
from quire.server.messages import MessagesResponder
from quire.server.messages_protocol import MessagesBody, _chat, _messages, parse_count, parse_messages
from quire.server.protocol import parse_chat
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin

ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 24,
    "system": "short",
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "extra_body": {"seed": 3},
}


@pytest.fixture
def server(interfaces_server):
    return interfaces_server


@pytest.fixture(scope="module")
def client(interfaces_server):
    with anthropic.Anthropic(base_url=interfaces_server.url, api_key="k1", max_retries=0) as client:
        yield client


# -- the official client --------------------------------------------------------------------------------------


def test_a_message_is_what_the_chat_route_answers(server, client):
    messages = [{"role": "system", "content": "short"}, *ASKED["messages"]]
    chat = server.json("/v1/chat/completions", {"messages": messages, "max_tokens": 24, "seed": 3})
    message = client.messages.create(**ASKED)
    assert [block.text for block in message.content] == [chat["choices"][0]["message"]["content"]]
    assert (message.role, message.model, message.type) == ("assistant", "demo", "message")
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 24
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_ends_as_ever_where_a_client_asks_for_usage_in_openais_words(client):
    with client.messages.stream(**ASKED | {"extra_body": {"stream_options": {"include_usage": True}}}) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_a_stream_has_the_events_of_the_reference_and_the_same_text(client):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24
    deltas = kinds[2:-3]
    assert kinds[:2] == ["message_start", "content_block_start"] and {*deltas} == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client):
    text = client.messages.create(**ASKED).content[0].text
    stop = text[5:8]
    message = client.messages.create(**ASKED, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_a_schema_holds(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"enum": [True, False]}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**ASKED | {"max_tokens": 200, "output_config": config})
    assert json.loads(message.content[0].text)["ok"] in (True, False) and message.stop_reason == "end_turn"


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(**{name: ASKED[name] for name in ("model", "system", "messages")})
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_model_that_never_thinks_may_be_told_not_to(client):
    message = client.messages.create(**ASKED, thinking={"type": "disabled"})
    assert message.content[0].text == client.messages.create(**ASKED).content[0].text


def test_models_are_described_as_anthropic_does(server, client):
    [model] = client.models.list(limit=1)  # the client goes on to the next page if there is one
    assert (model.id, model.display_name, model.type, model.lifecycle) == ("demo", "demo", "model", "active")
    assert abs(model.created_at.timestamp() - time.time()) < 3600 and client.models.retrieve("demo") == model
    listed = json.loads(server.get("/v1/models", **{"x-api-key": "k1"})[2])
    assert (listed["object"], listed["data"][0]["object"], listed["data"][0]["owned_by"]) == ("list", "model", "quire")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "demo", "demo")


def test_errors_are_anthropics(server, client):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**ASKED | {"model": "other"})
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError) as image:
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})
    assert image.value.type == "invalid_request_error" and "messages[0].content[0]" in image.value.api_message
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "x = 1\n" * 5000}]})
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**ASKED)
    assert wrong.value.type == "authentication_error"
    status, _, body = server.post("/v1/messages", b"{", **{"x-api-key": "k1"})
    assert status == 400 and json.loads(body)["type"] == "error"
    assert server.get("/v1/messages")[0] == 405


def test_both_headers_open_the_door_and_only_with_the_key(server):
    server.key, key = "", server.key
    try:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        assert server.post("/v1/messages", body, **{"x-api-key": "k1"})[0] == 200
        assert server.post("/v1/messages", body, authorization="Bearer k1")[0] == 200
        assert server.post("/v1/messages", body)[0] == 401
        assert server.post("/v1/messages", body, **{"x-api-key": "k1", "authorization": "Bearer wrong"})[0] == 401
    finally:
        server.key = key


# -- bodies ---------------------------------------------------------------------------------------------------


def chat(**fields: Any) -> dict[str, Any]:
    given = _decoded(fields)
    found = {"messages": _messages(given)[0]} | _chat(given)
    return json.loads(json.dumps(found, default=lambda raw: json.loads(bytes(raw))))


def _decoded(fields: dict[str, Any]) -> MessagesBody:
    return msgspec.json.decode(json.dumps({"messages": [], **fields}), type=MessagesBody)


def test_turns_become_the_messages_of_a_chat():
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I ask.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "sun", "is_error": False},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    text = {"type": "text", "text": "I ask."}
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert chat(messages=turns, system=[{"type": "text", "text": "be brief"}])["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [text],
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "t2", "content": "sun"},
        {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
    ]


def test_tools_and_choices_are_those_of_a_chat():
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    found = chat(tools=[tool], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert found["parallel_tool_calls"] is False
    for given_choice, ours in (("any", "required"), ("auto", "auto"), ("none", "none")):
        assert chat(tools=[tool], tool_choice={"type": given_choice})["tool_choice"] == ours


def test_null_is_not_given_within_turns_and_tools_too():
    tool = {"name": "f", "input_schema": {"type": "object"}}
    nulls = dict.fromkeys(("description", "strict", "type"))
    choice = {"type": "auto", "name": None, "disable_parallel_tool_use": None}
    found = chat(tools=[tool | nulls], tool_choice=choice)
    assert found["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert found["tool_choice"] == "auto" and "parallel_tool_calls" not in found
    result = {"type": "tool_result", "tool_use_id": "a", "content": None, "is_error": None}
    [said] = chat(messages=[{"role": "user", "content": [result]}])["messages"]
    assert said == {"role": "tool", "tool_call_id": "a", "content": ""}


def test_other_fields_mean_what_they_mean_in_a_chat():
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "stop_sequences": ["a"],
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "metadata": {"user_id": "me"},
        "cache_control": {"type": "ephemeral"},
        "new_field": 1,
        "stream": True,
    }
    call = parse_messages(json.dumps(body).encode())
    assert (call.params.max_tokens, call.params.stop, call.params.temperature) == (5, ("a",), 0.5)
    assert (call.params.top_k, call.params.seed, call.user, call.stream) == (3, 7, "me", True)
    assert call.ignored == ("new_field",)
    assert chat(thinking={"type": "enabled", "budget_tokens": 9}) == {
        "messages": [],
        "thinking": {"type": "enabled", "budget_tokens": 9},
    }
    body |= {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}, "chat_template_kwargs": {"x": 1}}
    call = parse_messages(json.dumps(body).encode())
    assert call.chat_template_kwargs == {"x": 1, "enable_thinking": False, "reasoning_effort": "low"}
    assert call.hints == {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}]},
            "mess",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"system": {"text": "x"}}, "system"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config"),
        ({"top_p": "x"}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"user_id": "x" * 5000}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_format": {"type": "text"}}, "output_format"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
    ],
)
def test_a_bad_field_is_named(fields, param):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as refused:
        parse_messages(json.dumps(body).encode())
    assert refused.value.status == 400 and str(refused.value.param).startswith(param)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image"}], 'type is "image"; it must be "text", "thinking", "tool_use" or "tool_result"'),
        ([{"text": "x"}], 'type is missing; it must be "text", "thinking", "tool_use" or "tool_result"'),
        (
            [{"type": "thinking", "thinking": "x"}],
            'type is "thinking"; in a turn of the user it must be "text" or "tool_result"',
        ),
    ],
)
def test_what_a_turn_may_hold_is_said(content, message):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(ApiError) as refused:
        parse_messages(json.dumps(body).encode())
    assert refused.value.message == f"messages[0].content[0].{message}"


def test_text_of_the_assistants_at_the_end_is_continued():
    """See `messages` in Anthropic's reference: a final turn of the assistant's is a prefill."""
    asked = {"role": "user", "content": "x"}
    for content in ("def", [{"type": "text", "text": "def"}]):
        body = {"max_tokens": 5, "messages": [asked, {"role": "assistant", "content": content}]}
        call = parse_messages(json.dumps(body).encode())
        assert (call.continue_final_message, call.add_generation_prompt) == (True, False)
    for last in (asked, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}):
        call = parse_messages(json.dumps({"max_tokens": 5, "messages": [asked, last]}).encode())
        assert (call.continue_final_message, call.add_generation_prompt) == (False, True)


def test_structured_output_has_two_spellings():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chats = [chat(output_format=form), chat(output_config={"format": form})]
    assert chats[0] == chats[1] and chats[0]["response_format"]["type"] == "json_schema"


KEYS = st.sampled_from(["type", "text", "role", "content"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["messages", "system", "tools", "tool_choice", "thinking", "metadata", "max_tokens", "stream", "x"]
)


@settings(max_examples=50)
@given(st.dictionaries(NAMES, JSON, max_size=5) | JSON)
def test_any_body_is_a_chat_or_a_400(value):
    for parse in (parse_messages, parse_count):
        try:
            parse(json.dumps(value).encode())
        except ApiError as error:
            assert error.status == 400 and "msgspec" not in error.message
    for body in (b"", b"\xff", b"[" * 100_000, b'{"messages":' + b"[" * 100_000):
        with pytest.raises(ApiError):
            parse_messages(body)


# -- replies --------------------------------------------------------------------------------------------------

EVENTS: list[ReplyEvent] = [
    ReasoningText("so "),
    ReasoningText("then"),
    ContentText("I ask."),
    ToolCallBegin(0, "a1", "weather"),
    ToolCallArguments(0, '{"city":'),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallBegin(1, "a2", "time"),
    ToolCallArguments(1, "{}"),
]


def responder() -> MessagesResponder:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    return MessagesResponder(parse_chat(json.dumps(body).encode()), "msg_1", "m")


def output(count: int, reason: str | None) -> RequestOutput:
    choice = CompletionOutput(0, token_ids=[1] * count, finish_reason=reason, events=EVENTS[:count])
    return RequestOutput("r", None, [1, 2, 3], [choice], seed=0)


@pytest.mark.parametrize("step", [1, 3, 8])
def test_reasoning_and_calls_stream_as_the_blocks_of_the_whole_message(step):
    whole = json.loads(responder().full([output(8, "stop")]))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "so then", "signature": ""},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "a1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "a2", "name": "time", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    streamed, told = responder(), []
    for count in range(step, 8 + step, step):
        done = count >= 8
        told += [json.loads(chunk) for chunk in streamed.chunks(0, output(min(count, 8), "stop" if done else None))]
    snapshot: Any = None
    buffers: dict[int, Any] = {}
    for event in told:
        parsed = TypeAdapter(RawMessageStreamEvent).validate_python(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert [block.to_dict() for block in snapshot.content] == whole["content"]
    assert snapshot.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("reason", "stop", "clamped", "told"),
    [
        ("stop", None, None, "end_turn"),
        ("stop", "x", None, "stop_sequence"),
        ("stop", 7, None, "end_turn"),
        ("length", None, None, "max_tokens"),
        ("length", None, 900, "model_context_window_exceeded"),
        ("abort", None, None, "pause_turn"),
    ],
)
def test_stop_reasons(reason, stop, clamped, told):
    made = output(2, reason)
    made.outputs[0].stop_reason, made.clamped_from = stop, clamped
    assert json.loads(responder().full([made]))["stop_reason"] == told


def test_params_of_a_call_are_a_chats():
    assert isinstance(parse_count(b'{"messages": [{"role": "user", "content": "x"}]}').params, SamplingParams)
