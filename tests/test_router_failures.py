"""What a router does with servers that fail, refuse or say too much, and with clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from quire.address import Address
from quire.http_client import Answer, Connections, HttpClient, HttpError
from quire.router.servers import Server
from tests.router_fakes import FakeServer, Loop, RouterThread, answer_text, errors_of, text_of
from tests.server_fakes import wait_until
from tests.test_router_serve import RouteProcess

FAST, SLOW = {"prefill_tokens_per_second": 1e6}, {"prefill_tokens_per_second": 1.0}
"""Of two servers that tell this, the first is asked first."""


def server_of(router: RouterThread, fake: FakeServer) -> Server:
    return router.site.servers.by_name[fake.address]


def test_a_client_that_leaves_before_the_answer_begins_ends_its_request_at_the_server(loop: Loop) -> None:
    server = FakeServer(loop, pause=30.0)
    with RouterThread([server]) as router:
        with pytest.raises(httpx2.TimeoutException):
            router.http.post("/v1/completions", json={"prompt": "p"}, timeout=0.3)
        assert len(server.requests) == 1
        load = server_of(router, server).engines[0].load
        assert wait_until(lambda: (load.running, load.waiting, load.queued) == (0, 0, 0), 5.0)
        assert wait_until(lambda: router.thread.num_tasks == 0)
        assert router.states[server.address] == "up"
    server.stop()


def test_many_requests_that_a_server_loses_at_once_are_one_failure(loop: Loop) -> None:
    first, second = FakeServer(loop, told=FAST, pause=0.2), FakeServer(loop, told=SLOW)
    with RouterThread([first, second]) as router, ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(router.stream, prompt=f"{number}") for number in range(12)]
        assert wait_until(lambda: server_of(router, first).running >= 6)
        first.stop()
        assert all(stream.result()[-1] == "[DONE]" for stream in streams)
        server = server_of(router, first)
        assert server.retry_at - server.failed_at < 3.0
    second.stop()


def test_clients_take_no_files_that_connections_to_servers_need(loop: Loop) -> None:
    """A router out of files could not reach its servers, would take all for down, and break off all their streams."""
    server = FakeServer(loop, pause=0.1, chunk=1)
    router = RouteProcess("--server", server.url)
    router.command = ["bash", "-c", 'ulimit -n 160 && exec "$0" "$@"', *router.command]
    router._warm = False
    body = b'{"prompt": "p", "stream": true}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request += b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    def ask(_: int) -> bytes:
        told = b""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", router.port), 30) as connection:
            connection.sendall(request)
            while data := connection.recv(1 << 16):
                told += data
        return told

    with router, ThreadPoolExecutor(120) as pool:
        wait_until(lambda: len(router.up()) == 1)
        answers = list(pool.map(ask, range(120)))
        begun = [told for told in answers if told.startswith(b"HTTP/1.1 200")]
        assert len(begun) >= 30 and all(b"[DONE]" in told and b"error" not in told for told in begun)
        assert router.json("/router/status")["servers"][0]["failures"] == 0
    server.stop()


async def test_idle_connections_are_closed_where_others_need_their_files() -> None:
    """The longest idle one first, of whatever server; those with requests stay."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    connections, upstreams = Connections(4), []
    for _ in range(3):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        upstreams.append(HttpClient(address, connections))
    first, second, third = upstreams

    async def ask(upstream: HttpClient) -> Answer:
        answer = await upstream.ask(upstream.address.request("GET", "/", (), b""))
        assert await answer.piece() == b"x" and await answer.piece() == b""
        return answer

    kept, held = [await ask(first) for _ in range(2)], [await ask(second) for _ in range(2)]
    for answer in kept:
        first.release(answer)
    assert connections.open == 4 and [*connections.idle] == kept
    held.append(await ask(third))
    await asyncio.sleep(0)
    assert connections.open == 4 and not kept[0].is_usable and [*connections.idle] == kept[1:]
    held += [await ask(third) for _ in range(3)]  # more requests than that: no idle one is left
    await asyncio.sleep(0)
    assert connections.open == len(held) == 6 and not connections.idle and all(each.is_usable for each in held)
    second.release(held.pop(0))
    assert (await ask(second)).is_usable and connections.open == 6, "the idle one is used"
    for upstream in upstreams:
        upstream.break_off()
    await asyncio.sleep(0.01)
    assert connections.open == 0 and not connections.idle


