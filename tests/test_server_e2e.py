"""`quire serve demo` as its users meet it: the official client, streams, determinism, many at once."""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
import socket

import openai
import pytest

from quire import LLM, SamplingParams
from tests.http_tools import CHECKED, EventStream, ServeProcess, listening_addresses, wait_until

PROMPTS = ["def fib(n):\n", "class Stack:\n", "import os\n", "for x in range(", "try:\n    pass\n"]
LONG = {"model": "demo", "max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server():
    with ServeProcess(*CHECKED, "--admin", "--max-queued-requests", "2048") as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1) as engine:
        yield engine


def nothing_is_left(server):
    """No request runs or waits, and no block is held."""
    stats = server.json("/view")["stats"]
    return not stats["running"] and not stats["waiting"] and not stats["held_blocks"]


# -- the official client --------------------------------------------------------------------------------------


def test_completion_and_stream_give_the_engines_own_tokens(client, llm):
    for prompt in PROMPTS:
        options = {"model": "demo", "prompt": prompt, "max_tokens": 30, "temperature": 0.8, "seed": 11}
        [expected] = llm.generate(prompt, SamplingParams(max_tokens=30, temperature=0.8, seed=11))
        whole = client.completions.create(**options)
        assert whole.choices[0].text == expected.outputs[0].text
        assert whole.usage.completion_tokens == len(expected.outputs[0].token_ids)
        assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
        parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        assert parts[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details}
        )
        assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == whole.choices[0].finish_reason


def test_chat_streams_what_it_returns_whole(client):
    options = {
        "model": "demo",
        "messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "def add(a, b):"}],
        "max_completion_tokens": 40,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    whole = client.chat.completions.create(**options)
    texts, logprobs = {}, {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
    assert [texts[choice.index] for choice in whole.choices] == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        assert logprobs[choice.index] == choice.logprobs.content
        assert "".join(entry.token for entry in choice.logprobs.content[:3]) in choice.message.content
    assert whole.system_fingerprint and len({choice.message.content for choice in whole.choices}) == 2


def test_echo_with_logprobs_and_no_tokens_scores_a_prompt_as_harnesses_do(client, llm):
    [direct] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0))
    expected = [None] + [
        entry[token].logprob
        for token, entry in zip(direct.prompt_token_ids[1:], direct.prompt_logprobs[1:], strict=True)
    ]
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model="demo", prompt=PROMPTS[0], max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
        )
        [choice] = answer.choices
        assert choice.text.startswith(PROMPTS[0]) and answer.usage.completion_tokens == max_tokens
        count = len(direct.prompt_token_ids)
        assert choice.logprobs.token_logprobs[:count] == pytest.approx(expected)
        assert "".join(choice.logprobs.tokens[:count]) == PROMPTS[0]
        assert len(choice.logprobs.tokens) == count + max_tokens


