"""`quire route` in front of stand-ins: what is passed on, what goes on elsewhere, and who is kept out."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.fleet.cached_prompts import MAX_NAMES, CachedPrompts
from quire.fleet.choice import POLICIES, Cost, PolicyName
from quire.fleet.prompt import CHUNK_BYTES, read_prompt
from quire.router.app import RouterApp, counted_as
from quire.router.config import RouterConfig
from quire.router.membership import DnsSource, FileSource, begin, read_servers_file
from quire.router.metrics import ROUTES
from quire.router.run import leave, make_site
from quire.router.servers import Engine, Servers
from quire.router.site import KEPT_SENDINGS
from tests.router_fakes import FakeServer, Loop, RouterThread, answer_text, errors_of, text_of
from tests.server_fakes import wait_until


@pytest.fixture
def pair(loop: Loop) -> Iterator[list[FakeServer]]:
    servers = [FakeServer(loop), FakeServer(loop, chunk=7)]
    yield servers
    for one in servers:
        one.stop()


# -- passing on ------------------------------------------------------------------------------------------------


def test_answers_and_streams_are_those_of_a_server(pair: list[FakeServer]) -> None:
    with RouterThread(pair) as router:
        whole = router.complete(seed=3)
        assert whole.json()["choices"][0]["text"] == answer_text({"prompt": "p", "seed": 3})
        events = router.stream(seed=3)
        assert text_of(events) == answer_text({"prompt": "p", "seed": 3})
        assert events.count("[DONE]") == 1
        models = router.http.get("/v1/models").json()
        assert (models["data"][0]["id"], models["last_id"], models["has_more"]) == ("m", "m", False)
        assert router.http.post("/tokenize", json={"prompt": "x"}).json()["path"] == "/tokenize"
        assert router.http.get("/health").json() == {"status": "ok", "servers_up": 2, "servers": 2}


def test_the_body_reaches_the_server_as_it_was_sent_but_for_a_seed_where_a_stream_has_none(
    pair: list[FakeServer],
) -> None:
    with RouterThread(pair[:1]) as router:
        body = b' {"prompt" : "a\\u00e4",  "strange": [1, {"x": null}]} '
        router.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        router.stream(seed=None)
        router.stream(seed=4)
    first, second, third = pair[0].requests
    assert (first["prompt"], first["strange"], "seed" in first) == ("aä", [1, {"x": None}], False)
    assert isinstance(second["seed"], int)
    assert third["seed"] == 4


def test_ids_and_keys_go_with_the_request_and_the_servers_own_headers_stay_behind(pair: list[FakeServer]) -> None:
    with RouterThread(pair, api_key=["k1", "k2"], admin=True) as router:
        answer = router.http.post(
            "/v1/completions",
            json={"prompt": "p"},
            headers={"x-request-id": "mine-1", "authorization": "Bearer k2", "x-secret": "s"},
        )
        assert answer.headers.get_list("x-request-id") == ["mine-1"] and "request-id" not in answer.headers
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        [asked] = [request for one in pair for request in one.requests]
        assert asked["headers"]["authorization"] == "Bearer k2"
        assert asked["headers"]["x-request-id"] == "mine-1"
        assert "x-secret" not in asked["headers"]
        assert router.http.get("/v1/models", headers={"authorization": ""}).status_code == 401
        other = {"authorization": "Bearer k2"}
        assert router.http.get("/router/status", headers=other).status_code == 403
        assert router.http.post(f"/admin/drain/{pair[0].address}", headers=other).status_code == 403


def test_an_error_of_the_request_is_the_servers_own(loop: Loop) -> None:
    server = FakeServer(loop, status=400, error_code="invalid_value")
    with RouterThread([server]) as router:
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        missing = router.complete(model="other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert router.http.get("/nothing").status_code == 404
        assert router.http.get("/v1/completions").status_code == 405
        broken = router.http.post("/v1/completions", content=b"x" * 9, headers={"content-type": "application/json"})
        assert broken.status_code == 400
        plain = router.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415
    server.stop()


def test_a_large_body_is_refused_and_a_large_answer_passes(loop: Loop) -> None:
    server = FakeServer(loop)
    with RouterThread([server], max_body_bytes=2048) as router:
        assert router.complete(prompt="x" * 4096).status_code == 413
    server.models_answer = None
    server.stop()


# -- choosing --------------------------------------------------------------------------------------------------


def test_a_conversation_stays_at_its_server_and_new_ones_are_spread(pair: list[FakeServer]) -> None:
    with RouterThread(pair) as router:
        homes = {}
        for turn in range(3):
            for talk in range(8):
                prompt = f"conversation {talk} " * 40 + "and on " * 40 * turn
                router.complete(prompt=prompt)
                [home] = [
                    index for index, one in enumerate(pair) if one.requests and one.requests[-1]["prompt"] == prompt
                ]
                assert homes.setdefault(talk, home) == home
        assert Counter(homes.values()) == {0: 4, 1: 4}
        status = router.http.get("/router/status").json()
        last = status["requests"][0]
        assert {cost["server"] for cost in last["costs"]} == {one.address for one in pair}
        assert max(cost["held"] for cost in last["costs"]) > 0


def test_a_server_that_is_busy_gets_less(pair: list[FakeServer]) -> None:
    pair[0].pause = 0.05  # of which each stream has twenty
    with RouterThread(pair) as router, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: router.stream(prompt=f"{number} " * 200), range(40)))
    assert len(pair[1].requests) > 1.5 * len(pair[0].requests)


def test_what_a_server_has_no_room_for_is_not_counted_on(loop: Loop) -> None:
    server = FakeServer(loop, told={"num_blocks": 64, "block_size": 16})  # 4 KiB of text
    with RouterThread([server]) as router:
        for number in range(4):
            router.complete(prompt=f"{number}" * 3000)
        router.complete(prompt="3" * 3000)
        router.complete(prompt="0" * 3000)
        last, before = (
            request["costs"][0]["held"] for request in router.http.get("/router/status").json()["requests"][:2]
        )
        assert before > 500
        assert last < 300
    server.stop()


def test_what_a_server_tells_of_its_cache_counts_and_one_that_tells_nothing_is_asked_no_more(loop: Loop) -> None:
    teller, other = FakeServer(loop, cached=[CachedPrompts("1")]), FakeServer(loop)
    prompt = "a conversation that another router has sent " * 40
    names = b"".join(read_prompt(json.dumps({"prompt": prompt}).encode()).hashes)
    teller.cached[0].computed(names, [b"block"], lambda block: True)
    with RouterThread([teller, other]) as router:
        known = router.site.servers.knowledge
        assert wait_until(lambda: known.count(teller.address) == len(names) // 8)
        router.complete(prompt=prompt)
        assert (len(teller.requests), teller.requests[0]["headers"]["x-quire-names"]) == (1, "1")
        teller.cached[0].gone([b"block"])
        assert wait_until(lambda: known.count(teller.address) == 0)
        assert known.expects(other.address) == -1
    for one in (teller, other):
        one.stop()


def test_of_a_large_fleet_the_log_and_the_page_show_the_lowest_costs_alone(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    told = [{"engine": f"1.{number}", "up": True, "running": number} for number in range(40)]
    one = FakeServer(loop, replicas=told)
    with RouterThread([one]) as router:
        assert wait_until(lambda: router.site.servers.by_name[one.address].engines[39:])
        assert wait_until(lambda: router.site.servers.by_name[one.address].engines[39].others == 39)
        with caplog.at_level("INFO"):
            router.complete()
        [sent] = router.http.get("/router/status").json()["requests"]
        assert [cost["server"] for cost in sent["costs"]] == [f"{one.address}#{number}" for number in range(8)]
        assert wait_until(lambda: "32 others" in caplog.text) and f"{one.address}#8 " not in caplog.text
    one.stop()


def test_many_engines_may_tell_of_full_caches(loop: Loop) -> None:
    told = [{"engine": f"1.{number}", "up": True} for number in range(3)]
    one = FakeServer(loop, replicas=told, cached=[CachedPrompts(f"1.{number}") for number in range(3)])
    names = b"".join(number.to_bytes(8, "little") for number in range(MAX_NAMES))
    for cached in one.cached:
        cached.computed(names, [b"block"], lambda block: True)
    with RouterThread([one]) as router:
        known = router.site.servers.knowledge
        assert wait_until(lambda: known.count(f"{one.address}#2") == MAX_NAMES)
        assert router.site.servers.by_name[one.address].num_failures == 0
    one.stop()


def test_each_engine_of_a_server_is_known_by_what_it_tells_and_asked_by_its_number(loop: Loop) -> None:
    """Two replicas behind one door: a prompt goes to the one that has it, until that one has too much to do, is away,
    or has begun anew; a number that is missing in what one of them tells costs a snapshot of that one alone.
    """
    told = [{"engine": f"1.{number}", "up": True, "prefill_tokens_per_second": 1000.0} for number in range(2)]
    one = FakeServer(loop, replicas=told, cached=[CachedPrompts("1.0"), CachedPrompts("1.1")])
    prompts = [f"a conversation of {stem} that went to one engine " * 40 for stem in "ab"]
    names = [b"".join(read_prompt(json.dumps({"prompt": prompt}).encode()).hashes) for prompt in prompts]
    for cached, each in zip(one.cached, names, strict=True):
        cached.computed(each, [b"block"], lambda block: True)
    with RouterThread([one]) as router:
        server, known = router.site.servers.by_name[one.address], router.site.servers.knowledge

        def engine(prompt: str) -> str:
            router.complete(prompt=prompt)
            return str(one.requests[-1]["headers"]["x-data-parallel-rank"])

        assert wait_until(lambda: known.count(f"{one.address}#1") == len(names[1]) // 8)
        assert [engine(prompt) for prompt in (prompts * 3)[1:]] == ["1", "0", "1", "0", "1"]
        document = router.http.get("/router/status").json()
        assert document["requests"][0]["server"] == f"{one.address}#1" and document["servers"][0]["engines"] == 2
        assert document["requests"][0]["costs"][1]["held"] > 400 > document["requests"][0]["costs"][0]["held"]

        told[0] |= {"running": 100}  # ways through other routers
        assert wait_until(lambda: server.engines[0].others == 100)
        assert engine(prompts[0]) == "1"
        told[0] |= {"running": 0}
        told[1] |= {"up": False}
        assert wait_until(lambda: not server.engines[1].is_up and not server.engines[0].others)
        assert engine(prompts[1]) == "0"

        one.cached[0]._events.kept.clear()  # a ring that has come round
        one.cached[0].computed(b"12345678", [b"other"], lambda block: True)
        one.cached[1] = CachedPrompts("2.1")
        told[1] |= {"up": True, "engine": "2.1"}
        assert wait_until(lambda: known.held(f"{one.address}#0", [b"12345678"]) == 1)
        assert wait_until(lambda: known.count(f"{one.address}#1") == 0)
    one.stop()


def test_of_an_engine_in_a_long_step_what_it_said_before_counts() -> None:
    engine = Engine("s")
    engine.take({"engine": "1", "up": True, "running": 5, "prefill_tokens_per_second": 9.0})
    engine.take({"engine": None, "up": True, "running": 0, "prefill_tokens_per_second": None})
    assert (engine.boot, engine.others, engine.load.shown, engine.is_up) == ("1", 5, 9.0, True)
    engine.take({"engine": None, "up": False})
    assert not engine.is_up


@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_request_goes_tells_a_tenant_nothing_of_what_another_one_asked(policy: PolicyName) -> None:
    """One asks this or that, of the same length, and it is computed. What another one's request costs, anywhere, and
    where it goes, is the same in both cases; were it the same tenant's, it would not be.
    """

    async def after(first: str, first_key: bytes) -> tuple[str, list[Cost]]:
        servers = Servers(policy, clock=lambda: 0.0)
        for number in range(4):
            server = servers.add(f"http://127.0.0.1:{1 + number}")
            server.state, server.models = "up", {"m": {}}
        for text, key in ((first, first_key), ("the same words " * 99, b"theirs")):
            body = json.dumps({"model": "m", "prompt": text}).encode()
            prompt = read_prompt(body, key)
            choice = servers.choose(prompt)
            assert choice is not None
            choice.engine.load.sent(0.0, choice.missing)  # as `Relay` does
            servers.knowledge.sent(choice.engine.name, prompt.hashes)
            choice.engine.load.begun(0.0, 1.0, choice.missing)
            choice.engine.load.ended(choice.missing, has_begun=True)
        await servers.close()
        return choice.server.name, list(choice.decision.costs)

    same, other = "the same words " * 99, "quite others.. " * 99
    told = asyncio.run(after(same, b"mine"))
    assert told == asyncio.run(after(other, b"mine"))
    assert all(cost.held == 0 for cost in told[1])
    assert any(cost.held for cost in asyncio.run(after(same, b"theirs"))[1])


def test_connections_to_servers_are_kept(pair: list[FakeServer]) -> None:
    with RouterThread(pair[:1]) as router:
        for number in range(20):
            router.complete(prompt=f"{number}")
            router.stream(prompt=f"{number}")
    assert pair[0].connections <= 3


def test_each_route_is_counted_under_its_own_name() -> None:
    app = RouterApp(make_site(RouterConfig(api_key=("k",))))
    names = [counted_as(path) for _, path in app._routes]
    named = ["/v1/models/a/b", "/v1/responses/r", "/router/requests/r", "/abort/r", "/admin/drain/s"]
    assert {*names, *map(counted_as, named)} <= {*ROUTES} - {"other"}
    assert len({*map(counted_as, named)}) == len(named)


def test_the_page_and_the_metrics_tell_of_each_server(pair: list[FakeServer]) -> None:
    with RouterThread(pair, api_key=["k1", "k2"], metrics_key=["m"]) as router:
        router.complete()
        for path, kind in (("/", "text/html"), ("/static/router.js", "text/javascript")):
            page = router.http.get(path, headers={"authorization": ""})
            assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (200, kind)
            assert "default-src 'self'" in page.headers["content-security-policy"]
        assert router.http.get("/static/../run.py", headers={"authorization": ""}).status_code in (401, 404)
        metrics = router.http.get("/metrics", headers={"authorization": "Bearer m"}).text
        for one in pair:
            assert f'quire:server_up{{server="{one.address}"}} 1.0' in metrics
        assert "quire:router_sent_total" in metrics


def test_the_page_keeps_only_the_last_requests(pair: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.router.relay.KEPT_NAMES", 3)
    with RouterThread(pair) as router:
        for number in range(KEPT_SENDINGS + 5):
            router.complete(prompt=f"{number} " * 500)
        sendings = router.site.sendings
        assert len(sendings) == KEPT_SENDINGS and {len(one.names) for one in sendings} == {3}


# -- failing ---------------------------------------------------------------------------------------------------


FAST, SLOW = {"prefill_tokens_per_second": 1e6}, {"prefill_tokens_per_second": 1.0}
"""Of two servers that tell this, the first is asked first."""


@pytest.mark.parametrize("after", [1, 2, 9, 20])
@pytest.mark.parametrize("last_words", [None, "shutting_down"])
def test_a_stream_goes_on_at_another_server_with_the_same_text(loop: Loop, after: int, last_words: str | None) -> None:
    first = FakeServer(loop, told=FAST, die_after=after, last_words=last_words)
    second = FakeServer(loop, told=SLOW, chunk=7)
    with RouterThread([first, second]) as router:
        events = router.stream()
        assert first.requests[0]["seed"] == second.requests[0]["seed"]
        assert text_of(events) == answer_text(first.requests[0])
        found = [json.loads(event) for event in events if event != "[DONE]"]
        assert not list(errors_of(events))
        assert len({(event["id"], event["created"]) for event in found}) == 1
        assert sum(choice["finish_reason"] is not None for event in found for choice in event["choices"]) == 1
        assert events[-1] == "[DONE]"
        assert router.http.get("/router/status").json()["requests"][0]["resumed"] == (after > 1)
    first.stop()
    second.stop()


def test_a_stream_goes_on_elsewhere_when_its_server_is_there_but_says_nothing_more(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.servers.PATIENCE_SECONDS", 0.3)
    first = FakeServer(loop, told=FAST, stalls_after=5)
    second = FakeServer(loop, told=SLOW, chunk=7)
    with RouterThread([first, second]) as router:
        events = router.stream()
        assert text_of(events) == answer_text(first.requests[0])
        assert router.states[first.address] == "down"
    first.stop()
    second.stop()


def test_a_whole_answer_comes_from_another_server_when_the_engine_hangs(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.servers.LOOK_SECONDS", 0.05)
    first, second = FakeServer(loop, told=FAST, pause=30.0), FakeServer(loop, told=SLOW)
    with RouterThread([first, second]) as router, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(router.complete)
        assert wait_until(lambda: first.requests != [])
        first.told = FAST | {"up": False}  # it is restarted, and goes on
        assert wait_until(lambda: not router.site.servers.by_name[first.address].engines[0].is_up)
        time.sleep(0.2)
        assert not answer.done()
        first.told = FAST | {"up": False, "stalled": True}
        assert answer.result().status_code == 200 and len(second.requests) == 1
    for one in (first, second):
        one.stop()


def test_a_stream_whose_only_server_has_an_engine_that_hangs_waits_until_it_is_restarted(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.relay.WAIT_SECONDS", 0.1)
    monkeypatch.setattr("quire.router.servers.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("quire.router.servers.FIRST_BACKOFF", 0.01)
    server = FakeServer(loop, die_after=9, last_words="engine_unavailable")
    with RouterThread([server]) as router, ThreadPoolExecutor(1) as pool:
        server.pause, server.told = 0.05, {"up": False}
        assert wait_until(lambda: not router.site.servers.by_name[server.address].engines[0].is_up)
        server.told = {"up": True}
        assert wait_until(lambda: router.site.servers.by_name[server.address].engines[0].is_up)
        stream = pool.submit(router.stream)
        assert wait_until(lambda: router.site.servers.by_name[server.address].running == 1)
        server.told = {"up": False}
        assert wait_until(lambda: server.die_after is None)
        time.sleep(0.4)
        assert not stream.done() and len(server.requests) == 1
        server.told = {"up": True}
        assert text_of(stream.result()) == answer_text(server.requests[0]) and server.had[1] > 0
    server.stop()


@pytest.mark.parametrize("known", [False, True])
def test_a_stream_does_not_go_on_where_other_kernels_compute(
    loop: Loop, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.relay.WAIT_SECONDS", 0.2)
    first = FakeServer(loop, told=FAST, die_after=5)
    second = FakeServer(loop, told=SLOW if known else SLOW | {"fingerprint": "fp"}, fingerprint="other")
    with RouterThread([first, second], mixed=True) as router:
        events = router.stream()
        assert [error["code"] for error in errors_of(events)] == ["server_lost"]
        assert answer_text(first.requests[0]).startswith(text_of(events))
        assert events[-1] == "[DONE]"
    first.stop()
    second.stop()


def test_a_stream_of_another_server_goes_on_only_if_nothing_was_sent(loop: Loop) -> None:
    servers = [FakeServer(loop, quire=False, die_after=5) for _ in range(2)]
    with RouterThread(servers) as router:
        events = router.stream(seed=1)
        assert [error["code"] for error in errors_of(events)] == ["server_lost"]
        assert sum(len(one.requests) for one in servers) == 1
    for one in servers:
        one.stop()


def test_a_whole_answer_comes_from_another_server_when_one_dies(loop: Loop) -> None:
    servers = [FakeServer(loop, quire=False, die_after=1), FakeServer(loop, quire=False)]
    with RouterThread(servers) as router:
        for number in range(4):
            assert router.complete(prompt=f"{number}").status_code == 200
    for one in servers:
        one.stop()


def test_a_request_in_whose_course_servers_die_is_not_sent_to_all_of_them(loop: Loop) -> None:
    servers = [FakeServer(loop, die_after=1) for _ in range(5)]
    with RouterThread(servers) as router:
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "server_lost")
        assert sum(len(one.requests) for one in servers) == 3
    for one in servers:
        one.stop()


def test_a_busy_servers_request_goes_to_another_and_if_all_are_busy_the_client_is_told(pair: list[FakeServer]) -> None:
    with RouterThread(pair) as router:
        pair[0].status = 429
        assert all(router.complete(prompt=f"{number}").status_code == 200 for number in range(4))
        pair[1].status = 503
        assert router.complete().status_code in (429, 503)
        pair[0].status = 200
        assert router.complete().status_code == 200


def refusal(status: int, code: object) -> tuple[int, object]:
    return status, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": code}}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_prompts_are_counted_by_a_server_of_their_model(loop: Loop, path: str) -> None:
    servers = {name: FakeServer(loop, name=name) for name in ("a", "b", "c")}
    with RouterThread([*servers.values()]) as router:
        for name, server in servers.items():
            answer = router.http.post(path, json={"model": name, "prompt": "x"})
            assert answer.json() == {"path": path, "server": server.port}
        assert router.http.post(path, json={"prompt": "x"}).status_code == 200
        refused = router.http.post(path, json={"model": "d", "prompt": "x"})
        assert refused.status_code == 404 and "a, b, c" in refused.json()["error"]["message"]
    for server in servers.values():
        server.stop()


def test_the_prompt_of_a_continued_response_is_counted_where_that_is_stored(loop: Loop) -> None:
    path, unknown = "/v1/responses/input_tokens", {"error": {"code": "previous_response_not_found"}}
    servers = [FakeServer(loop, answers={path: (400, unknown)}) for _ in range(3)]
    with RouterThread(servers) as router:
        asked = {"input": "x", "previous_response_id": "resp_1"}
        assert router.http.post(path, json=asked).status_code == 400
        assert [len(server.requests) for server in servers] == [1, 1, 1]
        servers[1].answers[path] = (200, {"input_tokens": 3})
        assert router.http.post(path, json=asked).json() == {"input_tokens": 3}
        for server in servers:
            server.answers[path] = (400, {"error": {"code": "invalid_type"}})
            server.requests.clear()
        assert router.http.post(path, json={"input": 3}).status_code == 400
        assert sum(len(server.requests) for server in servers) == 1
    for server in servers:
        server.stop()


def test_a_stored_response_that_went_on_elsewhere_is_the_one_that_ended(loop: Loop) -> None:
    path = "/v1/responses/resp_1"
    given = [(404, {}), (200, {"status": "cancelled"}), (200, {"status": "completed"}), (404, {})]
    contents = [(status, json.dumps(content, separators=(",", ":")).encode()) for status, content in given]
    servers = [FakeServer(loop, answers={path: content}) for content in contents]
    with RouterThread(servers) as router:
        assert router.http.get(path).json() == {"status": "completed"}
        assert [len(server.requests) for server in servers] == [1, 1, 1, 0]
        router.http.delete(path)
        assert [len(server.requests) for server in servers] == [2, 2, 2, 1], "wherever it is"
        servers[2].answers[path] = (404, b"{}")
        assert router.http.get(path).json() == {"status": "cancelled"}
    for server in servers:
        server.stop()


RESPONSE = (200, {"id": "resp_2", "usage": {"input_tokens": 3}})
NOT_STORED = refusal(400, "previous_response_not_found")


@pytest.mark.parametrize(
    ("quire", "first", "second", "status", "asked"),
    [
        (True, refusal(400, "invalid_value"), RESPONSE, 400, 1),  # wrong everywhere
        (True, refusal(404, "model_not_found"), RESPONSE, 404, 1),
        (True, (400, "bad request"), RESPONSE, 400, 1),
        (True, (400, {"error": "bad request"}), RESPONSE, 400, 1),
        (True, NOT_STORED, RESPONSE, 200, 2),
        (False, NOT_STORED, RESPONSE, 200, 2),
        (False, refusal(404, 404), RESPONSE, 200, 2),  # vLLM's
        (True, NOT_STORED, NOT_STORED, 400, 2),
        (True, NOT_STORED, refusal(400, "invalid_value"), 400, 2),
        (True, refusal(429, "queue_full"), NOT_STORED, 429, 2),  # who was busy may have it
        (True, NOT_STORED, refusal(429, "queue_full"), 429, 2),
    ],
)
def test_a_request_that_continues_a_response_goes_on_only_where_that_may_be_stored_elsewhere(
    loop: Loop, quire: bool, first: tuple[int, object], second: tuple[int, object], status: int, asked: int
) -> None:
    path = "/v1/responses"
    servers = [FakeServer(loop, quire=quire) for _ in range(2)]
    with RouterThread(servers, policy="round-robin") as router:
        router.http.post(path, json={"input": "a"})  # so that it is known whose turn is next
        [before] = [one for one in servers if one.requests]
        [after] = [one for one in servers if one is not before]
        after.answers[path], before.answers[path] = first, second
        answer = router.http.post(path, json={"input": "b", "previous_response_id": "resp_1"})
        assert answer.status_code == status
        assert answer.json() == (first if asked == 1 or first[0] == 429 else second)[1]
        assert [len(one.requests) for one in (after, before)] == [1, asked]
        # Without it, no other server is asked of what one has refused.
        after.answers[path] = before.answers[path] = NOT_STORED
        assert router.http.post(path, json={"input": "c"}).status_code == 400
        assert sum(len(one.requests) for one in servers) == asked + 2
    for one in servers:
        one.stop()


def test_a_server_that_fails_is_left_alone_for_a_growing_while_and_comes_back(
    pair: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.servers.FIRST_BACKOFF", 0.05)
    with RouterThread(pair) as router:
        pair[0].stop()
        assert wait_until(lambda: router.states[pair[0].address] == "down")
        assert all(router.complete(prompt=f"{number}").status_code == 200 for number in range(6))
        server = router.site.servers.by_name[pair[0].address]
        assert wait_until(lambda: server.retry_at - server.failed_at > 3.9 * 0.05)
        assert router.http.get("/router/status").json()["servers"][0]["state"] == "down"
        pair[0].start()
        assert wait_until(lambda: router.up == 2)


def test_without_any_server_requests_are_refused_at_once(loop: Loop) -> None:
    server = FakeServer(loop)
    server.stop()
    with RouterThread([server], wait=False) as router:
        answer = router.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert router.http.get("/health").status_code == 503


def test_a_stream_whose_last_server_dies_waits_for_it_for_a_while(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(loop, die_after=9)
    with RouterThread([server]) as router, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(router.stream)
        assert wait_until(lambda: router.up == 0)
        server.start()
        events = stream.result()
        assert text_of(events) == answer_text(server.requests[0]) and len(server.requests) == 2
        assert events[-1] == "[DONE]" and not list(errors_of(events))
        monkeypatch.setattr("quire.router.relay.WAIT_SECONDS", 0.0)
        server.die_after = 9
        [error] = errors_of(router.stream())
        assert error["code"] == "no_server"
    server.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_request_before_the_first_look_at_the_servers_waits_for_it(path: str, loop: Loop) -> None:
    server = FakeServer(loop, stalled=True)
    with RouterThread([server], wait=False) as router, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(router.http.post, path, json={"prompt": "p", "model": "m"})
        both = "quire:http_requests_in_progress 2.0"  # the question is one itself
        assert wait_until(lambda: answer.done() or both in router.http.get("/metrics").text)
        server.stalled = False
        assert answer.result().status_code == 200
    server.stop()


def test_a_response_is_ended_by_its_id_wherever_it_is_made(pair: list[FakeServer]) -> None:
    with RouterThread(pair) as router:
        assert router.http.post("/abort/some-id").json()["path"] == "/abort/some-id"
        assert router.http.post("/abort/nobodys").status_code == 404


def test_a_client_that_leaves_ends_its_request_at_the_server(loop: Loop) -> None:
    server = FakeServer(loop, pause=0.05)
    with RouterThread([server]) as router:
        with router.http.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as answer:
            next(answer.iter_lines())
        load = router.site.servers.by_name[server.address].engines[0].load
        assert wait_until(lambda: (load.running, load.waiting, load.queued) == (0, 0, 0))
        assert wait_until(lambda: router.thread.num_tasks == 0)
    server.stop()


# -- who may serve ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(404, {"error": 1}), (200, {"data": "x"}), (200, b"<html>"), (200, [])])
def test_a_server_that_is_not_openais_is_refused_by_name(loop: Loop, answer: tuple[int, object]) -> None:
    server = FakeServer(loop, models_answer=answer)
    with RouterThread([server], wait=False) as router:
        assert wait_until(lambda: router.states[server.address] == "refused")
        assert "no OpenAI server" in router.reason(server)
        assert router.complete().status_code == 503
    server.stop()


def test_a_server_with_another_key_is_refused_and_says_what_to_do(loop: Loop) -> None:
    server = FakeServer(loop, key="theirs")
    with RouterThread([server], wait=False, api_key=["ours"]) as router:
        assert wait_until(lambda: router.states[server.address] == "refused")
        assert "--server-key" in router.reason(server)
    with RouterThread([server], api_key=["ours"], server_key="theirs") as router:
        assert router.complete().status_code == 200
    server.stop()


def test_another_model_behind_the_same_name_is_refused(loop: Loop) -> None:
    first = FakeServer(loop, told={"checkpoint": "aaa"})
    with RouterThread([first]) as router:
        second = FakeServer(loop, told={"checkpoint": "bbb"})
        foreign = [FakeServer(loop, name="v", quire=False, card={"root": f"/data/{root}"}) for root in ("x", "y", "x")]
        for one in (second, *foreign):
            router.thread.call(_add(router, one))
            assert wait_until(lambda: router.states[one.address] not in ("new", "loading"))  # noqa: B023
        assert router.states[second.address] == "refused"
        assert "another model as 'm'" in router.reason(second)
        assert [router.states[one.address] for one in foreign] == ["up", "refused", "up"]
        assert all(router.complete().status_code == 200 for _ in range(4))
        assert not second.requests
        for one in (first, second, *foreign):
            one.stop()


def test_servers_that_compute_in_another_way_stand_aside(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = ([FakeServer(loop, fingerprint=name) for _ in range(2)] for name in ("bf16", "int8"))
    with RouterThread([ours[0], theirs[0]], wait=False) as router:
        assert wait_until(lambda: sorted(router.states.values()) == ["aside", "up"])
        [up] = [one for one in (ours[0], theirs[0]) if router.states[one.address] == "up"]
        mine, other = (ours, theirs) if up is ours[0] else (theirs, ours)
        assert mine[0].fingerprint in router.reason(other[0]) and "--mixed" in router.reason(other[0])
        assert f"server {other[0].address} is aside: its tokens would be others" in caplog.text
        shown = router.http.get("/router/status").json()["servers"]
        assert {one["state"] for one in shown} == {"up", "aside"} and {one["fingerprint"] for one in shown}
        assert all(router.complete(prompt=f"{number}").status_code == 200 for number in range(6))
        assert not other[0].requests
        router.thread.call(_add(router, other[1]))  # they are more now
        assert wait_until(lambda: [router.states[one.address] for one in (mine[0], *other)] == ["aside", "up", "up"])
        router.thread.call(_add(router, mine[1]))
        assert wait_until(lambda: router.states.get(mine[1].address) == "aside"), "as many: who serves goes on"
        for one in other:
            one.stop()
        assert wait_until(lambda: [router.states[one.address] for one in mine] == ["up", "up"])
        assert router.complete().status_code == 200
    for one in mine:
        one.stop()


def test_a_mixed_router_has_servers_that_compute_in_another_way(loop: Loop) -> None:
    servers = [FakeServer(loop, fingerprint=name) for name in ("bf16", "int8")]
    with RouterThread(servers, mixed=True) as router:
        assert [*router.states.values()] == ["up", "up"]
    for one in servers:
        one.stop()


async def _add(router: RouterThread, server: FakeServer) -> None:
    router.site.servers.add(server.url)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no server"),
        ({"server": ["ftp://x"]}, "http://127.0.0.1:8000"),
        ({"server": ["http://u:p@x"]}, "--server-key"),
        ({"server": ["http://x:99999"]}, "'http://x:99999' is not a server's URL"),
        ({"server": "http://[::1"}, "is not a server's URL"),
        ({"server": 5}, "server must be a string or a list of strings"),
        ({"server": ["http://x:1", "http://x:1/v1"]}, "twice"),
        ({"server": ["http://x"], "policy": "best"}, "allowed"),
        ({"server": ["dns+https://x"]}, r"use dns\+http://"),
        ({"server": ["dns+x"]}, "http://127.0.0.1:8000"),
        ({"server": ["redis://x"]}, "http://127.0.0.1:8000"),
        ({"server": ["http://x"], "admin": True}, "admin needs api_key"),
        ({"server": ["http://x"], "metrics_key": ["k"]}, "api_key"),
        ({"server": ["http://x"], "port": 70_000}, "65535"),
        ({"servers": ["http://x"]}, "server"),
    ],
)
def test_options_that_cannot_be_are_refused_with_one_line(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        RouterConfig.from_options(options)
    assert "\n" not in str(error.value)


def test_one_server_needs_no_list_in_a_file() -> None:
    assert RouterConfig.from_options({"server": "http://x:1", "api_key": "k"}).server == ("http://x:1",)


def test_a_body_nested_too_deeply_is_passed_on_like_any_that_is_not_valid() -> None:
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert read_prompt(deep).body == deep and not read_prompt(deep).streams


# -- joining and leaving ---------------------------------------------------------------------------------------


def test_servers_of_a_file_come_and_go_with_its_lines(
    loop: Loop,
    pair: list[FakeServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("quire.router.membership.WATCH_SECONDS", 0.05)
    path = tmp_path / "servers"
    path.write_text(f"# ours\n{pair[0].url}  # the first\n")
    assert read_servers_file(path) == {pair[0].url: "serve"}
    with RouterThread(servers_file=str(path)) as router:
        watching = router.thread.call(begin([FileSource(path)], router.site.servers))
        assert wait_until(lambda: router.states.get(pair[0].address) == "up")
        path.write_text(f"{pair[0].url}\nprefill {pair[1].url}\n")
        assert wait_until(lambda: router.up == 2)
        assert router.site.servers.by_name[pair[1].address].role == "prefill"
        path.write_text("what is this\n")
        assert wait_until(lambda: "the servers stay as they were" in caplog.text)
        assert router.up == 2
        path.write_text(f"{pair[1].url}\n")
        assert wait_until(lambda: list(router.states) == [pair[1].address])
        assert wait_until(lambda: router.up == 1)
        assert router.complete().status_code == 200
        router.thread.loop.call_soon_threadsafe(watching[0].cancel)


def test_a_file_that_is_being_written_takes_no_server_away(loop: Loop, pair: list[FakeServer], tmp_path: Path) -> None:
    path = tmp_path / "servers"
    both = f"{pair[0].url}\n{pair[1].url}\n"
    path.write_text(both)
    with RouterThread(servers_file=str(path)) as router:
        source = FileSource(path)

        def look() -> set[str]:
            router.thread.call(source.look(router.site.servers))
            return set(router.states)

        addresses = {server.address for server in pair}
        assert look() == addresses
        for written in ("", pair[0].url):  # as far as it is there yet
            path.write_text(written)
            assert look() == addresses
            path.write_text(both)
            assert look() == addresses
        path.write_text(pair[0].url)
        assert look() == addresses
        assert look() == {pair[0].address}


def test_each_address_of_a_name_is_a_server_as_long_as_the_name_has_it(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.router.membership.DNS_SECONDS", 0.05)
    server = FakeServer(loop)
    said: list[Any] = [["127.0.0.1"]]

    async def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("decode.internal", server.port)
        if isinstance(said[-1], Exception):
            raise said[-1]
        return list(said[-1])

    with RouterThread(server=[f"dns+http://decode.internal:{server.port}/v1"]) as router:
        source = DnsSource(router.config.server[0], "serve", resolve)
        [watching] = router.thread.call(begin([source], router.site.servers))
        assert wait_until(lambda: router.up == 1)
        assert router.complete().status_code == 200
        said.append(["::1", "127.0.0.1"])
        assert wait_until(lambda: set(router.states) == {server.address, f"[::1]:{server.port}"})
        said.append(OSError(-2, "Name or service not known"))
        assert wait_until(lambda: "not known; the servers stay as they were" in caplog.text)
        assert router.up == 1 and len(router.states) == 2
        said.append(["::1"])
        assert wait_until(lambda: list(router.states) == [f"[::1]:{server.port}"])
        router.thread.loop.call_soon_threadsafe(watching.cancel)
    server.stop()


def test_a_name_is_looked_up_as_the_machine_does(loop: Loop) -> None:
    server = FakeServer(loop)
    with RouterThread(server=[f"dns+http://localhost:{server.port}"]) as router:
        source = DnsSource(router.config.server[0], "serve")
        [watching] = router.thread.call(begin([source], router.site.servers))
        assert wait_until(lambda: router.states == {server.address: "up"})
        router.thread.loop.call_soon_threadsafe(watching.cancel)
    server.stop()


def test_a_server_that_left_its_port_to_another_program_is_forgotten(
    pair: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.router.servers.FORGET_SECONDS", 0.3)
    with RouterThread(pair[:1]) as router:

        async def join() -> None:
            router.site.servers.add(pair[1].url, "serve", "joined")

        router.thread.call(join())
        assert wait_until(lambda: router.up == 2)
        pair[1].models_answer = (404, {"detail": "Not Found"})
        assert wait_until(lambda: router.states == {pair[0].address: "up"})


@pytest.mark.parametrize("line", ["http://", "serve http://x", "prefill http://x y", "x"])
def test_a_line_of_the_file_that_is_no_server_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text(f"http://ok\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_servers_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_servers_file(tmp_path / "nothing")


def test_servers_join_and_leave_with_the_operators_key(loop: Loop) -> None:
    server = FakeServer(loop, key="k1")
    with RouterThread(api_key=["k1", "k2"]) as router:
        join = {"url": server.url}
        assert router.http.post("/admin/join", json=join, headers={"authorization": "Bearer k2"}).status_code == 403
        assert router.http.post("/admin/join", json={"url": "x"}).status_code == 400
        assert router.http.post("/admin/join", json=join).status_code == 200
        assert wait_until(lambda: router.up == 1)
        assert router.complete().status_code == 200
        assert router.http.post("/admin/join", json={**join, "leaves": True}).status_code == 200
        assert not router.states
    with RouterThread([server], wait=False) as router:
        answer = router.http.post("/admin/join", json=join)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "joining_is_off")
    server.stop()


def test_a_server_that_is_drained_ends_what_it_has_and_gets_nothing_more(loop: Loop, pair: list[FakeServer]) -> None:
    pair[0].pause = pair[1].pause = 0.02
    with RouterThread(pair) as router:  # without a key nobody may drain
        refused = router.http.post(f"/admin/drain/{pair[0].address}")
        assert refused.status_code == 404 and "--admin" in refused.text
    with RouterThread(pair, admin=True, api_key=["k"]) as router:
        assert router.http.post(f"/admin/drain/{pair[0].address}", headers={"authorization": ""}).status_code == 401
        streams = [threading.Thread(target=lambda: texts.append(text_of(router.stream(seed=1)))) for _ in range(4)]
        texts: list[str] = []
        for one in streams:
            one.start()
        assert wait_until(
            lambda: all(server.requests for server in pair) and sum(len(one.requests) for one in pair) == 4
        )
        before = len(pair[0].requests)
        drained = router.http.post(f"/admin/drain/{pair[0].address}").json()
        assert drained["draining"] is True
        assert router.http.get("/router/status").json()["servers"][0]["state"] == "draining"
        for number in range(6):
            assert router.complete(prompt=f"{number}").status_code == 200
        assert len(pair[0].requests) == before
        for one in streams:
            one.join()
        assert texts == [answer_text({"prompt": "p", "seed": 1})] * 4
        router.http.post(f"/admin/undrain/{pair[0].address}")
        for number in range(6):
            router.complete(prompt=f"again {number}")
        assert len(pair[0].requests) > before
        assert router.http.post("/admin/drain/nobody").status_code == 404


def test_a_router_whose_time_is_over_ends_streams_with_an_error_that_says_so(loop: Loop) -> None:
    server = FakeServer(loop, pause=0.05)
    with RouterThread([server]) as router:
        events: list[str] = []
        asking = threading.Thread(target=lambda: events.extend(router.stream(seed=1)))
        asking.start()
        assert wait_until(lambda: router.site.servers.by_name[server.address].running == 1)
        end = time.monotonic() + 0.1
        router.thread.call(leave(router.thread.server, router.site, lambda: end))
        asking.join()
        assert [error["code"] for error in errors_of(events)] == ["shutting_down"]
        assert events[-1] == "[DONE]"
        assert answer_text({"prompt": "p", "seed": 1}).startswith(text_of(events))
    server.stop()


# -- prefill and decode ----------------------------------------------------------------------------------------


def test_a_long_prompt_gets_a_pair_and_a_short_one_the_decode_server_alone(loop: Loop) -> None:
    prefill = FakeServer(loop, told={"prefill_tokens_per_second": 1e5, "kv_transfer": {"remote_engine_id": "e"}})
    decode = FakeServer(loop, told={"prefill_tokens_per_second": 1e3})
    with RouterThread([decode], prefill_server=[prefill.url]) as router:
        assert wait_until(lambda: router.up == 2)
        router.complete(prompt="a long prompt " * 1000)
        router.complete(prompt="short")
        router.complete(prompt="a long prompt " * 1000 + "once more")
        router.complete(prompt="its own " * 1000, kv_transfer_params={"do_remote_decode": True})
        asked = [request.get("kv_transfer_params") for request in decode.requests]
        assert asked == [
            {"do_remote_prefill": True, "remote_engine_id": "e"},
            None,
            None,  # its prefix is there
            {"do_remote_decode": True},
        ]
        assert not prefill.requests
        decode.stop()
        assert wait_until(lambda: router.up == 1)
        assert router.complete().status_code == 200  # a prefill server can serve, too
    prefill.stop()


# -- what is read of bodies ------------------------------------------------------------------------------------


def test_prompts_that_begin_alike_have_hashes_that_begin_alike() -> None:
    turns = [{"role": "user", "content": f"{number} " + "word " * 60} for number in range(6)]
    bodies = [json.dumps({"model": "m", "messages": turns[: count + 1]}).encode() for count in range(6)]
    prompts = [read_prompt(body) for body in bodies]
    for before, after in itertools.pairwise(prompts):
        shared = len(before.hashes) - 1  # but for the list's end
        assert before.hashes[:shared] == after.hashes[:shared]
        assert len(after.hashes) == after.size // CHUNK_BYTES
    assert read_prompt(bodies[5], b"key").hashes[0] != prompts[5].hashes[0]
    assert read_prompt(bodies[5].replace(b'"m"', b'"n"')).hashes[0] != prompts[5].hashes[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"stream": 3}', b'{"prompt": "\xff"}', b"null"])
def test_a_body_that_is_not_valid_is_passed_on_for_a_server_to_judge(body: bytes) -> None:
    prompt = read_prompt(body)
    assert (prompt.body, len(prompt.hashes)) == (body, 1)
    assert not prompt.streams


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a":1}', b'{"a":1, "seed": null}\n'])
def test_fields_are_added_behind_those_of_the_client(body: bytes) -> None:
    assert json.loads(read_prompt(body).with_fields({"seed": 7})) == {**json.loads(body), "seed": 7}


# -- many ------------------------------------------------------------------------------------------------------


def _storm(loop: Loop, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests while servers come and go: each has exactly one end, and streams have the right text."""
    monkeypatch.setattr("quire.router.servers.FIRST_BACKOFF", 0.01)
    monkeypatch.setattr("quire.router.servers.MAX_BACKOFF", 0.02)
    servers = [FakeServer(loop, chunk=2 + index) for index in range(4)]
    chance = random.Random(count)
    with RouterThread(servers, log_requests=False) as router, ThreadPoolExecutor(16) as pool:
        over = threading.Event()

        def come_and_go() -> None:
            while not over.wait(0.1):
                one = chance.choice(servers)
                one.stop()
                time.sleep(0.02)
                one.start()

        def ask(number: int) -> str:
            if number % 3 == 0:
                answer = router.complete(prompt=f"{number % 50}", seed=number)
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] == answer_text(
                        {"prompt": f"{number % 50}", "seed": number}
                    )
                return str(answer.status_code)
            try:
                events = router.stream(prompt=f"{number % 50}", seed=number)
            except AssertionError as error:
                assert "server_lost" in str(error) or "no_server" in str(error)
                return "refused"
            assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
            if list(errors_of(events)):
                return "error"
            assert text_of(events) == answer_text({"prompt": f"{number % 50}", "seed": number})
            return "stream"

        going = threading.Thread(target=come_and_go)
        going.start()
        try:
            ends = Counter(pool.map(ask, range(count)))
        finally:
            over.set()
            going.join()
        assert ends.total() == count
        assert set(ends) <= {"200", "502", "503", "stream", "error", "refused"}
        assert ends["200"] + ends["stream"] > 0.9 * count, ends
        assert wait_until(lambda: router.thread.num_tasks == 0)
        for one in router.site.servers.by_name.values():
            assert (one.running, one.waiting, one.queued) == (0, 0, 0)
    for one in servers:
        one.stop()


@pytest.mark.slow
def test_500_requests_while_servers_come_and_go_have_one_end_each(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    _storm(loop, 500, monkeypatch)


@pytest.mark.slow
def test_10000_requests_while_servers_come_and_go_have_one_end_each(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    _storm(loop, 10_000, monkeypatch)
