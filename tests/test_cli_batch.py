"""`quire batch`: OpenAI's batch format, resumable after an end at any byte."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.cli.batch import _ready
from quire.cli.main import main
from quire.errors import BatchError, ConfigError
from quire.server.batch_lines import Answer, Answers, Counts, Requests
from quire.server.batch_lines import run as run_batch
from tests.http_tools import wait_until


@pytest.fixture
def server(interfaces_server):
    return interfaces_server


def request(name: str, prompt: str = "x =", **body: object) -> dict[str, object]:
    url = body.pop("url", "/v1/completions")
    asked = {"model": "demo", "prompt": prompt, "max_tokens": 4, "seed": 1, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def write(file: Path, lines: list[object]) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def answers_of(file: Path) -> dict[str, dict[str, object]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_every_line_gets_its_answer_or_its_error(server, tmp_path, capfd):
    lines = [
        request("a"),
        request("chat", url="/v1/chat/completions", messages=[{"role": "user", "content": "x"}], prompt=None),
        request("vector", url="/v1/embeddings", input="x", prompt=None, max_tokens=None, seed=None),
        request("other model", model="other"),
        request("streams", stream=True),
        request("elsewhere", url="/abort/x"),
        "not JSON",
        "",
        {"custom_id": "", "url": "/v1/completions", "body": {}},
        *[request(str(number)) for number in range(40)],
    ]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    command = ["batch", str(source), str(target), "--url", server.url, "--api-key", "k1"]
    assert main(command) == 1
    found = answers_of(target)
    assert len(found) == len(lines) - 1  # but the empty one
    assert found["a"]["response"]["status_code"] == 200
    assert found["a"]["response"]["body"]["choices"][0]["text"] and found["a"]["error"] is None
    assert found["a"]["id"].startswith("batch_req_") and found["a"]["response"]["request_id"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert len(found["vector"]["response"]["body"]["data"][0]["embedding"]) == 256
    assert found["other model"]["response"]["status_code"] == 404
    assert "model" in found["other model"]["response"]["body"]["error"]["message"]
    for name, word in (("streams", "stream"), ("elsewhere", "/abort/x"), ("line-7", "line 7"), ("line-9", "custom_id")):
        assert found[name]["response"] is None and word in found[name]["error"]["message"]
    assert f"{len(found)} of {len(found)} requests answered, 5 with errors" in capfd.readouterr().err
    before = target.read_bytes()
    vllm = ["run-batch", "-i", str(source), "-o", str(target), *command[3:]]
    assert main(command) == main(vllm) == 1 and target.read_bytes() == before  # nothing is done twice
    assert main([*vllm[:3], *vllm[5:]]) == 2 and "a batch needs two files" in capfd.readouterr().err
    assert main([*command, "--max-num-seqs", "8"]) == 2
    assert "unknown option --max-num-seqs; " in (said := capfd.readouterr().err) and "'quire serve' go after --" in said


def test_it_goes_on_after_an_end_at_any_byte(server, tmp_path):
    source = write(tmp_path / "in", [request(str(number), f"x{number} =") for number in range(6)])
    target, part = tmp_path / "out", tmp_path / "part"
    assert main(["batch", str(source), str(target), "--url", server.url, "--api-key", "k1", "--concurrency", "1"]) == 0
    whole, texts = target.read_bytes(), texts_of(target)
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, *(end + more for end in ends[:3] for more in (-1, 0, 1, 200)), len(whole) - 1]:
        part.write_bytes(whole[:cut])
        assert (
            main(["batch", str(source), str(part), "--url", server.url, "--api-key", "k1", "--concurrency", "3"]) == 0
        )
        assert texts_of(part) == texts
        assert part.read_bytes().startswith(whole[: max([end for end in ends if end <= cut], default=0)])


def texts_of(file: Path) -> dict[str, str]:
    found = answers_of(file)
    return {name: line["response"]["body"]["choices"][0]["text"] for name, line in found.items()}


def test_killed_in_the_middle_it_loses_and_repeats_nothing(server, tmp_path):
    lines = [request(str(number), max_tokens=30, ignore_eos=True) for number in range(40)]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "batch",
        str(source),
        str(target),
        "--url",
        server.url,
        "--api-key",
        "k1",
    ]
    with subprocess.Popen([*command, "--concurrency", "2"], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, what="some answers")
        os.kill(process.pid, signal.SIGKILL)
    before = target.read_bytes()
    assert before.count(b"\n") < 40
    assert main(command[3:]) == 0
    assert target.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert len(answers_of(target)) == 40


@pytest.mark.slow
def test_without_a_url_it_brings_its_own_server(tmp_path, capfd):
    source, target = write(tmp_path / "in", [request("a"), request("b")]), tmp_path / "out"
    assert main(["batch", str(source), str(target), "--", "--threads", "1"]) == 0
    assert len(answers_of(target)) == 2
    target.unlink()
    assert main(["batch", str(source), str(target), "--model", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capfd.readouterr().err and not target.read_bytes()


@pytest.mark.parametrize(
    ("lines", "arguments", "word"),
    [
        ([request("a"), request("a")], [], "lines 1 and 2 have the same custom_id, 'a'"),
        (["junk", request("line-1")], [], "a line without one is called by its number"),
        ([request("a"), request("a", stream=True)], [], "lines 1 and 2 have the same custom_id, 'a'"),
        ([{"custom_id": "a", "url": "/v1/completions", "body": {}}], [], "--model"),
        ([request("a")], ["--url", "http://127.0.0.1:1", "--model", "x"], "--url"),
        ([request("a")], ["--url", "http://127.0.0.1:1", "--concurrency", "0"], "--concurrency"),
        ([request("a")], ["--url", "ftp://x"], "URL"),
    ],
)
def test_what_cannot_be_begun_is_refused(tmp_path, capfd, lines, arguments, word):
    source = write(tmp_path / "in", lines)
    assert main(["batch", str(source), str(tmp_path / "out"), *arguments]) == 2
    assert word in capfd.readouterr().err
    assert main(["batch", str(source), str(source)]) == 2
    assert main(["batch", str(source)]) == 2


def test_files_that_cannot_be_read_again_are_refused(tmp_path, capfd):
    source, pipe = write(tmp_path / "in", [request("a")]), os.pipe()
    os.write(pipe[1], source.read_bytes())
    os.close(pipe[1])
    url = ["--url", "http://127.0.0.1:1"]
    assert main(["batch", f"/dev/fd/{pipe[0]}", str(tmp_path / "out"), *url]) == 2
    os.close(pipe[0])
    assert "no regular file" in capfd.readouterr().err
    for target, why in (("/dev/null", "no regular file"), (str(tmp_path / "no" / "out"), "cannot be written")):
        assert main(["batch", str(source), target, *url]) == 2
        assert why in capfd.readouterr().err


def batch(lines: list[object], tmp_path: Path, post) -> tuple[Counts, dict[str, dict[str, object]]]:
    requests = Requests(write(tmp_path / "in", lines))
    answers = Answers(tmp_path / "out")
    try:
        return asyncio.run(run_batch(requests, answers, post, 3, lambda counts: None)), answers_of(tmp_path / "out")
    finally:
        answers.close()
        requests.close()


def test_an_answer_that_cannot_be_had_leaves_no_line(tmp_path):
    asked: Counter[bytes] = Counter()

    async def post(url: str, body: bytes) -> Answer:
        asked[body] += 1
        if len(asked) > 4:
            raise BatchError("gone")
        await asyncio.sleep(0)
        return Answer(200, "r", b'{"usage": {"completion_tokens": 2}}')

    lines: list[object] = [request(str(number), f"{number}") for number in range(9)]
    with pytest.raises(ExceptionGroup):
        batch(lines, tmp_path, post)
    done = answers_of(tmp_path / "out")
    assert 0 < len(done) < 9
    asked.clear()

    async def later(url: str, body: bytes) -> Answer:
        asked[body] += 1
        return Answer(200, "r", b"{}")

    counts, found = batch(lines, tmp_path, later)
    assert (counts.completed, counts.failed, len(found)) == (9, 0, 9) and len(asked) == 9 - len(done)


@contextlib.contextmanager
def answering(status: Callable[[str, int], int]) -> Iterator[tuple[str, Counter[str]]]:
    """A server whose `status` depends on a prompt and on how often it was sent: its URL, and these counts."""
    tries: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            tries[prompt] += 1
            code = status(prompt, tries[prompt])
            body = json.dumps({"error": {"code": "request_timeout"}} if code == 503 else {}).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", tries
        finally:
            server.shutdown()


def test_a_request_that_takes_too_long_is_tried_again_and_does_not_stop_the_batch(tmp_path, monkeypatch):
    """For a proxy (504) or for the server's --request-timeout."""
    monkeypatch.setattr("quire.cli.batch.random.uniform", lambda *_: 0.0)
    source = write(tmp_path / "in", [request(name, name) for name in ("late", "late once", "slow")])

    def status(prompt: str, tries: int) -> int:
        return 200 if prompt == "late once" and tries == 2 else 503 if prompt == "slow" else 504

    with answering(status) as (url, tries):
        assert main(["batch", str(source), str(tmp_path / "out"), "--url", url]) == 1
    found = {name: line["response"]["status_code"] for name, line in answers_of(tmp_path / "out").items()}
    assert found == {"late": 504, "late once": 200, "slow": 503}
    assert tries == {"late": 3, "late once": 2, "slow": 3}


