"""`LLM` as a user meets it, on the embedded model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import inspect
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

import quire
from quire import LLM, AsyncLLM, RequestError, SamplingParams
from quire.errors import (
    ChatTemplateError,
    ConcurrentUseError,
    ConfigError,
    EmptyPromptError,
    EngineClosedError,
    PoolTooSmallError,
    PromptTooLongError,
    SamplingParamsError,
    TokenOutOfRangeError,
    UnknownTemplateVariableError,
)
from quire.kv.disk import open_folder
from quire.models.checkpoint import resolve
from quire.ops.cpu.kernels import CpuKernels
from quire.vllm_options import VLLM_METHODS
from tests.forks import in_a_fork

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1, check_invariants=True, max_num_seqs=8) as llm:
        yield llm


def test_a_prompt_may_be_text_or_token_ids_alone_or_in_a_list(llm):
    ids = llm.tokenizer.encode("def f(")
    forms = ["def f(", ["def f("], ids, [ids], {"prompt": "def f("}, [{"prompt_token_ids": ids}]]
    texts = {llm.generate(form, GREEDY)[0].outputs[0].text for form in forms}
    assert len(texts) == 1
    outputs = llm.generate(["def f(", ids, {"prompt": "def f(", "prompt_token_ids": None}], sampling_params=GREEDY)
    assert [output.prompt for output in outputs] == ["def f(", None, "def f("]
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_outputs_come_in_the_prompts_order_with_their_own_params(llm):
    params = [SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["import os", "class A", "x = 1"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["import os", "class A", "x = 1"]
    assert all(output.outputs[0].finish_reason == "length" and output.finished for output in outputs)


def test_logprobs_always_hold_the_sampled_token(llm):
    [output] = llm.generate("import ", SamplingParams(max_tokens=8, seed=3, logprobs=2, temperature=1.5))
    choice = output.outputs[0]
    assert len(choice.logprobs) == len(choice.token_ids) == 8
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert 2 <= len(entry) <= 3 and token in entry
        assert sorted(other.rank for other in entry.values())[:2] == [1, 2]
        assert all(other.logprob <= 0 and isinstance(other.decoded_token, str) for other in entry.values())
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_cover_every_token_after_the_first(llm):
    [output] = llm.generate("def add(a, b):\n    return a + b\n", SamplingParams(max_tokens=1, prompt_logprobs=1, n=2))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token in entry and math.isfinite(entry[token].logprob)


def test_a_prompt_that_fills_the_context_and_the_pool_can_be_scored(llm):
    prompt = [token % 500 + 10 for token in range(64)]
    [longer] = llm.generate([[*prompt, 7]], SamplingParams(max_tokens=1, prompt_logprobs=2))
    with LLM("demo", max_model_len=64, num_kv_blocks=5, block_size=16) as small:
        [output] = small.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1))
        assert output.prompt_logprobs == longer.prompt_logprobs[:64]
        [choice] = output.outputs
        assert (choice.token_ids, choice.text, choice.logprobs, choice.finish_reason) == ([], "", [], "length")
        assert small.stats.output_tokens == 0
        assert output.metrics.time_to_first_token is None


def test_choices_differ_and_a_seed_repeats_them(llm):
    params = SamplingParams(n=3, seed=11, max_tokens=10, temperature=1.0)
    first, second = (llm.generate("for i in ", params)[0] for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]


def test_a_request_without_a_seed_tells_the_one_it_drew(llm):
    [first] = llm.generate("for i in ", SamplingParams(max_tokens=10, temperature=1.0))
    [again] = llm.generate("for i in ", SamplingParams(max_tokens=10, temperature=1.0, seed=first.seed))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert float(first.seed) == first.seed < 2**53  # it survives programs whose numbers are doubles


def test_a_stop_string_across_token_borders_ends_the_text_before_it(llm):
    [free] = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=24))
    text = free.outputs[0].text
    stop = text[7:12]
    expected = text[: text.index(stop)]
    for include, wanted in ((False, expected), (True, expected + stop)):
        params = SamplingParams(temperature=0.0, max_tokens=24, stop=[stop], include_stop_str_in_output=include)
        [output] = llm.generate("def f(", params)
        choice = output.outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (wanted, "stop", stop)
        assert len(choice.token_ids) < 24
        assert llm.tokenizer.decode(choice.token_ids).startswith(expected + stop)
    assert llm.idle


def test_a_stop_token_is_named_as_the_reason(llm):
    [free] = llm.generate("def f(", GREEDY)
    token = free.outputs[0].token_ids[3]
    place = free.outputs[0].token_ids.index(token)
    [output] = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[token]))
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason, len(choice.token_ids)) == ("stop", token, place + 1)


def test_masks_biases_and_bad_words_are_obeyed(llm):
    allowed = llm.tokenizer.encode(" a b c", add_special_tokens=False)
    params = SamplingParams(max_tokens=10, seed=1, allowed_token_ids=allowed, ignore_eos=True)
    assert set(llm.generate("x", params)[0].outputs[0].token_ids) <= set(allowed)
    [free] = llm.generate("import os\nimport ", GREEDY)
    first = free.outputs[0].token_ids[0]
    banned = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={first: -100.0})
    assert llm.generate("import os\nimport ", banned)[0].outputs[0].token_ids[0] != first
    word = llm.tokenizer.token_text(first).strip()
    if word:
        params = SamplingParams(temperature=0.0, max_tokens=12, bad_words=[word])
        assert word not in llm.generate("import os\nimport ", params)[0].outputs[0].text.split()


def test_min_tokens_holds_off_the_end(llm):
    eos = 0
    params = SamplingParams(max_tokens=20, min_tokens=15, seed=2, logit_bias={eos: 100.0})
    assert len(llm.generate("x", params)[0].outputs[0].token_ids) >= 15


def test_a_second_prompt_with_the_same_head_is_read_from_the_cache(llm):
    head = "import os\nimport sys\n\ndef main(argv):\n    return argv[1:]\n" * 3
    llm.generate(head, GREEDY)
    [output] = llm.generate(head + "main(", GREEDY)
    assert output.cached_tokens > 0.7 * len(output.prompt_token_ids)
    llm_off = LLM("demo", threads=1, prefix_cache="off")
    assert llm_off.generate(head + "main(", GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids
    llm_off.close()


def test_a_salt_separates_tenants(llm):
    prompt = "def secret_function(with_arguments, that_are_long):\n    return None\n" * 2
    llm.generate(prompt, SamplingParams(max_tokens=1, cache_salt="one"))
    [other] = llm.generate(prompt, SamplingParams(max_tokens=1, cache_salt="two"))
    [same] = llm.generate(prompt, SamplingParams(max_tokens=1, cache_salt="one"))
    assert other.cached_tokens == 0 and same.cached_tokens > 0


def test_streamed_deltas_add_up_to_the_text(llm):
    params = SamplingParams(max_tokens=20, seed=5)
    deltas = []
    for output in llm.stream("class A:", params):
        deltas.append(output.outputs[0].delta)
    assert "".join(deltas) == output.outputs[0].text == llm.generate("class A:", params)[0].outputs[0].text
    assert len(deltas) > 5 and output.finished


def test_leaving_a_stream_early_aborts_it(llm):
    for _ in llm.stream("class A:", SamplingParams(max_tokens=500, ignore_eos=True)):
        break
    gc.collect()
    llm.step()
    assert llm.idle


def test_a_stream_that_nobody_reads_costs_nothing(llm):
    llm.stream("class A:")
    assert llm.idle
    with pytest.raises(EmptyPromptError):
        llm.stream("")


def test_ids_may_be_numpys(llm):
    ids = llm.tokenizer.encode("def f(")
    assert llm.generate(list(np.array(ids)), GREEDY)[0].prompt_token_ids == ids


def test_text_that_is_not_unicode_is_refused_where_it_enters(llm):
    for fields in ({"cache_salt": "\ud800"}, {"stop": "\udfff"}, {"bad_words": ["a\ud800"]}):
        with pytest.raises(SamplingParamsError, match="valid Unicode"):
            SamplingParams(**fields)
    for messages in (5, {"role": "user", "content": "x"}, "hi"):
        with pytest.raises(ChatTemplateError):
            llm.chat(messages)


def test_two_streams_side_by_side_do_not_lose_anything(llm):
    params = SamplingParams(max_tokens=15, seed=5, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].outputs[0].text for prompt in ("class A:", "import ")]
    streams = [llm.stream(prompt, params) for prompt in ("class A:", "import ")]
    texts = ["", ""]
    open_streams = {0, 1}
    while open_streams:
        for index in list(open_streams):
            output = next(streams[index], None)
            if output is None:
                open_streams.discard(index)
            else:
                texts[index] += output.outputs[0].delta
    assert texts == alone


def test_requests_can_be_driven_by_hand(llm):
    first = llm.add_request("def f(", GREEDY, request_id="mine")
    second = llm.add_request("class A", GREEDY)
    assert first == "mine" and second != first
    with pytest.raises(RequestError, match="in use"):
        llm.add_request("x", GREEDY, request_id="mine")
    ends = []
    while not llm.idle:
        ends += [output.request_id for output in llm.step() if output.finished]
    assert sorted(ends) == sorted([first, second])


def test_an_id_is_in_use_until_its_last_output_was_handed_out(llm):
    llm.add_request("def f(", GREEDY, request_id="mine")
    llm.generate("class A", SamplingParams(max_tokens=30, ignore_eos=True))  # the other one ends meanwhile
    with pytest.raises(RequestError, match="'mine' is in use"):
        llm.add_request("x", GREEDY, request_id="mine")
    [output] = llm.step()
    assert output.prompt == "def f(" and output.finished
    llm.add_request("x", GREEDY, request_id="mine")
    llm.generate("class A", SamplingParams(max_tokens=30, ignore_eos=True))
    [output] = llm.abort("mine")
    assert output.prompt == "x" and output.outputs[0].finish_reason == "length", "it had finished on its own"
    assert llm.abort("mine") == [] and llm.idle
    llm.add_request("y", GREEDY, request_id="mine")
    llm.abort("mine")


@contextlib.contextmanager
def in_another_thread(llm, monkeypatch, name="worker"):
    """While a thread of this name is amid a step of `generate`; what it made is in the list that this gives."""
    inside, go_on, made = threading.Event(), threading.Event(), []
    step = llm._engine.step

    def held():
        inside.set()
        assert go_on.wait(60)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", held)
        thread = threading.Thread(target=lambda: made.extend(llm.generate("def f(", GREEDY)), name=name)
        thread.start()
        assert inside.wait(60)
        try:
            yield made
        finally:
            go_on.set()
            thread.join()


def test_a_second_thread_is_refused_and_told_who_is_inside_and_what_to_use(llm, monkeypatch):
    [expected] = llm.generate("def f(", GREEDY)
    stream = llm.stream("class A", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    calls = [
        lambda: llm.generate("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: next(llm.stream("x")),
        lambda: next(stream),
        lambda: llm.add_request("x"),
        llm.step,
        lambda: llm.abort("x"),
        llm.close,
    ]
    with in_another_thread(llm, monkeypatch) as made:
        for call in calls:
            with pytest.raises(ConcurrentUseError, match=r"while thread 'worker' is in LLM\.generate.*AsyncLLM"):
                call()
    assert made[0].outputs == expected.outputs, "it harmed nobody"
    assert next(stream, None) is None and llm.step() == [] and llm.idle, "a stream that was refused has ended"


def test_a_signals_handler_that_calls_amid_a_step_is_refused_and_changes_no_token(llm, monkeypatch):
    [expected] = llm.generate("def f(", GREEDY)
    forward, told = llm._engine.model.forward, []

    def handler(number, frame):
        with pytest.raises(
            ConcurrentUseError, match=r"^LLM\.generate was called amid LLM\.generate of the same thread"
        ):
            llm.generate("x", GREEDY)
        told.append(number)

    def interrupted(*args):
        signal.raise_signal(signal.SIGUSR1)
        return forward(*args)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(llm._engine.model, "forward", interrupted)
        [output] = llm.generate("def f(", GREEDY)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert output.outputs == expected.outputs and told and llm._guard.free


def test_a_stream_that_is_left_while_another_thread_is_inside_is_ended_by_the_next_step(llm, monkeypatch):
    stream = llm.stream("class A", SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    with in_another_thread(llm, monkeypatch):
        stream.close()
    llm.step()
    assert llm.idle


def test_threads_may_use_it_one_after_the_other(llm):
    [expected] = llm.generate("def f(", GREEDY)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(llm.generate, "def f(", GREEDY).result()[0].outputs == expected.outputs
    request = llm.add_request("def f(", GREEDY)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        while not llm.idle:
            outputs = pool.submit(llm.step).result()
    assert outputs[0].request_id == request and outputs[0].outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_fork_of_the_process_is_told_that_the_engine_is_not_its_own(llm):
    """It would wait for threads that it does not have, and write where the engine does."""
    [expected] = llm.generate("def f(", GREEDY)
    stream = llm.stream("class A", GREEDY)
    next(stream)
    for call in (lambda: llm.generate("x"), lambda: next(stream), lambda: llm.add_request("x"), llm.step):
        told = in_a_fork(call)
        assert told.startswith(f"EngineClosedError: this engine belongs to process {os.getpid()}") and "spawn" in told
    assert in_a_fork(llm.close) == "None" and "closed" in in_a_fork(lambda: llm)
    assert len(list(stream)) > 1 and llm.generate("def f(", GREEDY)[0].outputs == expected.outputs


def test_an_abort_gives_back_what_there_was(llm):
    request = llm.add_request("def f(", SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        llm.step()
    [output] = llm.abort(request)
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) >= 4
    assert llm.abort(request) == [] and llm.idle


def test_chat_renders_the_models_own_template(llm):
    messages = [{"role": "user", "content": "Write a function."}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == llm.render_chat(messages)
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    raw = llm.generate(text, GREEDY)[0]  # a rendered prompt is the same one, and is not if it is only text
    assert (raw.prompt_token_ids, raw.prompt) == (output.prompt_token_ids, text)
    literal = llm.generate({"prompt": text, "parse_special": False}, GREEDY)[0]
    assert len(literal.prompt_token_ids) > len(raw.prompt_token_ids) and literal.prompt == text
    with pytest.raises(RequestError, match="'parse_special' of a prompt is a int"):
        llm.generate({"prompt": "x", "parse_special": 1})
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    with pytest.raises(ChatTemplateError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}], GREEDY)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sampling_params": [{"temperature": 0}]},
            "prompt 0: sampling_params is a dict; it must be SamplingParams or None",
        ),
        ({"sampling_params": []}, "1 prompts came with 0 sampling_params"),
        ({"tools": 5}, "tools is a int; it must be a list of functions"),
        ({"tools": {}}, "tools is a dict"),
        ({"tool_choice": 5}, 'tool_choice is 5; it must be "auto"'),
    ],
)
def test_what_is_wrong_with_a_chats_arguments_is_told(llm, given, message):
    with pytest.raises(RequestError, match=f"^{re.escape(message)}"):
        llm.chat([{"role": "user", "content": "x"}], **given)


def test_vllms_methods_that_are_not_there_say_what_to_use(llm):
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'encode': use embed"):
        llm.encode(["x"])
    with pytest.raises(AttributeError, match="/v1/score"):
        llm.score("x", "y")
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'nonsense'$"):
        llm.nonsense()
    assert not hasattr(llm, "encode") and not [name for name in VLLM_METHODS if hasattr(LLM, name)]


def test_vllms_names_of_arguments_are_taken_or_refused_by_name(llm):
    messages = [{"role": "user", "content": "x"}]
    [expected], [answer] = llm.generate("def f(", GREEDY), llm.chat(messages, GREEDY)
    assert llm.generate("def f(", GREEDY, use_tqdm=False, lora_request=None)[0].outputs == expected.outputs
    assert llm.chat(messages, GREEDY, chat_template_kwargs={}, use_tqdm=False)[0].outputs == answer.outputs
    for call, message in (
        (lambda: llm.generate("x", GREEDY, lora_request=object()), "^lora_request=.* LoRA"),
        (
            lambda: llm.generate("x", GREEDY, use_tqdm=True, progress=True),
            "use_tqdm and progress are the same|progress",
        ),
        (lambda: llm.generate(prompt_token_ids=[[1]]), "^prompt_token_ids=.*pass them as prompts"),
        (lambda: llm.chat(messages, chat_template="{{ x }}"), r"^chat_template=.*where the engine is made"),
        (lambda: llm.chat(messages, chat_template_kwargs=["x"]), "^chat_template_kwargs is a list"),
        (lambda: llm.chat(messages, chat_template_kwargs={"a": 1}, a=2), "^a is given twice"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(UnknownTemplateVariableError, match="'enable_thinking'"):
        llm.chat(messages, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        llm.generate("x", nonsense=1)


def test_a_chat_may_go_on_with_its_last_message(llm):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def f("}]
    [output] = llm.chat(messages, GREEDY, continue_final_message=True)
    whole = llm.tokenizer.decode(output.prompt_token_ids)
    assert whole.endswith("assistant\ndef f(") and output.outputs[0].token_ids
    assert (
        llm.render_chat(messages, continue_final_message=True, add_generation_prompt=False) == output.prompt_token_ids
    )
    request = llm.add_chat(messages, GREEDY, continue_final_message=True)
    outputs = {each.request_id: each for _ in range(200) if not llm.idle for each in llm.step()}
    assert outputs[request].outputs[0].token_ids == output.outputs[0].token_ids
    opened = llm.render_chat(messages[:1], add_generation_prompt=False)
    assert llm.render_chat(messages[:1])[: len(opened)] == opened != llm.render_chat(messages[:1])
    with pytest.raises(ChatTemplateError, match="set one of them to false"):
        llm.chat(messages, continue_final_message=True, add_generation_prompt=True)


def test_metrics_tell_where_the_time_went(llm):
    [output] = llm.generate("def f(", GREEDY)
    metrics = output.metrics
    assert 0 <= metrics.queue_seconds <= metrics.time_to_first_token <= metrics.total_seconds
    assert metrics.steps == 12 and metrics.preemptions == 0
    assert metrics.prefill_seconds > 0 and metrics.decode_seconds > 0


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", None, EmptyPromptError),
        ([5, 10**6], None, TokenOutOfRangeError),
        ([5, -1], None, TokenOutOfRangeError),
        ([5] * 5000, None, PromptTooLongError),
        ([5] * 2000, SamplingParams(min_tokens=100), PromptTooLongError),
        ("x", SamplingParams(stop_token_ids=[10**6]), TokenOutOfRangeError),
        ([5, 10**5000], None, TokenOutOfRangeError),
        ("x \ud800", None, RequestError),
        (["x", 5.0], None, RequestError),
        (b"bytes", None, RequestError),
        ({}, None, RequestError),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, None, RequestError),
        ([{"prompt_token_ids": "x"}], None, RequestError),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, params, error):
    with pytest.raises(error):
        llm.generate([prompt] if isinstance(prompt, str) else prompt, params)
    assert llm.idle


def test_max_tokens_beyond_the_context_is_clamped_and_told(llm):
    prompt = [5] * (llm.max_model_len - 3)
    for asked, told in ((3, None), (4, 4), (10**6, 10**6), (None, None)):
        [output] = llm.generate([prompt], SamplingParams(max_tokens=asked, ignore_eos=True, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"
        assert output.clamped_from == told
    with pytest.raises(PromptTooLongError, match=r"context length is .* 10 in the completion\); .* lower min_tokens"):
        llm.generate([prompt], SamplingParams(max_tokens=10, min_tokens=4))


def test_the_error_tells_which_prompt_of_a_list_is_bad(llm):
    with pytest.raises(RequestError, match="prompt 2") as caught:
        llm.generate(["a", "b", "", "d"], GREEDY)
    assert caught.value.index == 2 and isinstance(caught.value, EmptyPromptError)
    with pytest.raises(RequestError, match="2 prompts came with 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(SamplingParamsError):
        llm.generate("a", {"temperature": 0})


def test_engine_options_are_checked_by_name():
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM("demo", max_num_seq=4)
    with pytest.raises(ConfigError, match="never runs code from a checkpoint"):
        LLM("demo", trust_remote_code=True)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        LLM("demo", max_model_len=10**6)
    with pytest.raises(ConfigError, match="raise it to"):
        LLM("demo", enable_chunked_prefill=False, max_num_batched_tokens=1000)


def test_a_pool_too_small_for_one_request_names_values_that_work():
    with pytest.raises(PoolTooSmallError, match="set max_model_len to at most 160"):
        LLM("demo", max_model_len=1024, num_kv_blocks=10)
    with LLM("demo", num_kv_blocks=10, threads=1) as llm:
        assert llm.max_model_len == 160 and any("160" in note for note in llm.notes)


def test_a_closed_engine_refuses_calls_and_frees_its_memory():
    llm = LLM("demo", threads=1)
    model, cache = weakref.ref(llm.model), weakref.ref(llm._engine.kv_cache[0])
    llm.close()
    llm.close()
    gc.collect()
    assert model() is None and cache() is None
    with pytest.raises(EngineClosedError):
        llm.model  # noqa: B018
    with pytest.raises(EngineClosedError):
        llm.generate("x")


def test_an_engine_that_nobody_has_any_more_is_closed_and_freed_at_once(tmp_path):
    """A notebook's cell that is run again: the next engine's memory plan, and its folder, count on that."""
    gc.collect()
    gc.disable()  # a cycle would be found some time
    try:
        llm = LLM("demo", threads=1, disk_kv_path=str(tmp_path), host_kv_memory="4MiB", disk_kv_memory="64MiB")
        llm.generate("x", GREEDY)
        left = llm.stream("x", GREEDY)
        next(left)
        freed = weakref.ref(llm.model), weakref.ref(llm._engine.kv_cache[0]), weakref.ref(llm)
        del llm, left
        assert [each() for each in freed] == [None, None, None]
        os.close(open_folder(str(tmp_path))[2])  # it is in nobody's use
    finally:
        gc.enable()


def test_a_caller_who_interrupts_the_start_leaves_nothing_held(tmp_path):
    def interrupt(phase, share):
        if phase == "ready":
            raise KeyboardInterrupt

    options = {"threads": 1, "disk_kv_path": str(tmp_path), "host_kv_memory": "4MiB", "disk_kv_memory": "64MiB"}
    with pytest.raises(KeyboardInterrupt):
        LLM("demo", on_load=interrupt, **options)
    with LLM("demo", **options) as llm:
        assert any(note.startswith("disk tier: ") for note in llm.notes), "the folder is free again"


def threads_of(llm: LLM) -> int:
    """How many the kernels have, as they are called from here."""
    kernels = llm.model.kernels
    return kernels._lib.threads() if isinstance(kernels, CpuKernels) else torch.get_num_threads()


def test_an_engines_threads_are_its_own():
    with LLM("demo", threads=2) as two, LLM("demo", threads=1) as one:
        assert (two.threads, one.threads) == (2, 1)
        seen = {}
        for name, llm in (("two", two), ("one", one)):
            forward = llm.model.forward

            def spy(batch, kv, aux, name=name, llm=llm, forward=forward):
                seen[name] = threads_of(llm)
                return forward(batch, kv, aux)

            llm.model.forward = spy
            llm.generate("x", SamplingParams(max_tokens=2))
        assert seen == {"two": 2, "one": 1}
        assert threads_of(one) == torch.get_num_threads() == 1, "the program around them keeps its number"


def test_two_engines_live_side_by_side():
    with LLM("demo", threads=1) as one, LLM("demo", threads=1, block_size=32, prefix_cache="hash") as two:
        requests = [engine.add_request("def f(", GREEDY) for engine in (one, two)]
        texts = {}
        while not (one.idle and two.idle):
            for engine in (one, two):
                for output in engine.step():
                    texts[output.request_id] = output.outputs[0].text
        assert texts[requests[0]] == texts[requests[1]] != ""


def test_a_step_that_raises_ends_its_requests_and_not_the_engine(llm, monkeypatch):
    def broken(*args):
        raise RuntimeError("the kernel said no")

    model = llm._engine.model
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        [output] = llm.generate("def f(", GREEDY)
        assert output.outputs[0].finish_reason == "error" and "log" in output.outputs[0].error
    assert llm.generate("def f(", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_program_may_end_while_a_step_runs():
    """Nobody closed the engine: an error ended the program, say. It must not end it with an abort of its own."""
    code = (
        "from quire import LLM, SamplingParams\n"
        "llm = LLM('demo', async_scheduling=True)\n"
        "stream = llm.stream('x', SamplingParams(max_tokens=500, ignore_eos=True))\n"
        "[next(stream) for _ in range(20)]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_step_in_flight_behind_a_stop_token_leaves_nothing_held(llm):
    stop = llm.generate("def f(", GREEDY)[0].outputs[0].token_ids[3]
    other = LLM("demo", async_scheduling=True, check_invariants=True)
    [output] = other.generate("def f(", SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop]))
    assert output.outputs[0].finish_reason == "stop"
    kv = other._engine.scheduler.kv
    assert kv.num_available == kv.num_usable
    other.close()


def test_ctrl_c_waits_for_the_end_of_the_step_and_leaves_an_engine_that_works(llm, monkeypatch):
    expected = llm.generate("def f(", GREEDY)[0].outputs[0].text
    scheduler = llm._engine.scheduler
    commit, finished = scheduler.commit, []

    def pressed(*args):
        signal.raise_signal(signal.SIGINT)
        finished.append(commit(*args))
        return finished[-1]

    other = llm.add_request("def f(", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "commit", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["def f(", "class"], GREEDY)
    assert len(finished) == 1, "the step ran to its end, and was the last one"
    while not llm.idle:
        outputs = {output.request_id: output.outputs[0].text for output in llm.step()}
    assert outputs == {other: expected}, "a request that was not interrupted goes on"


def test_a_streams_outputs_go_to_the_stream_alone(llm):
    stream = llm.stream("class A:", SamplingParams(max_tokens=10, seed=5, ignore_eos=True))
    text = next(stream).outputs[0].delta
    assert llm.step() == [] and llm.step() == []
    for output in stream:
        text += output.outputs[0].delta
    assert text == output.outputs[0].text and output.finished and len(output.outputs[0].token_ids) == 10
    stream = llm.stream(
        "class A:",
        SamplingParams(max_tokens=100, ignore_eos=True),
    )
    request_id = next(stream).request_id
    assert llm.abort(request_id) == []
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    assert llm.idle


def test_the_counters_know_requests_that_a_stop_string_ended(llm):
    [free] = llm.generate("def f(", GREEDY)
    before = llm.stats.cached_tokens
    stop = free.outputs[0].text[7:12]
    [output] = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=12, stop=[stop]))
    assert output.outputs[0].finish_reason == "stop" and output.cached_tokens > 0
    assert llm.stats.cached_tokens - before == output.cached_tokens
    assert (llm.stats.running, llm.stats.waiting) == (0, 0)


def test_logits_that_are_not_finite_end_that_request_alone(llm):
    table = llm._engine.model.embedding
    healthy = llm.generate("def f(", GREEDY)[0].outputs[0].text
    poisoned_token = 4000
    original = type(table).__call__

    def poisoned(self, ids):
        rows = original(self, ids)
        return torch.where((ids == poisoned_token)[:, None], torch.nan, rows).to(rows.dtype)

    type(table).__call__ = poisoned
    try:
        bad = [11, 12, 13, *llm.tokenizer.encode("def f(") * 12, poisoned_token, 7]
        outputs = llm.generate([bad, llm.tokenizer.encode("def f(")], GREEDY)
        again = llm.generate([bad], GREEDY)[0]
    finally:
        type(table).__call__ = original
    assert outputs[0].outputs[0].finish_reason == "error" and "finite" in outputs[0].outputs[0].error
    assert outputs[1].outputs[0].text == healthy
    assert again.cached_tokens == 0, "blocks of a request that met a NaN are never shared"
    assert llm.generate(["def f("] * 8, GREEDY)[7].outputs[0].text == healthy, "poisoned blocks do no harm"


# -- what people see of it ---------------------------------------------------------------------------------------


def test_it_says_what_it_is_and_what_it_takes(llm):
    assert repr(llm).startswith("<LLM 'demo': 4,000,512 parameters, ") and llm.get_tokenizer() is llm.tokenizer
    options = inspect.signature(LLM).parameters
    assert options["max_num_seqs"].default == 64 and "preset" in options and "options" not in options
    assert inspect.signature(AsyncLLM).parameters == options
    assert {"LLM", "AsyncLLM", "RequestOutput"} <= {*dir(quire)}


def test_an_unknown_sampling_parameter_names_the_nearest():
    with pytest.raises(TypeError, match="no parameter 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)


def test_a_chat_template_that_is_not_valid_stops_chats_alone(tmp_path):
    folder = shutil.copytree(resolve("demo", None), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")
    with LLM(str(folder), threads=1) as llm:
        assert [note for note in llm.notes if note.startswith("chats are refused: ")]
        with pytest.raises(ChatTemplateError, match=re.escape(str(folder / "chat_template.jinja"))):
            llm.chat([{"role": "user", "content": "x"}])
        assert llm.generate("def f(", GREEDY)[0].outputs[0].finish_reason in ("stop", "length")


def test_a_checkpoint_without_a_tokenizer_says_so_when_it_is_loaded(tmp_path):
    folder = shutil.copytree(resolve("demo", None), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with LLM(str(folder), threads=1) as llm:
        assert [note for note in llm.notes if note.startswith("the checkpoint has no tokenizer.json")]
        assert llm.generate([5, 9], GREEDY)[0].outputs[0].token_ids