def test_every_form_of_prompt_gives_the_same_text(client, llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    options = {"model": "demo", "max_tokens": 12, "temperature": 0}
    one = client.completions.create(prompt=PROMPTS[0], **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == one
    for many in ([PROMPTS[0], PROMPTS[1]], [ids, llm.tokenizer.encode(PROMPTS[1])]):
        choices = client.completions.create(prompt=many, n=2, **options).choices
        assert [choice.index for choice in choices] == [0, 1, 2, 3]
        assert choices[0].text == choices[1].text == one != choices[2].text == choices[3].text


def test_cached_tokens_are_told(client):
    prompt = "x = 1\n" * 60
    first, second = (client.completions.create(model="demo", prompt=prompt, max_tokens=1) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens < 10
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_a_stream_that_is_closed_is_cancelled(server, client):
    stream = client.completions.create(
        prompt="def f():",
        stream=True,
        **{k: v for k, v in LONG.items() if k != "ignore_eos"},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: nothing_is_left(server))


def test_abort_ends_a_stream_from_outside(server):
    with server.stream("/v1/completions", {**LONG, "prompt": "x", "n": 4}) as stream:
        chunks = stream.chunks()
        name = next(chunks)["id"]
        assert server.post(f"/abort/{name}")[0] == 200
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons[-1] == "abort"
    assert server.post(f"/abort/{name}")[0] == 404


def test_the_errors_are_openais(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded" and "5000" in str(long.value)
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert tools.value.param == "tools" and "--tool-format" in str(tools.value)


def test_what_was_ignored_and_what_was_clamped_is_told(server):
    status, headers, body = server.post(
        "/v1/completions",
        {"model": "demo", "prompt": [5] * 2000, "max_tokens": 10**6, "no_such_field": 1, "stop": "\n", "seed": 1},
    )
    assert status == 200 and headers["x-quire-ignored"] == "no_such_field" and "x-quire-clamped" in headers
    assert json.loads(body)["choices"][0]["finish_reason"] in ("stop", "length")


# -- many at once ---------------------------------------------------------------------------------------------


def job(index):
    """One of a set of unlike requests, by its number."""
    rng = random.Random(index)
    return {
        "model": "demo",
        "prompt": rng.choice(PROMPTS) * rng.choice([1, 1, 2, 30]),
        "max_tokens": rng.choice([1, 4, 9, 16]),
        "temperature": rng.choice([0, 0.7, 1.2]),
        "top_p": rng.choice([1, 0.9]),
        "frequency_penalty": rng.choice([0, 0.5]),
        "seed": index,
        "n": rng.choice([1, 1, 2]),
        "stop": rng.choice([None, "\n\n", [" return", "="]]),
    }


def whole(server, index):
    answer = server.json("/v1/completions", job(index))
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def test_tokens_are_the_same_at_concurrency_1_and_64_streamed_or_not(server):
    def streamed(index):
        return server.stream("/v1/completions", job(index)).texts()

    order = 2 * [*range(16)]
    alone = [whole(server, index) for index in order[:16]]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        asked = [(pool.submit(whole, server, index), pool.submit(streamed, index)) for index in order]
    for index, (at_once, in_parts) in zip(order, asked, strict=True):
        assert at_once.result() == alone[index]
        assert in_parts.result() == {choice: text for choice, text, _ in alone[index]}


def test_200_streams_at_once_all_end_once(server):
    def run(index):
        events = list(server.stream("/v1/completions", {**job(index), "max_tokens": 8, "n": 1}).events())
        assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        assert [reason for reason in reasons if reason] == reasons[-1:]

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        list(pool.map(run, range(200)))
    wait_until(lambda: nothing_is_left(server))


def test_disconnects_at_random_moments_leave_no_block(server):
    def run(index):
        rng = random.Random(index)
        with server.stream(
            "/v1/completions", {**LONG, "prompt": PROMPTS[index % 5], "n": rng.choice([1, 3])}
        ) as stream:
            for _, _ in zip(range(rng.choice([0, 0, 1, 5, 40])), stream.events(), strict=False):
                pass

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(48)))
    wait_until(lambda: nothing_is_left(server))
    assert whole(server, 3) == whole(server, 3)


def test_a_reader_that_does_not_read_slows_nobody(server):
    def slow(body):
        return EventStream(server.port, "/v1/completions", {**LONG, "prompt": "x", "stream": True, **body}, buffer=4096)

    much = slow({"max_tokens": 300, "logprobs": 5, "n": 4})
    little = slow({"max_tokens": 60})
    for index in range(3):
        assert whole(server, index)
    wait_until(lambda: nothing_is_left(server))  # their tokens are made, and wait in bounded memory
    assert list(little.events())[-1] == "[DONE]"
    much.close()


# -- the server as a whole ------------------------------------------------------------------------------------


def test_it_listens_on_the_address_it_was_given_and_nowhere_else(server):
    assert listening_addresses(server.pids("all")) == {f"127.0.0.1:{server.port}"}


def test_metrics_add_up(server):
    before = server.metric("vllm:generation_tokens_total")
    made = sum(
        server.json("/v1/completions", job(index) | {"stop": None})["usage"]["completion_tokens"] for index in range(5)
    )
    wait_until(lambda: server.metric("vllm:generation_tokens_total") == before + made)


def test_one_line_tells_of_each_request(server):
    name = "my-id-17"
    answer = server.post("/v1/completions", job(1) | {"user": "alice"}, x_request_id=name)
    assert answer[1]["x-request-id"] == json.loads(answer[2])["id"] == name
    wait_until(lambda: name in server.stderr)
    [line] = [line for line in server.stderr.splitlines() if name in line]
    assert "/v1/completions, demo, user alice: " in line and re.search(r"prompt|cached|tok/s", line)


def patient(server, body):
    """An answer, asked for again while it is 503: an HTTP process may still start when another one is ready."""

    def ask():
        status, _, answer = server.post("/v1/completions", body)
        assert status in (200, 503), answer
        return json.loads(answer) if status == 200 else None

    return wait_until(ask)


def told(status):
    """The status, or None if it is that of an HTTP process which is not ready."""
    return None if status == 503 else status


def opened(stream):
    """The stream, or None if its HTTP process is not ready."""
    assert stream.status in (200, 503), stream.error
    return stream if stream.status == 200 else None


def test_several_http_processes_share_the_port_the_metrics_and_the_aborts():
    with ServeProcess("--api-workers", "3", "--admin") as server:
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda index: patient(server, job(index) | {"stop": None}), range(48)))
        made = sum(answer["usage"]["completion_tokens"] for answer in answers)
        # Whoever answers, once it knows the engine.
        wait_until(lambda: {server.metric("vllm:generation_tokens_total") for _ in range(6)} == {made})
        body = {**LONG, "prompt": "x", "n": 8}
        streams = [wait_until(lambda: opened(server.stream("/v1/completions", body))) for _ in range(6)]
        chunks = [stream.chunks() for stream in streams]
        for name in [next(one)["id"] for one in chunks]:
            status = wait_until(lambda name=name: told(server.post(f"/abort/{name}")[0]))
            assert status == 200
        wait_until(lambda: nothing_is_left(server))
        for stream in streams:
            stream.close()


