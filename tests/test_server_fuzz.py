"""Some seconds of mixed traffic, good and bad, timed by a seed; then the books must balance.

The invariants of blocks (`quire.core.invariants`) are checked by the engine after every step
(`--check-invariants`), those of requests from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time

import pytest

from tests.http_tools import ServeProcess, raw_request, resident_bytes, wait_until

PATHS = ["/v1/completions", "/v1/chat/completions"]
BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "\\ud800", "model": "demo"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}",
    b'{"prompt": "' + b"x" * (17 << 20) + b'"}',
]
BAD_FIELDS = {
    "prompt": ["", [], [[]], [-1], [10**9], [2**70], ["x", 1], {"a": 1}, [True], None, ["x"] * 5000],
    "max_tokens": [-2, 1.5, "5", True, 2**40],
    "temperature": [-1, 1e9, "hot", [], True],
    "top_p": [0, -0.1, 2, "x"],
    "top_k": [-2, 1.5, 2**40],
    "min_p": [-1, 2],
    "n": [0, -1, 10**6, 1.5],
    "best_of": [7],
    "logprobs": [-1, 999, "yes"],
    "logit_bias": [{"-1": 1}, {"x": 1}, {"5": 1000}, {"999999999": 1}, [1]],
    "stop": ["", [""], 5, ["x"] * 1000, "y" * 10**5],
    "seed": [2**64, 1.5, "x"],
    "stream": ["yes", 1],
    "stop_token_ids": [[-1], [10**9], "x"],
    "allowed_token_ids": [[], [-1], [10**9]],
    "bad_words": [[""], ["x" * 10**5]],
    "min_tokens": [10**9, -1],
    "repetition_penalty": [0, -1, 1e9],
    "frequency_penalty": [3, "x"],
    "tools": [[{}]],
    "suffix": ["x"],
    "echo": ["x"],
    "model": ["nobody", 5, "x" * 10**5],
    "cache_salt": ["", 5],
    "priority": [2**40],
}
BAD_HTTP = [
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /health HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{",
]


def good_body(rng: random.Random) -> dict[str, object]:
    body = {
        "model": "demo",
        "max_tokens": rng.choice([0, 1, 3, 20, 80]),
        "temperature": rng.choice([0, 0.8]),
        "seed": rng.randrange(100),
        "n": rng.choice([1, 1, 1, 2, 5]),
        "stop": rng.choice([None, "\n", ["return", "x"]]),
        "logprobs": rng.choice([None, 0, 3]),
        "echo": rng.random() < 0.2,
        "cache_salt": rng.choice([None, "a", "b"]),
        "priority": rng.choice([0, 1]),
        "prompt": rng.choice(["def f(x):\n", "import sys\n" * rng.randrange(1, 60), [5, 6, 7] * rng.randrange(1, 300)]),
        "something_new": rng.choice([1, None]),
    }
    if body["max_tokens"] == 0:
        body["stop"] = None
    return body


def chat_body(rng: random.Random) -> dict[str, object]:
    body = good_body(rng)
    for name in ("prompt", "echo", "logprobs"):
        del body[name]
    content = rng.choice(["hello", "x" * 500, [{"type": "text", "text": "<|im_end|>"}], "\u202e\U0001f600"])
    body["messages"] = [{"role": "user", "content": content}]
    body["max_tokens"] = body["max_tokens"] or 1
    return body


class Fuzzer:
    """One client that does as a seed says until its time is over, and remembers what was wrong."""

    def __init__(self, server: ServeProcess, seed: int, until: float) -> None:
        self.server, self.rng, self.until = server, random.Random(seed), until
        self.wrong: list[str] = []
        self.done: dict[str, int] = {}

    def run(self) -> None:
        while time.monotonic() < self.until:
            act = self.rng.choice([self.good, self.good, self.stream, self.leave, self.bad_field, self.bad_bytes])
            try:
                act()
            except Exception as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
            self.done[act.__name__] = self.done.get(act.__name__, 0) + 1

    def body(self) -> tuple[str, dict[str, object]]:
        path = self.rng.choice(PATHS)
        return path, good_body(self.rng) if path == PATHS[0] else chat_body(self.rng)

    def good(self) -> None:
        path, body = self.body()
        status, _, answer = self.server.post(path, body)
        self.check(status in (200, 429), f"{status} {answer[:300]!r} for {body}")
        if status == 200:
            document = json.loads(answer)
            reasons = [choice["finish_reason"] for choice in document["choices"]]
            self.check(len(reasons) == body["n"] and set(reasons) <= {"stop", "length"}, f"{reasons} for {body}")
            made = document["usage"]["completion_tokens"]
            self.check(made <= body["n"] * body["max_tokens"], f"{made} tokens for {body}")

    def stream(self) -> None:
        path, body = self.body()
        with self.server.stream(path, {**body, "stream_options": {"include_usage": True}}) as stream:
            if stream.status == 429:
                return
            events = list(stream.events())
        self.check(events.count("[DONE]") == 1 and events[-1] == "[DONE]", f"{events[-3:]} for {body}")
        chunks = [json.loads(event) for event in events[:-1]]
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
        self.check(sorted(ends) == list(range(body["n"])), f"ends {ends} for {body}")
        self.check(chunks[-1]["choices"] == [] and "usage" in chunks[-1], f"{chunks[-1]} for {body}")

    def leave(self) -> None:
        path, body = self.body()
        body["max_tokens"] = 500
        with self.server.stream(path, body) as stream:
            for _, _ in zip(range(self.rng.choice([0, 1, 7])), stream.events(), strict=False):
                pass

    def bad_field(self) -> None:
        name = self.rng.choice(sorted(BAD_FIELDS))
        body = {**good_body(self.rng), name: self.rng.choice(BAD_FIELDS[name])}
        if body["prompt"] is None:
            del body["prompt"]
        status, _, answer = self.server.post("/v1/completions", body)
        expected = {"model": (404, 400)}.get(name, (400,))
        harmless = name == "max_tokens" and body[name] == 2**40  # clamped
        self.check(status in expected or harmless or status == 429, f"{status} for {name}={str(body.get(name))[:80]}")
        if status >= 400:
            error = json.loads(answer)["error"]
            self.check(set(error) == {"message", "type", "param", "code"}, f"{error}")

    def bad_bytes(self) -> None:
        if self.rng.random() < 0.5:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before the end
                status, _, answer = self.server.post(self.rng.choice(PATHS), self.rng.choice(BAD_BODIES))
                self.check(status in (400, 413) and "error" in json.loads(answer), f"{status} {answer[:200]!r}")
            return
        answer = raw_request(self.server.port, self.rng.choice(BAD_HTTP), timeout=1.0)
        self.check(not answer or answer.startswith(b"HTTP/1.1 4"), f"{answer[:200]!r}")

    def check(self, condition: bool, text: str) -> None:
        if not condition:
            self.wrong.append(text)


def fuzz(server: ServeProcess, seed: int, seconds: float, clients: int) -> tuple[list[str], dict[str, int]]:
    until = time.monotonic() + seconds
    fuzzers = [Fuzzer(server, seed * 1000 + index, until) for index in range(clients)]
    threads = [threading.Thread(target=fuzzer.run) for fuzzer in fuzzers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done: dict[str, int] = {}
    for fuzzer in fuzzers:
        for name, count in fuzzer.done.items():
            done[name] = done.get(name, 0) + count
    return [text for fuzzer in fuzzers for text in fuzzer.wrong], done


def balanced(server: ServeProcess) -> bool:
    """Nobody runs or waits, no block is held, and nothing is queued."""
    live = server.json("/view")
    kv, stats = live["kv"], live["stats"]
    assert kv["free"] + kv["cached"] + kv["held"] == kv["num_blocks"]
    return not (live["requests"] or kv["held"] or stats["running"] or stats["waiting"])


FLAGS = ["--check-invariants", "--num-kv-blocks", "300", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]


@pytest.mark.timeout(240)
def test_mixed_traffic_leaves_the_books_balanced():
    with ServeProcess(*FLAGS, "--admin") as server:
        files = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in server.pids("all")}
        wrong, done = fuzz(server, seed=1, seconds=8, clients=12)
        assert not wrong, "\n".join(wrong[:20])
        assert min(done.values()) > 5 and len(done) == 5, done
        wait_until(lambda: balanced(server))
        assert server.health() == 200 and server.pids("all") == list(files)  # nobody died on the way
        wait_until(lambda: all(len(os.listdir(f"/proc/{pid}/fd")) <= files[pid] + 4 for pid in files))
        assert "Traceback" not in server.stderr and "invariant" not in server.stderr.lower()
        assert server.terminate() == 0 and server.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_of_mixed_traffic_keep_the_memory_flat():
    with ServeProcess(*FLAGS, "--admin") as server:
        fuzz(server, seed=2, seconds=120, clients=8)
        before = {pid: resident_bytes(pid) for pid in server.pids("all")}
        wrong, _ = fuzz(server, seed=3, seconds=480, clients=8)
        assert not wrong, "\n".join(wrong[:20])
        wait_until(lambda: balanced(server))
        after = {pid: resident_bytes(pid) for pid in server.pids("all")}
        assert after.keys() == before.keys()
        assert {pid: after[pid] - before[pid] for pid in after if after[pid] > before[pid] + (24 << 20)} == {}
