"""Bodies of requests: what becomes a call, what is refused, and with which words."""

from __future__ import annotations

import inspect
import json
import re
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from quire import errors as quire_errors
from quire.core.sampling_params import SamplingParams
from quire.errors import (
    ChatTemplateError,
    CheckpointError,
    EmptyPromptError,
    EngineClosedError,
    PromptTooLongError,
    SamplingParamsError,
    TokenizerTimeoutError,
    TokenizerUnavailableError,
    UnknownTemplateVariableError,
)
from quire.server import fields as tables
from quire.server.body import MAX_IGNORED, MAX_IGNORED_LENGTH
from quire.server.errors import ApiError, api_error
from quire.server.limits import Limits
from quire.server.protocol import (
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from quire.server.schemas import openapi_bodies

HELLO = [{"role": "user", "content": "Hello"}]
PARSERS: list[Callable[[bytes], Any]] = [parse_completion, parse_chat, parse_tokenize, parse_detokenize]


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def completion(**fields: Any) -> CompletionCall:
    return parse_completion(body(**{"prompt": "Hello", **fields}))


def chat(**fields: Any) -> ChatCall:
    return parse_chat(body(**{"messages": HELLO, **fields}))


def refusal(parse: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse()
    assert_refused_in_shape(caught.value)
    return caught.value


def assert_refused_in_shape(error: ApiError) -> None:
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert 0 < len(error.message) < 400
    msgspec.json.encode(error.body())


# -- what is understood --------------------------------------------------------------------------------------


def test_a_bare_completion_has_openais_defaults() -> None:
    call = completion()
    assert (call.prompts, call.params.max_tokens, call.params.n) == (["Hello"], 16, 1)
    assert (call.stream, call.echo, call.model, call.ignored) == (False, False, None, ())
    assert call.params.logprobs is None and call.params.temperature is None


def test_a_bare_chat_runs_to_the_end_of_the_context() -> None:
    call = chat()
    assert (call.messages, call.params.max_tokens) == (HELLO, None)
    assert (call.add_generation_prompt, call.continue_final_message) == (True, False)


def test_a_seed_is_drawn_where_none_is_given_and_a_given_one_is_kept_to_the_last_bit() -> None:
    drawn = {completion().params.seed for _ in range(8)}
    assert len(drawn) == 8 and all(seed is not None and 0 <= seed < 2**53 for seed in drawn)
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert completion(seed=seed).params.seed == seed
    assert refusal(lambda: completion(seed=2**63)).param == "seed"


SAME_NAME: dict[str, Any] = {
    "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 3, "stop": ["a", "b"], "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True, "min_tokens": 2, "ignore_eos": True, "allowed_token_ids": [5, 6],
    "bad_words": ["x"], "prompt_logprobs": 2, "skip_special_tokens": False, "priority": -3, "cache_salt": "s",
    "max_tokens": 9, "speculate": False, "kv_transfer_params": {"do_remote_decode": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_NAME)
@pytest.mark.parametrize("make", [completion, chat])
def test_every_sampling_field_reaches_the_parameters(name: str, make: Callable[..., Any]) -> None:
    value = SAME_NAME[name]
    found = getattr(make(**{name: value}).params, name)
    assert found == (tuple(value) if isinstance(value, list) else value)


def test_no_field_of_the_sampling_parameters_is_forgotten() -> None:
    others = {"max_tokens", "logprobs", "structured_outputs"}  # by other names, or of another meaning
    assert {*tables.SAMPLING} == {*SamplingParams.__struct_fields__} - others


def test_logit_bias_has_ids_as_strings() -> None:
    assert completion(logit_bias={"12": -100, "0": 1.5}).params.logit_bias == {12: -100.0, 0: 1.5}
    for key in ("x", "-1", "1.5", "", " 1", "\u0661", "1" * 30):
        assert refusal(lambda key=key: completion(logit_bias={key: 1})).param == "logit_bias"
    assert refusal(lambda: completion(logit_bias={"1": 101})).param == "logit_bias"
    assert refusal(lambda: completion(logit_bias={"1": None})).param == "logit_bias"


def test_null_means_not_given_for_every_field() -> None:
    call = completion(seed=1, **dict.fromkeys([*tables.COMPLETION.keys() - {"prompt", "seed"}, "nobody_knows"]))
    assert call == completion(seed=1)
    assert chat(seed=1, **dict.fromkeys([*tables.CHAT.keys() - {"messages", "seed"}, "tools"])) == chat(seed=1)
    assert completion(seed=1, **dict.fromkeys(tables.COMPLETION_UNSUPPORTED)) == completion(seed=1)


@pytest.mark.parametrize(
    "prompt", ["", "Hello", ["a", "b"], [""], [1, 2, 3], [0], [[1, 2], [3]], ["a", "[1, 2]"], '["a"]']
)
def test_prompts_come_as_text_texts_ids_and_lists_of_ids(prompt: Any) -> None:
    expected = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    assert completion(prompt=prompt).prompts == expected


def test_space_around_values_and_repeated_fields_change_nothing() -> None:
    call = parse_completion(b' { "n" :\n null , "prompt" : \t[ 1 , 2 ] , "top_k" : 1, "top_k" : 5 } ')
    assert (call.prompts, call.params.n, call.params.top_k) == ([[1, 2]], 1, 5)


def test_echo_with_logprobs_scores_the_prompt_and_may_make_no_token_at_all() -> None:
    call = completion(echo=True, logprobs=1, max_tokens=0)
    assert (call.params.prompt_logprobs, call.params.logprobs, call.params.max_tokens) == (1, 1, 0)
    assert call.prompt_logprobs is None  # the field of that name was not asked for
    both = completion(echo=True, logprobs=1, prompt_logprobs=4)
    assert (both.params.prompt_logprobs, both.prompt_logprobs) == (4, 4)
    assert completion(echo=True).params.prompt_logprobs is None
    assert completion(logprobs=1).params.prompt_logprobs is None


def test_logprobs_of_a_chat_are_a_flag_and_a_number() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params.logprobs == 5
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert refusal(lambda: chat(top_logprobs=3)).param == "top_logprobs"
    assert refusal(lambda: chat(logprobs=True, top_logprobs=21)).param == "top_logprobs"
    assert refusal(lambda: chat(logprobs=1)).param == "logprobs"
    assert refusal(lambda: completion(logprobs=True)).param == "logprobs"
    assert refusal(lambda: completion(logprobs=21)).param == "logprobs"


@pytest.mark.parametrize("make", [completion, chat])
def test_max_completion_tokens_are_max_tokens(make: Callable[..., Any]) -> None:
    assert make(max_completion_tokens=7).params.max_tokens == 7
    assert make(max_completion_tokens=7, max_tokens=7).params.max_tokens == 7
    assert refusal(lambda: make(max_completion_tokens=7, max_tokens=8)).param == "max_completion_tokens"
    assert refusal(lambda: make(max_completion_tokens=-2)).param == "max_completion_tokens"
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert make(**{name: -1}).params.max_tokens is None  # the rest of the context
    assert refusal(lambda: make(max_tokens=3, min_tokens=4)).param == "min_tokens"


def test_top_k_of_minus_one_is_off_as_in_vllm() -> None:
    assert completion(top_k=-1).params.top_k == 0
    assert refusal(lambda: completion(top_k=-2)).param == "top_k"


def test_stream_options_need_a_stream() -> None:
    call = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True, "new": 1})
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)
    assert call.ignored == ("stream_options.new",)
    assert refusal(lambda: completion(stream_options={"include_usage": True})).param == "stream_options"
    assert refusal(lambda: completion(stream=True, stream_options=[])).param == "stream_options"
    error = refusal(lambda: completion(stream=True, stream_options={"include_obfuscation": True}))
    assert error.param == "stream_options.include_obfuscation"
    assert refusal(lambda: completion(stream=True, stream_options={"include_usage": 1})).param == (
        "stream_options.include_usage"
    )


