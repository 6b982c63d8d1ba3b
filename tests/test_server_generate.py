"""The routes for text, over a real uvicorn server: official clients, raw sockets, and an engine that can be told what
to do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import log
from quire.errors import (
    ChatTemplateError,
    EngineClosedError,
    PromptTooLongError,
    TokenizerTimeoutError,
    TokenizerUnavailableError,
)
from quire.server import generation
from quire.server.app import create_app
from quire.server.auth import Tenants
from quire.server.config import ServerConfig
from quire.server.context import AppContext
from quire.server.metrics import Metrics
from quire.server.transport import HttpServer, make_server
from quire.text.reply_syntax import ReplySyntax
from tests.server_fakes import FakeEngineClient, FakeTokenizerPool, Script, expected_ids, expected_text

SECONDS = 60.0
"""Nothing that a test waits for takes longer."""
LETTERS = [97 + position % 26 for position in range(50_000)]


class Client(FakeEngineClient):
    """The fake engine, with a tokenizer of bytes."""

    tokenizer = SimpleNamespace(token_text=chr, token_bytes=lambda token: bytes([token]))


@dataclass
class Served:
    """A server that runs in this event loop."""

    context: AppContext
    port: int
    http: httpx2.AsyncClient
    server: HttpServer

    @property
    def client(self) -> Client:
        return self.context.client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)

    async def post(self, path: str, body: object, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return await self.http.post(self.url + path, content=content, headers=headers)

    async def complete(self, **options: object) -> httpx2.Response:
        return await self.post("/v1/completions", {"model": "demo", "prompt": "abc", "seed": 1, **options})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels; 0 where there are none."""
        families = text_string_to_metric_families(self.context.metrics.render([])[0].decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def waiting(self) -> tuple[float, float]:
        """What the queue bound holds, in requests and tokens."""
        return self.metric("quire:queued_requests"), self.metric("quire:queued_tokens")


@contextlib.asynccontextmanager
async def serving(*keys: str, pool: FakeTokenizerPool | None = None, **options: object) -> AsyncIterator[Served]:
    context = AppContext(
        server=ServerConfig(port=0, api_key=keys, **options),
        client=Client(),
        metrics=Metrics(),
        model_names=("demo", "other-name"),
        tenants=Tenants(keys),
        pool=pool or FakeTokenizerPool(),
    )
    server = make_server(create_app(context))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)  # so that who does not read is soon noticed
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=SECONDS, limits=limits) as http:
            yield Served(context, listener.getsockname()[1], http, server)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, SECONDS)
        listener.close()


async def until(condition, what: str = "") -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def events_of(body: bytes) -> list[object]:
    """A stream's events, comments left out; every one of them must be well-formed."""
    found = []
    assert body.endswith(b"\n\n")
    for event in body.removesuffix(b"\n\n").split(b"\n\n"):
        if event.startswith(b":"):
            continue
        assert event.startswith(b"data: ") and b"\n" not in event
        data = event.removeprefix(b"data: ")
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    assert found.count("[DONE]") == 1 and found[-1] == "[DONE]"
    return found[:-1]


def text_of(events: list) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.fixture
def lines():
    """Lines that were logged for requests, as (text, fields)."""
    found: list[tuple[str, dict]] = []

    class Handler(logging.Handler):
        def emit(self, record):
            name, fields = getattr(record, "event_name", "log"), getattr(record, "event_fields", {})
            found.append((record.getMessage(), {"event": name, **fields}))

    handler, logger = Handler(), logging.getLogger("quire.server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def requests_in(lines) -> list[dict]:
    return [fields for _, fields in lines if fields["event"] == "request"]


# -- answers -------------------------------------------------------------------------------------------------


async def test_a_completion_through_the_official_client():
    async with serving() as served, served.openai() as client:
        answer = await client.completions.create(model="demo", prompt="abc", max_tokens=6, seed=3)
    assert answer.choices[0].text == expected_text("abc", 6, seed=3)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.system_fingerprint == "fp_0123456789abcdef"
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", answer.id)


async def test_the_synchronous_client_works_too():
    async with serving() as served:

        def ask():
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
                messages = [{"role": "user", "content": "hi"}]
                answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=4, seed=0)
                stream = client.chat.completions.create(
                    model="demo", messages=messages, max_tokens=4, seed=0, stream=True
                )
                return answer.choices[0].message.content, [chunk.choices[0].delta.content for chunk in stream]

        whole, parts = await asyncio.to_thread(ask)
    assert whole == "".join(part or "" for part in parts) == expected_text("<user>hi\n<assistant>", 4)


