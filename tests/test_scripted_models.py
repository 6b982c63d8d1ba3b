"""Scripted models behind the server's routes: what a model of each family writes comes out as reasoning, content and
calls. Such a model wants to write one given text, token by token; only the mask may make it write another token, and
never does, since each text is what its family is trained to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from quire.text.tokenizer import Tokenizer
from tests.reply_templates import FORMATS
from tests.scripted import ScriptedEngine, scripted_server
from tests.test_reply_grammar import SPECIALS, marked_tokenizer, markers_of, template

THOUGHT = "I need a forecast."
CITY: dict[str, Any] = {"city": "São Paulo", "day": "2024-01-01"}
DAYS: dict[str, Any] = {"city": "Main St", "days": 3}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "w", "parameters": PARAMETERS}}]
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


def both(one: str, between: str = "") -> str:
    """Two calls in JSON; `{}` stands for the arguments."""
    return between.join(one.replace("{}", json.dumps(each, ensure_ascii=False)) for each in (CITY, DAYS))


def listed(begin: str, name: str, end: str) -> str:
    """Two calls whose parameters are written one by one; `K` and `V` stand for a name and a value."""
    calls = [
        "".join(name.replace("K", key).replace("V", str(value)) for key, value in each.items()) for each in (CITY, DAYS)
    ]
    return "".join(begin + call + end for call in calls)


XML = "\n<tool_call>\n<function=weather>\n", "<parameter=K>\nV\n</parameter>\n", "</function>\n</tool_call>"
GLM = "\n<tool_call>weather\n", "<arg_key>K</arg_key>\n<arg_value>V</arg_value>\n", "</tool_call>"
MINIMAX = '<invoke name="weather">\n', '<parameter name="K">V</parameter>\n', "</invoke>\n"
WRITTEN = {
    "hermes": f"<think>\n{THOUGHT}\n</think>\n\n"
    + both('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "\n"),
    "qwen3_coder": listed(*XML).strip(),
    "glm45": f"\n<think>{THOUGHT}</think>" + listed(*GLM),
    "llama3_json": '{"type": "function", "name": "weather", "parameters": '
    + json.dumps(CITY, ensure_ascii=False)
    + "}",
    "mistral": "[TOOL_CALLS] [" + both('{"name": "weather", "arguments": {}, "id": "abcDEF123"}', ", ") + "]",
    "derived": both("[TOOL_CALLS]weather[ARGS]{}"),
    "deepseek_v3": f"{THOUGHT}\n</think>\n\n{DS[0]}"
    + both(f"{DS[1]}function{DS[2]}weather\n```json\n{{}}\n```{DS[3]}", "\n")
    + DS[4],
    "deepseek_v31": DS[0] + both(f"{DS[1]}weather{DS[2]}{{}}{DS[3]}") + DS[4],
    "minimax_m2": f"<think>\n{THOUGHT}\n</think>\n\n<minimax:tool_call>\n" + listed(*MINIMAX) + "</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(KIMI.format(n, json.dumps(each, ensure_ascii=False)) for n, each in enumerate((CITY, DAYS)))
    + "<|tool_calls_section_end|>",
    "lfm2": "<|tool_call_start|>[weather(city='São Paulo', day='2024-01-01'), weather(city=\"Main St\", days=3)]"
    "<|tool_call_end|>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>São Paulo<|"|>,day:<|"|>2024-01-01<|"|>}<tool_call|>'
    '<|tool_call>call:weather{city:<|"|>Main St<|"|>,days:3}<tool_call|>',
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps(CITY, ensure_ascii=False),
}
"""What models of each way of writing write, by the names of what is found in their templates."""


@dataclass
class Site:
    engine: ScriptedEngine
    http: httpx2.Client

    def play(self, name: str, *written: str) -> None:
        """From now on the model has the format with a name, and writes these replies."""
        base = marked_tokenizer(tuple(markers_of(template(name).reply_syntax)))
        self.engine.pool.use(Tokenizer(base._source, SPECIALS, {"default": FORMATS[name]}))
        self.engine.replies, self.engine.corrected = [*written], None

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json={"model": "demo", **body})
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with scripted_server(marked_tokenizer()) as (url, engine), httpx2.Client(base_url=url, timeout=60) as http:
        yield Site(engine, http)


ASKED = [{"role": "user", "content": "Will it rain in São Paulo?"}]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_model_writes_comes_out_of_the_chat_route_as_calls(site: Site, name: str) -> None:
    site.play(name, WRITTEN[name], WRITTEN[name])
    calls = [CITY] if name in ("llama3_json", "harmony") else [CITY, DAYS]
    answer = site.post("/v1/chat/completions", messages=ASKED, tools=TOOLS)
    message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert found == [("weather", arguments) for arguments in calls] and reason == "tool_calls"
    assert not message["content"]
    assert (message.get("reasoning") or "") == (THOUGHT if THOUGHT in WRITTEN[name] else "")
    pieces: dict[int, list[str]] = {}
    for event in site.post("/v1/chat/completions", messages=ASKED, tools=TOOLS, stream=True):
        for call in (event["choices"] or [{"delta": {}}])[0]["delta"].get("tool_calls") or ():
            pieces.setdefault(call["index"], []).append(call["function"].get("arguments") or "")
    assert [json.loads("".join(one)) for one in pieces.values()] == calls


@pytest.mark.parametrize("name", ["hermes", "glm45", "minimax_m2"])
def test_reasoning_and_calls_come_out_of_the_other_routes(site: Site, name: str) -> None:
    site.play(name, WRITTEN[name], WRITTEN[name])
    tools = [{"name": "weather", "description": "w", "input_schema": PARAMETERS}]
    answer = site.post("/v1/messages", messages=ASKED, tools=tools, max_tokens=1000)
    assert [part["type"] for part in answer["content"]] == ["thinking", "tool_use", "tool_use"]
    assert [part["input"] for part in answer["content"][1:]] == [CITY, DAYS] and answer["stop_reason"] == "tool_use"
    functions = [{"type": "function", "name": "weather", "description": "w", "parameters": PARAMETERS}]
    answer = site.post("/v1/responses", input="Will it rain?", tools=functions, store=False)
    assert [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"] == [
        CITY,
        DAYS,
    ]


def test_the_mask_corrects_what_a_tool_does_not_take(site: Site) -> None:
    site.play("qwen3_coder", WRITTEN["qwen3_coder"].replace(">\n3\n<", ">\nthree\n<"))
    site.engine.corrected = []
    site.post("/v1/chat/completions", messages=ASKED, tools=TOOLS)
    assert site.engine.corrected