async def test_a_request_that_meets_the_end_of_a_kept_connection_is_sent_once_more_and_no_oftener() -> None:
    answered = [True, False, True, False, False]  # the requests that come, in order; the others end their connections

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while await reader.readuntil(b"\r\n\r\n") and answered.pop(0):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    for _ in range(2):
        assert await client.fetch("GET", "/", seconds=30) == (200, b"x")
    with pytest.raises(HttpError, match="closed before it answered"):
        await client.fetch("GET", "/", seconds=30)
    assert answered == [] and client.connections.open == 0


@pytest.mark.parametrize("status", [429, 503])
def test_a_stream_goes_on_at_a_third_server_if_the_second_is_busy_which_is_no_failure(loop: Loop, status: int) -> None:
    first = FakeServer(loop, told=FAST, die_after=5)
    busy = FakeServer(loop, told={"prefill_tokens_per_second": 1e3}, status=status)
    third = FakeServer(loop, told=SLOW, chunk=7)
    with RouterThread([first, busy, third]) as router:
        events = router.stream()
        assert text_of(events) == answer_text(first.requests[0]) and events[-1] == "[DONE]"
        assert len(busy.requests) == 1
        server = server_of(router, busy)
        assert (server.state, server.num_failures) == ("up", 0)
    for one in (first, busy, third):
        one.stop()


def test_a_stream_waits_for_a_busy_server_if_there_is_no_other(loop: Loop) -> None:
    first, busy = FakeServer(loop, told=FAST, die_after=5), FakeServer(loop, told=SLOW, status=429)
    with RouterThread([first, busy]) as router, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(router.stream)
        assert wait_until(lambda: len(busy.requests) > 1)
        busy.status = 200
        assert text_of(stream.result()) == answer_text(first.requests[0])
    busy.stop()


def test_a_stream_that_no_other_server_takes_ends_with_an_error_and_that_server_stays_up(loop: Loop) -> None:
    first, strict = FakeServer(loop, told=FAST, die_after=5), FakeServer(loop, told=SLOW, status=400)
    with RouterThread([first, strict]) as router:
        events = router.stream()
        assert [error["code"] for error in errors_of(events)] == ["server_lost"] and events[-1] == "[DONE]"
        assert server_of(router, strict).num_failures == 0
    strict.stop()


def test_a_large_answer_is_passed_on_and_one_too_large_is_not_the_servers_failure(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer(loop)
    server.answers["/tokenize"] = 200, json.dumps({"tokens": "x" * (5 << 20)}).encode()
    with RouterThread([server]) as router:
        answer = router.http.post("/tokenize", json={"prompt": "p"})
        assert answer.status_code == 200 and answer.content == server.answers["/tokenize"][1]
        monkeypatch.setattr("quire.router.app.ANSWER_BYTES", 1 << 20)
        answer = router.http.post("/tokenize", json={"prompt": "p"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_answer")
        assert server_of(router, server).num_failures == 0
        assert router.complete().status_code == 200
    server.stop()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
def test_a_large_document_that_breaks_off_does_not_look_like_a_whole_one(loop: Loop, path: str) -> None:
    server, other = FakeServer(loop, told=FAST), FakeServer(loop, told=SLOW)
    for one in (server, other):
        one.answers[path] = 200, b"x" * (8 << 20)
        one.answer_dies_after = 3 << 20
    with RouterThread([server, other]) as router:
        with pytest.raises(httpx2.RemoteProtocolError):
            router.http.post(path, json={"input": "p", "prompt": "p"})
        assert len(server.requests) + len(other.requests) == 1
        assert wait_until(lambda: router.thread.num_tasks == 0)
    for one in (server, other):
        with contextlib.suppress(Exception):
            one.stop()


ODD_ANSWERS = [
    {"usage": {"prompt_tokens": 5, "prompt_tokens_details": 7}},
    {"usage": {"prompt_tokens": 5, "completion_tokens": "many"}},
    {"usage": [5]},
    b'{"usage": {"prompt_tokens": 5, "\xff": 1}}',
    b'{"content": ' + b"[" * 5000 + b"]" * 5000 + b', "usage": {"prompt_tokens": 5}}',
]


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=range(len(ODD_ANSWERS)))
def test_an_answer_that_the_router_cannot_read_is_passed_on(loop: Loop, answer: object) -> None:
    server = FakeServer(loop, quire=False)
    server.answers["/v1/completions"] = 200, answer
    with RouterThread([server]) as router:
        assert router.complete().status_code == 200
        assert wait_until(lambda: router.thread.num_tasks == 0)
    server.stop()