async def test_a_stream_equals_the_whole_answer():
    async with serving() as served, served.openai() as client:
        served.client.script = Script(cached=2)
        options = {"model": "demo", "prompt": ["abc", "xyz", "de"], "n": 2, "max_tokens": 9, "seed": 5}
        options |= {"logprobs": 2, "stop": ["q"]}
        whole = await client.completions.create(**options)
        texts, tokens, reasons = [""] * 6, [[] for _ in range(6)], [None] * 6
        usage = None
        stream = await client.completions.create(**options, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            assert usage is None, "the usage comes last"
            usage = chunk.usage
            for choice in chunk.choices:
                assert reasons[choice.index] is None, "nothing comes after a choice's end"
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
                reasons[choice.index] = choice.finish_reason
    ordered = sorted(whole.choices, key=lambda choice: choice.index)
    assert [choice.index for choice in ordered] == list(range(6))
    assert texts == [choice.text for choice in ordered]
    assert tokens == [choice.logprobs.tokens for choice in ordered]
    assert reasons == [choice.finish_reason for choice in ordered]
    assert usage.prompt_tokens == whole.usage.prompt_tokens == 8
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens_details.cached_tokens == 6


async def test_a_stream_has_its_headers_at_once_and_one_end():
    async with serving() as served:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate)
        body = {"prompt": "abc", "stream": True, "max_tokens": 5, "seed": 1}
        async with served.http.stream("POST", served.url + "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["x-request-id"]
            assert not served.client.calls[0].output.outputs[0].token_ids
            gate.set()
            events = events_of(await answer.aread())
    assert text_of(events) == expected_text("abc", 5, seed=1)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"


async def test_unknown_fields_are_named_in_a_header_and_logged_once(lines, monkeypatch):
    monkeypatch.setattr(generation, "MAX_IGNORED_NAMES", 3)
    async with serving() as served:
        answer = await served.complete(nobody_knows=1, **{"evil\r\nx-injected: 1": 2}, max_tokens=2)
        assert answer.status_code == 200
        assert answer.headers["x-quire-ignored"].startswith("nobody_knows, ")
        assert "x-injected" not in answer.headers
        stream = await served.complete(nobody_knows=1, also_this=1, and_this=2, max_tokens=2, stream=True)
        assert stream.headers["x-quire-ignored"] == "nobody_knows, also_this, and_this"
    named = [fields["field"] for _, fields in lines if fields["event"] == "ignored_field"]
    assert named.count("nobody_knows") == 1 and len(named) == 3


async def test_hints_that_the_models_template_has_no_use_for_are_named_by_their_fields(lines):
    async with serving(pool=FakeTokenizerPool(unused=("enable_thinking", "reasoning_effort", "mood"))) as served:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "thinking": {"type": "enabled"}}
        asked["chat_template_kwargs"] = {"mood": "calm", "used": True}
        for path, hint, named in (
            ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
            ("/v1/chat/completions", {"reasoning": {"effort": "low"}, "stream": True}, "reasoning.effort"),
            ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
            ("/tokenize", {"reasoning_effort": "low", "max_tokens": None}, "reasoning_effort"),
        ):
            answer = await served.post(path, asked | hint)
            assert answer.status_code == 200, answer.text
            told = set(answer.headers["x-quire-ignored"].split(", "))
            assert told == {named, "thinking", "chat_template_kwargs.mood"}
        served.context.pool.reply_syntax = ReplySyntax()  # without reasoning
        budget = {"thinking": {"type": "enabled", "budget_tokens": 5}}
        told = (await served.post("/v1/chat/completions", asked | budget)).headers["x-quire-ignored"]
        assert "thinking.budget_tokens" in told
    assert {"thinking", "chat_template_kwargs.mood"} <= {fields.get("field") for _, fields in lines}