# -- what is refused by name, and what is ignored by name ------------------------------------------------------


def openai_fields(module: Any, base: str) -> set[str]:
    return set(get_type_hints(getattr(module, base)))


def test_every_field_that_openai_knows_is_supported_or_refused_by_name() -> None:
    for_completions = openai_fields(completion_create_params, "CompletionCreateParamsBase") | {"stream"}
    assert for_completions <= {*tables.COMPLETION, *tables.COMPLETION_UNSUPPORTED, "best_of"}
    for_chats = openai_fields(chat_create_params, "CompletionCreateParamsBase") | {"stream"}
    assert for_chats <= {*tables.CHAT, *tables.CHAT_UNSUPPORTED, "best_of"}


ASKING: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": "f"}, "audio": {"voice": "a"},
    "modalities": ["text", "audio"],
    "web_search_options": {}, "moderation": {}, "suffix": "x",
    "chat_template": "{{ x }}",
    "use_beam_search": True,
    "best_of": 2,
    "length_penalty": True, "prompt_embeds": "AAAA", "lora_path": "x", "mirostat": 2, "typical_p": 0.9,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "repeat_penalty": 1.1, "samplers": ["top_k"],
    "options": {"num_ctx": 4096},
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("make", [completion, chat])
def test_what_is_not_supported_is_refused_by_name(name: str, make: Callable[..., Any]) -> None:
    error = refusal(lambda: make(**{name: ASKING[name]}))
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message.startswith(f"{name} is ") and "leave it out" in error.message


