"""What happens to a running server: killed processes, signals, wedged engines, bad starts."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import tempfile

import pytest

from quire.models.hub import resolve
from tests import warm
from tests.http_tools import ServeProcess, request, wait_until

LONG = {
    "model": "demo",
    "prompt": "def fib(n):\n",
    "max_tokens": 200,
    "ignore_eos": True,
    "seed": 1,
    "temperature": 0.9,
}


def jobs(count, **more):
    return [{**LONG, "seed": seed, **more} for seed in range(count)]


@pytest.fixture(scope="module")
def server():
    """One that survives what befalls it."""
    with ServeProcess() as process:
        yield process


def test_streams_go_on_with_the_same_tokens_when_the_engine_is_killed_twice(server):
    long = jobs(4, max_tokens=400)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda job: server.json("/v1/completions", job), long)
        expected = [answer["choices"][0]["text"] for answer in answers]
        streams = [server.stream("/v1/completions", job) for job in long]
        chunks = [stream.chunks() for stream in streams]
        texts = [next(chunk)["choices"][0]["text"] for chunk in chunks]
        for _ in range(2):
            # Whoever runs alone, on probation, while an engine dies has brought it down twice: wait for the others.
            wait_until(lambda: all_run(server, 4))
            pid = server.kill("engine")
            wait_until(lambda pid=pid: server.pids("engine") not in ([], [pid]) and server.health() == 200)
            texts = [text + next(chunk)["choices"][0]["text"] for text, chunk in zip(texts, chunks, strict=True)]
        for index, chunk in enumerate(chunks):
            texts[index] += "".join(choice["text"] for event in chunk for choice in event["choices"])
        assert texts == expected
        wait_until(lambda: server.health() == 200)
        assert server.json("/v1/completions", long[0])["choices"][0]["text"] == expected[0]


def all_run(server, count):
    """So many requests run, or have ended. An engine that is just starting says nothing of itself."""
    stats = server.json("/view").get("stats")
    return stats is not None and stats["running"] + stats["finished"] >= count


@pytest.mark.slow
def test_a_request_that_brings_the_engine_down_twice_ends_with_an_error_and_harms_no_one():
    flags = ["--inject-fault", "crash:1234", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
    with ServeProcess(*flags) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.json, "/v1/completions", job) for job in jobs(4, prompt=[7, 8, 9])]
        # A long prompt, so that its end is computed when the others have come.
        with server.stream("/v1/completions", {**LONG, "prompt": [5] * 1500 + [1234]}) as stream:
            events = list(stream.events())
        error = json.loads(events[-2])["error"]
        assert events[-1] == "[DONE]" and "twice" in error["message"]
        for future in good:
            assert future.result()["choices"][0]["finish_reason"] == "length"
        status, _, body = server.post("/v1/completions", {**LONG, "prompt": [1234]})
        assert status == 500 and "error" in json.loads(body)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_streams_go_on_with_the_same_tokens_when_a_rank_dies_or_hangs(number):
    long = jobs(3, max_tokens=600)
    flags = ["--tensor-parallel-size", "2", "--threads", "1", "--collective-timeout-s", "4"]
    with ServeProcess(*flags) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda job: server.json("/v1/completions", job), long)
        expected = [answer["choices"][0]["text"] for answer in answers]
        streams = [server.stream("/v1/completions", job) for job in long]
        chunks = [stream.chunks() for stream in streams]
        texts = [next(chunk)["choices"][0]["text"] for chunk in chunks]
        wait_until(lambda: all_run(server, 3))
        killed = server.kill("rank", number=number)
        for index, chunk in enumerate(chunks):
            texts[index] += "".join(choice["text"] for event in chunk for choice in event["choices"])
        assert texts == expected
        cause = {signal.SIGKILL: "rank 1 died (killed by SIGKILL)", signal.SIGSTOP: "rank 1 has not answered for 4 s"}
        assert cause[number] in server.stderr
        wait_until(lambda: server.health() == 200 and server.pids("rank") not in ([], [killed]))
        assert server.terminate() == 0
        assert server.survivors() == []


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_is_replaced_before_the_next_request():
    with ServeProcess("--tensor-parallel-size", "2", "--threads", "1") as server:
        killed = server.kill("rank")
        wait_until(lambda: server.pids("rank") not in ([], [killed]) and server.health() == 200)
        assert "rank 1 died (killed by SIGKILL)" in server.stderr
        assert server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200


def test_killed_tokenizer_and_http_processes_are_replaced(server):
    server.kill("tokenizer")
    assert server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
    old = server.kill("http")
    wait_until(lambda: server.pids("http") and server.pids("http") != [old] and server.health() == 200)
    assert server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
    wait_until(lambda: server.json("/view")["stats"]["held_blocks"] == 0)


def test_sigterm_lets_running_requests_finish_and_leaves_nothing_behind():
    with ServeProcess() as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.json, "/v1/completions", job) for job in jobs(8, max_tokens=300)]
        wait_until(lambda: all_run(server, 8))
        server.process.send_signal(signal.SIGTERM)
        for future in futures:
            assert future.result()["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert server.survivors() == []
        with pytest.raises(ConnectionRefusedError):
            request(server.port, "GET", "/live")


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [pytest.param([signal.SIGTERM], marks=pytest.mark.slow), [signal.SIGINT, signal.SIGINT]]
)
def test_requests_that_the_end_of_the_drain_cuts_off_return_what_they_have(signals):
    endless = {**LONG, "max_tokens": 1900, "n": 8}
    flags = ["--drain-timeout", "0.2" if len(signals) == 1 else "600", "--api-workers", "2"]
    with ServeProcess(*flags) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(server.post, "/v1/completions", {**endless, "seed": seed}) for seed in range(4)]
        streams = [server.stream("/v1/completions", endless) for _ in range(4)]
        readers = [stream.events() for stream in streams]
        for reader in readers:
            next(reader)
        wait_until(lambda: all_run(server, 8 * 8))
        server.pids("all")
        for number in signals:
            seen = server.stderr.count(signals[0].name)
            server.process.send_signal(number)
            wait_until(lambda seen=seen: server.stderr.count(signals[0].name) > seen)
        for reader in readers:
            events = list(reader)
            assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
            ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            assert {reason for reason in ends if reason} == {"abort"} and len([end for end in ends if end]) == 8
        for future in whole:
            status, _, body = future.result()
            answer = json.loads(body)
            if status == 503:  # it had no token yet
                assert answer["error"]["code"] == "shutting_down"
                continue
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
            assert any(choice["text"] for choice in answer["choices"]) and answer["usage"]["completion_tokens"] > 0
        assert server.wait() == (0 if len(signals) == 1 else 130)
        assert server.survivors() == []


def test_children_do_not_outlive_a_killed_supervisor():
    with ServeProcess() as server:
        pids = server.pids("all")
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not server.survivors())
        assert len(pids) >= 4


def fails(*arguments):
    """Exit code and the last line of a server that cannot start."""
    done = warm.run("serve", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_starts_that_cannot_work_end_with_one_clear_line_and_2_where_a_restart_would_not_help(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = fails("demo", "--port", str(port))
        assert code == 1 and str(port) in line and line.startswith("quire: error:")
    code, line = fails("no/such/folder/anywhere", "--port", "0")
    assert code == 2 and "no/such/folder" in line and line.startswith("quire: error:")
    broken = tmp_path / "broken"
    shutil.copytree(resolve("demo"), broken)
    (broken / "tokenizer.json").write_text('{"broken":')
    code, line = fails(str(broken), "--port", "0")
    assert code == 2 and "tokenizer.json" in line and line.startswith("quire: error:")
    code, line = fails("demo", "--port", "0", "--kv-cache-memory", "1KiB")
    assert code == 2 and "kv_cache_memory" in line and line.startswith("quire: error:")


@pytest.mark.slow
def test_nothing_of_a_server_stays_on_disk(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="q") as folder:  # a short name, since a socket's path must be short
        monkeypatch.setenv("TMPDIR", folder)
        with ServeProcess("--api-workers", "2") as server:
            assert [name for name in os.listdir(folder) if name.startswith("quire-")]
            server.kill("http")
            wait_until(lambda: server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200)
            assert server.terminate() == 0
        assert os.listdir(folder) == []