async def test_max_tokens_beyond_the_context_is_clamped_and_said():
    async with serving() as served:
        answer = await served.complete(prompt="x" * 250, max_tokens=100)
        assert answer.headers["x-quire-clamped"] == "max_tokens=6"
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert "x-quire-clamped" not in (await served.complete(max_tokens=3)).headers


async def test_scoring_a_prompt_makes_no_token_and_leaves_the_queue():
    async with serving() as served:
        answer = await served.complete(echo=True, logprobs=1, max_tokens=0)
        choice = answer.json()["choices"][0]
        assert choice["text"] == "abc" and len(choice["logprobs"]["tokens"]) == 3
        assert choice["logprobs"]["token_logprobs"][0] is None
        ids = await served.complete(prompt=[100, 101], echo=True, max_tokens=1)
        assert ids.json()["choices"][0]["text"].startswith("de")
        assert served.waiting() == (0, 0)


async def test_what_the_engine_is_told():
    async with serving("first", "second") as served, served.openai("second") as client:
        await client.completions.create(
            model="other-name", prompt="abc", max_tokens=2, extra_body={"bad_words": ["no"], "cache_salt": "s"}
        )
        call = served.client.calls[0]
        assert call.owner == served.context.tenants.find([b"Bearer second"]).owner != ""
        assert re.fullmatch(r"cmpl-[0-9a-f]{24}", call.name)
        assert call.prepared.bad_words == [[110, 111]]
        assert call.prepared.params.cache_salt == "s"
        assert call.prepared.params.seed is not None


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.quick(
    "False-body1-400-context_length_exceeded",
    "False-body2-400-empty_prompt",
    "False-body3-400-token_out_of_range",
    "False-body5-400-token_out_of_range",
    "False-{-400-invalid_json",
    "False-body7-400-invalid_type",
    "True-body0-404-model_not_found",
    "True-body4-400-invalid_value",
)
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nobody", "prompt": "a"}, 404, "model_not_found"),
        ({"prompt": "a" * 256}, 400, "context_length_exceeded"),
        ({"prompt": ""}, 400, "empty_prompt"),
        ({"prompt": [1, 100_000]}, 400, "token_out_of_range"),
        ({"prompt": "a", "top_p": 0}, 400, "invalid_value"),
        ({"prompt": "a", "stop_token_ids": [100_000]}, 400, "token_out_of_range"),
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_a_status_and_openais_shape_also_where_a_stream_was_asked_for(body, status, code, stream):
    async with serving() as served:
        if isinstance(body, dict):
            body = {**body, "stream": stream}
        answer = await served.post("/v1/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert served.waiting() == (0, 0)
        assert not served.client.calls


async def test_refusals_are_counted_by_reason_and_logged_with_their_status(lines):
    async with serving(max_body_bytes=2000) as served:
        await served.post("/v1/completions", {"model": "nobody", "prompt": "a"})
        await served.post("/v1/completions", {"prompt": "a" * 300})
        await served.post("/v1/completions", b"x" * 3000)
        await served.post("/v1/chat/completions", b"?")
        for reason in ("unknown_model", "context_length", "too_large", "invalid"):
            assert served.metric("quire:requests_rejected_total", reason=reason) == 1, reason
    assert [fields["reason"] for fields in requests_in(lines)] == [
        "refused 404",
        "refused 400",
        "refused 413",
        "refused 400",
    ]


async def test_a_prompt_of_several_that_is_bad_is_named():
    async with serving() as served:
        answer = await served.post("/v1/completions", {"prompt": ["a", "b" * 300]})
    assert answer.status_code == 400 and "prompt 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TokenizerTimeoutError("tokenizing took longer than 10 s"), "tokenizer_timeout"),
        (ChatTemplateError("the chat template refuses these messages: no"), "chat_template_error"),
        (PromptTooLongError("the prompt has 9 bytes", param="prompt"), "context_length_exceeded"),
    ],
)
async def test_what_the_tokenizer_refuses_is_a_400(error, code):
    async with serving(pool=FakeTokenizerPool(raises=error)) as served:
        answer = await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert answer.json()["error"]["param"] in (None, "messages")
        assert served.waiting() == (0, 0)


