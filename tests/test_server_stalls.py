"""What happens to a running server, by the clock; the rest is in `test_server_faults.py`."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time

from tests.http_tools import ServeProcess, wait_until
from tests.test_server_faults import LONG, jobs


def test_wedged_processes_are_replaced_and_a_request_that_wedges_the_engine_twice_ends_alone():
    flags = ["--inject-fault", "spin:1234", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
    flags += ["--stall-restart-s", "5", "--api-workers", "2"]
    with ServeProcess(*flags) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        wait_until(lambda: len(server.pids("tokenizer")) == 2)
        stopped = server.kill("http", index=1, number=signal.SIGSTOP)  # the other one takes the connections
        long = jobs(3, max_tokens=300)
        answers = pool.map(lambda job: server.json("/v1/completions", job), long)
        expected = [answer["choices"][0]["text"] for answer in answers]
        streams = [server.stream("/v1/completions", job) for job in long]
        # A long prompt, so that its end is computed when the others have come.
        status, _, body = server.post("/v1/completions", {**LONG, "prompt": [5] * 1500 + [1234]})
        assert status == 500 and "twice" in json.loads(body)["error"]["message"]
        assert [stream.texts()[0] for stream in streams] == expected
        assert stopped not in wait_until(lambda: server.pids("http"))
        wait_until(lambda: server.health() == 200)
        assert server.json("/v1/completions", long[0])["choices"][0]["text"] == expected[0]
        for number in (1, 2):
            assert f"engine {number} died (it showed no sign of life" in server.stderr
        assert "HTTP process 1 died (it showed no sign of life" in server.stderr


def test_the_port_answers_at_once_and_says_how_far_loading_is():
    with ServeProcess(wait="url") as server:
        opened = time.monotonic() - server.started
        status, headers, body = wait_until(lambda: _answer(server))
        assert opened < 30  # a busy machine; the figure is in benchmarks
        if status == 503:
            assert json.loads(body)["status"] == "loading" and {"phase", "percent"} <= json.loads(body).keys()
            status, headers, body = server.post("/v1/completions", {"prompt": "x"})
            assert status in (503, 200) and (status == 200 or "retry-after" in headers)
        server.wait_ready()


def _answer(server):
    try:
        return server.get("/health")
    except OSError:
        return None
