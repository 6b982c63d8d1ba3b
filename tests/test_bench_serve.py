"""`quire bench serve`: what is measured, by the definitions, and what an answer says of its tokens."""

from __future__ import annotations

import asyncio

import pytest

from quire.bench.serve import table
from quire.bench.serve.summary import Distribution, summarize
from tests.load_stand_in import (
    Asked,
    Reply,
    answering,
    config,
    load,
    one,
    record,
    stand_in,
)

ABOUT = {"quire": "0", "date": "2026-01-01", "url": "http://127.0.0.1:1/v1", "model": "m"}


# What is measured.


def test_latencies_of_a_request_are_what_the_definitions_say() -> None:
    request = record(10.0, [10.5, 10.6, 10.9], 11.0, counts=[1, 1, 3])
    assert request.ttft == pytest.approx(0.5)
    assert request.e2e == pytest.approx(1.0)
    assert request.tpot == pytest.approx((1.0 - 0.5) / (5 - 1))
    assert request.gaps() == [(pytest.approx(0.1), 1), (pytest.approx(0.1), 3)]


def test_a_single_token_has_no_time_per_output_token() -> None:
    assert record(0.0, [0.5], 0.6).tpot is None


def test_the_servers_count_of_tokens_wins_over_the_chunks() -> None:
    assert record(0.0, [0.2, 0.4], 0.5, output_usage=4).tpot == pytest.approx(0.1)


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    found = Distribution.of([0.04, 0.01, 0.02, 0.03])
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.max) == pytest.approx((25.0, 25.0, 37.0, 40.0))
    assert found.p99 == pytest.approx(39.7)
    assert Distribution.of([]) is None


def test_a_chunk_of_several_tokens_counts_as_often_in_inter_token_latency() -> None:
    records = [record(0.0, [1.0, 1.1, 1.7], 1.7, counts=[1, 1, 3])]
    found = summarize(config(), records).latencies["itl"]
    assert found is not None
    assert found.count == 4
    assert found.mean == pytest.approx((100 + 3 * 200) / 4)


def test_throughput_is_of_what_succeeded_over_the_whole_time() -> None:
    records = [
        record(0.0, [0.5, 1.0], 1.0, prompt_tokens=7),
        record(1.0, [1.5], 4.0, error="timeout", message="too late"),
        record(0.5, [1.0, 2.0, 2.5, 3.0], 3.0, prompt_tokens=9),
    ]
    found = summarize(config(), records)
    assert (found.succeeded, found.failed, found.seconds) == (2, 1, 4.0)
    assert (found.requests_per_s, found.input_per_s, found.output_per_s, found.total_per_s) == (0.5, 4.0, 1.5, 5.5)
    assert found.failures["timeout"].count == 1
    assert found.failures["timeout"].message == "too late"


def test_goodput_counts_requests_that_met_every_target() -> None:
    records = [
        record(0.0, [0.1, 0.2], 0.2),  # both met
        record(0.0, [0.6, 0.7], 0.7),  # first token late
        record(0.0, [0.1, 0.5], 0.5),  # tokens slow
        record(0.0, [0.2], 2.0),  # a single token has no TPOT to miss
        record(0.0, [], 0.1, error="http_500"),
    ]
    found = summarize(config(goodput=("ttft:500", "tpot:100")), records).goodput
    assert found is not None
    assert (found.requests, found.share, found.per_s) == (2, pytest.approx(0.4), pytest.approx(1.0))


def test_a_run_without_a_single_request_still_has_a_report() -> None:
    found = summarize(config(goodput=("e2e:1",)), [])
    assert found.requests_per_s == 0.0
    assert "0 succeeded" in table.render(config(), found, ABOUT)


def test_the_rate_asked_and_the_rate_sent_are_both_reported() -> None:
    records = [record(at, [at + 0.1], at + 0.2, due=at - 0.01, output_usage=1) for at in (1.0, 1.5, 2.0, 3.0)]
    found = summarize(config(rate="2"), records)
    assert (found.asked_rate, found.sent_rate) == (2.0, 1.5)
    assert found.late_ms is not None
    assert found.late_ms.p99 == pytest.approx(10.0)
    assert found.notes == []


def test_a_client_that_cannot_keep_to_the_times_says_so() -> None:
    records = [record(at, [at + 0.1], at + 0.2, due=at - 0.06, output_usage=1) for at in (1.0, 1.5)]
    [note] = summarize(config(rate="2"), records).notes
    assert "2 of 2 requests were sent over 50 ms late" in note