async def test_a_request_whose_tokenizers_were_stopped_is_told_to_try_again():
    error = TokenizerUnavailableError("two tokenizer workers were stopped or killed; try again")
    async with serving(pool=FakeTokenizerPool(raises=error)) as served:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            answer = await served.post(path, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "tokenizer_unavailable")
            assert int(answer.headers["retry-after"]) > 0


async def test_an_unexpected_error_is_a_500_that_tells_nothing_and_harms_nobody(lines):
    async with serving() as served:
        served.client.script = lambda ids: Script(raises=ValueError("/secret/path") if ids == [98] else None)
        bad = await served.complete(prompt="b")
        assert bad.status_code == 500 and b"secret" not in bad.content
        streamed = await served.complete(prompt="b", stream=True)
        assert streamed.status_code == 200 and b"secret" not in streamed.content
        [event] = events_of(streamed.content)
        assert event["error"]["code"] == "internal_error"
        assert (await served.complete()).status_code == 200
        assert served.waiting() == (0, 0)
    assert [fields["reason"] for fields in requests_in(lines)] == ["error", "error", "length"]


async def test_an_engine_that_is_gone_is_a_503_or_an_error_event():
    async with serving() as served:
        served.client.script = Script(raises=EngineClosedError("killed by signal 9 in /somewhere/private"))
        whole = await served.complete()
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in whole.headers and b"private" not in whole.content
        [event] = events_of((await served.complete(stream=True)).content)
        assert event["error"]["code"] == "engine_unavailable"
        assert served.waiting() == (0, 0)


async def test_a_large_body_is_parsed_aside_and_gives_the_same_answer(monkeypatch):
    async with serving() as served:
        usual = (await served.complete()).json()["choices"]
        monkeypatch.setattr(generation, "SMALL_BODY_BYTES", 10)
        assert (await served.complete()).json()["choices"] == usual
        assert (await served.post("/v1/completions", b"{" * 20)).status_code == 400


async def test_a_choice_that_fails_is_a_500_or_an_error_event():
    async with serving() as served:
        served.client.script = Script(fail_at=3, error="the engine ran out of luck")
        whole = await served.complete(max_tokens=9)
        assert whole.status_code == 500
        assert whole.json()["error"]["message"] == "the engine ran out of luck"
        events = events_of((await served.complete(max_tokens=9, stream=True)).content)
        assert events[-1]["error"]["message"] == "the engine ran out of luck"
        assert text_of(events[:-1]) == expected_text("abc", 3, seed=1)
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
        several = events_of((await served.complete(prompt=["abc", "x"], max_tokens=9, stream=True)).content)
        assert "error" in several[-1] and sum("error" in event for event in several) == 1
        assert not served.client.open_calls


# -- the queue bound -----------------------------------------------------------------------------------------


async def test_beyond_the_bound_calls_are_refused_until_one_has_its_first_token():
    async with serving(max_queued_requests=2) as served:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate, gate_at=0)
        waiting = [asyncio.create_task(served.complete(max_tokens=2)) for _ in range(2)]
        await until(lambda: len(served.client.calls) == 2)
        assert served.waiting() == (2, 6)
        refused = await served.complete()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await served.post("/tokenize", {"prompt": "a"})).status_code == 429
        assert served.metric("quire:requests_rejected_total", reason="queue_requests") == 2
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert served.waiting() == (0, 0)
        assert (await served.complete()).status_code == 200


async def test_what_has_begun_to_answer_waits_no_more():
    async with serving(max_queued_requests=1) as served:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate, gate_at=1)
        first = asyncio.create_task(served.complete(max_tokens=5))
        await until(lambda: served.client.calls and served.client.calls[0].output.outputs[0].token_ids)
        await until(lambda: served.waiting() == (0, 0))
        second = asyncio.create_task(served.complete(max_tokens=5))
        await until(lambda: len(served.client.calls) == 2)
        gate.set()
        assert (await first).status_code == (await second).status_code == 200