# -- speculation ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drafts_change_no_answer_and_are_told_in_metrics_and_live_view(client):
    config = {"method": "ngram", "adaptive": False, "num_speculative_tokens": 3}
    options = {"model": "demo", "prompt": "x = 1\n" * 20, "max_tokens": 40, "temperature": 0.8, "seed": 5}
    expected = client.completions.create(**options).choices[0].text
    with ServeProcess(*CHECKED, "--speculative-config", json.dumps(config)) as server:
        assert server.json("/v1/completions", options | {"speculate": False})["choices"][0]["text"] == expected
        counts = drafts_in(server)
        assert not any(counts.values()) and counts.keys() >= {f"per_pos {position}" for position in range(3)}
        assert server.json("/v1/completions", options)["choices"][0]["text"] == expected
        counts = drafts_in(server)
        assert counts["draft_tokens"] >= counts["accepted_tokens"] > 0
        assert counts["accepted_tokens"] == sum(counts[f"per_pos {position}"] for position in range(3))
        view = server.json("/view")
        assert [view["stats"][name] for name in ("verifications", "drafted", "accepted", "draft_depth")] == [
            *(counts[name] for name in ("drafts", "draft_tokens", "accepted_tokens")), 3
        ]  # fmt: skip
        for name, count in (("drafted", counts["draft_tokens"]), ("accepted", counts["accepted_tokens"])):
            assert sum(step[name] for step in view["steps"]) == count
            plain, drafted = [one[name] for one in view["finished"]]
            assert plain == 0 < drafted <= count  # a last step may come too late for the request
        spans = [span for step in view["steps"] for span in step["spans"] if span[0] == view["finished"][1]["id"]]
        ends = [start + sampled for _, _, start, _, sampled, _ in spans[1:]]
        assert [start for _, _, start, *_ in spans[2:]] == ends[:-1]  # none begins at an upper bound
        assert server.json("/server_info")["engine_options"]["speculative_config"]["value"] == config


def drafts_in(server):
    """What `/metrics` says of drafts, by the part of the name that differs."""
    pattern = r'^vllm:spec_decode_num_(\w+)_total{.*?(?:position="(\d)")?} (\S+)$'
    found = re.findall(pattern, server.get("/metrics")[2].decode(), re.MULTILINE)
    return {f"per_pos {position}" if position else name: float(count) for name, position, count in found}


def test_connections_that_say_nothing_hold_nobody_up(server):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    assert server.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 2})[0] == 200
    for connection in silent:
        connection.close()
