"""Tools through the interfaces of Anthropic and of OpenAI's Responses, with the official clients, on a server whose
template has them: a call, its result, and what is said then. The demo model knows nothing of tools; what it says meets
their schemas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from quire.models.checkpoint import resolve
from tests.http_tools import ServeProcess
from tests.reply_templates import HERMES

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = {"role": "user", "content": "weather?"}
OF_MESSAGES: dict[str, Any] = {
    "model": "tools",
    "max_tokens": 200,
    "messages": [QUESTION],
    "tools": [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}],
    "extra_body": {"seed": 3},
}
OF_RESPONSES: dict[str, Any] = {
    "model": "tools",
    "max_output_tokens": 200,
    "input": [QUESTION],
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
    "parallel_tool_calls": False,
    "extra_body": {"seed": 3},
}


# The model reasons where it is asked to, and as long as it may: it would not end by itself.
THINKING = "'<|im_start|>assistant\\n<think>\\n' + ('' if enable_thinking else '\\n</think>\\n\\n')"


def folder_with_tools(folder: Path) -> Path:
    """The demo model with a template that writes tools and their calls, and reasoning."""
    for file in resolve("demo").iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((resolve("demo") / "tokenizer_config.json").read_text())
    template = HERMES.replace("'<|im_start|>assistant\\n'", THINKING)
    config["chat_template"] = "{% if tools %}{{- tools | tojson }}{% endif %}" + template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = folder_with_tools(tmp_path_factory.mktemp("tools"))
    with ServeProcess("--served-model-name", "tools", model=str(folder)) as process:
        yield process


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_message_calls_a_tool_and_goes_on_from_its_result(claude, choice):
    asked = OF_MESSAGES | {"tool_choice": choice | {"disable_parallel_tool_use": True}}
    message = claude.messages.create(**asked)
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "weather" and call.input["city"] in ("Oslo", "Rome") and message.stop_reason == "tool_use"
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content == message.content and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(**asked | {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 6})
    assert [block.type for block in answer.content] == ["text"]


def test_tools_are_counted(claude):
    asked = {name: OF_MESSAGES[name] for name in ("model", "messages", "tools")}
    with_tools = claude.messages.count_tokens(**asked).input_tokens
    del asked["tools"]
    assert with_tools > claude.messages.count_tokens(**asked).input_tokens > 0


def test_a_chat_with_tools_is_tokenized_as_it_is_answered(server, client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked = {"messages": [QUESTION], "tools": [tool]}
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model="tools", max_tokens=1, tool_choice=choice, **asked, extra_body={"return_token_ids": True}
        )
        told = httpx2.post(f"{server.url}/tokenize", json={**asked, "tool_choice": choice}).json()
        assert told["tokens"] == answer.model_extra["prompt_token_ids"] and told["count"] == len(told["tokens"])


def test_a_response_calls_a_tool_and_goes_on_from_its_result(client):
    response = client.responses.create(**OF_RESPONSES, tool_choice="required")
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    assert response.status == "completed"
    events = list(client.responses.create(**OF_RESPONSES, tool_choice="required", stream=True))
    told = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(told) == call.arguments
    [streamed] = [item for item in events[-1].response.output if item.type == "function_call"]
    assert (streamed.name, streamed.arguments, streamed.call_id) == (call.name, call.arguments, call.call_id)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    goes_on = {"model": "tools", "max_output_tokens": 6, "extra_body": {"seed": 3}}
    answer = client.responses.create(**goes_on, previous_response_id=response.id, input=[result])
    said = [QUESTION, *(item.to_dict() for item in response.output), result]
    assert answer.output_text == client.responses.create(**goes_on, input=said).output_text


def test_a_tool_that_must_be_called_and_is_not_there_is_refused(claude, client):
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**OF_MESSAGES | {"tool_choice": {"type": "tool", "name": "time"}})
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**OF_RESPONSES, tool_choice={"type": "function", "name": "time"})


def test_reasoning_is_told_apart_bounded_and_counted_on_every_interface(claude, client):
    marker = 8  # tokens of "</think>", at most
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": "tools", "messages": [QUESTION], "max_tokens": 120, "seed": 3}
    own = {"enable_thinking": True, "thinking_token_budget": 6}
    calls = {"tools": [tool], "tool_choice": "required"}
    answer = client.chat.completions.create(**asked, **calls, extra_body=own)
    [call] = answer.choices[0].message.tool_calls[:1]
    reasoning = answer.choices[0].message.model_extra["reasoning"]
    assert call.function.name == "weather" and reasoning
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert 6 <= counted <= 6 + marker and answer.usage.completion_tokens > counted
    chunks = [*client.chat.completions.create(**asked, **calls, extra_body=own, stream=True)]
    deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks if chunk.choices]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == reasoning
    none = client.chat.completions.create(**asked | {"max_tokens": 9}, extra_body={**own, "thinking_token_budget": 0})
    assert "reasoning" not in none.choices[0].message.model_extra
    assert none.usage.completion_tokens_details.reasoning_tokens <= marker

    response = client.responses.create(
        model="tools", input="Hm?", max_output_tokens=40, extra_body={**own, "chat_template_kwargs": {}, "seed": 3}
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert 6 <= response.usage.output_tokens_details.reasoning_tokens <= 6 + marker

    thinking = {"type": "enabled", "budget_tokens": 6}
    message = claude.messages.create(
        **OF_MESSAGES | {"tool_choice": {"type": "any"}, "thinking": thinking, "max_tokens": 300}
    )
    assert [block.type for block in message.content][:2] == ["thinking", "tool_use"]


def test_a_bound_that_means_nothing_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="this is not a chat") as found:
        client.completions.create(model="tools", prompt="Once", extra_body={"thinking_token_budget": 3})
    assert found.value.param == "thinking_token_budget"
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is -2"):
        client.chat.completions.create(model="tools", messages=[QUESTION], extra_body={"thinking_token_budget": -2})
