"""A real HTTP process, with the test in the supervisor's and the engine's place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import zmq

import quire
from quire.child import python
from quire.ipc import wire
from quire.ipc.board import PULSE, Board
from quire.server.config import HttpStart, ServerConfig
from quire.tls import client_context
from tests.certificates import make_certificate, needs_openssl
from tests.forks import Fork, spawn_rank
from tests.server_fakes import engine_info, wait_until

KEY = "sk-very-secret"
DEMO = Path(quire.__file__).parent / "assets" / "demo"


class Parent:
    """Starts one HTTP process and plays the others of its server.

    Args:
        warm: it has imported what it needs when it begins, see `tests/forks.py`.
    """

    process: Fork | subprocess.Popen[bytes]

    def __init__(self, warm: bool = True, **options: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="quire-test-"))
        self.listener = socket.create_server(("127.0.0.1", 0))
        scheme, trust = "http", None
        if "ssl_certfile" in options:
            scheme, trust = "https", client_context(options["ssl_certfile"])
        self.url = f"{scheme}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.control = self.router(wire.control_address(self.directory))
        self.board = Board.create(wire.board_path(self.directory, 0, 1))
        self.own_board = Board.create(wire.http_board_path(self.directory, 3))
        self.ended = threading.Event()
        start = HttpStart(
            directory=str(self.directory),
            worker=3,
            fd=self.listener.fileno(),
            server=ServerConfig(api_key=(KEY,), port=0, **options),
            model_names=("demo",),
        )
        (self.directory / "metrics").mkdir(exist_ok=True)
        if warm:
            self.process = spawn_rank(python("quire.server.http_process"), start, fds=[self.listener.fileno()])
        else:
            self.process = self._begin(start)
        self.http = httpx2.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60, verify=trust or True
        )

    def _begin(self, start: HttpStart) -> subprocess.Popen[bytes]:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # until it is closed
        process = subprocess.Popen(
            python("quire.server.http_process"),
            stdin=subprocess.PIPE,
            stderr=self.errors,
            pass_fds=[self.listener.fileno()],
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start))
        process.stdin.close()
        return process

    def router(self, address: str) -> zmq.Socket[bytes]:
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)
        return router

    def hello(self) -> wire.Hello:
        assert self.control.poll(60_000), "no hello"
        self.peer, message = self.control.recv_multipart()
        hello = wire.decode_to_supervisor(message)
        assert isinstance(hello, wire.Hello)
        return hello

    def tell(self, message: wire.FromSupervisor) -> None:
        self.control.send_multipart([self.peer, wire.encode(message)])

    def get_ready(self) -> zmq.Socket[bytes]:
        """Bring it to where it takes requests; returns the engine's socket."""
        self.hello()
        engine = self.router(wire.engine_address(self.directory, 0, 1))
        threading.Thread(target=self.beat, daemon=True).start()
        info = engine_info(path=str(DEMO), vocab_size=8192, max_model_len=2048)
        self.tell(wire.EngineState(boot=1, state="ready", path=str(DEMO), info=info))
        assert wait_until(lambda: self.status() == 200), self.http.get("/health").text
        return engine

    def beat(self) -> None:
        while not self.ended.wait(0.2):
            self.board.fields[PULSE] += 1

    def status(self) -> int:
        return self.http.get("/health").status_code

    def end(self) -> None:
        self.ended.set()
        self.http.close()
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.listener.close()
        shutil.rmtree(self.directory)


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.end()


