"""The routes for text, by the clock: limits, silence, and readers who do not read; the rest is in
`test_server_generate.py`."""

# ruff: noqa: F811  # fixtures of another file
from __future__ import annotations

import asyncio
import re

from quire.server import streaming, transport
from tests.server_fakes import FakeTokenizerPool, Script, expected_text
from tests.test_server_generate import (
    LETTERS,
    SECONDS,
    Served,
    events_of,
    lines,  # noqa: F401
    raw_post,
    requests_in,
    serving,
    text_of,
    until,
)


async def test_a_silent_stream_is_told_to_be_alive(monkeypatch):
    monkeypatch.setattr(streaming, "SILENCE_SECONDS", 0.05)
    async with serving() as served:
        gate = asyncio.Event()
        served.client.script = Script(gate=gate, gate_at=1)
        body, content = {"prompt": "abc", "seed": 1, "stream": True, "max_tokens": 3}, b""
        async with served.http.stream("POST", served.url + "/v1/completions", json=body) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if content.count(b": waiting\n\n") == 3:
                    gate.set()
    assert text_of(events_of(content)) == expected_text("abc", 3, seed=1)


async def test_a_request_that_takes_too_long_is_ended(lines):
    async with serving(request_timeout=0.2) as served:
        served.client.script = Script(gate=asyncio.Event(), gate_at=2)
        whole = await served.complete(max_tokens=9)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "request_timeout")
        while (stream := await served.complete(max_tokens=9, stream=True)).status_code != 200:
            assert stream.status_code == 503  # its time was over before it began
        events = events_of(stream.content)
        assert events[-1]["error"]["code"] == "request_timeout"
        assert expected_text("abc", 2, seed=1).startswith(text_of(events[:-1]))
        assert not served.client.open_calls and served.waiting() == (0, 0)
    assert {fields["reason"] for fields in requests_in(lines)} == {"timeout"}


async def test_the_time_limit_holds_while_tokenizing():
    async with serving(pool=FakeTokenizerPool(seconds=60), request_timeout=0.1) as served:
        assert (await served.complete(stream=True)).status_code == 503
        assert (await served.post("/tokenize", {"prompt": "abc"})).status_code == 503
        assert served.waiting() == (0, 0)
        assert served.metric("quire:requests_rejected_total", reason="timeout") == 2


async def test_the_time_limit_holds_for_the_body_too():
    async with serving(request_timeout=0.2) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 9\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), SECONDS)  # it closes the connection
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.2 s" in answer


async def test_a_slow_reader_loses_nothing_slows_nobody_and_is_bounded():
    async with serving() as served:
        served.client.info.max_model_len = 60_000
        served.client.script = lambda ids: Script(ids=LETTERS if ids == [97, 98, 99] else None, burst=9, seconds=1e-6)
        body = {"prompt": "abc", "max_tokens": 50_000, "stream": True, "seed": 1}
        connection = await raw_post(served.port, "/v1/completions", body, receive_buffer=4096)
        slow = await _stalled(served)
        answer = await served.complete(prompt="xyz", max_tokens=20)
        assert answer.status_code == 200
        assert len(slow.output.outputs[0].token_ids) < 50_000, "nothing more is asked for than is read"
        reader, writer = await asyncio.open_connection(sock=connection)
        data = b""
        async with asyncio.timeout(SECONDS):
            while b"data: [DONE]\n\n" not in data[-99:]:
                data += await reader.read(1 << 16)
        writer.close()
        assert len(re.findall(rb'"finish_reason":"length"', data)) == 1
        texts = re.findall(rb'"text":"([a-z]*)"', data)
        assert b"".join(texts) == bytes(LETTERS)


async def _stalled(served: Served):
    """Wait until the only stream comes no further, since nobody reads it."""
    await until(lambda: served.client.calls)
    call, before = served.client.calls[0], -1
    async with asyncio.timeout(SECONDS):
        while (now := len(call.output.outputs[0].token_ids)) != before or not now:
            before = now
            await asyncio.sleep(0.1)
    return call


async def test_a_reader_that_never_reads_is_given_up(monkeypatch, lines):
    monkeypatch.setattr(transport, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(streaming, "SILENCE_SECONDS", 0.1)
    async with serving() as served:
        served.client.info.max_model_len = 60_000
        served.client.script = Script(ids=LETTERS, burst=9, seconds=1e-6)
        body = {"prompt": "abc", "max_tokens": 50_000, "stream": True}
        connection = await raw_post(served.port, "/v1/completions", body, receive_buffer=4096)
        await until(lambda: requests_in(lines))
        assert not served.client.open_calls and served.client.calls[0].aborted
        await until(lambda: not served.server.server_state.connections)
        connection.close()
    assert requests_in(lines)[0]["reason"] == "disconnect"
