"""`quire bench serve`: servers that fail, connections, and when requests are sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serve.driver import MOST_HOPELESS, Driver
from quire.bench.serve.openai_client import OpenAIClient
from quire.bench.serve.records import Record
from quire.bench.serve.summary import summarize
from quire.errors import BenchmarkError
from tests.load_stand_in import (
    Asked,
    Behaviour,
    Reply,
    answering,
    closed_port,
    config,
    load,
    one,
    prompt_tokens,
    stand_in,
    status,
    until,
    url_of,
)

# Servers that fail.


def sending(*events: bytes, close: bool = False) -> Behaviour:
    """These events as a stream, and its end, or a connection that closes."""

    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for event in events:
            await reply.event(event)
        if close:
            raise ConnectionError
        await reply.raw(b"0\r\n\r\n")

    return behave


async def _garbage(asked: Asked, reply: Reply) -> None:
    await reply.raw(b"\x00\xffnot http at all\r\n\r\n")


async def _endless_header(asked: Asked, reply: Reply) -> None:
    await reply.raw(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await reply.raw(b"x" * 65536)


async def _silence(asked: Asked, reply: Reply) -> None:
    await asyncio.sleep(60)


async def _close(asked: Asked, reply: Reply) -> None:
    raise ConnectionError


TEXT = b'data: {"choices": [{"text": " a"}]}\n\n'


@pytest.mark.parametrize(
    ("behave", "kind", "message"),
    [
        (status(500, b'{"error": {"message": "it broke"}}'), "http_500", "it broke"),
        (status(404, b'{"error": {"message": "no model x"}}'), "http_404", "no model x"),
        (status(400, b'{"detail": "odd"}'), "http_400", "odd"),
        (status(502, b"<h1>Bad\nGateway</h1>", "text/html"), "http_502", "<h1>Bad Gateway</h1>"),
        (status(500, b""), "http_500", "(no message)"),
        (status(200, b'{"choices": []}'), "not_a_stream", "application/json instead of text/event-stream"),
        (sending(TEXT, close=True), "closed", "in mid-answer"),
        (_close, "closed", "before it answered"),
        (_garbage, "garbage", "not HTTP"),
        (_endless_header, "garbage", "header is longer"),
        (sending(b"data: {]\n\n"), "garbage", "not what it should be"),
        (sending(b"data: [1]\n\n"), "garbage", "not what it should be"),
        (sending(b'data: {"choices": [{"text": 5}]}\n\n'), "garbage", "not what it should be"),
        (sending(TEXT), "cut_short", "without a finish reason"),
        (sending(TEXT, b'data: {"error": {"message": "out of memory"}}\n\n'), "error_in_stream", "out of memory"),
        (sending(b'data: {"object": "error", "message": "old style"}\n\n'), "error_in_stream", "old style"),
    ],
)
async def test_a_failure_has_a_kind_and_the_servers_own_words(behave: Behaviour, kind: str, message: str) -> None:
    found = await one(behave)
    assert found.error == kind
    assert message in found.message
    assert found.end >= found.sent


async def test_a_server_that_never_answers_times_out() -> None:
    found = await one(_silence, timeout=0.2)
    assert (found.error, found.message) == ("timeout", "not finished in 0.2 s (--timeout)")
    assert 0.19 <= found.e2e < 60


async def test_an_event_that_never_ends_is_given_up() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        while True:
            await reply.event(b"data: " + b"x" * 500_000)

    found = await one(behave)
    assert (found.error, "longer than" in found.message) == ("garbage", True)


async def test_a_server_that_is_not_there_is_given_up_after_some_tries() -> None:
    with closed_port() as held:
        driver = await load(config(url_of(held), num_requests=1000, concurrency=2))
    assert len(driver.records) <= MOST_HOPELESS + 2
    assert {found.error for found in driver.records} == {"connect"}
    assert driver.stopped is not None
    assert "connect" in driver.stopped


async def test_a_server_that_dies_in_mid_run_leaves_what_was_done() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        if len(server.asked) == 6:
            await reply.stream()
            await server.stop()
            raise ConnectionError
        await answering()(asked, reply)

    async with stand_in(behave) as server:
        driver = await load(config(server.url, num_requests=1000, concurrency=1))
    found = summarize(config(), driver.records, stopped=driver.stopped)
    assert found.succeeded == 5
    assert set(found.failures) == {"closed", "connect"}
    assert found.stopped is not None


async def test_refusals_before_any_success_end_the_run_but_overload_does_not() -> None:
    async with stand_in(status(404, b"{}")) as server:
        driver = await load(config(server.url, num_requests=50, concurrency=1))
    assert len(driver.records) == MOST_HOPELESS
    async with stand_in(status(429, b"{}")) as server:
        driver = await load(config(server.url, num_requests=50, concurrency=1))
    assert len(driver.records) == 50


async def test_a_warm_up_that_fails_ends_the_command_with_the_reason() -> None:
    async with stand_in(status(401, b'{"error": {"message": "no key"}}')) as server:
        with pytest.raises(BenchmarkError, match="http_401: no key; give the server's key with --api-key"):
            await load(config(server.url, warmup=1))


# Connections.


async def test_connections_are_kept_for_the_next_request() -> None:
    async with stand_in(answering()) as server:
        driver = await load(config(server.url, num_requests=30, concurrency=3))
        assert len(driver.records) == 30
        assert server.connections == 3
        await until(lambda: server.open == 0)


async def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_failure() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await answering()(asked, reply)
        raise ConnectionError  # close after each answer, without having said so

    async with stand_in(behave) as server:
        driver = await load(config(server.url, num_requests=20, concurrency=1))
    assert [found.error for found in driver.records] == [None] * 20


async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    ended = []

    async def behave(asked: Asked, reply: Reply) -> None:
        ended.append(await reply.reader.read())  # returns when the client closes

    async with stand_in(behave) as server:
        driver = await load(config(server.url, num_requests=3, timeout=0.1, concurrency=3))
        await until(lambda: ended == [b""] * len(server.asked) and server.open == 0)
    assert [found.error for found in driver.records] == ["timeout"] * 3


async def test_an_answer_after_100_continue_is_taken() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
        await answering()(asked, reply)

    assert (await one(behave)).error is None


# Loads.


async def test_a_closed_loop_keeps_so_many_requests_running_and_no_more() -> None:
    async with stand_in(answering(first=0.02)) as server:
        driver = await load(config(server.url, num_requests=20, concurrency=4))
    assert server.most_running == driver.most_running == 4
    assert len(driver.records) == 20


async def test_an_open_loop_waits_for_nobody() -> None:
    """The server answers none before all have come: a closed loop would stand still."""
    everybody = asyncio.Event()

    async def behave(asked: Asked, reply: Reply) -> None:
        if len(server.asked) == 12:
            everybody.set()
        await everybody.wait()
        await answering()(asked, reply)

    async with stand_in(behave) as server:
        driver = await load(config(server.url, num_requests=12, rate="200"))
    assert [found.error for found in driver.records] == [None] * 12
    assert driver.most_running == 12


async def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 8, "output_length": 2, "hash_ids": [at]} for at in (0, 400, 1000)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    async with stand_in(answering()) as server:
        driver = await load(config(server.url, trace=str(trace), speedup=4.0))
    due = [found.due for found in driver.records]
    assert all(at is not None for at in due)
    assert [at - due[0] for at in due] == pytest.approx([0.0, 0.1, 0.25])  # type: ignore[operator]
    assert all(found.sent >= found.due - 0.002 for found in driver.records if found.due is not None)


async def test_after_the_duration_nothing_new_is_sent_and_the_rest_ends_as_usual() -> None:
    async with stand_in(answering(first=0.2)) as server:
        driver = await load(config(server.url, duration=0.5, concurrency=2))
    assert driver.stopped is None
    assert {found.error for found in driver.records} == {None}
    assert 2 <= len(driver.records) <= 6  # two at a time, each at least 0.2 s long


async def test_a_run_that_is_stopped_breaks_off_what_is_in_flight() -> None:
    async with stand_in(_silence) as server:
        settings = config(server.url, num_requests=10, concurrency=4)
        client = OpenAIClient(settings)
        driver = Driver(settings, client)
        running = asyncio.create_task(driver.run())
        await until(lambda: len(server.asked) == 4)
        driver.stop("interrupted")
        await running
        await client.close()
    assert (driver.records, driver.broken_off, driver.running) == ([], 4, 0)
    assert client._http.connections.open == 0


async def test_the_warm_up_is_not_counted_and_shares_no_prefix_with_the_rest() -> None:
    async with stand_in(answering()) as server:
        driver = await load(config(server.url, num_requests=4, warmup=2, output_len="40"))
    assert len(driver.records) == 4
    first = [asked.body["prompt"][:3] for asked in server.asked]
    assert all(prefix not in first[2:] for prefix in first[:2])
    assert [asked.body["max_tokens"] for asked in server.asked] == [16, 16, 40, 40, 40, 40]


@pytest.mark.parametrize(
    ("endpoint", "prompt_type"), [("completions", "text"), ("completions", "ids"), ("chat", "text")]
)
async def test_each_turn_begins_with_all_that_was_said(endpoint: str, prompt_type: str) -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.token(" yes", token_ids=[7])
        await reply.token(" no", "length", token_ids=[8])
        await reply.usage(prompt_tokens(asked.body), 2)
        await reply.end()

    options = {"endpoint": endpoint, "prompt_type": prompt_type, "workload": "multi-turn", "turns": "3"}
    async with stand_in(behave) as server:
        driver = await load(config(server.url, conversations=1, output_len="2", **options))
    assert [found.turn for found in driver.records] == [0, 1, 2]
    assert [found.asked_input for found in driver.records] == [5, 12, 19]
    assert [prompt_tokens(asked.body) for asked in server.asked] == [5, 12, 19]
    bodies = [asked.body for asked in server.asked]
    if endpoint == "chat":
        said = {"role": "assistant", "content": " yes no"}
        assert bodies[2]["messages"][:-1] == [*bodies[1]["messages"], said]
    else:
        answer: Any = [7, 8] if prompt_type == "ids" else " yes no"
        before = bodies[1]["prompt"] + answer
        assert bodies[2]["prompt"][: len(before)] == before


async def test_a_conversation_ends_with_its_first_failure() -> None:
    async with stand_in(status(500, b"{}")) as server:
        driver = await load(config(server.url, workload="multi-turn", conversations=3, turns="4"))
    assert len(driver.records) == 3


async def test_token_id_conversations_need_a_server_that_sends_ids() -> None:
    found = await one_conversation(answering(), prompt_type="ids")
    assert (found.error, "--prompt-type text" in found.message) == ("no_token_ids", True)


async def one_conversation(behave: Behaviour, **options: Any) -> Record:
    async with stand_in(behave) as server:
        driver = await load(config(server.url, workload="multi-turn", conversations=1, turns="2", **options))
    [record] = driver.records
    return record


async def test_a_request_holds_what_was_asked_for() -> None:
    async with stand_in(answering()) as server:
        await load(config(server.url, num_requests=1, api_key="sk-1", extra_body='{"top_p": 0.5}', temperature=0.7))
    [asked] = server.asked
    assert asked.path == "/v1/completions"
    assert asked.headers["authorization"] == "Bearer sk-1"
    fields = {"model": "m", "stream": True, "temperature": 0.7, "ignore_eos": True, "max_tokens": 3, "top_p": 0.5}
    assert fields | {"stream_options": {"include_usage": True}, "prompt": asked.body["prompt"]} == asked.body