def test_a_value_that_asks_for_nothing_is_named_once() -> None:
    error = refusal(lambda: completion(repeat_penalty=1.1))
    assert error.message == "repeat_penalty is 1.1, which is not supported here; leave it out or set it to 1"


def test_what_is_not_supported_is_refused_by_name_at_any_size() -> None:
    error = refusal(lambda: chat(functions=[{"name": "f" * 400_000}]))
    assert (error.param, error.code) == ("functions", "unsupported_parameter")


CALLED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def allowed(mode: str, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [CALLED, CALLED]}, "tools[1]"),
    ({"tools": [CALLED] * 300}, "tools"),
    ({"tools": [CALLED], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": allowed("auto", "f", "g")}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": allowed("none", "f")}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": allowed("auto", ["f"])}, "tool_choice"),
    ({"tools": [CALLED], "tool_choice": {"type": "allowed_tools", "allowed_tools": "f"}}, "tool_choice"),
    (
        {"tools": [CALLED], "tool_choice": allowed("auto") | {"allowed_tools": {"mode": "auto", "tools": ["f"]}}},
        "tool_choice",
    ),
    ({"tool_choice": allowed("auto", "f")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CALLED], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
]


def test_a_json_object_may_have_a_schema_as_in_llama_cpp() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = chat(response_format={"type": "json_object", "schema": schema}).params.structured_outputs
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert asked is not None and asked == chat(response_format=named).params.structured_outputs
    plain = chat(response_format={"type": "json_object", "schema": None}).params.structured_outputs
    assert plain is not None and plain.kind == "json_object"
    for bad in ({"schema": "x"}, {"schema": schema, "strict": True}, {"json_schema": named["json_schema"]}):
        error = refusal(lambda bad=bad: chat(response_format={"type": "json_object", **bad}))
        assert (error.param or "").startswith("response_format")


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS)
def test_bad_tools_are_refused_by_their_place(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: chat(**fields)).param == param


def test_tools_and_their_messages_are_read() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    said = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    call = chat(messages=said, tools=[CALLED], tool_choice={"type": "function", "function": {"name": "f"}})
    assert call.messages[1]["tool_calls"] == calls and call.messages[1]["content"] is None
    assert call.messages[2] == {"role": "tool", "tool_call_id": "a", "content": "2"}
    for null in ({"reasoning": "hm"}, {}):  # vLLM's answers have no content where all of it was reasoning
        assert chat(messages=[*HELLO, {"role": "assistant", "content": None, **null}]).messages[1]["content"] is None
    assert call.reply.callable == [CALLED["function"]]
    assert chat(tools=[CALLED], tool_choice="none").reply.callable == []
    assert chat(reasoning_effort="low", enable_thinking=True).chat_template_kwargs == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }


def test_some_of_the_tools_may_be_allowed() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    for mode in ("auto", "required"):
        asked = chat(tools=tools, tool_choice=allowed(mode, "h", "f")).reply
        assert asked.tool_choice == mode and asked.parallel and asked.tools == tools  # the prompt has all of them
        assert [function["name"] for function in asked.callable] == ["f", "h"]


HARMLESS: dict[str, Any] = {
    "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": False,
    "service_tier": "auto", "verbosity": "medium", "parallel_tool_calls": True, "best_of": 1, "user": "me",
    "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "suffix": "", "length_penalty": 1,
    "use_beam_search": False,
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("make", [completion, chat])
def test_values_that_ask_for_nothing_and_labels_change_nothing(name: str, make: Callable[..., Any]) -> None:
    assert make(seed=1, **{name: HARMLESS[name]}) == make(seed=1)


def test_the_defaults_that_clients_of_llama_cpp_send_change_nothing() -> None:
    sent = {"mirostat": 0, "typical_p": 1, "xtc_probability": 0, "dry_multiplier": 0.0, "repeat_last_n": 64, "lora": []}
    assert completion(seed=1, **sent) == completion(seed=1)


@pytest.mark.parametrize("make", [completion, chat])
def test_every_line_of_the_table_of_hints_is_accepted_and_listed(make: Callable[..., Any]) -> None:
    assert make(**dict.fromkeys(tables.IGNORED, "x")).ignored == tuple(tables.IGNORED)
    assert make(**{name: values[0] for name, values in tables.IGNORED.items() if values}).ignored == ()


def test_raw_prompts_parse_special_tokens_and_chats_never_do() -> None:
    assert completion().parse_special and not completion(parse_special=False).parse_special
    assert not parse_tokenize(b'{"prompt": "x", "parse_special": false}').parse_special
    assert chat(seed=1, parse_special=False) == chat(seed=1)
    assert refusal(lambda: chat(parse_special=True)).param == "parse_special"


def test_thinking_is_asked_for_in_the_words_of_openai_openrouter_and_anthropic() -> None:
    effort = chat(reasoning={"effort": "low", "summary": "detailed", "other": 1})
    assert effort.chat_template_kwargs == {"reasoning_effort": "low"}
    assert effort.hints == {"reasoning_effort": "reasoning.effort"}
    assert effort.ignored == ("reasoning.summary", "reasoning.other")
    off = chat(thinking={"type": "disabled", "budget_tokens": 5})
    assert (off.chat_template_kwargs, off.params.thinking_token_budget) == ({"enable_thinking": False}, None)
    on = chat(thinking={"type": "enabled", "budget_tokens": 5}, enable_thinking=True, thinking_token_budget=5)
    assert (on.chat_template_kwargs, on.params.thinking_token_budget) == ({"enable_thinking": True}, 5)
    switched = chat(reasoning={"enabled": False}, chat_template_kwargs={"mood": "calm"})
    assert switched.chat_template_kwargs == {"enable_thinking": False, "mood": "calm"}
    assert chat(reasoning={"max_tokens": 7}).params.thinking_token_budget == 7
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": 1}}, "reasoning.enabled"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": "low"}, "reasoning"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, "thinking"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}, "thinking_token_budget": 4}, "thinking_token_budget"),
        ({"thinking": {"budget_tokens": 3}, "reasoning": {"max_tokens": 4}}, "thinking.budget_tokens"),
    ],
)
def test_fields_about_thinking_that_are_wrong_or_disagree_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: chat(**fields)).param == param


