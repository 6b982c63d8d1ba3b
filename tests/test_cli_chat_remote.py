"""`quire chat --url`: the same conversation, with a server that may be loading, refuse, break off or be hostile."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.conversation import Chat
from quire.cli.main import main
from quire.cli.remote import MAX_BODY_BYTES, RemoteTalker
from quire.errors import ConfigError, RemoteError

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


def delta(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


ANSWER: list[Any] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    delta("Hel"),
    delta("lo"),
    delta(None, "stop"),
    {"choices": [], "usage": USAGE},
    "[DONE]",
]


class Server(ThreadingHTTPServer):
    """A scripted server.

    Attributes:
        events: what a chat is answered with; a callable among them is called with the handler.
        answers: what the first chats are answered with, in place of these.
        refusals: (status, body) of the next answers to a chat.
        num_loading: how many times `/v1/models` still answers 503.
        seen: bodies of the chats. headers: of every request.
        hung_up: set when a client went away in the middle of an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[Any] = ANSWER
        self.answers: list[list[Any]] = []
        self.refusals: list[tuple[int, bytes]] = []
        self.extra_headers: dict[str, str] = {}
        self.models: Any = {"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]}
        self.num_loading = 0
        self.key: str | None = None
        self.seen: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/health":
            self.reply(503, b'{"status": "loading", "phase": "reading weights", "percent": 40}')
        elif server.key and self.headers.get("authorization") != f"Bearer {server.key}":
            self.reply(401, error("an API key is needed"))
        elif server.num_loading:
            server.num_loading -= 1
            self.reply(503, error("the model is loading", "model_loading"))
        elif self.path == "/v1/models":
            self.reply(200, json.dumps(server.models).encode())
        else:
            self.reply(404, b"<html>nothing here</html>")

    def do_POST(self) -> None:
        server = self.server
        server.seen.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if server.refusals:
            self.reply(*server.refusals.pop(0))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        for name, value in server.extra_headers.items():
            self.send_header(name, value)
        self.end_headers()
        for event in server.answers.pop(0) if server.answers else server.events:
            if callable(event):
                event(self)
                continue
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f": a comment\n\ndata: {data}\n\n".encode())


def error(message: str, code: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def chat(server: Server) -> Iterator[Chat]:
    talker = RemoteTalker(server.url)
    yield Chat(talker, {"max_tokens": 6})
    talker.close()


def test_a_small_model_is_sampled_as_the_server_suggests_until_the_user_says_otherwise(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = {"data": [{"id": "first", "sampling_suggestions": {"temperature": 0.7}}]}
    assert run(server, "Hi\n/set temperature 1\nHi\n/set temperature none\nHi\n", monkeypatch) == 0
    assert [body["temperature"] for body in server.seen] == [0.7, 1.0, 0.7]
    assert "temperature 0.7, as the model is small and its files give none" in capsys.readouterr().err


def run(server: Server, lines: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "--url", server.url, *flags])


def test_an_answer_streams_and_is_remembered(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret-key"
    flags = ["--api-key", "secret-key", "--temperature", "0.5", "--stop", "END", "--system", "Be brief."]
    assert run(server, "Hi\nand now?\n", monkeypatch, *flags) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\nHello\n"
    assert "first at http://127.0.0.1" in err and "context 64 tokens" in err
    system = {"role": "system", "content": "Be brief."}
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert [body["messages"] for body in server.seen] == [
        [system, turn[0]],
        [system, *turn, {"role": "user", "content": "and now?"}],
    ]
    settings = {name: server.seen[0][name] for name in ("model", "stream", "temperature", "stop")}
    assert settings == {"model": "first", "stream": True, "temperature": 0.5, "stop": ["END"]}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_in_v1(server: Server, suffix: str) -> None:
    talker = RemoteTalker(server.url + suffix, model="second")
    assert (talker.model, talker.context, talker.url) == ("second", None, server.url)
    talker.close()


def test_set_reset_and_stats_work_as_with_a_model_here(
    server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("/stats")
    assert "last answer" not in capsys.readouterr().err
    for line in ("/set top_k 3", "/set logit_bias 5:1.5", "hello", "/stats", "/set logprobs 2", "/reset"):
        assert chat.take(line)
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert server.seen[0]["top_k"] == 3 and server.seen[0]["logit_bias"] == {"5": 1.5}
    assert "2 tokens in" in err and "7, of them cached 5" in err and "9 of 64 tokens" in err
    assert "session: answers" in err and "logprobs is not supported in a chat with a server" in err
    assert chat.fields == {"max_tokens": 6, "top_k": 3, "logit_bias": {5: 1.5}} and chat.messages == []


@pytest.mark.parametrize(
    ("usage", "fields", "words"),
    [
        ({"prompt_tokens": 62, "completion_tokens": 2}, {"max_tokens": 9}, "(the context of 64 tokens is full: /reset"),
        ({"prompt_tokens": 6, "completion_tokens": 2}, {"max_tokens": 2}, "(stopped after max_tokens=2; /set"),
        (None, {}, "(stopped at the server's limit"),
    ],
)
def test_an_answer_that_ends_at_a_limit_says_which(
    server: Server, chat: Chat, usage: Any, fields: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = [delta("Hel", "length"), {"choices": [], "usage": usage}, "[DONE]"]
    chat.fields = fields
    chat.take("Hi")
    assert words in capsys.readouterr().err


def tool_delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [fields]}}]}


