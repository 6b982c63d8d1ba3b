"""Chats with tools and reasoning in a whole engine: valid calls, and the same tokens in any company."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.errors import SamplingParamsError
from quire.models.hub import ASSETS
from quire.text.reply_grammar import reply_request
from tests.reply_templates import HERMES
from tests.test_structured_outputs import NAMES, SCHEMAS

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


@pytest.mark.quick("choice1")
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


# -- with everything else ----------------------------------------------------------------------------------------

# Calls that come to an end, whoever writes them.
CLOSED = [TOOLS[0], {"type": "function", "function": {"name": "now", "parameters": CITIES}}]
WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n": {"n": 3},
    "logprobs": {"logprobs": 2},
    "min_tokens": {"min_tokens": 30},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {40: 5.0, 70: -5.0}},
    "a stop string": {"stop": ['"days"'], "include_stop_str_in_output": True},
}


def asked(llm: LLM, options: dict[str, Any]) -> list[CompletionOutput]:
    params = [SamplingParams(max_tokens=90, seed=seed, temperature=seed / 2, **options) for seed in range(3)]
    outputs = llm.chat([CHAT] * len(params), params, tools=CLOSED, tool_choice="required", parallel_tool_calls=False)
    return [one for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[CompletionOutput]]:
    return {name: asked(llm, options) for name, options in WITH.items()}


@pytest.mark.parametrize("name", WITH)
def test_calls_are_valid_beside_other_parameters(alone: dict[str, list[CompletionOutput]], name: str) -> None:
    for one in alone[name]:
        if one.error is not None:  # the form may end before so many tokens
            assert name == "min_tokens" and "no token is left" in one.error
            continue
        assert one.finish_reason in ("stop", "length")
        assert {call.name for call in one.reply.tool_calls} <= {"weather", "now"} and not one.reply.content
        for call in one.reply.tool_calls if one.finish_reason == "stop" and one.stop_reason is None else ():
            jsonschema.validate(json.loads(call.arguments), CITIES)
    ended = [one for one in alone[name] if one.finish_reason == "stop"]
    assert ended
    if name == "n":
        assert len(alone[name]) == 9 and len({tuple(one.token_ids) for one in alone[name]}) > 4
    if name == "logprobs":
        assert all(len(one.logprobs or ()) == len(one.token_ids) for one in alone[name])
    if name == "min_tokens":
        assert all(len(one.token_ids) >= 30 for one in ended)
    if name == "a stop string":
        cut = [one for one in ended if one.stop_reason is not None]
        assert cut and all(one.reply.tool_calls[-1].arguments.endswith('"days"') for one in cut)


COMPANIES: dict[str, dict[str, Any]] = {
    "overlap, few blocks": {
        "num_kv_blocks": 17, "max_num_seqs": 8, "max_num_batched_tokens": 24, "async_scheduling": True,
    },
    "ngrams": {
        "num_kv_blocks": 512,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
        "async_scheduling": True,
    },
}  # fmt: skip


@pytest.mark.quick("ngrams")
@pytest.mark.parametrize("company", COMPANIES)
def test_the_same_calls_come_in_any_company(
    checkpoint: Path, alone: dict[str, list[CompletionOutput]], company: str
) -> None:
    with LLM(str(checkpoint), max_model_len=256, check_invariants=True, **COMPANIES[company]) as other:
        together = {name: asked(other, options) for name, options in WITH.items()}
        assert "few blocks" not in company or other.stats.preemptions > 0
        assert company != "ngrams" or other.stats.drafted > 0
    for name, found in together.items():
        for one, two in zip(alone[name], found, strict=True):
            assert one.token_ids == two.token_ids and one.error == two.error, name
            assert one.reply == two.reply and one.cumulative_logprob == two.cumulative_logprob, name


# -- any tools ---------------------------------------------------------------------------------------------------

PARAMETERS = st.dictionaries(NAMES, SCHEMAS, max_size=3).flatmap(
    lambda properties: st.builds(
        lambda required, more: {
            "type": "object", "properties": properties, "required": sorted(required), "additionalProperties": more,
        },
        st.sets(st.sampled_from(sorted(properties))) if properties else st.just(set()),
        st.sampled_from([False, False, {"type": "integer"}]),
    )
)  # fmt: skip
SOME_TOOLS = st.dictionaries(
    st.sampled_from(["f", "f2", "get_weather", "get-weather.now"]), PARAMETERS, min_size=1, max_size=3
)


def call_random_tools(llm: LLM, tools: dict[str, Any], choice: str, parallel: bool, seed: int, cut: int) -> int:
    """How many replies ended by themselves."""
    named = {"type": "function", "function": {"name": min(tools)}}
    told = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
    wanted = reply_request(told, named if choice == "named" else choice, parallel)
    chat = llm._render(CHAT, {}, wanted)
    temperatures = (0.0, 0.7, 1.3, 2.0)
    params = [
        SamplingParams(structured_outputs=chat.structured, temperature=temperature, seed=seed, max_tokens=most)
        for most in (150, cut)
        for temperature in temperatures
    ]
    try:
        prompt = chat.token_ids[-16:]  # the tools' own text is of no matter here, and long
        prepared = llm._frontend.prepare_all([prompt] * len(params), params, [chat.reply] * len(params))
    except SamplingParamsError as error:
        assert "cannot be used" in str(error), error  # nothing can meet a schema
        return 0
    outputs = [output.outputs[0] for output in llm._run_all(prepared, progress=False)]
    ended = 0
    for one, part in zip(outputs, outputs[len(temperatures) :], strict=False):
        assert one.error is None and part.error is None and one.finish_reason in ("stop", "length")
        assert one.token_ids[: len(part.token_ids)] == part.token_ids
        calls = one.reply.tool_calls
        assert [call.name for call in part.reply.tool_calls] == [call.name for call in calls][
            : len(part.reply.tool_calls)
        ]
        assert {call.name for call in calls} <= tools.keys()
        assert choice != "named" or {call.name for call in calls} <= {min(tools)}
        # What was cut is a beginning: the grammar has taken it, and does not end there unless it may.
        assert (
            llm._engine.grammars.matcher(params[0].structured_outputs, llm.model.eos_token_ids, one.token_ids).error
            is None
        )
        if one.finish_reason != "stop":
            continue
        ended += 1
        assert choice == "auto" or (calls and not one.reply.content)
        assert len(calls) <= 1 or (parallel and choice != "named")
        for call in calls:
            schema = {"type": "object"} if call.name in chat.loosened else tools[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
    return ended


@pytest.fixture(scope="module", params=["hermes", "mistral", "qwen3_coder"])
def calling(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("demo", max_model_len=1024, tool_format=request.param) as made:
        yield made


@pytest.mark.quick("qwen3_coder")
def test_whatever_the_tools_a_finished_reply_calls_them_as_they_are(calling: LLM) -> None:
    _any_tools(calling, 3)


@pytest.mark.slow
def test_many_random_tools(calling: LLM) -> None:
    _any_tools(calling, 100)


def _any_tools(llm: LLM, examples: int) -> None:
    ended = []

    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(
        tools=SOME_TOOLS,
        choice=st.sampled_from(["required", "named", "auto"]),
        parallel=st.booleans(),
        seed=st.integers(0, 99),
        cut=st.integers(1, 60),
    )
    def run(tools: dict[str, Any], choice: str, parallel: bool, seed: int, cut: int) -> None:
        ended.append(call_random_tools(llm, tools, choice, parallel, seed, cut))

    run()
    assert examples < 100 or sum(ended) > examples


def test_a_form_of_content_is_met_beside_tools_that_may_not_be_called(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), seed=1)
    [output] = llm.chat(CHAT, params, tools=TOOLS, tool_choice="none")
    assert output.outputs[0].reply.content in ("yes", "no")
