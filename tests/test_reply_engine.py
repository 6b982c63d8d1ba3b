"""Chats with tools and reasoning in a whole engine: valid calls, and the same tokens in any company."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.outputs import RequestOutput
from quire.models.hub import ASSETS
from tests.reply_templates import HERMES

CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITIES}},
    {"type": "function", "function": {"name": "now"}},
]
# Without reasoning: the demo model would never come to an end of it.
TEMPLATE = HERMES.replace("<think>", "").replace("</think>", "")
CHAT = [{"role": "user", "content": "Will it rain?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hermes") / "demo"
    shutil.copytree(ASSETS / "demo", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), max_model_len=512, num_kv_blocks=256) as made:
        yield made


def ask(llm: LLM, **options: Any) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=120, seed=seed, temperature=seed / 2) for seed in range(4)]
    return llm.chat([CHAT] * len(params), params, tools=TOOLS, **options)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_are_valid_at_any_temperature(llm: LLM, choice: Any) -> None:
    ended = 0
    for output in ask(llm, tool_choice=choice):
        [one] = output.outputs
        if one.finish_reason != "stop":
            continue
        ended += 1
        assert one.reply.content == "" and one.reply.tool_calls
        for call in one.reply.tool_calls:
            assert call.name in ("weather", "now")
            arguments = json.loads(call.arguments)
            if call.name == "weather":
                jsonschema.validate(arguments, CITIES)
    assert ended or choice == "required"


def test_the_same_calls_come_with_drafts_overlap_and_preemption(checkpoint: Path, llm: LLM) -> None:
    alone = [output.outputs[0] for output in ask(llm, tool_choice="required")]
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "async_scheduling": True}
    with LLM(str(checkpoint), max_model_len=512, num_kv_blocks=40, **options) as other:
        together = [output.outputs[0] for output in ask(other, tool_choice="required")]
    for one, two in zip(alone, together, strict=True):
        assert one.token_ids == two.token_ids and one.reply == two.reply and one.events == two.events


def test_a_form_of_content_is_met_beside_tools_that_may_not_be_called(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), seed=1)
    [output] = llm.chat(CHAT, params, tools=TOOLS, tool_choice="none")
    assert output.outputs[0].reply.content in ("yes", "no")