@pytest.fixture
def cold_parent() -> Iterator[Parent]:
    parent = Parent(warm=False)
    yield parent
    parent.end()
    parent.errors.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_it_answers_at_once_and_the_rest_follows(cold_parent: Parent) -> None:
    """The port answers long before the app is imported; what needs the app waits for it."""
    parent = cold_parent
    answer = parent.http.get("/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "loading", "phase": "starting", "percent": 0}
    assert parent.http.get("/live").json() == {"status": "ok"}
    answers = [parent.http.get("/v1/models", headers=headers) for headers in ({}, {"authorization": "Bearer no"})]
    assert [answer.status_code for answer in answers] == [503, 401]
    hello = parent.hello()
    assert (hello.worker, hello.pid) == (3, parent.process.pid)


@needs_openssl
def test_with_a_certificate_it_speaks_https_from_the_beginning(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    parent = Parent(ssl_certfile=str(files.cert), ssl_keyfile=str(files.key))
    try:
        assert parent.http.get("/live").json() == {"status": "ok"}
        parent.get_ready()
        assert parent.http.post("/tokenize", json={"prompt": "Hello"}).status_code == 200
    finally:
        parent.end()


def test_no_key_is_in_its_arguments_or_environment(cold_parent: Parent) -> None:
    cold_parent.hello()
    for name in ("cmdline", "environ"):
        assert KEY.encode() not in Path(f"/proc/{cold_parent.process.pid}/{name}").read_bytes()


def test_it_leaves_signals_to_the_supervisor(parent: Parent) -> None:
    parent.hello()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        parent.process.send_signal(number)
    assert parent.http.get("/live").status_code == 200
    assert parent.process.poll() is None


def test_loading_shows_the_engines_phase(parent: Parent) -> None:
    parent.hello()
    parent.board.set_phase("packing weights", 0.5)
    parent.tell(wire.EngineState(boot=1, state="loading"))
    expected = {"status": "loading", "phase": "packing weights", "percent": 50}
    assert wait_until(lambda: parent.http.get("/health").json() == expected)


def test_with_folder_and_engine_it_is_ready_and_tokenizes(parent: Parent) -> None:
    parent.get_ready()
    answer = parent.http.post("/tokenize", json={"prompt": "Hello"})
    assert answer.status_code == 200
    assert answer.json()["count"] >= 1
    assert parent.http.get("/server_info").json()["engine"]["path"] == str(DEMO)


def test_its_pulse_goes_on_as_long_as_its_loop_turns(parent: Parent) -> None:
    def beats() -> bool:
        before = parent.own_board.pulse
        return wait_until(lambda: parent.own_board.pulse > before + 1)

    assert beats()  # before anybody has told it anything
    assert parent.own_board.patience == 0
    parent.get_ready()
    assert beats()


def test_a_drain_lets_requests_go_on_and_ends_what_is_left_with_what_it_has(parent: Parent) -> None:
    """The engine here never answers, so the stream is still open when the time is over."""
    engine = parent.get_ready()
    workers = children(parent.process.pid)
    assert workers  # the tokenizers
    body = {"prompt": "Hello", "stream": True}
    with parent.http.stream("POST", "/v1/completions", json=body) as stream:
        assert engine.poll(60_000)  # the request has come through
        idle = httpx2.Client(base_url=parent.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert idle.get("/health").status_code == 200
        parent.tell(wire.Drain(60.0))
        assert wait_until(lambda: idle.get("/health").json() == {"status": "draining"})
        refused = idle.get("/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
        parent.tell(wire.Drain(0.1))  # the time is over sooner
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    [choice] = json.loads(events[-2])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    assert events[-1] == "[DONE]"
    assert parent.process.wait(60) == 0
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
    engine.close()


def test_a_drain_without_requests_ends_at_once(parent: Parent) -> None:
    parent.get_ready().close()
    parent.tell(wire.Drain(300.0))
    assert parent.process.wait(60) == 0


def test_a_drain_while_loading_ends_at_once(parent: Parent) -> None:
    parent.hello()
    parent.tell(wire.Drain(300.0))
    assert parent.process.wait(60) == 0


def test_tokenizers_that_cannot_start_end_it_with_one_line(cold_parent: Parent, tmp_path: Path) -> None:
    parent = cold_parent
    parent.hello()
    (tmp_path / "tokenizer.json").write_text("{")
    parent.tell(wire.EngineState(boot=1, state="loading", path=str(tmp_path)))
    assert parent.process.wait(60) == 1
    parent.errors.seek(0)
    text = parent.errors.read().decode()
    assert "tokenizer" in text
    assert "Traceback" not in text, text
