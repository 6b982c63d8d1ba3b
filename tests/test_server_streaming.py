"""How an answer is sent: events, comments in silence, readers that do not read, and what cuts an answer off."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server import streaming
from quire.server.errors import ApiError
from quire.server.streaming import AnswerWriter, CutOffError, all_of, merged, supervised, unless


class Connection:
    """ASGI's two ends. `reading` is cleared by a reader that takes nothing; `leave` is the client's going."""

    def __init__(self):
        self.messages = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.gone = asyncio.Event()

    async def send(self, message):
        await self.reading.wait()
        self.messages.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def leave(self):
        self.gone.set()
        self.reading.set()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)


def run(work, writer, connection, **options):
    return supervised(work, writer, connection.receive, **options)


async def test_a_stream_is_headers_then_events_then_one_end():
    connection = Connection()
    writer = AnswerWriter(connection.send)

    async def work():
        await writer.start({"x-quire-ignored": "a"})
        await writer.events([b'{"a":1}', b'{"a":2}'])
        await writer.events([])
        await writer.end([b'{"a":3}'])

    await run(work(), writer, connection)
    assert [message["type"] for message in connection.messages] == ["http.response.start"] + ["http.response.body"] * 2
    headers = dict(connection.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert headers[b"x-quire-ignored"] == b"a"
    assert connection.body == b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: {"a":3}\n\ndata: [DONE]\n\n'
    assert [message["more_body"] for message in connection.messages[1:]] == [True, False]


async def test_nothing_is_written_after_the_end():
    connection = Connection()
    writer = AnswerWriter(connection.send)
    await writer.start({})
    await writer.end()
    before = len(connection.messages)
    await writer.end()
    await writer.events([b"{}"])
    assert not await writer.fail(ApiError(500, "too late"))
    assert len(connection.messages) == before


async def test_a_silent_stream_gets_comments_and_its_answer_goes_on(monkeypatch):
    monkeypatch.setattr(streaming, "SILENCE_SECONDS", 0.05)
    connection = Connection()
    writer = AnswerWriter(connection.send)

    async def work():
        await writer.start({})
        while connection.body.count(b": waiting\n\n") < 3:
            await asyncio.sleep(0.005)
        await writer.end([b"{}"])

    await asyncio.wait_for(run(work(), writer, connection), 60)
    assert connection.body.endswith(b": waiting\n\ndata: {}\n\ndata: [DONE]\n\n")


async def test_before_its_headers_a_stream_says_nothing(monkeypatch):
    monkeypatch.setattr(streaming, "SILENCE_SECONDS", 0.02)
    connection = Connection()
    writer = AnswerWriter(connection.send)
    await run(asyncio.sleep(0.2), writer, connection)
    assert connection.messages == []


async def test_a_client_that_leaves_ends_the_work_at_once():
    connection = Connection()
    writer = AnswerWriter(connection.send)
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    asyncio.get_running_loop().call_later(0.02, connection.leave)
    begun = time.monotonic()
    with pytest.raises(CutOffError) as cut:
        await run(work(), writer, connection)
    assert cut.value.cause == "disconnect" and ended == [True] and time.monotonic() - begun < 50


async def test_the_deadline_cuts_off_too():
    connection = Connection()
    with pytest.raises(CutOffError) as cut:
        deadline = time.monotonic() + 0.02
        await run(asyncio.sleep(60), AnswerWriter(connection.send), connection, deadline=deadline)
    assert cut.value.cause == "timeout"


async def test_what_must_not_outlast_the_server_is_cut_off_when_it_leaves():
    stopping, ended = asyncio.Event(), []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return 7
        finally:
            ended.append(seconds)

    assert await unless(stopping, work(0)) == 7
    asyncio.get_running_loop().call_later(0.02, stopping.set)
    with pytest.raises(CutOffError) as cut:
        await unless(stopping, work(60))
    assert cut.value.cause == "shutdown" and ended == [0, 60]
    waiting = asyncio.create_task(unless(asyncio.Event(), work(61)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [0, 60, 61]


async def test_a_stream_that_is_cut_off_ends_with_an_error_event_and_done():
    connection = Connection()
    writer = AnswerWriter(connection.send)

    async def work():
        await writer.start({})
        await writer.events([b"{}"])
        await asyncio.sleep(60)

    with pytest.raises(CutOffError):
        await run(work(), writer, connection, deadline=time.monotonic() + 0.05)
    assert await writer.fail(ApiError(503, "too slow", code="request_timeout"))
    head, error, done, rest = connection.body.split(b"\n\n")
    assert (head, done, rest) == (b"data: {}", b"data: [DONE]", b"")
    assert b'"code":"request_timeout"' in error and b'"message":"too slow"' in error


async def test_the_last_words_to_a_reader_that_does_not_read_are_few(monkeypatch):
    monkeypatch.setattr(streaming, "CLOSING_SECONDS", 0.05)
    connection = Connection()
    writer = AnswerWriter(connection.send)
    await writer.start({})
    connection.reading.clear()
    assert not await asyncio.wait_for(writer.fail(ApiError(503, "x")), 60)


async def test_errors_of_the_work_are_raised_and_its_own_cancellation_is_an_error():
    connection = Connection()
    writer = AnswerWriter(connection.send)

    async def fails():
        raise ApiError(400, "no")

    async def cancels_itself():
        raise asyncio.CancelledError

    with pytest.raises(ApiError):
        await run(fails(), writer, connection)
    with pytest.raises(RuntimeError):
        await run(cancels_itself(), writer, connection)


async def test_no_task_is_left_whoever_ends_the_answer():
    before = asyncio.all_tasks()
    connection = Connection()
    outer = asyncio.create_task(run(asyncio.sleep(60), AnswerWriter(connection.send), connection))
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert asyncio.all_tasks() == before


# -- several prompts -----------------------------------------------------------------------------------------


async def test_of_works_done_together_the_first_failure_ends_the_others():
    async def work(number, fails=False):
        if fails:
            raise KeyError(number)
        await asyncio.sleep(0 if number < 10 else 60)
        return number

    assert await all_of([work(number) for number in range(10)]) == [*range(10)]
    before = asyncio.all_tasks()
    with pytest.raises(KeyError, match="1"):
        await all_of([work(10), work(1, fails=True), work(11)])
    assert asyncio.all_tasks() == before


def stream_of(name, tokens, closed, fail=False, seconds=0.0):
    output = RequestOutput(name, None, [1], [CompletionOutput(0)], seed=0)

    async def stream():
        try:
            for token in tokens:
                await asyncio.sleep(seconds)
                output.begin_deltas()
                output.outputs[0].token_ids.append(token)
                output.outputs[0].delta += chr(token)
                yield output.hand_out()
            if fail:
                raise ApiError(500, f"{name} failed")
            output.outputs[0].finish_reason = "length"
            yield output.hand_out()
        finally:
            closed.append(name)

    return stream()


@pytest.mark.parametrize("count", [1, 2, 20])
async def test_merging_keeps_each_streams_order_and_loses_nothing(count):
    closed, texts, generator = [], [""] * count, random.Random(count)
    streams = [stream_of(str(i), range(97, 97 + 5 + i), closed, seconds=0.001 * (i % 3)) for i in range(count)]
    async for batch in merged(streams):
        assert batch
        indices = [index for index, _ in batch]
        assert len(set(indices)) == len(indices)
        if generator.random() < 0.3:
            await asyncio.sleep(0.003)  # a reader that is behind
        for index, output in batch:
            texts[index] += output.outputs[0].delta
            output.outputs[0].delta = ""
    assert texts == ["".join(map(chr, range(97, 97 + 5 + i))) for i in range(count)]
    assert sorted(closed, key=int) == [str(i) for i in range(count)]


@pytest.mark.parametrize("count", [1, 5])
async def test_closing_the_merge_closes_every_stream(count):
    before, closed = asyncio.all_tasks(), []
    streams = [stream_of(str(i), range(100), closed, seconds=0.001) for i in range(count)]
    news = merged(streams)
    for _ in range(3):
        await anext(news)
    await news.aclose()
    assert len(closed) == count
    assert asyncio.all_tasks() == before


async def test_an_error_of_one_stream_ends_the_others():
    closed = []
    streams = [stream_of("a", range(1000), closed, seconds=0.001), stream_of("b", [1], closed, fail=True)]
    with pytest.raises(ApiError, match="b failed"):
        async for _ in merged(streams):
            pass
    assert sorted(closed) == ["a", "b"]