async def test_calls_are_refused_before_they_are_tokenized():
    pool = FakeTokenizerPool(gate=asyncio.Event())
    async with serving(pool=pool, max_queued_tokens=50) as served:
        first = asyncio.create_task(served.complete(prompt="x" * 90))
        await until(lambda: len(pool.calls) == 1)
        assert (await served.complete(prompt="x" * 90)).status_code == 429
        assert len(pool.calls) == 1
        pool.gate.set()
        assert (await first).status_code == 200


async def test_a_call_larger_than_the_bound_runs_when_nothing_waits():
    async with serving(max_queued_tokens=10) as served:
        assert (await served.complete(prompt="x" * 200)).status_code == 200


async def test_a_key_that_floods_the_queue_does_not_keep_another_ones_request_out():
    """Nine calls of 128 choices are more than the whole queue holds."""
    async with serving("operator", "flood", "other") as served:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate, gate_at=0)

        async def ask(key, n):
            return await served.post("/v1/completions", {"prompt": "abc", "n": n}, authorization=f"Bearer {key}")

        flood = [asyncio.create_task(ask("flood", 128)) for _ in range(8)]
        await until(lambda: served.waiting()[0] == 1024)
        refused = await ask("flood", 128)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        other = asyncio.create_task(ask("other", 1))
        await until(lambda: len(served.client.calls) == 9)
        owners = {served.context.tenants.find([f"Bearer {key}".encode()]).owner for key in ("flood", "other")}
        assert {call.owner for call in served.client.calls} == owners and len(owners) == 2
        assert (await ask("flood", 1)).status_code == 429
        gate.set()
        assert (await other).status_code == 200
        assert {(await answer).status_code for answer in flood} == {200}
        assert served.waiting() == (0, 0)


async def test_without_keys_an_address_that_floods_the_queue_does_not_keep_anothers_request_out():
    """Neither does it take its turns in the engine; of what is cached, all are one tenant."""
    transport = httpx2.AsyncHTTPTransport(local_address="127.0.0.2")
    async with serving() as served, httpx2.AsyncClient(timeout=SECONDS, transport=transport) as other:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate, gate_at=0)
        flood = [asyncio.create_task(served.complete(n=128)) for _ in range(8)]
        await until(lambda: served.waiting()[0] == 1024)
        assert (await served.complete(n=128)).status_code == 429
        task = asyncio.create_task(other.post(f"{served.url}/v1/completions", json={"prompt": "abc", "max_tokens": 1}))
        await until(lambda: len(served.client.calls) == 9)
        assert {(call.owner, call.queue) for call in served.client.calls} == {("", "127.0.0.1"), ("", "127.0.0.2")}
        gate.set()
        assert (await task).status_code == 200
        assert {(await answer).status_code for answer in flood} == {200}


# -- what ends a call early ----------------------------------------------------------------------------------


