"""Tools through the interfaces of Anthropic and of OpenAI's Responses, with the official clients, on a server whose
template has them: a call, its result, and what is said then. The demo model knows nothing of tools; what it says meets
their schemas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
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


def folder_with_tools(folder: Path) -> Path:
    """The demo model with a template that writes tools and their calls."""
    for file in resolve("demo").iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((resolve("demo") / "tokenizer_config.json").read_text())
    lines = [line for line in HERMES.split("\n") if "reasoning_content" not in line]
    config["chat_template"] = "{% if tools %}{{- tools | tojson }}{% endif %}" + "\n".join(lines)
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