def test_a_busy_server_is_waited_for_as_long_as_it_answers_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("quire.cli.batch.random.uniform", lambda *_: 0.0)
    source = write(tmp_path / "in", [request("a")])
    command = ["batch", str(source), str(tmp_path / "out"), "--url"]
    with answering(lambda prompt, tries: 200 if tries == 50 else 429) as (url, tries):
        assert main([*command, url]) == 0 and tries.total() == 50
    (tmp_path / "out").unlink()
    with answering(lambda prompt, tries: 502) as (url, tries):
        assert main([*command, url]) == 1 and tries.total() == 12
    monkeypatch.setattr("quire.cli.batch.BUSY_SECONDS", 0.0)
    with answering(lambda prompt, tries: 429) as (url, tries):
        assert main([*command, url]) == 1 and tries.total() == 1
    assert "answers 429, and has answered no request for 0 s" in capfd.readouterr().err


def test_a_full_disk_ends_a_batch_in_words_and_it_goes_on_later(tmp_path, monkeypatch):
    async def post(url: str, body: bytes) -> Answer:
        return Answer(200, "r", b"{}")

    write, room = os.write, 500

    def until_full(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:room])
        room -= written
        return written

    lines: list[object] = [request(str(number)) for number in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr("quire.server.batch_lines.os.write", until_full)
        with pytest.raises(ExceptionGroup) as caught:
            batch(lines, tmp_path, post)
    assert caught.group_contains(BatchError, match="^the answer file cannot be written: No space left")
    assert not (tmp_path / "out").read_text().endswith("\n"), "the last line was cut"
    counts, found = batch(lines, tmp_path, post)
    assert (counts.completed, len(found)) == (9, 9)


def test_two_batches_do_not_write_one_file(tmp_path):
    first = Answers(tmp_path / "out")
    with pytest.raises(BatchError, match="another batch"):
        Answers(tmp_path / "out")
    first.close()


@pytest.mark.parametrize("content", ["{}\n", "hello\n", '{"custom_id": 3}\n', json.dumps(request("a")) + "\n"])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content):
    (tmp_path / "out").write_text(content)
    with pytest.raises(BatchError, match="is not a batch response"):
        Answers(tmp_path / "out")
    assert (tmp_path / "out").read_text() == content


def test_answers_of_another_batch_are_not_gone_on_with(tmp_path):
    line = {"id": "batch_req_0", "custom_id": "z", "response": {"status_code": 200}, "error": None}
    (tmp_path / "out").write_text(json.dumps(line) + "\n")

    async def post(url: str, body: bytes) -> Answer:
        raise AssertionError

    with pytest.raises(ConfigError, match="not a request of this batch; it seems to belong to another input file"):
        batch([request("a")], tmp_path, post)


def test_a_servers_other_words_do_not_hide_that_it_is_ready():
    lines = ["5", "[1]", '"\\xff', "null", json.dumps({"event": "started", "url": "http://x"})]
    program = f"import sys\nfor line in {lines!r}: sys.stderr.write(line + chr(10))"

    async def url():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
        found = await _ready(process.stderr)
        await process.wait()
        return found

    assert asyncio.run(url()) == "http://x"