def test_reasoning_and_tool_calls_of_a_server_are_those_of_a_model_here(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    thought = [{"choices": [{"index": 0, "delta": {name: "I add"}}]} for name in ("reasoning", "reasoning_content")]
    calls = [
        tool_delta(index=0, id="x1", type="function", function={"name": "add", "arguments": ""}),
        tool_delta(index=0, function={"arguments": '{"a": 1, '}),
        tool_delta(index=0, function={"arguments": '"b": 2}'}),
        tool_delta(id="x2", function={"name": "add", "arguments": '{"a": "x"}'}),  # all at once, without a number
    ]
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    server.answers = [[*thought, *calls, ended, {"choices": [], "usage": USAGE}, "[DONE]"]]
    flags = ["--tools", str(tools), "--yes", "--tool-choice", "required"]
    assert run(server, "What is 1 + 2?\n", monkeypatch, *flags) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n" and "(thought for 3 words" in err  # "I addI add"
    assert '╭ add\n│ {"a": 1, "b": 2}\n╰' in err and "→ 3\n" in err
    first, second = server.seen
    assert first["tools"][0]["function"]["name"] == "add"
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert first["parallel_tool_calls"] is False and "parallel_tool_calls" not in second
    user, called, *results = second["messages"]
    assert user["content"] == "What is 1 + 2?" and called["content"] is None
    assert called["reasoning_content"] == "I addI add"
    assert [call["id"] for call in called["tool_calls"]] == ["x1", "x2"]
    assert [each["tool_call_id"] for each in results] == ["x1", "x2"]
    assert results[0]["content"] == "3" and results[1]["content"].startswith("error: ")


@pytest.mark.parametrize(
    "call", [{"index": 1, "function": {"name": "a"}}, {"index": 0, "function": {"arguments": "{}"}}, {"index": -1}]
)
def test_calls_that_are_not_numbered_in_order_are_no_answer(
    server: Server, chat: Chat, call: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = [tool_delta(**call), delta(None, "tool_calls"), "[DONE]"]
    chat.take("Hi")
    assert "an invalid chunk: tool call number" in capsys.readouterr().err and chat.messages == []


def test_fields_that_the_server_ignores_are_named_once(
    server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    server.extra_headers = {"x-quire-ignored": "foo, bar"}
    chat.take("Hi")
    chat.take("Hi")
    assert capsys.readouterr().err.count("ignores: bar, foo") == 1


def test_ctrl_c_stops_the_answer_by_closing_the_connection(
    server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(handler: Handler) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(ConnectionResetError):  # the client hangs up with something unread
            if handler.connection.recv(1) != b"":  # ends only when the client hangs up
                return
        server.hung_up.set()

    server.events = [delta("Hel"), interrupt]
    assert chat.take("Hi")
    assert server.hung_up.wait(30)
    assert "(interrupted" in capsys.readouterr().err
    server.events = ANSWER
    assert chat.take("again")
    assert capsys.readouterr().out == "Hello\n"


# -- a server that is not ready ------------------------------------------------------------------------------


def test_a_server_that_loads_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.remote.POLL_SECONDS", 0.01)
    server.num_loading = 3
    assert run(server, "Hi\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n" and "waiting for the server: the model is loading" in err


def test_the_wait_for_a_server_has_an_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.num_loading = 1_000_000
    assert run(server, "", monkeypatch, "--wait", "0.2") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "not ready after 0.2 s: the model is loading; wait longer with --wait SECONDS" in last


def test_a_question_to_a_server_that_restarts_waits_too(
    server: Server, chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.remote.POLL_SECONDS", 0.01)
    server.refusals = [(503, error("the engine is being restarted"))]
    server.num_loading = 2
    chat.take("Hi")
    assert capsys.readouterr().out == "Hello\n" and len(server.seen) == 2


# -- refusals and failures -----------------------------------------------------------------------------------


def test_no_server_at_the_address_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["chat", "--url", url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: error: no server answers at {url} (") and "is 'quire serve' running there" in line


def test_a_missing_key_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret-key"
    assert run(server, "", monkeypatch) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "answers 401: an API key is needed; give the server's key with --api-key" in line


def test_an_unknown_model_is_refused_with_those_there_are(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "", monkeypatch, "--model", "third") == 1
    assert "the server has no model 'third'; it has: first, second" in capsys.readouterr().err


@pytest.mark.parametrize(
    "models", [[], {"data": []}, {"data": [{"name": "x"}]}, {"data": [{"id": "x" * MAX_BODY_BYTES}]}]
)
def test_a_server_of_another_kind_is_refused(server: Server, models: Any) -> None:
    server.models = models
    with pytest.raises(RemoteError, match=r"OpenAI-compatible|longer than"):
        RemoteTalker(server.url)


def test_a_page_that_does_not_exist_hints_at_the_url(server: Server) -> None:
    with pytest.raises(RemoteError, match=r"404.*is this the URL of an OpenAI-compatible server"):
        RemoteTalker(server.url + "/elsewhere")


def test_a_prompt_that_is_too_long_gives_advice_and_changes_nothing(
    server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusals = [(400, error("the context holds 64", "context_length_exceeded"))]
    chat.take("Hi")
    assert "the context holds 64; or use /reset to start over" in capsys.readouterr().err
    assert chat.messages == []


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_a_refused_question_says_why_and_changes_nothing(
    server: Server, chat: Chat, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteTalker, "_health", lambda self: type("Health", (), {"status": "draining"}))
    server.refusals = [(status, error("not \x1b[31mnow"))]
    chat.take("Hi")
    err = capsys.readouterr().err
    assert f"answers {status}: not \N{REPLACEMENT CHARACTER}[31mnow" in err
    assert chat.messages == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([delta("Hel"), {"error": {"message": "the engine died"}}, "[DONE]"], "the engine died"),
        ([delta("Hel"), {"error": "plain"}, "[DONE]"], "plain"),
        ([delta("Hel")], "the connection ended before the answer did"),
        ([delta("Hel"), "no json"], "not what it should be"),
        ([delta("Hel"), {"choices": 3}], "not what it should be"),
        ([delta("Hel"), "[" * 100_000], "not what it should be"),
        ([delta("Hel"), "x" * (5 << 20)], "failed"),
    ],
)
def test_an_answer_that_breaks_off_says_so_and_keeps_what_came(
    server: Server, chat: Chat, events: list[Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = events
    chat.take("Hi")
    out, err = capsys.readouterr()
    assert out == "Hel\n" and "error: " in err and words in err
    assert chat.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_a_server_cannot_steer_the_terminal(server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    server.events = [delta("a\x1b]0;title\x07b", "stop"), "[DONE]"]
    chat.take("Hi")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and out.startswith("a")


def test_half_a_surrogate_pair_is_refused_here(server: Server, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("\ud800")
    assert "valid Unicode" in capsys.readouterr().err and server.seen == []


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:1", "--block-size", "32"], "block_size is an engine option"),
        (["--url", "http://127.0.0.1:1", "--preset", "chat"], "preset is an engine option"),
        (["demo", "--url", "http://127.0.0.1:1"], "use --model demo"),
        (["--url", "http://127.0.0.1:1", "--logprobs", "1"], "logprobs is not supported"),
        (["--url", "http://127.0.0.1:1", "--n", "2"], "which has one answer at a time"),
        (["--url", "http://127.0.0.1:1", "--wait", "nan"], "--wait is nan"),
        (["--url", "http://127.0.0.1:1", "--wait", "-1"], "--wait is -1.0"),
        (["--url", "http://127.0.0.1:1", "--api-key", "a key"], "api_key 1 has a space"),
        (["--url", "http://127.0.0.1:1", "--api-key", ""], "api_key 1 is empty"),
        (["demo", "--api-key", "x"], "--api-key needs a server; add --url"),
        (["demo", "--wait", "3"], "--wait needs a server; add --url"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:x", "http://host:99999", "http://a b",
            "http://host/?q=1", "http://user:word@host", "http://[::1", "http://host\n"],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a server's URL; write|has a password"):
        RemoteTalker(url)


def test_a_file_may_hold_the_key_but_only_one(
    server: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret-key"
    path = tmp_path / "keys"
    path.write_text("# mine\nsecret-key\n")
    assert run(server, "Hi\n", monkeypatch, "--api-key", f"@{path}") == 0
    path.write_text("one\ntwo\n")
    assert run(server, "Hi\n", monkeypatch, "--api-key", f"@{path}") == 2
    assert "has 2 keys; give a file with one" in capsys.readouterr().err


def test_the_environment_names_no_proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert run(server, "Hi\n", monkeypatch) == 0


def test_a_remote_chat_imports_no_torch(server: Server) -> None:
    code = (
        "import sys; from quire.cli.main import main; code = main(['chat', '--url', sys.argv[1]]); "
        "print(code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, server.url]
    done = subprocess.run(command, input="Hi\n", capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "Hello\n0 False\n"