@pytest.mark.parametrize("make", [completion, chat])
def test_other_spellings_of_max_tokens_and_of_forms_mean_the_same(make: Callable[..., Any]) -> None:
    assert make(n_predict=7).params.max_tokens == 7
    assert make(n_predict=-1).params.max_tokens is None, "llama.cpp's default: the rest of the context"
    assert refusal(lambda: make(n_predict=-2)).param == "n_predict"
    assert refusal(lambda: make(n_predict=7, max_tokens=8)).param == "n_predict"
    assert make(regex="[ab]").params.structured_outputs.regex == "[ab]"
    assert make(json_schema={"type": "integer"}).params.structured_outputs.kind == "json"


@pytest.mark.parametrize("make", [completion, chat])
def test_a_float_without_a_fraction_is_an_integer(make: Callable[..., Any]) -> None:
    params = make(max_tokens=5.0, n=2.0, seed=3.0, top_k=4.0, best_of=2.0).params
    assert [params.max_tokens, params.n, params.seed, params.top_k] == [5, 2, 3, 4]
    assert refusal(lambda: make(max_tokens=5.5)).param == "max_tokens"
    assert refusal(lambda: make(n=1.5)).param == "n"
    assert refusal(lambda: make(seed=1e300)).param == "seed"


def test_labels_have_types_and_bounds() -> None:
    assert refusal(lambda: chat(user=5)).param == "user"
    assert refusal(lambda: chat(user="x" * 5000)).param == "user"
    assert refusal(lambda: chat(metadata=[])).param == "metadata"


def test_best_of_may_be_n() -> None:
    assert completion(n=3, best_of=3).params.n == 3
    assert refusal(lambda: completion(n=3, best_of=2)).param == "best_of"
    assert refusal(lambda: completion(n=1, best_of=True)).param == "best_of"


def test_fields_of_the_other_route_are_refused() -> None:
    assert refusal(lambda: completion(messages=HELLO)).param == "messages"
    assert refusal(lambda: completion(top_logprobs=2)).param == "top_logprobs"
    assert refusal(lambda: chat(prompt="x")).param == "prompt"
    assert refusal(lambda: chat(echo=True)).param == "echo"
    assert refusal(lambda: chat(add_special_tokens=True)).param == "add_special_tokens"


def test_what_nobody_knows_is_ignored_by_name() -> None:
    call = chat(thinking={"budget": 5}, wibble=1, messages=[{**HELLO[0], "mood": "good"}] * 2)
    assert call.ignored == ("wibble", "messages[].mood", "thinking.budget")


def test_ignored_names_fit_into_a_header() -> None:
    names = ["a,b\r\nx-evil: 1", "\u00e9", "", "x" * 500, *(f"field{i}" for i in range(100))]
    found = completion(**dict.fromkeys(names, 1)).ignored
    assert found[:3] == ("a?b??x-evil:?1", "?", "x" * MAX_IGNORED_LENGTH)
    assert len(found) == MAX_IGNORED
    assert all(re.fullmatch(r"[!-+\--~]{1,64}", name) for name in found)


# -- messages ------------------------------------------------------------------------------------------------


def test_messages_keep_names_and_text_parts_and_developers_are_system() -> None:
    messages = [
        {"role": "developer", "content": "Be kind.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": None, "refusal": None},
    ]
    assert chat(messages=messages).messages == [
        {"role": "system", "content": "Be kind.", "name": "boss"},
        messages[1],
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
    ]


BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"), ([], "messages"), ("Hello", "messages"), ({}, "messages"), ([1], "messages"),
    ([[]], "messages"), ([{}], "messages[0].role"), ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"), ([{"role": "assistant"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([*HELLO, {"role": "tool", "content": "x", "tool_call_id": 1}], "messages[1].tool_call_id"),
    ([{"role": "function", "content": "x"}], "messages[0].role"), ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([{"role": "<|im_start|>", "content": "x"}], "messages[0].role"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"), ([{"role": "user", "content": ["a"]}], "messages"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": "x", "name": "n" * 300}], "messages[0].name"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD_MESSAGES)])
def test_bad_messages_are_refused_by_their_place(messages: Any, param: str) -> None:
    assert refusal(lambda: chat(messages=messages)).param == param


def test_a_message_without_a_role_lacks_one() -> None:
    for messages, told in (([{"content": "x"}], "is missing; it must be one"), ([{"role": None}], "is null; it must")):
        assert told in refusal(lambda messages=messages: chat(messages=messages)).message


def test_the_unsupported_kind_of_content_is_named() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:..."}}]
    assert '"image_url"' in refusal(lambda: chat(messages=[{"role": "user", "content": content}])).message


def test_continuing_the_last_message_opens_no_new_one() -> None:
    call = chat(continue_final_message=True)
    assert (call.add_generation_prompt, call.continue_final_message) == (False, True)
    assert not chat(add_generation_prompt=False).add_generation_prompt
    assert refusal(lambda: chat(continue_final_message=True, add_generation_prompt=True)).param == (
        "continue_final_message"
    )


def test_template_variables_are_few_named_and_plain() -> None:
    kwargs = {"enable_thinking": False, "list": [1, {"a": None}]}
    assert chat(chat_template_kwargs=kwargs).chat_template_kwargs == kwargs
    nested: Any = 1
    for _ in range(9):
        nested = [nested]
    bad: list[Any] = [
        5, [], {"messages": []}, {"tools": []}, {"add_generation_prompt": True}, {"chat_template": "x"}, {"a b": 1},
        {"": 1}, {"a" * 65: 1}, {f"v{i}": i for i in range(17)}, {"v": nested}, {"v": "x" * 70000},
    ]  # fmt: skip
    for value in bad:
        assert refusal(lambda value=value: chat(chat_template_kwargs=value)).param == "chat_template_kwargs"


# -- bad input -----------------------------------------------------------------------------------------------

BAD_JSON: list[bytes] = [
    b"", b" ", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"nobody": "\xff"}',
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x",}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00abcdefgh"}', b"\xef\xbb\xbf{}",
    b'{"prompt": "\x00"}', b"{'prompt': 'x'}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"nobody": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"prompt": "x"} {}',
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"messages": "\\ud800"}', b'{"tokens": "\\ud800"}',
]  # fmt: skip


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: str(parse.__name__))
@pytest.mark.parametrize("data", BAD_JSON, ids=range(len(BAD_JSON)))
def test_malformed_bodies_are_refused(parse: Callable[[bytes], Any], data: bytes) -> None:
    refusal(lambda: parse(data))


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0), ("n", True), ("n", "2"), ("n", 1.5), ("n", 10**30), ("temperature", "hot"), ("temperature", -1),
    ("temperature", False), ("top_p", 0), ("top_p", 1.5), ("min_p", -0.1), ("seed", 1.5), ("seed", True),
    ("stop", 5), ("stop", ["x"] * 65), ("stop", [""]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]),
    ("min_tokens", -1), ("max_tokens", -2), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", 2**31),
    ("allowed_token_ids", []), ("allowed_token_ids", ["1"]), ("bad_words", "x" * 300), ("prompt_logprobs", 21),
    ("prompt_logprobs", True), ("priority", 2**40), ("cache_salt", ""), ("cache_salt", 5), ("stream", "yes"),
    ("stream", 1), ("ignore_eos", "true"), ("return_token_ids", 0), ("model", 5), ("model", "m" * 1000),
    ("repetition_penalty", 0), ("presence_penalty", 3), ("logit_bias", [1]), ("skip_special_tokens", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD_VALUES)])
@pytest.mark.parametrize("make", [completion, chat])
def test_a_bad_value_is_refused_by_the_name_of_its_field(name: str, value: Any, make: Callable[..., Any]) -> None:
    assert refusal(lambda: make(**{name: value})).param == name


def test_a_number_that_no_float_holds_is_blamed_on_its_field() -> None:
    for number in (b"1e400", b"-1e400", b"9" * 5000):
        assert (
            refusal(lambda number=number: parse_completion(b'{"prompt": "x", "top_p": %b}' % number)).param == "top_p"
        )