async def test_delays_of_a_server_are_measured_as_they_are() -> None:
    async with stand_in(answering(first=0.15, gap=0.05)) as server:
        driver = await load(config(server.url, num_requests=4, concurrency=4, output_len="5"))
    for found in driver.records:
        assert found.error is None
        assert found.ttft is not None
        assert found.tpot is not None
        assert 0.149 <= found.ttft < found.e2e
        assert 0.348 <= found.e2e < 60
        assert found.e2e == pytest.approx(found.ttft + 4 * found.tpot)
        assert sum(gap for gap, _ in found.gaps()) == pytest.approx(found.times[-1] - found.times[0])


# What an answer says of its tokens.


async def test_token_ids_tell_how_many_tokens_a_chunk_carries() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.token(" a", token_ids=[5])
        await reply.token("", token_ids=[6])  # half of a character: no text yet
        await reply.token(" b c d", "length", token_ids=[7, 8, 9])
        await reply.usage(5, 5)
        await reply.end()

    found = await one(behave, return_token_ids=True)
    assert list(found.counts) == [1, 1, 3]


async def test_usage_that_runs_along_tells_how_many_tokens_a_chunk_carries() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.token("", usage={"prompt_tokens": 5, "completion_tokens": 0})
        await reply.token(" a", usage={"prompt_tokens": 5, "completion_tokens": 1})
        await reply.token(" b c", "length", usage={"prompt_tokens": 5, "completion_tokens": 3})
        await reply.end()

    assert list((await one(behave)).counts) == [1, 2]


async def test_a_total_in_the_last_chunk_is_not_taken_for_that_chunks_tokens() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.token(" a")
        await reply.token(" b")
        await reply.token("", "length", usage={"prompt_tokens": 5, "completion_tokens": 2})
        await reply.end()

    found = await one(behave)
    assert list(found.counts) == [1, 1]
    assert found.output_tokens == 2


async def test_without_usage_chunks_are_counted_and_the_report_says_so() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for text in (" a", " b", " c"):
            await reply.token(text)
        await reply.token("", "length")
        await reply.end()

    found = await one(behave)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (5, 3, None)
    settings = config()
    shown = summarize(settings, [found])
    assert any("no usage" in note and "counted chunks" in note for note in shown.notes)
    assert "the server does not tell" in table.render(settings, shown, ABOUT)


async def test_chunks_of_unknown_size_are_pointed_out() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.token(" a b c", "length")
        await reply.usage(5, 3)
        await reply.end()

    [note] = summarize(config(), [await one(behave)]).notes
    assert "1 of 3 output tokens" in note
    assert "--return-token-ids" in note


async def test_cached_prompt_tokens_are_reported_where_usage_tells() -> None:
    found = summarize(config(), [await one(answering(cached=4))])
    assert (found.cached_tokens, found.input_tokens) == (4, 5)
    assert "4 (80.0%)" in table.render(config(), found, ABOUT)


def test_prompts_that_an_earlier_run_left_in_the_cache_are_pointed_out() -> None:
    known = record(0.0, [0.1], 0.2, output_usage=1, prompt_tokens=10, cached_tokens=9)
    [note] = summarize(config(), [known]).notes
    assert "another --seed" in note
    assert summarize(config(workload="shared-prefix"), [known]).notes == []


async def test_reasoning_counts_as_content_of_a_chat() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await reply.event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
        await reply.token("so", "stop")
        await reply.usage(5, 2)
        await reply.end()

    assert list((await one(behave, endpoint="chat")).counts) == [1, 1]


async def test_comments_and_crlf_and_split_events_are_read_as_they_should() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.event(b": still here\r\n\r\nevent: x\r\nda")
        await asyncio.sleep(0.01)
        await reply.event(b'ta: {"choices": [{"text": " a"}]}\r\n\r\ndata:{"choices": [{"finish_reason": "stop"}]}\n\n')
        await reply.end()

    found = await one(behave)
    assert (list(found.counts), found.finish_reason, found.error) == ([1], "stop", None)


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        await reply.raw(b'data: {"choices": [{"text": " a", "finish_reason": "stop"}]}\n\n')
        reply.writer.close()
        raise ConnectionError

    assert (await one(behave)).error is None
