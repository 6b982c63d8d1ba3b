"""An endpoint picker of the Gateway API Inference Extension chooses the server, and the router goes on from there."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from quire.address import Address
from quire.router.picked import NOTHING_PICKED, Picked, read_picked
from tests.router_fakes import FakeServer, Loop, RouterThread, answer_text, errors_of, text_of
from tests.server_fakes import wait_until

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
FAST, SLOW = {"prefill_tokens_per_second": 1e6}, {"prefill_tokens_per_second": 1.0}
"""Of two servers that tell this, the cost prefers the first."""
NOBODY = "127.0.0.1:1"


@pytest.fixture
def fast(loop: Loop) -> Iterator[FakeServer]:
    one = FakeServer(loop, told=FAST)
    yield one
    one.stop()


@pytest.fixture
def slow(loop: Loop) -> Iterator[FakeServer]:
    one = FakeServer(loop, told=SLOW, chunk=7)
    yield one
    one.stop()


def asked(router: RouterThread, **headers: str) -> httpx2.Response:
    """A completion; `to` and `among` are the picker's headers."""
    names = {"to": DESTINATION, "among": SUBSET}
    given = {names[name]: value for name, value in headers.items()}
    return router.http.post("/v1/completions", json={"prompt": "p"}, headers=given)


def streamed(router: RouterThread, headers: dict[str, str]) -> list[str]:
    """What the events of a stream carry."""
    body = {"prompt": "p", "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        return [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]


def test_the_picked_server_gets_the_request_and_everyone_is_told(
    fast: FakeServer, slow: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with RouterThread([fast, slow]) as router, caplog.at_level("INFO"):
        answer = asked(router, to=slow.address)
        assert (answer.status_code, answer.headers[SERVED]) == (200, slow.address)
        assert (len(fast.requests), len(slow.requests)) == (0, 1)
        assert not [name for name in slow.requests[0]["headers"] if name.startswith("x-gateway")]
        assert router.http.get("/router/status").json()["requests"][0]["as_picked"] is True
        assert wait_until(lambda: f"to {slow.address} as picked: " in caplog.text)
        assert 'quire:router_picked_total{sent_to="picked"} 1.0' in router.http.get("/metrics").text
        assert SERVED not in asked(router).headers and len(fast.requests) == 1  # without a picker, the cost decides


def test_of_several_the_first_that_can_take_it_is_used(fast: FakeServer, slow: FakeServer) -> None:
    with RouterThread([fast, slow]) as router:
        for listed in (f"{NOBODY},{slow.address}", f"{slow.address}, {fast.address}", f"x,,{slow.address}"):
            assert asked(router, to=listed).headers[SERVED] == slow.address
        slow.status = 429
        assert asked(router, to=f"{slow.address},{fast.address}").headers[SERVED] == fast.address


def test_an_endpoint_that_is_no_server_of_the_routers_is_never_asked_and_the_cost_decides(
    loop: Loop, fast: FakeServer, slow: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = FakeServer(loop)
    with RouterThread([fast, slow]) as router, caplog.at_level("INFO"):
        answer = asked(router, to=stranger.address)
        assert (answer.status_code, len(fast.requests), stranger.connections) == (200, 1, 0)
        assert SERVED not in answer.headers  # which would tell a client of another server's address
        assert router.http.get("/router/status").json()["requests"][0]["as_picked"] is False
        assert wait_until(lambda: f"since none that was picked can take it ({stranger.address})" in caplog.text)
        assert 'quire:router_picked_total{sent_to="other"} 1.0' in router.http.get("/metrics").text
    stranger.stop()


def test_a_picked_server_that_may_get_nothing_new_gets_nothing(loop: Loop, fast: FakeServer, slow: FakeServer) -> None:
    prefill = FakeServer(loop)
    with RouterThread([fast, slow], prefill_server=[prefill.url]) as router:
        assert wait_until(lambda: router.up == 3)
        router.site.servers.by_name[slow.address].draining = True
        for one in (slow, prefill):
            assert SERVED not in asked(router, to=one.address).headers
        assert (len(fast.requests), slow.requests, prefill.requests) == (2, [], [])
    prefill.stop()


def test_a_stream_goes_on_elsewhere_if_the_picked_server_dies(fast: FakeServer, slow: FakeServer) -> None:
    slow.die_after = 3
    with RouterThread([fast, slow]) as router:
        events = streamed(router, {DESTINATION: slow.address})
        assert text_of(events) == answer_text(slow.requests[0]) and not list(errors_of(events))
        assert (slow.had, len(fast.had)) == ([0], 1) and fast.had[0] > 0


def test_outside_the_subset_no_server_is_used(
    fast: FakeServer, slow: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.relay.WAIT_SECONDS", 0.1)
    with RouterThread([fast, slow]) as router:
        assert asked(router, among=f"{NOBODY},{slow.address}").status_code == 200
        assert SERVED not in asked(router, to=fast.address, among=slow.address).headers
        assert (fast.requests, len(slow.requests)) == ([], 2)
        for nobody in (NOBODY, ""):
            refused = asked(router, to=fast.address, among=nobody)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_server")
            assert SUBSET in refused.json()["error"]["message"] and refused.headers["retry-after"]
        slow.die_after = 3
        events = streamed(router, {SUBSET: slow.address})
        assert [error["code"] for error in errors_of(events)] == ["no_server"] and fast.requests == []


def test_headers_are_lists_and_may_be_repeated() -> None:
    name, subset = DESTINATION.encode(), SUBSET.encode()
    assert read_picked([(b"x-other", b"1.2.3.4:80")]) is NOTHING_PICKED
    assert read_picked([(name, b"a:1 , b:2"), (name, b"[::1]:3")]) == Picked(("a:1", "b:2", "[::1]:3"))
    assert read_picked([(subset, b"a:1,a:1"), (name, b"\xff:1")]) == Picked(("ÿ:1",), frozenset({"a:1"}))
    assert read_picked([(subset, b"")]).among == frozenset()


def test_an_endpoint_is_host_and_port_alone() -> None:
    assert Address("http://10.0.0.1:8000/prefix/v1").endpoint == "10.0.0.1:8000"
    assert (Address("http://[2001:DB8::1]").endpoint, Address("unix:/run/q.sock").endpoint) == ("[2001:db8::1]:80", "")