@pytest.mark.parametrize(
    "prompt",
    [
        [], [[]], [[1], []], 5, True, {}, {"a": "b"}, [1, True], [1, 1.5], [-1], [2**31], [10**30], [1, "a"],
        ["a", 1], ["a", ["b"]], [[1], 2], [1, [2]], [[["a"]]], [None], [[None]], [{}], ["a", None],
    ],
    ids=repr,
)  # fmt: skip
def test_bad_prompts_are_refused(prompt: Any) -> None:
    assert refusal(lambda: completion(prompt=prompt)).param == "prompt"


def test_the_first_bad_token_id_is_named_with_its_place() -> None:
    assert "prompt[2] is -7" in refusal(lambda: completion(prompt=[1, 2, -7])).message
    assert "prompt[1][0] is true" in refusal(lambda: completion(prompt=[[1], [True]])).message


def test_a_missing_prompt_says_what_it_could_be() -> None:
    error = refusal(lambda: parse_completion(b"{}"))
    assert error.code == "missing_parameter" and "a list of strings" in error.message


# -- bounds --------------------------------------------------------------------------------------------------


def test_prompts_and_choices_are_counted() -> None:
    limits = Limits(prompts=3, choices=5, text=10, token_ids=6)

    def parse(**fields: Any) -> CompletionCall:
        return parse_completion(body(**fields), limits)

    assert len(parse(prompt=["a"] * 3).prompts) == 3
    assert refusal(lambda: parse(prompt=["a"] * 4)).param == "prompt"
    assert refusal(lambda: parse(prompt=[[1]] * 4)).param == "prompt"
    assert parse(prompt=["a"] * 2, n=2).num_choices == 4
    assert refusal(lambda: parse(prompt=["a"] * 2, n=3)).param == "n"
    assert refusal(lambda: parse(prompt=["abcdef", "abcdef"])).param == "prompt"
    assert parse(prompt=[1] * 6).prompts == [[1] * 6]
    assert refusal(lambda: parse(prompt=[1] * 7)).param == "prompt"


def test_messages_and_their_parts_are_counted() -> None:
    limits = Limits(messages=2, content_parts=3, text=10)
    part = {"type": "text", "text": "a"}

    def parse(messages: list[Any]) -> ChatCall:
        return parse_chat(body(messages=messages), limits)

    assert len(parse(HELLO * 2).messages) == 2
    for bad in (HELLO * 3, HELLO * 9, [{"role": "user", "content": "x" * 11}]):
        assert refusal(lambda bad=bad: parse(bad)).param == "messages"
    parts = {"role": "user", "content": [part] * 2}
    assert refusal(lambda: parse([parts, parts])).param == "messages[1].content"
    assert refusal(lambda: parse([{"role": "user", "content": [part] * 9}])).param == "messages[0].content"


@pytest.mark.parametrize(
    ("parse", "before", "item", "after"),
    [
        (parse_completion, '{"prompt":[', '"ab"', "]}"),
        (parse_chat, '{"messages":[', r'{"\u0072ole":1}', "]}"),  # names may be written in more than one way
        (parse_chat, '{"messages":[{"role":"user","content":[', r'{"\u0074ype":1}', "]}]}"),
    ],
)
def test_what_is_far_too_many_is_refused_before_it_is_built(
    parse: Callable[[bytes], Any], before: str, item: str, after: str
) -> None:
    attack = (before + ",".join([item] * 200_000) + after).encode()
    tracemalloc.start()
    try:
        error = refusal(lambda: parse(attack))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "more than" in error.message
    assert peak < 4 * len(attack)  # copies of the bytes, and no object for each


def test_texts_full_of_quotes_and_backslashes_are_no_lists_of_strings() -> None:
    text = '"role", "type": "\\' * 100_000
    assert completion(prompt=[text, text]).prompts == [text, text]
    assert chat(messages=[{"role": "user", "content": text}]).messages[0]["content"] == text


def test_log_probabilities_are_priced_before_anything_runs() -> None:
    limits = Limits(logprob_entries=1000, prompt_logprob_entries=1000, max_model_len=500)

    def parse(**fields: Any) -> CompletionCall:
        return parse_completion(body(**{"prompt": "x", **fields}), limits)

    parse(logprobs=19, max_tokens=50)
    assert refusal(lambda: parse(logprobs=19, max_tokens=51)).param == "logprobs"
    assert refusal(lambda: parse(logprobs=19, max_tokens=26, n=2)).param == "logprobs"
    parse(logprobs=1, max_tokens=10**6)  # the context bounds it
    assert refusal(lambda: parse(prompt=[1] * 101, prompt_logprobs=9)).param == "prompt_logprobs"
    assert refusal(lambda: parse(prompt=[1] * 501, echo=True, logprobs=1)).param == "prompt_logprobs"
    parse(prompt=[1] * 100, echo=True, logprobs=4, n=2)
    assert refusal(lambda: parse(prompt=[1] * 101, echo=True, logprobs=4, n=2)).param == "prompt_logprobs"
    endless = body(messages=HELLO, logprobs=True, top_logprobs=2)
    assert refusal(lambda: parse_chat(endless, limits)).param == "logprobs"


