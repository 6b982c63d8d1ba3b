"""The command `quire bench serve`: its reports, its exit codes, and mistakes in its options."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.bench.serve import plot
from quire.bench.serve.openai_client import OpenAIClient
from quire.cli.main import main
from quire.errors import ConfigError
from tests.load_stand_in import (
    Asked,
    Reply,
    StandIn,
    answering,
    closed_port,
    config,
    record,
    stand_in_thread,
    status,
    until,
    url_of,
)

# The command.


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in_thread(answering(cached=2)) as running:
        yield running


def bench(server: StandIn, *arguments: str) -> int:
    return main(["bench", "serve", "--url", server.url, "--input-len", "4", "--output-len", "3", *arguments])


def test_the_command_prints_a_table_that_lines_up(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-requests", "5", "--goodput", "ttft:60000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("/v1, model stand-in: random prompts of token ids, 8 requests at a time")
    heading = next(line for line in lines if line.startswith("latency, ms"))
    rows = [line for line in lines if line.startswith(("  time", "  inter", "  end"))]
    ends = [match.end() for match in re.finditer(r"\S+", heading)][2:]
    assert [[match.end() for match in re.finditer(r"[\d.,]+", row)] for row in rows] == [ends] * 4


def test_json_holds_every_setting_and_figure_but_not_the_key(server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert bench(server, "--num-requests", "6", "--api-key", "sk-secret", "--json", str(file), "--details") == 0
    text = file.read_text()
    content = json.loads(text)
    assert "sk-secret" not in text
    assert content["settings"]["input_len"] == "4"
    assert content["settings"]["api_key"] == "given"
    assert content["result"]["succeeded"] == len(content["requests"]) == 6
    assert content["result"]["cached_tokens"] == 12
    assert {"count", "mean", "p50", "p90", "p99"} <= set(content["result"]["latencies"]["ttft"])
    assert content["requests"][0]["chunk_tokens"] == [1, 1, 1]
    assert content["requests"][0]["sent_ms"] == 0.0


def test_json_to_standard_output_leaves_the_table_to_standard_error(
    server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--num-requests", "2", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["result"]["succeeded"] == 2
    assert "time to first token" in err


def test_the_html_picture_needs_nothing_else(server: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    assert bench(server, "--num-requests", "9", "--plot", str(file)) == 0
    text = file.read_text()
    assert text.count("<svg") == 6
    assert not re.search(r"(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg|127\.0\.0\.1)", text)
    assert "nan" not in text.lower()


def test_a_picture_of_nothing_is_a_page_without_curves() -> None:
    assert plot.figures([]) == []
    assert "<b>" not in plot.page("<b>", "<b>", [])


def test_requests_in_flight_are_drawn_as_they_were() -> None:
    [*_, flight] = plot.figures([record(0.0, [0.1, 0.9], 12.0), record(3.0, [5.0], 6.0)])
    seen = dict(flight.points)
    assert [seen[at] for at in sorted(seen) if 2.9 < at < 3.15] == [1, 2, 2]
    assert max(seen.values()) == 2
    assert seen[max(seen)] == 1


def test_png_without_matplotlib_is_refused_before_the_run(
    server: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench(server, "--plot", "run.png") == 2
    assert "write .html, or install it" in capsys.readouterr().err
    assert server.asked == []


def test_a_servers_words_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in_thread(status(500, b'{"error": {"message": "\\u001b[2Jboo"}}')) as server:
        assert bench(server, "--num-requests", "2", "--warmup", "0") == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "boo" in out
    assert "no request succeeded; http_500" in err.splitlines()[-1]


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as held:
        url = url_of(held)
        assert main(["bench", "serve", "--url", url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: error: {url}/v1/models: connect: no connection: ")
    assert "is the server running at this --url?" in line


@pytest.mark.parametrize("load", [[], ["--concurrency", "2"], ["--warmup", "0"]])
def test_a_bad_line_of_a_trace_is_named_before_anything_is_sent(
    server: StandIn, load: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [1]}\n')
    assert main(["bench", "serve", "--url", server.url, "--trace", str(file), *load]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "trace.jsonl, line 1: 1 hash_ids for 1024 tokens" in line
    assert server.asked == []


def test_waiting_gives_a_server_time_to_start() -> None:
    command = [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--wait", "600", "--num-requests", "2"]
    with (
        closed_port() as held,
        subprocess.Popen([*command, "--url", url_of(held)], stdout=subprocess.PIPE) as process,
    ):

        async def serve_late() -> None:
            server = StandIn(answering())
            await asyncio.sleep(0.5)
            listener = await asyncio.start_server(server.serve, sock=held)
            await until(lambda: process.poll() is not None)
            listener.close()
            await server.stop()

        asyncio.run(serve_late())
        assert process.returncode == 0


def test_ctrl_c_reports_what_was_done() -> None:
    async def behave(asked: Asked, reply: Reply) -> None:
        if len(server.asked) == 6:
            os.kill(process.pid, signal.SIGINT)
        if len(server.asked) >= 6:
            await asyncio.sleep(60)
        await answering()(asked, reply)

    with stand_in_thread(behave) as server:
        command = [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--url", server.url]
        options = ["--warmup", "0", "--concurrency", "2", "--input-len", "4", "--output-len", "2"]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped early: interrupted" in out
    assert re.search(rb"[45] succeeded, 0 failed, [12] broken off", out)
    assert err == b""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no server was given"),
        (["--url", "localhost:8000"], "is not a server's URL"),
        (["--url", "http://u:p@localhost"], "has a password before it; keys are given by --api-key"),
        (["--url", "http://h", "--rate", "1", "--concurrency", "2"], "were both given"),
        (["--url", "http://h", "--rate", "nan"], "--rate nan is not valid"),
        (["--url", "http://h", "--rate", "0"], "--rate 0 is not valid"),
        (["--url", "http://h", "--burstiness", "2"], "--burstiness shapes the arrivals"),
        (["--url", "http://h", "--groups", "2"], "--groups does not apply to the workload 'random'"),
        (["--url", "http://h", "--workload", "multi-turn", "--num-requests", "2"], "use --conversations and --turns"),
        (["--url", "http://h", "--workload", "trace"], "needs a file: --trace FILE"),
        (["--url", "http://h", "--endpoint", "chat", "--prompt-type", "ids"], "messages are text"),
        (["--url", "http://h", "--input-len", "0"], "input_len='0' is not valid"),
        (["--url", "http://h", "--input-len", "9-3"], "input_len='9-3' is not valid"),
        (["--url", "http://h", "--goodput", "ttft"], "write NAME:MILLISECONDS"),
        (["--url", "http://h", "--goodput", "speed:1"], "of ttft, tpot, e2e"),
        (["--url", "http://h", "--extra-body", "[1]"], "must be a JSON object"),
        (["--url", "http://h", "--extra-body", '{"stream": false}'], "may not set stream"),
        (["--url", "http://h", "--details"], "--details needs --json"),
        (["--url", "http://h", "--plot", "run.pdf"], "must end in .html or .png"),
        (["--url", "http://h", "--api-key", "a\nb"], "no header could carry"),
        (["--url", "http://h", "--concurency", "2"], "did you mean --concurrency?"),
        (["--url", "http://h", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_a_mistake_in_the_options_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_length_of_answers_is_given_as_in_a_request(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", server.url, "--num-requests", "1", "--max-tokens", "3"]) == 0
    assert {asked.body["max_tokens"] for asked in server.asked if asked.body} == {3}


def test_a_base_url_may_hold_v1_or_a_path_before_it() -> None:
    for url, root in {
        "http://h:1": "http://h:1/v1",
        "http://h:1/v1/": "http://h:1/v1",
        "https://h/llm": "https://h:443/llm/v1",
        "http://[::1]:8000": "http://[::1]:8000/v1",
    }.items():
        assert OpenAIClient(config(url)).root == root


def test_an_option_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="concurrency=0 is out of range"):
        config(concurrency=0)
