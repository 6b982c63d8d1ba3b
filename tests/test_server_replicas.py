"""`quire serve --data-parallel-size 2`: what replicas take over from each other, and what each keeps to itself."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time

import pytest

from quire.fleet.prompt import read_prompt
from tests.http_tools import ServeProcess, wait_until

FLAGS = ["--data-parallel-size", "2", "--admin", "--inject-fault", "crash:1234"]
LONG = {"model": "demo", "prompt": "def fib(n):\n", "max_tokens": 400, "ignore_eos": True, "temperature": 0.9}


def jobs(count, **more):
    return [{**LONG, "seed": seed, **more} for seed in range(count)]


def ready(server):
    """Which replicas are ready."""
    return [state == "ready" for state in server.json("/health").get("replicas", [])]


def all_ready(server):
    wait_until(lambda: ready(server) == [True, True])


def served(server):
    """Requests that each replica has finished."""
    return [server.json(f"/view?engine={engine}")["stats"]["finished"] for engine in range(2)]


def restarts(server):
    return [server.metric("quire:engine_restarts_total", engine=str(engine)) for engine in range(2)]


def text_of(server, job):
    return server.json("/v1/completions", job)["choices"][0]["text"]


def texts_of(server, jobs):
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: text_of(server, job), jobs))


class Streams:
    """Streams that have begun, and what they say in the end."""

    def __init__(self, server, jobs):
        streams = [server.stream("/v1/completions", job) for job in jobs]
        self._chunks = [stream.chunks() for stream in streams]
        self._begun = [next(chunks)["choices"][0]["text"] for chunks in self._chunks]

    def texts(self):
        rest = ["".join(choice["text"] for event in chunks for choice in event["choices"]) for chunks in self._chunks]
        return [begun + more for begun, more in zip(self._begun, rest, strict=True)]


@pytest.fixture(scope="module")
def server():
    with ServeProcess(*FLAGS) as server:
        all_ready(server)
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """What one replica says, alone: the first one has not died yet."""
    return texts_of(server, jobs(4))


def test_the_first_replica_serves_while_the_others_load_and_all_have_its_limits(server):
    info = server.json("/server_info")
    assert info["engine_options"]["data_parallel_size"]["value"] == 2
    assert info["replicas"] == ["ready", "ready"]
    pools = [server.json(f"/view?engine={engine}")["stats"]["num_blocks"] for engine in range(2)]
    assert pools[0] == pools[1]


def test_requests_that_have_nothing_in_common_are_spread_evenly(server):
    before = served(server)
    for number in range(12):
        text_of(server, {**LONG, "prompt": [10 + number] * 40, "max_tokens": 2})
    assert [after - then for after, then in zip(served(server), before, strict=True)] == [6, 6]


def test_a_prefix_is_asked_for_where_it_is_cached(server):
    prefix, before = [300 + index for index in range(160)], served(server)
    cached = []
    for number in range(6):
        job = {**LONG, "prompt": [*prefix, number], "max_tokens": 2}
        cached.append(server.json("/v1/completions", job)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 160
    assert sorted(after - then for after, then in zip(served(server), before, strict=True)) == [0, 6]


def test_a_router_hears_what_each_replica_has_and_names_the_one_that_it_wants(server):
    job = {**LONG, "prompt": "a prompt of some length, which is asked for at the second replica " * 4, "max_tokens": 2}

    def told(since):
        return server.json(f"/load/prompts?since={since}")["engines"]

    before, served_before = told("-1,-1"), served(server)
    for _ in range(2):
        assert server.post("/v1/completions", job, x_quire_names="1", x_data_parallel_rank="1")[0] == 200
    assert [after - then for after, then in zip(served(server), served_before, strict=True)] == [0, 2]
    first, second = told(f"{before[0]['next']},{before[1]['next']}")
    names = [each.hex() for each in read_prompt(json.dumps(job).encode()).hashes]
    assert first["events"] == [] and second["events"] == [f"+{name}" for name in names]
    assert "snapshot" in told(f"{1 << 40}")[1] and first["boot"] != second["boot"]
    assert [each["engine"] for each in server.json("/load")["engines"]] == [first["boot"], second["boot"]]
    for number in ("2", "-1", "x", "1" * 99):
        status, _, answer = server.post("/v1/completions", job, x_data_parallel_rank=number)
        assert status == 400 and b"from 0 to 1" in answer
    assert server.get("/load/prompts?since=1,")[0] == 400


@pytest.mark.slow
def test_many_requests_with_one_prefix_are_not_all_left_to_the_replica_that_has_it(server):
    before = served(server)
    Streams(server, jobs(8, prompt=list(range(500, 532)), max_tokens=800)).texts()  # all at once, on any machine
    assert min(after - then for after, then in zip(served(server), before, strict=True)) >= 1


@pytest.mark.slow
def test_a_request_that_brings_its_engine_down_takes_no_other_one_with_it(server, expected):
    good, engines, before = Streams(server, jobs(4)), server.pids("engine"), restarts(server)
    with server.stream("/v1/completions", {**LONG, "prompt": [5] * 600 + [1234]}) as stream:
        events = list(stream.events())
    assert "twice" in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"
    assert good.texts() == expected
    all_ready(server)
    assert len(set(engines) & set(server.pids("engine"))) == 1
    assert sorted(after - then for after, then in zip(restarts(server), before, strict=True)) == [0, 2]


@pytest.mark.slow
def test_streams_go_on_at_the_other_replica_when_one_is_killed(server, expected):
    streams, engines = Streams(server, jobs(4)), server.pids("engine")
    assert len(engines) == 2
    before = restarts(server)
    killed = server.kill("engine", index=0)
    wait_until(lambda: killed not in server.pids("engine"))
    assert server.health() == 200
    assert streams.texts() == expected
    all_ready(server)
    assert engines[1] in server.pids("engine")
    assert sorted(after - then for after, then in zip(restarts(server), before, strict=True)) == [0, 1]


@pytest.mark.slow
def test_streams_go_on_at_the_other_replica_when_one_hangs_within_ten_seconds(server, expected):
    streams = Streams(server, jobs(4))
    stopped, begin = server.kill("engine", index=0, number=signal.SIGSTOP), time.monotonic()
    try:
        assert streams.texts() == expected
        assert time.monotonic() - begin < 15
    finally:
        os.kill(stopped, signal.SIGCONT)
    all_ready(server)


@pytest.mark.slow
def test_streams_wait_for_the_next_engine_when_all_are_killed(server, expected):
    streams, engines = Streams(server, jobs(4)), server.pids("engine")
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    assert streams.texts() == expected
    all_ready(server)
    assert not set(engines) & set(server.pids("engine"))


def test_a_response_is_aborted_and_a_cache_emptied_wherever_they_are(server):
    def aborted(name):
        with server.stream("/v1/completions", {**LONG, "max_tokens": 1900}, x_request_id=name) as stream:
            events = stream.chunks()
            next(events)
            assert server.post(f"/abort/{name}")[0] == 200
            return [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1]

    assert [aborted(f"name-{number}") for number in range(4)] == ["abort"] * 4
    wait_until(lambda: server.held_blocks() == 0)
    assert server.json("/reset_prefix_cache", {})["blocks"] > 0
    assert [server.metric("quire:kv_blocks", state="cached", engine=str(engine)) for engine in range(2)] == [0, 0]


def test_documents_say_which_engine_they_are_of(server):
    assert server.json("/view?engine=1")["engine"] == 1 and server.json("/view?engine=0")["engine"] == 0
    assert server.json("/view")["engines"] == ["ready", "ready"]
    status, _, body = server.get("/view?engine=2")
    assert status == 400 and "0 to 1" in json.loads(body)["error"]["message"]


def test_a_drain_lets_the_requests_of_all_replicas_end(server, expected):
    streams = Streams(server, jobs(4))
    assert {request["engine"] for request in server.json("/debug/requests")["requests"]} == {0, 1}
    server.process.send_signal(signal.SIGTERM)
    assert streams.texts() == expected
    assert server.wait() == 0
    assert server.survivors() == []