def test_the_price_is_exact_for_ids_and_grows_with_bytes_and_choices() -> None:
    assert completion(prompt=[1] * 100).price() == 100
    assert completion(prompt=[[1] * 100, [2] * 50], n=2).price() == 300
    assert 1000 / 3 <= completion(prompt="x" * 1000).price() <= 1000 / 3 + 1
    assert completion(prompt="\u4e16" * 1000).price() >= 1000
    longer = [{"role": "user", "content": [{"type": "text", "text": "x" * 3000}]}]
    assert 1000 <= chat(messages=longer).price() < 1100
    assert chat(messages=longer, n=4).price() == 4 * chat(messages=longer).price()


HOSTILE: dict[str, bytes] = {
    "empty objects as messages": b'{"messages": [' + b"{}," * 700_000 + b"{}]}",
    "small messages": b'{"messages": [' + b'{"role":1},' * 200_000 + b"{}]}",
    "empty parts": b'{"messages":[{"role":"user","content":[' + b'{"type":1},' * 200_000 + b"{}]}]}",
    "fields nobody knows": b'{"prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(150_000)) + b"}",
    "fields of a message": b'{"messages":[{"role":"user","content":"x",' + b'"k":1,' * 300_000 + b'"z":1}]}',
    "empty lists as prompts": b'{"prompt": [' + b"[]," * 700_000 + b"[]]}",
    "objects as a prompt": b'{"prompt": {"a": [' + b"{}," * 700_000 + b"{}]}}",
    "a repeated field": b'{"prompt": "x"' + b',"n":1' * 300_000 + b"}",
    "a long key": b'{"' + b"k" * 2_000_000 + b'": 1}',
    "large stop": b'{"prompt": "x", "stop": [' + b'"a",' * 500_000 + b'"a"]}',
    "large bias": b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}}",
    "large tools": b'{"prompt": "x", "messages": 1, "tools": [' + b"{}," * 700_000 + b"{}]}",
    "many token ids": b'{"tokens": [' + b"1," * 1_500_000 + b"1]}",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: str(parse.__name__))
def test_large_bodies_of_nonsense_are_refused_for_little_work(parse: Callable[[bytes], Any], what: str) -> None:
    began = time.process_time()
    refusal(lambda: parse(HOSTILE[what]))
    assert time.process_time() - began < 2.0  # building all of it takes far longer than looking over it


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted(
    {*tables.COMPLETION, *tables.CHAT, *tables.CHAT_UNSUPPORTED, *tables.TOKENIZE, "tokens", "best_of", "zz"}
)
PLAUSIBLE = st.sampled_from(
    [HELLO, "x", [1, 2], [[1]], ["a"], True, False, 0, 1, 2, -1, 0.5, {}, [], [{"role": "user", "content": []}]]
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(NAMES), PLAUSIBLE | JSON, max_size=6), valid=st.booleans())
def test_whatever_json_comes_it_is_a_call_or_a_refusal(fields: dict[str, Any], valid: bool) -> None:
    if valid:
        fields = {"prompt": "x", **fields}
    data = json.dumps(fields, ensure_ascii=True).encode()
    for parse in PARSERS:
        try:
            call = parse(data)
        except ApiError as error:
            assert_refused_in_shape(error)
        else:
            assert type(call) is get_type_hints(parse)["return"]
            if isinstance(call, CompletionCall | ChatCall):
                assert call.params.seed is not None and call.price() >= call.num_choices >= call.params.n
            else:
                assert call.price() == len(call.tokens) if isinstance(call, DetokenizeCall) else call.price() >= 1


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_whatever_bytes_come_they_are_refused_in_shape(data: bytes) -> None:
    for parse in PARSERS:
        refusal(lambda parse=parse: parse(data))


# -- tokenizing ----------------------------------------------------------------------------------------------


