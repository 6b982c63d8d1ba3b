"""Whole sessions of agents' clients, as they send them, with a model that writes what such a model writes.

The requests are of our own making, in the shape of those that the clients send; texts are shortened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import tokenizers

from quire.core.structured_outputs import MAX_GRAMMAR_BYTES
from quire.models.hub import ASSETS
from quire.text.tokenizer import Tokenizer
from tests.published_templates import tokenizer as published
from tests.reply_templates import HERMES, QWEN3_CODER
from tests.scripted import ScriptedEngine, scripted_server

WITH_TOOLS = "{% if tools %}{{- tools | tojson + '\\n' }}{% endif %}"


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def site(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, ScriptedEngine]]:
    """The format of the model's calls, where the server is, and its engine."""
    template = WITH_TOOLS + {"hermes": HERMES, "qwen3_coder": QWEN3_CODER}[request.param]
    library = tokenizers.Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    tokenizer = Tokenizer(library.to_str(), {"bos_token": "<s>", "eos_token": "</s>"}, {"default": template})
    assert tokenizer.reply_syntax.name == request.param
    with scripted_server(tokenizer) as (url, engine):
        yield request.param, url, engine


def written(form: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    if form == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def streamed(url: str, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], httpx2.Headers]:
    """The events of a stream, and the headers."""
    answer = httpx2.post(url + path, json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"], answer.headers


# -- Codex -----------------------------------------------------------------------------------------------------------

PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF ("@@" LF)? (/[+ -]/ /(.*)/ LF)+
%import common.LF
"""


def function(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described = {"description": f"What {name} does.", "strict": False}
    return {"type": "function", "name": name, **described, "parameters": parameters}


STRING = {"type": "string", "description": "Some text."}
NUMBER = {"type": "number", "description": "Some number."}
CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "tools": [
        function("exec_command", {"cmd": STRING, "workdir": STRING, "yield_time_ms": NUMBER}, ["cmd"]),
        function("write_stdin", {"session_id": NUMBER, "chars": STRING}, ["session_id"]),
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files. This is a FREEFORM tool.",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
        },
        {"type": "web_search", "external_web_access": False},
        function("view_image", {"path": STRING}, ["path"]),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for agents.",
            "tools": [function("spawn_agent", {"message": STRING}, ["message"])],
        },
        {
            "type": "namespace",
            "name": "mcp__tickets",
            "description": "Tools in the mcp__tickets namespace.",
            "tools": [function("find", {"query": STRING, "limit": {"type": "integer"}}, ["query"])],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0193",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
PATCH = '*** Begin Patch\n*** Update File: a "b".py\n@@\n-x = 1\n+x = 2\n*** End Patch'


def codex_turn(site: tuple[str, str, ScriptedEngine], items: list[Any], reply: str) -> tuple[list[Any], Any]:
    """What Codex keeps of a turn: each item that is done, as it stands in that event."""
    _, url, engine = site
    engine.replies.append(reply)
    events, headers = streamed(url, "/v1/responses", {**CODEX, "input": items})
    assert events[-1]["type"] == "response.completed", events[-1]
    return [event["item"] for event in events if event["type"] == "response.output_item.done"], headers


def test_a_session_of_codex(site: tuple[str, str, ScriptedEngine]) -> None:
    form, _, engine = site

    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    items = [said("developer", "<permissions>"), said("user", "<environment_context>"), said("user", "Fix ticket 7.")]
    reply = "I look.\n" + written(form, "mcp__tickets__find", {"query": "7"})
    [text, call], headers = codex_turn(site, items, reply)
    assert text["content"][0]["text"].strip() == "I look."
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__tickets", "find")
    assert json.loads(call["arguments"]) == {"query": "7"}
    ignored = headers["x-quire-ignored"].split(", ")
    assert {"tools[].web_search", "reasoning.effort"} <= {*ignored} and not any("custom" in one for one in ignored)
    loosened = headers.get("x-quire-loosened", "")  # a grammar is enforced where text is bare
    assert ("tool apply_patch" in loosened and "'lark'" in loosened) == (form == "hermes")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x must be 2"}
    items += [text, call, output]

    [call], _ = codex_turn(site, items, written(form, "exec_command", {"cmd": 'cat "a.py"', "yield_time_ms": 1000}))
    assert call["name"] == "exec_command" and "namespace" not in call
    assert written(form, "mcp__tickets__find", {"query": "7"}) in engine.prompts[-1]
    output = [{"type": "input_text", "text": "x = 1"}]
    items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]

    [call], _ = codex_turn(site, items, written(form, "apply_patch", {"input": PATCH}))
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    items += [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}]

    if form == "qwen3_coder":
        with pytest.raises(AssertionError, match=r"response\.failed"):
            codex_turn(site, items, written(form, "apply_patch", {"input": "*** Begin Patch\nx = 1"}))
    [text], _ = codex_turn(site, items, "x is 2 now.")
    assert text["content"][0]["text"] == "x is 2 now." and text["status"] == "completed"
    assert written(form, "apply_patch", {"input": PATCH}) in engine.prompts[-1] and "Done." in engine.prompts[-1]


# -- Claude Code -----------------------------------------------------------------------------------------------------

NAMES = (
    *("Agent", "AskUserQuestion", "Bash", "CronCreate", "CronDelete", "CronList", "Edit", "EnterPlanMode"),
    *("EnterWorktree", "ExitPlanMode", "ExitWorktree", "Glob", "Grep", "Monitor", "NotebookEdit", "Read"),
    *("ScheduleWakeup", "Skill", "TaskCreate", "TaskOutput", "TaskStop", "TaskUpdate", "WebFetch", "Write"),
)
DRAFT = "https://json-schema.org/draft/2020-12/schema"
QUESTION = {"type": "object", "properties": {"question": STRING, "options": {"type": "array", "items": STRING}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "AskUserQuestion": {"questions": {"type": "array", "items": QUESTION, "minItems": 1, "maxItems": 4}},
    "Bash": {"command": STRING, "timeout": NUMBER, "run_in_background": {"type": "boolean"}},
    "Edit": {
        "file_path": STRING,
        "old_string": STRING,
        "new_string": STRING,
        "replace_all": {"type": "boolean", "default": False},
    },
    "Read": {"file_path": STRING, "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**53 - 1}},
    "TaskUpdate": {
        "id": STRING,
        "status": {"anyOf": [{"enum": ["pending", "completed"]}, {"const": "deleted"}]},
        "metadata": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    },
    "WebFetch": {"url": {"type": "string", "format": "uri"}, "prompt": STRING},
}
CLAUDE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": name,
            "description": f"What {name} does.",
            "input_schema": {
                "$schema": DRAFT,
                "type": "object",
                "properties": SCHEMAS.get(name, {"prompt": STRING}),
                "required": [next(iter(SCHEMAS.get(name, {"prompt": 0})))],
                "additionalProperties": False,
            },
        }
        for name in NAMES
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": '{"device_id": "1", "session_id": "2"}'},
}


def claude_turn(site: tuple[str, str, ScriptedEngine], messages: list[Any], reply: str) -> tuple[list[Any], str]:
    """The blocks of an answer, as its stream adds up, and why it ended."""
    _, url, engine = site
    engine.replies.append(reply)
    events, headers = streamed(url, "/v1/messages?beta=true", {**CLAUDE, "messages": messages})
    assert "output_config.effort" in headers["x-quire-ignored"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            [key] = delta.keys() - {"type"}
            own = "input" if key == "partial_json" else key
            blocks[-1][own] = (blocks[-1][own] or "") + delta[key]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    [stop] = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return blocks, stop


def test_a_session_of_claude_code(site: tuple[str, str, ScriptedEngine]) -> None:
    form, _, engine = site
    asked = [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "Make x 2."}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    turns = [
        ("<think>\nWhere is it?\n</think>\n\n", "Read", {"file_path": "/a.py", "limit": 9}),
        ("I edit.\n", "Edit", {"file_path": "/a.py", "old_string": 'x = "1"\n', "new_string": "x = 2"}),
        ("", "TaskUpdate", {"id": "1", "status": "completed", "metadata": {"a": [1]}}),
        ("", "Bash", {"command": "echo '2024-01-01' | tee \\"}),
    ]
    for index, (before, name, given) in enumerate(turns):
        blocks, stop = claude_turn(site, messages, before + written(form, name, given))
        assert stop == "tool_use" and (blocks[-1]["name"], blocks[-1]["input"]) == (name, given)
        assert [block["type"] for block in blocks[:-1]] == [["thinking"], ["text"], [], []][index]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": f"result {index}"}
        later = [{**result, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "<system-reminder>"}]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": later}]
    blocks, stop = claude_turn(site, messages, "Done.")
    assert stop == "end_turn" and blocks == [{"type": "text", "text": "Done."}]
    for index, (_, name, given) in enumerate(turns):
        assert written(form, name, given) in engine.prompts[-1] and f"result {index}" in engine.prompts[-1]


def test_a_turn_of_claude_code_that_was_cut_within_its_thinking_goes_on_there(
    site: tuple[str, str, ScriptedEngine],
) -> None:
    cut = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Two and", "signature": ""}]}
    blocks, _ = claude_turn(site, [{"role": "user", "content": "2 + 2?"}, cut], " two.\n</think>\n\nFour.")
    assert [block.get("thinking", block.get("text")) for block in blocks] == ["two.", "Four."]
    assert site[2].prompts[-1].endswith("<think>\nTwo and")


# -- many tools ------------------------------------------------------------------------------------------------------

TYPES: tuple[dict[str, Any], ...] = (
    *({"type": name} for name in ("string", "integer", "boolean")),
    *({"type": "array", "items": {"type": "string"}}, {"enum": ["a", "b"]}, {"type": ["string", "null"]}),
)
MANY = [
    {
        "type": "function",
        "function": {
            "name": f"server_{index}_tool",
            "description": "What it does. " * 5,
            "parameters": {
                "type": "object",
                "properties": {
                    f"of_{index}_{n}": {**TYPES[n % 6], "description": f"Text {n}. " * 9} for n in range(12)
                },
                "required": [f"of_{index}_0"],
            },
        },
    }
    for index in range(128)
]


def test_128_tools_of_12_described_parameters_stand_in_the_form_once_and_without_descriptions() -> None:
    """With a published template that writes parameters one by one."""
    given = {"of_77_0": "2024-01-01", "of_77_3": ["x"], "of_77_5": "null and void"}
    with scripted_server(published("Qwen3-Coder", real=False)) as (url, engine):
        engine.replies = ["I look.\n" + 2 * ("\n" + written("qwen3_coder", "server_77_tool", given))]
        body = {"messages": [{"role": "user", "content": "Go on."}], "tools": MANY}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [given, given]
    form = engine.prepared[0].params.structured_outputs
    assert form is not None and str(form.structural_tag).count("of_77_5") == 1
    assert "Text" not in str(form.structural_tag) and form.size < MAX_GRAMMAR_BYTES / 2
