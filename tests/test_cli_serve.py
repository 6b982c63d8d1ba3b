"""`quire serve`: its options, its mistakes, what it shows, and a real server from the first line to the last."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import __version__, log
from quire.cli import serve
from quire.cli.main import main
from quire.cli.options import CommandParser
from quire.cli.serve_screen import JsonScreen, TextScreen
from quire.config import EngineConfig
from quire.errors import CheckpointNotFoundError, ConfigError
from quire.server.config import ServerConfig
from quire.server.processes import listen
from quire.server.serve_options import ServeOptions
from tests.http_tools import URL, ServeProcess, listening_addresses, request, wait_until
from tests.server_stand_ins import engine_info
from tests.warm import COMMAND, WarmProcess

SERVER_VALUES: dict[str, tuple[list[str], Any]] = {
    "host": (["::1"], "::1"),
    "port": (["0"], 0),
    "api_key": (["one", "two"], ("one", "two")),
    "metrics_key": (["three"], ("three",)),
    "allowed_host": (["quire", "*"], ("quire", "*")),
    "served_model_name": (["a", "b"], ("a", "b")),
    "api_workers": (["2"], 2),
    "tokenizer_workers": (["3"], 3),
    "tokenizer_deadline": (["2.5"], 2.5),
    "max_queued_requests": (["7"], 7),
    "max_queued_tokens": (["70"], 70),
    "request_timeout": (["9"], 9.0),
    "max_body_bytes": (["2048"], 2048),
    "drain_timeout": (["1"], 1.0),
    "restart_limit": (["0"], 0),
    "stall_restart_s": (["60"], 60.0),
    "cors_origin": (["*"], ("*",)),
    "root_path": (["/llm"], "/llm"),
    "log_format": (["json"], "json"),
    "join": (["http://127.0.0.1:8080"], "http://127.0.0.1:8080"),
    "otlp_traces_endpoint": (["http://127.0.0.1:4318/v1/traces"], "http://127.0.0.1:4318/v1/traces"),
}


def parse(*arguments: str) -> argparse.Namespace:
    parser = CommandParser("quire serve", "")
    serve.add_arguments(parser)
    return parser.parse(arguments)


def options_of(*arguments: str) -> ServeOptions:
    return serve.read_options(parse(*arguments))[1]


# -- options --------------------------------------------------------------------------------------------------


def test_every_server_option_is_a_flag() -> None:
    flags = [f"--{name.replace('_', '-')}={text}" for name, (texts, _) in SERVER_VALUES.items() for text in texts]
    booleans = ["--admin", "--no-log-requests", "--debug"]
    server = options_of("demo", *flags, *booleans).server
    expected = {name: value for name, (_, value) in SERVER_VALUES.items()}
    elsewhere = dict.fromkeys(("uds", "ssl_certfile", "ssl_keyfile", "cacert"))  # see test_server_door.py
    expected |= {"admin": True, "log_requests": False, "debug": True}
    assert dataclasses.asdict(server) == expected | elsewhere


def test_several_names_of_the_model_may_follow_one_flag_where_the_model_comes_first() -> None:
    for arguments in (
        ("demo", "--served-model-name", "a", "b", "--port", "0"),
        ("demo", "--port", "0", "--served-model-name", "a", "--served-model-name", "b"),
        ("--served-model-name", "a", "--served-model-name", "b", "demo"),
    ):
        options = options_of(*arguments)
        assert (options.engine.model, options.server.served_model_name) == ("demo", ("a", "b"))


def test_every_server_option_is_a_key_of_the_configuration_file_beside_the_engines(tmp_path: Path) -> None:
    values = {name: list(value) if isinstance(value, tuple) else value for name, (_, value) in SERVER_VALUES.items()}
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps(values | {"model": "demo", "max_num_seqs": 3, "admin": True, "max-model-len": 99}))
    options = options_of("--config", str(file))
    assert options.server.api_key == ("one", "two")
    assert options.server.stall_restart_s == 60.0
    assert options.server.admin
    assert (options.engine.model, options.engine.max_num_seqs, options.engine.max_model_len) == ("demo", 3, 99)


def test_it_is_told_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nadmin: true\nmax_num_seqs: 3\n")
    options = options_of("demo", "--config", str(file), "--port", "0", "--preset", "chat", "--threads", "1")
    assert options.origins == {
        "model": "flag",
        "port": "flag",
        "threads": "flag",
        "admin": "file",
        "max_num_seqs": "file",
        "max_num_batched_tokens": "preset",
        "target_itl_ms": "preset",
    }
    assert options.engine.max_num_batched_tokens == 512


def test_replicas_need_a_gpu_each_where_they_run_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "count_gpus", lambda: 2)
    assert options_of("demo", "-dp", "2", "--device", "cuda").engine.replicas == 2
    with pytest.raises(ConfigError, match=r"^data_parallel_size=3 needs that many GPUs, but there are 2; lower"):
        options_of("demo", "-dp", "3", "--device", "cuda")
    with pytest.raises(ConfigError, match=r"^data_parallel_size=2 x 2 ranks needs that many GPUs, but there are 2"):
        options_of("demo", "-dp", "2", "-tp", "2", "--device", "cuda")
    assert options_of("demo", "-dp", "3", "--device", "cpu").engine.replicas == 3
    assert options_of("demo", "-dp", "3", "-ep", "--device", "cuda").engine.replicas == 1


def test_disable_log_requests_is_the_name_that_others_use() -> None:
    assert not options_of("demo", "--disable-log-requests").server.log_requests
    assert options_of("demo").server.log_requests


def test_a_fault_is_passed_on_and_not_advertised(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of("demo", "--inject-fault", "crash:5").fault == "crash:5"
    assert main(["serve", "--help-all"]) == 0
    assert "inject" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no model was given"),
        (["demo", "other"], "2 models were given"),
        (["demo", "--model", "other"], "2 models were given"),
        (["demo", "--prot", "1"], "did you mean --port?"),
        (["demo", "--port", "many"], "'many' is not a whole number"),
        (["demo", "--port", "70000"], "port=70000 is out of range"),
        (["demo", "--api-key", ""], "api_key 1 is empty"),
        (["demo", "--api-key", "a b"], "api_key 1 has a space"),
        (["demo", "--api-key", "@/no/such/file"], "@/no/such/file cannot be read"),
        (["demo", "--max-num-seqs", "0"], "max_num_seqs=0 is out of range"),
        (["demo", "--host", ""], "host="),
        (["demo", "--role", "prefill", "--cluster-key-file", "/no/key"], "--cluster-key-file /no/key: No such file"),
    ],
)
def test_a_mistake_is_told_at_once_with_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("quire: error: ")
    assert said in last


def test_a_model_that_does_not_exist_is_told_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "listening" not in err
    assert err.splitlines()[-1].startswith("quire: error: no checkpoint '/no/such/model'")
    with pytest.raises(CheckpointNotFoundError):
        options_of("/no/such/model")


def test_an_occupied_port_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "demo", "--port", str(port)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: error: cannot listen on 127.0.0.1 port {port}: another program listens there")


def test_the_command_imports_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys, quire.cli.serve, quire.cli.serve_screen, quire.server.supervisor; "
        "sys.exit(bool({'torch', 'numpy', 'fastapi', 'uvicorn', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- what it shows --------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as one:
        yield one


def serve_options(**server: Any) -> ServeOptions:
    return ServeOptions(server=ServerConfig(**server), engine=EngineConfig(model="demo"))


def test_the_screen_says_how_many_replicas_there_are_where_there_are_several(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    for replicas in (1, 3):
        engine = EngineConfig(model="demo", data_parallel_size=replicas)
        options = dataclasses.replace(serve_options(), engine=engine)
        TextScreen(options, listener, {}).ready(engine_info(1), 1.0)
    assert capsys.readouterr().err.count("3; sizes are those of each, and the others load now") == 1


def test_the_screen_says_url_model_memory_and_keys_in_columns(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = TextScreen(serve_options(), listener, {"max_num_seqs": 16})
    screen.listening()
    screen.loading("reading weights", 40)
    screen.loading("reading weights", 60)
    screen.loading("making kernels", 90)
    screen.close()
    screen.ready(engine_info(1), 2.34)
    screen.close()
    out, err = capsys.readouterr()
    port = listener.getsockname()[1]
    assert not out
    lines = err.splitlines()
    assert (found := URL.search(lines[0])) and found[1] == str(port)
    assert "max_num_seqs=16" in lines[1]
    assert [line for line in lines if line.startswith("loading: ")] == [
        "loading: reading weights (40 %)",
        "loading: making kernels (90 %)",
    ]
    assert "a note about the checkpoint" in lines
    rows = [line.strip().split("  ", 1) for line in lines[lines.index(f"Quire {__version__} serves demo") + 1 :]]
    shown = {name: value.strip() for name, value in rows}
    assert shown["model"] == "demo"
    assert shown["architecture"] == "StandIn, 1,000 parameters in bfloat16"
    assert shown["longest context"] == "256 tokens"
    assert shown["API keys"] == "none: requests need no key"
    assert shown["URL"] == f"http://127.0.0.1:{port}/v1"
    assert shown["ready after"] == "2.3 s"


def test_a_port_that_others_reach_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("0.0.0.0", 0) as listener:
        TextScreen(serve_options(), listener, {}).ready(engine_info(1), 1.0)
        assert "anyone who does may use the server" in capsys.readouterr().err.splitlines()[-1]
        TextScreen(serve_options(api_key=("k",)), listener, {}).ready(engine_info(1), 1.0)
        assert "anyone" not in capsys.readouterr().err


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    """Where a log in JSON goes; afterwards logging is as it was."""
    root, level = logging.getLogger(), logging.getLogger().level
    stream = io.StringIO()
    log.configure("json", stream=stream)
    yield stream
    for handler in [handler for handler in root.handlers if isinstance(handler, log.LineHandler)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_keys_are_counted_and_never_shown(
    listener: socket.socket, capsys: pytest.CaptureFixture[str], json_log: io.StringIO
) -> None:
    options = serve_options(api_key=("secret-one", "secret-two"))
    for kind in (TextScreen, JsonScreen):
        screen = kind(options, listener, {})
        screen.listening()
        screen.ready(engine_info(1), 1.0)
    log.flush()
    started = json.loads(json_log.getvalue().splitlines()[-1])
    assert (started["event"], started["api_keys"]) == ("started", 2)
    err = capsys.readouterr().err
    assert re.search(r"API keys +2$", err, re.MULTILINE)
    assert "secret" not in err + json_log.getvalue()


# -- a real server --------------------------------------------------------------------------------------------


def test_a_real_server_opens_its_port_serves_drains_and_leaves_nothing() -> None:
    with ServeProcess() as server:
        pids = server.pids("all")
        assert len(server.pids("engine")) == len(server.pids("http")) == 1
        body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 4, "ignore_eos": True}
        assert server.json("/v1/completions", body)["usage"]["completion_tokens"] == 4
        assert "ready after" in server.stderr
        assert server.terminate() == 0
        assert not server.survivors()
        assert pids


def test_a_model_that_does_not_fit_is_one_clear_last_line_although_the_cause_lies_in_a_child() -> None:
    with ServeProcess("--num-kv-blocks", "3", "--max-model-len", "2048", wait="nothing") as server:
        assert server.wait() == 2
        last = server.stderr.splitlines()[-1]
        assert last.startswith("quire: error: ")
        assert "num_kv_blocks" in last or "max_model_len" in last
        assert "Traceback" not in server.stderr


def test_ctrl_c_while_loading_leaves_at_once_with_code_0() -> None:
    with ServeProcess(wait="url", warm=False) as server:  # whose engine loads for long
        assert server.terminate(number=signal.SIGINT) == 0
        assert "Traceback" not in server.stderr


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        return request(port, "GET", "/health")[0] == 200
    return False


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- 2>&-"])
def test_a_server_without_standard_error_serves(redirection: str) -> None:
    """Nor was anything imported for it by others, as for those of `tests/warm.py`."""
    line = f'exec "$0" -m quire.cli.main serve demo --threads 1 --port 0 {redirection}'
    with subprocess.Popen(["sh", "-c", line, sys.executable], stdout=subprocess.DEVNULL) as process:
        try:
            [address] = wait_until(lambda: listening_addresses([process.pid]))
            port = int(address.rpartition(":")[2])
            wait_until(lambda: is_ready(port))
            assert request(port, "POST", "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 2})[0] == 200
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_server_whose_log_nobody_reads_any_more_goes_on() -> None:
    with WarmProcess(COMMAND, "serve", "demo", "--threads", "1", "--port", "0") as process:
        try:
            found = URL.search(process.stderr.readline().decode())
            assert found
            process.stderr.close()
            wait_until(lambda: is_ready(int(found[1])))
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_log_in_json_is_json_from_the_first_line_to_the_last() -> None:
    with ServeProcess("--log-format", "json") as server:
        assert server.terminate() == 0
        lines = [json.loads(line) for line in server.stderr.splitlines()]
        names = [line["event"] for line in lines]
        assert names[0] == "listening"
        assert "started" in names
        assert names[-1] == "stopped"