async def test_when_the_server_leaves_its_last_requests_return_what_they_have(lines):
    async with serving() as served:
        served.client.script = Script(gate=asyncio.Event(), gate_at=4)
        ways = {"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}
        whole, stream = (asyncio.create_task(served.complete(max_tokens=9, **way)) for way in ways)
        await until(lambda: [len(call.output.outputs[0].token_ids) for call in served.client.calls] == [4, 4])
        served.context.stop()
        partial = expected_text("abc", 4, seed=1)
        answer = (await whole).json()
        assert ((await whole).status_code, answer["usage"]["completion_tokens"]) == (200, 4)
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [(partial, "abort")]
        *events, usage = events_of((await stream).content)
        assert (text_of(events), events[-1]["choices"][0]["finish_reason"]) == (partial, "abort")
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
        assert (await stream).content.endswith(b"data: [DONE]\n\n")
        assert served.waiting() == (0, 0)
    assert [fields["reason"] for fields in requests_in(lines)] == ["abort", "abort"]


async def test_a_chat_that_the_servers_end_cuts_off_returns_what_it_has_too():
    async with serving() as served, served.openai() as client:
        served.client.script = Script(gate=asyncio.Event(), gate_at=4)
        messages = [{"role": "user", "content": "hi"}]
        ask = client.chat.completions.create(model="demo", messages=messages, max_tokens=9, seed=1, n=2)
        asking = asyncio.create_task(ask)
        await until(lambda: served.client.calls and len(served.client.calls[0].output.outputs[1].token_ids) == 4)
        served.context.stop()
        choices = (await asking).choices
        assert [choice.finish_reason for choice in choices] == ["abort", "abort"]
        assert all(len(choice.message.content) == 4 for choice in choices)


async def test_what_has_nothing_yet_when_the_server_leaves_is_told_to_try_elsewhere():
    pool = FakeTokenizerPool(gate=asyncio.Event())
    async with serving(pool=pool) as served:
        served.client.script = Script(gate=asyncio.Event(), gate_at=0)
        tokenizing = [asyncio.create_task(served.complete(max_tokens=9, stream=stream)) for stream in (False, True)]
        ids = [asyncio.create_task(served.complete(prompt=[1, 2], max_tokens=9, stream=way)) for way in (False, True)]
        await until(lambda: len(served.client.calls) == 2 and len(pool.calls) == 2)
        served.context.stop()
        for answer in [await tokenizing[0], await tokenizing[1], await ids[0]]:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in answer.headers
        [event] = events_of((await ids[1]).content)  # it has begun to answer
        assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("", "abort")
        assert served.waiting() == (0, 0)


async def test_aborting_by_the_responses_id():
    async with serving("first", "second") as served, served.openai("first") as client:
        served.client.script = Script(gate=asyncio.Event(), gate_at=2)
        stream = await client.completions.create(model="demo", prompt="abc", max_tokens=9, stream=True)
        chunk = await anext(stream)
        path = f"/abort/{chunk.id}"
        assert (await served.post(path, b"", authorization="Bearer second")).status_code == 404
        aborted = await served.post(path, b"", authorization="Bearer first")
        assert (aborted.status_code, aborted.json()) == (200, {"aborted": True})
        rest = [chunk async for chunk in stream]
        assert rest[-1].choices[0].finish_reason == "abort"
        again = await served.post(path, b"", authorization="Bearer first")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_response")
        for name in ("x", "cmpl-", "a" * 5000, "%00", "..%2f"):
            assert (await served.post(f"/abort/{name}", b"", authorization="Bearer first")).status_code == 404


async def raw_post(
    port: int, path: str, body: dict, receive_buffer: int | None = None, *, name: str = ""
) -> socket.socket:
    """A connection that has sent a request and reads nothing yet."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-request-id: {name}\r\n"
    await loop.sock_sendall(connection, head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed_at_once(stream, lines):
    async with serving() as served:
        served.client.script = Script(gate=asyncio.Event(), gate_at=1)
        connection = await raw_post(served.port, "/v1/completions", {"prompt": "abc", "stream": stream}, name="me")
        await until(lambda: served.client.calls and served.client.calls[0].output.outputs[0].token_ids)
        connection.close()
        await until(lambda: not served.client.open_calls)
        await until(lambda: requests_in(lines))
        assert served.client.calls[0].aborted
        assert served.waiting() == (0, 0)
        assert served.metric("quire:disconnects_total") == 1
        assert served.metric("vllm:request_success_total", finished_reason="abort") == 1
    [line] = requests_in(lines)
    assert (line["reason"], line["request_id"]) == ("disconnect", "me")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_noticed_too(path, lines):
    async with serving(pool=FakeTokenizerPool(seconds=60)) as served:
        connection = await raw_post(served.port, path, {"prompt": "abc"})
        await until(lambda: served.waiting()[0] == 1)
        connection.close()
        await until(lambda: served.waiting() == (0, 0))
        await until(lambda: requests_in(lines))
    assert requests_in(lines)[0]["reason"] == "disconnect" and not served.client.calls


# -- books ---------------------------------------------------------------------------------------------------


async def test_one_line_tells_how_a_request_went(lines):
    async with serving() as served:
        served.client.script = Script(cached=2)
        await served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}, **{"x-request-id": "mine"})
        await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    first, second = requests_in(lines)
    assert first["request_id"] == "mine"
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (3, 2, 4)
    assert first["reason"] == "length" and 0 < first["first_token_seconds"] <= first["total_seconds"]
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", second["request_id"])
    facts = {one.name: first[one.name] for one in dataclasses.fields(log.RequestSummary)}
    assert lines[0][0] == log.request_line(log.RequestSummary(**facts))


@pytest.mark.quick(
    "/v1/completions--True",
    "/v1/completions-my-trace_1:2/3-True",
    "/v1/completions-nice try-True",
    "/v1/completions-given3-True",
    "/v1/completions-<b>-False",
    "/v1/completions-<b>-True",
    "/v1/chat/completions-my-trace_1:2/3-False",
    "/v1/chat/completions-two, of them-True",
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["", "my-trace_1:2/3", "nice try", "x" * 129, "<b>", "two, of them"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_header_body_and_log_carry_one_id(lines, path, given, stream):
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "abc"}
    async with serving("first", "second") as served:
        headers = {"authorization": "Bearer second"} | ({"x-request-id": given} if given else {})
        answer = await served.post(path, body | {"stream": stream, "user": "alice", "max_tokens": 2}, **headers)
        ids = {event["id"] for event in events_of(answer.content)} if stream else {answer.json()["id"]}
    [line] = requests_in(lines)
    assert ids == {answer.headers["x-request-id"]} == {line["request_id"]}
    made = re.fullmatch(r"(chat)?cmpl-[0-9a-f]{24}", line["request_id"])
    assert line["request_id"] == given if given == "my-trace_1:2/3" else made
    assert (line["path"], line["model"], line["key"], line["user"]) == (path, "demo", "key 2", "alice")


async def test_every_refusal_is_logged_with_its_id_path_and_key(lines):
    """Of all kinds, also where nothing but the header of a request was read."""
    async with serving("first", "second", max_body_bytes=2048, max_queued_requests=1) as served:
        key = {"authorization": "Bearer second"}
        served.client.script = Script(gate=asyncio.Event(), gate_at=0)
        waiting = asyncio.create_task(served.post("/v1/completions", {"prompt": "a"}, **key))
        await until(lambda: served.client.calls)
        ask = {"prompt": "abc", "user": "alice"}
        answers = {
            400: await served.post("/v1/completions", b"{", **key),
            401: await served.post("/v1/completions", ask),
            403: await served.http.get(served.url + "/metrics", headers=key),
            404: await served.post("/v1/completions", ask | {"model": "nobody"}, **key),
            405: await served.http.delete(served.url + "/v1/models", headers=key),
            413: await served.post("/v1/completions", b"x" * 4000, **key),
            415: await served.post("/v1/completions", b"x", **key | {"content-type": "text/plain"}),
            429: await served.post("/tokenize", {"prompt": "abc"}, **key),
        }
        served.client.draining = True
        answers[503] = await served.post("/v1/completions", ask, **key)
        served.client.draining = False
        served.client.script.gate.set()
        assert (await waiting).status_code == 200
    by_id = {line["request_id"]: (text, line) for text, line in lines if line["event"] == "request"}
    assert len(by_id) == len(answers) + 1
    for status, answer in answers.items():
        assert answer.status_code == status
        text, line = by_id[answer.headers["x-request-id"]]
        assert line["reason"] == f"refused {status}" and line["error"] == answer.json()["error"]["message"]
        assert line["path"] == answer.url.path and line["path"] in text and f"refused {status}" in text
        assert line["key"] == ("" if status == 401 else "key 2")
    _, line = by_id[answers[404].headers["x-request-id"]]
    assert (line["model"], line["user"]) == ("nobody", "alice")


async def test_what_is_asked_of_a_server_that_loads_is_no_line_a_probe(lines):
    async with serving() as served:
        served.client.state = "loading"
        assert (await served.http.get(served.url + "/health")).status_code == 503
        await served.post("/tokenize", {"prompt": "a"})
    assert [line["reason"] for line in requests_in(lines)] == ["refused 503"]


async def test_what_is_not_http_is_logged_with_the_id_that_the_client_gets(lines):
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"NONSENSE\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
    [line] = requests_in(lines)
    assert line["reason"] == "refused 400" and f"x-request-id: {line['request_id']}\r\n".encode() in answer


async def test_a_request_whose_body_breaks_off_has_one_line_and_one_id(lines):
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"x-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: served.metric("quire:http_requests_in_progress") == 1)
        writer.write(b"nonsense\r\n")
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        await until(lambda: requests_in(lines))
    [line] = requests_in(lines)
    assert (line["request_id"], line["reason"]) == ("mine", "refused 400") and b"x-request-id: mine\r\n" in answer


async def test_no_line_where_none_is_wanted(lines):
    async with serving(log_requests=False) as served:
        await served.complete()
    assert requests_in(lines) == []


async def test_metrics_count_tokens_gaps_and_choices():
    async with serving() as served:
        await served.complete(prompt=["abc", "x"], n=2, max_tokens=5)
        await served.complete(max_tokens=5, stream=True)
        metric = served.metric
        assert metric("vllm:time_to_first_token_seconds_count") == 2
        assert metric("vllm:inter_token_latency_seconds_count") == (2 * 2 + 1) * 4
        assert metric("vllm:request_prompt_tokens_sum") == 3 + 1 + 3
        assert metric("vllm:request_generation_tokens_sum") == 25
        assert metric("vllm:request_success_total", finished_reason="length") == 5


# -- tokenizing ----------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize():
    async with serving() as served:
        answer = await served.post("/tokenize", {"prompt": "abc", "return_token_strs": True, "strange": 1})
        assert answer.json() == {
            "count": 3,
            "max_model_len": 256,
            "tokens": [97, 98, 99],
            "token_strs": ["a", "b", "c"],
        }
        assert answer.headers["x-quire-ignored"] == "strange"
        chat = (await served.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})).json()
        assert bytes(chat["tokens"]) == b"<user>a\n<assistant>" and chat["token_strs"] is None
        assert (await served.post("/detokenize", {"tokens": [97, 98]})).json() == {"prompt": "ab"}
        bad = await served.post("/detokenize", {"tokens": [97, 300]})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "token_out_of_range")
        assert (await served.post("/tokenize", {"prompt": "a", "model": "nobody"})).status_code == 404
        assert (await served.post("/detokenize", {"tokens": "abc"})).status_code == 400
        assert served.waiting() == (0, 0)


# -- at random moments ---------------------------------------------------------------------------------------


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("seed", range(4))
async def test_whenever_clients_leave_everything_is_given_back(seed, lines):
    generator = random.Random(seed)
    pool = FakeTokenizerPool(seconds=0.003)
    async with serving(pool=pool, max_queued_requests=40) as served:
        served.client.script = lambda ids: Script(
            seconds=generator.choice([0.0, 0.001, 0.004]), fail_at=generator.choice([None, None, 3])
        )

        async def one():
            body = {
                "prompt": generator.choice(["abc", ["a", "b", "c"], [1, 2], "x" * 300]),
                "n": generator.choice([1, 1, 3]),
                "max_tokens": generator.randint(0, 30),
                "stream": generator.random() < 0.6,
            }
            connection = await raw_post(served.port, "/v1/completions", body)
            await asyncio.sleep(generator.choice([0.0, 0.005, 0.02, 0.05, 0.2]) * generator.random())
            connection.close()

        for _ in range(5):
            await asyncio.gather(*(one() for _ in range(16)))
        await until(lambda: not served.client.open_calls and len(requests_in(lines)) == 80)
        assert served.waiting() == (0, 0)
        assert all(call.ended != call.aborted for call in served.client.calls)
        assert served.metric("quire:http_requests_in_progress") == 0
        assert (await served.complete()).status_code in (200, 500)
    names = {fields["request_id"] for fields in requests_in(lines)}
    assert len(names) == 81, "one line each"


async def test_two_hundred_streams_at_once():
    async with serving() as served:
        answers = await asyncio.gather(
            *(served.complete(prompt=f"p{i}", max_tokens=8, stream=True) for i in range(200))
        )
    for i, answer in enumerate(answers):
        assert text_of(events_of(answer.content)) == expected_text(f"p{i}", 8, seed=1)


def test_the_fake_engine_is_what_these_tests_take_it_for():
    assert expected_ids([1], 3) == [98, 101, 104]