def test_tokenize_takes_a_text_or_a_chat() -> None:
    text = parse_tokenize(body(prompt="Hello", add_special_tokens=False, return_token_strs=True, model="m"))
    assert (text.prompt, text.messages, text.add_special_tokens) == ("Hello", None, False)
    assert (text.return_token_strs, text.model) == (True, "m")
    talk = parse_tokenize(body(messages=HELLO, continue_final_message=True, add_special_tokens=False, other=1))
    assert (talk.prompt, talk.messages, talk.add_generation_prompt, talk.ignored) == (None, HELLO, False, ("other",))
    assert parse_tokenize(body(prompt="")).prompt == ""
    tooled = parse_tokenize(body(messages=HELLO, tools=[CALLED]))
    assert tooled.reply.callable == [CALLED["function"]] and tooled.price() > talk.price()
    assert refusal(lambda: parse_tokenize(body(prompt="x", tools=[CALLED]))).param == "tools"
    assert parse_tokenize(body(prompt="x", tools=[])).prompt == "x"
    for bad in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": ["x"]}, {"prompt": [1]}, {"prompt": 5}):
        assert refusal(lambda bad=bad: parse_tokenize(body(**bad))).param == "prompt"
    assert refusal(lambda: parse_tokenize(body(messages=HELLO, add_special_tokens=True))).param == "add_special_tokens"
    assert refusal(lambda: parse_tokenize(body(prompt="x", chat_template="y"))).param == "chat_template"


def test_detokenize_takes_ids() -> None:
    assert parse_detokenize(body(tokens=[1, 2])).tokens == [1, 2]
    assert parse_detokenize(body(tokens=[])).tokens == []
    for bad in (None, "x", 5, {}, [1.5], [True], [-1], ["1"], [[1]], [2**31]):
        assert refusal(lambda bad=bad: parse_detokenize(body(tokens=bad))).param == "tokens"


# -- errors --------------------------------------------------------------------------------------------------


def test_errors_have_openais_shape() -> None:
    error = ApiError(429, "full", code="rate_limit_exceeded", headers={"retry-after": "1"})
    assert error.body() == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    }
    assert ApiError(418, "x").type == "invalid_request_error"
    assert ApiError(502, "x").type == "server_error"
    assert ApiError(503, "x", type="mine").type == "mine"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (PromptTooLongError("x").at(3), 400, "context_length_exceeded"),
        (EmptyPromptError("x"), 400, "empty_prompt"),
        (SamplingParamsError("x"), 400, "invalid_value"),
        (TokenizerTimeoutError("x"), 400, "tokenizer_timeout"),
        (TokenizerUnavailableError("x"), 503, "tokenizer_unavailable"),
        (quire_errors.TokenizerFailedError("/secret/path"), 500, "internal_error"),
        (UnknownTemplateVariableError("x"), 400, "unknown_template_variable"),
        (quire_errors.RequestError("x"), 400, None),
        (EngineClosedError("/secret/path is gone"), 503, "engine_unavailable"),
        (CheckpointError("/secret/path is bad"), 500, "internal_error"),
        (KeyError("/secret/path"), 500, "internal_error"),
        (ApiError(404, "x", code="y"), 404, "y"),
    ],
)
def test_errors_become_answers_without_secrets(error: Exception, status: int, code: str | None) -> None:
    answer = api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "/secret" not in answer.message


def test_every_kind_of_request_error_is_the_clients() -> None:
    kinds = [kind for _, kind in inspect.getmembers(quire_errors, inspect.isclass)]
    for kind in kinds:
        if issubclass(kind, quire_errors.RequestError | ChatTemplateError):
            assert api_error(kind("x")).status == 400


def test_the_field_to_blame_is_told() -> None:
    assert api_error(SamplingParamsError("stop is bad", param="stop")).param == "stop"
    assert api_error(SamplingParamsError("stop is bad", param="stop").at(1)).param == "stop"


def test_a_variable_that_the_template_needs_is_one_of_its_arguments() -> None:
    told = api_error(UnknownTemplateVariableError("the chat template uses something undefined"))
    assert (told.param, told.code) == ("chat_template_kwargs", "unknown_template_variable")


def test_of_a_templates_failures_only_our_words_and_its_own_are_told() -> None:
    told = api_error(ChatTemplateError("the chat template refuses these messages: roles must alternate"))
    assert told.message.endswith("roles must alternate") and told.param == "messages"
    for text in (
        "/secret/model has no chat template; add one",
        "this checkpoint has no tokenizer, so no chat template",
    ):
        missing = api_error(ChatTemplateError(text))
        assert missing.code == "no_chat_template" and "/secret" not in missing.message
    failed = api_error(ChatTemplateError("the chat template failed on these messages: TypeError: at 0x7f"))
    assert "0x7f" not in failed.message


# -- the document --------------------------------------------------------------------------------------------


def test_the_openapi_bodies_refer_to_what_is_there() -> None:
    bodies = openapi_bodies()
    known = {*bodies["schemas"], "Error"}  # the app adds errors
    used = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(bodies)))
    assert used <= known
    others = {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages", "/v1/messages/count_tokens"}
    others.add("/v1/responses")
    ours = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
    assert {*ours, *others} == {*bodies["paths"]}
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert {*tables.SAMPLING, "stream", "max_tokens"} <= {*bodies["schemas"][name]["properties"]}
