"""`quire chat`: the conversation, its commands, and its keys."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.conversation import Chat
from quire.cli.keyboard import line_editing, typed
from quire.cli.main import main
from quire.cli.talk import LocalTalker
from quire.errors import ConfigError
from tests.warm import COMMAND, WarmProcess

FIELDS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=128) as engine:
        yield engine


@pytest.fixture
def chat(llm: LLM) -> Chat:
    return Chat(LocalTalker(llm), dict(FIELDS))


def test_an_answer_is_that_of_the_python_interface_and_is_remembered(
    chat: Chat, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(**FIELDS)
    for question in ("def add(a, b):", "and now?"):
        messages = [*chat.messages, {"role": "user", "content": question}]
        assert chat.take(question)
        answer = llm.chat(messages, params)[0].outputs[0].text
        out, err = capsys.readouterr()
        assert out == answer + "\n"
        assert "(stopped after max_tokens=6; /set max_tokens changes it)" in err
        assert chat.messages == [*messages, {"role": "assistant", "content": answer}]


def test_the_embedded_model_is_introduced_unless_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, introduced in ([], True), (["--quiet"], False):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert main(["chat", "demo", "--num-kv-blocks", "64", *options]) == 0
        assert ("it is not an assistant" in capsys.readouterr().err) == introduced


def test_the_second_turn_finds_the_first_in_the_prefix_cache(chat: Chat) -> None:
    chat.take("def unlike_any_other_test(x, y, z):")
    assert chat.last is not None
    first = chat.last.prompt_tokens
    assert first is not None
    chat.take("go on")
    assert chat.last.cached_tokens is not None and chat.last.cached_tokens >= first


def test_set_changes_a_parameter_and_none_takes_it_back(chat: Chat) -> None:
    for line in ("/set temperature 0.5", "/set stop-token-ids 1,2", '/set stop ["\\n", "END"]', "/set ignore_eos off"):
        assert chat.take(line)
    chat.take("/set speculate off")
    assert chat.fields == {
        "max_tokens": 6,
        "temperature": 0.5,
        "stop_token_ids": [1, 2],
        "stop": ["\n", "END"],
        "ignore_eos": False,
        "speculate": False,
    }
    chat.take("/set temperature none")
    assert "temperature" not in chat.fields


def test_a_session_with_drafts_says_what_they_brought(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM("demo", speculative_config={"method": "ngram", "adaptive": False}) as llm:
        chat = Chat(LocalTalker(llm), FIELDS | {"max_tokens": 30})
        chat.take("/set speculate off")
        chat.take("x = 1\n" * 20)
        assert "session: speculation" not in dict(chat.talker.session())
        chat.take("/set speculate on")
        chat.take("x = 1\n" * 20)
        assert "tokens a verification" in dict(chat.talker.session())["session: speculation"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature 1000", "temperature is 1000.0; it must be"),
        ("/set temperature hot", "temperature: 'hot' is not a number"),
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set temperature", "needs a value"),
        ("/set n 2", "which has one answer at a time"),
        ("/set min_tokens 7", "min_tokens is 7 but max_tokens is 6"),
        ("/rset", "unknown command '/rset'; did you mean '/reset'"),
    ],
)
def test_a_wrong_command_says_so_and_changes_nothing(
    line: str, message: str, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(chat.fields)
    assert chat.take(line)
    assert message in capsys.readouterr().err
    assert chat.fields == before and chat.messages == []


def test_reset_and_system_start_anew(chat: Chat) -> None:
    chat.take("hello")
    assert len(chat.messages) == 2
    chat.take("/reset")
    assert chat.messages == []
    chat.take("/system Answer in Python.")
    system = [{"role": "system", "content": "Answer in Python."}]
    assert chat.messages == system
    chat.take("hello")
    assert chat.messages[:1] == system and len(chat.messages) == 3
    chat.take("/reset")
    assert chat.messages == system
    chat.take("/system")
    assert chat.messages == []


def test_retry_edit_and_undo_change_the_last_turn(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/retry")
    assert "there is no message yet" in capsys.readouterr().err
    chat.take("first")
    first = list(chat.messages)
    chat.take("def f(x):")
    answered = list(chat.messages)
    chat.take("/retry")
    assert chat.messages == answered, "at temperature 0 the same answer comes again, in the place of the old one"
    chat.take("/set temperature 1.5")
    chat.take("/set seed 5")
    capsys.readouterr()
    chat.take("/retry")
    assert "seed=5 is set" in capsys.readouterr().err
    assert chat.messages[:3] == answered[:3] and len(chat.messages) == 4
    chat.take("/edit class A:")
    assert [message["content"] for message in chat.messages[:3:2]] == ["first", "class A:"] and len(chat.messages) == 4
    chat.take("/undo")
    assert chat.messages == first
    chat.take("/undo")
    assert chat.messages == []
    assert "Removed: class A:" in capsys.readouterr().err


def test_edit_opens_an_editor_with_the_message(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    chat.take("one\ntwo")
    monkeypatch.delenv("EDITOR", raising=False)
    chat.take("/edit")
    assert "a message of several lines needs an editor; set $EDITOR" in capsys.readouterr().err
    monkeypatch.setenv("EDITOR", "sed -i s/two/three/")
    chat.take("/edit")
    assert chat.messages[0]["content"] == "one\nthree"
    before = list(chat.messages)
    chat.take("/edit")
    assert "The message is as it was" in capsys.readouterr().err
    for editor, words in (("false", "ended with exit code 1"), ("no-such-editor", "could not be used")):
        monkeypatch.setenv("EDITOR", editor)
        chat.take("/edit")
        assert words in capsys.readouterr().err
    assert chat.messages == before


def test_a_question_that_failed_can_be_asked_again_and_the_old_answer_stays_until_there_is_a_new_one(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("x " * 500)
    assert chat.messages == [] and "maximum context length" in capsys.readouterr().err
    chat.take("/edit hello")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    before = list(chat.messages)
    chat.take("/edit " + "x " * 500)
    assert chat.messages == before
    chat.take("/retry")
    assert chat.messages == before, "what is answered again is the last message of the conversation"


def test_a_conversation_can_be_saved_and_loaded(
    chat: Chat, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("/system Be brief.")
    chat.take("/set logit_bias 5:-1.5")
    chat.take("hello")
    file = tmp_path / "my chat.json"
    chat.take(f"/save {file}")
    chat.take("and now?")
    chat.take(f"/save {file}")
    saved = json.loads(file.read_text())
    assert saved["messages"] == chat.messages and saved["sampling"] == FIELDS | {"logit_bias": {"5": -1.5}}
    other = Chat(LocalTalker(llm), {"top_k": 3})
    other.take(f"/load {file}")
    assert (other.messages, other.system) == (chat.messages, "Be brief.")
    other.take("go on")
    chat.take("go on")
    assert other.messages == chat.messages, "the same settings, so the same answer"
    other.take("/reset")
    assert other.messages == chat.messages[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my chat.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello", "is not a conversation saved by /save"),
        ("[]", "is not a conversation saved by /save"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "has the role 'robot'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "has the content 5"),
        ('{"messages": [], "sampling": {"temprature": 1}}', "did you mean 'temperature'"),
        ('{"messages": [], "sampling": {"n": 2}}', "which has one answer at a time"),
    ],
)
def test_a_file_that_holds_no_conversation_changes_nothing_and_is_not_written_over(
    chat: Chat, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("hello")
    before, fields, file = list(chat.messages), dict(chat.fields), tmp_path / "file"
    file.write_text(content)
    chat.take(f"/load {file}")
    assert words in capsys.readouterr().err and (chat.messages, chat.fields) == (before, fields)
    if "messages" not in content:
        chat.take(f"/save {file}")
        assert "exists and is not a conversation" in capsys.readouterr().err and file.read_text() == content
    chat.take("/save")
    chat.take(f"/save {tmp_path}/no/chat.json")
    chat.take(f"/load {tmp_path}/no/chat.json")
    err = capsys.readouterr().err
    assert "needs a file name" in err and "cannot be written: No such file" in err and "cannot be read" in err


def test_tab_completes_commands_parameters_and_files(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file[1].json").touch()
    assert chat.complete("/re") == ["/retry", "/reset", "/reasoning"] and chat.complete("/ex") == ["/exit"]
    assert chat.complete("/set temp") == ["temperature "] and chat.complete("/set temperature 0") == []
    assert chat.complete("/reasoning o") == ["on", "off"]
    assert chat.complete(f"/save {tmp_path}/f") == [f"{tmp_path}/file[1].json", f"{tmp_path}/folder/"]
    assert chat.complete(f"/load {tmp_path}/file[") == [f"{tmp_path}/file[1].json"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert chat.complete("/load ~/fo") == ["~/folder/"]
    assert chat.complete("hel") == [] and chat.complete("/system /s") == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("a\nb\n", [("a", False), ("b", False)]),
        ("a\\\nb\\\n\nc", [("a\nb\n", False), ("c", False)]),
        ('"""a\n\n/b\\\nc"""\nd', [("a\n\n/b\\\nc", True), ("d", False)]),
        ('"""\n  a\n"""\n', [("  a", True)]),
        ('"""/etc is a folder"""', [("/etc is a folder", True)]),
        ('say """x"""', [('say """x"""', False)]),
    ],
)
def test_a_message_may_have_several_lines(
    lines: str, expected: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert [tuple(each) for each in typed()] == expected


def test_ctrl_c_at_the_prompt_says_how_to_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: Iterator[BaseException | str] = iter([KeyboardInterrupt(), "a", EOFError()])

    def press(prompt: str) -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", press)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert [tuple(each) for each in typed()] == [("a", False)]
    assert "Ctrl-D leaves" in capsys.readouterr().err


@pytest.mark.parametrize("lines", ['"""a\nb\n', "a\\"])
def test_input_that_ends_within_a_message_is_refused(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with pytest.raises(ConfigError, match="ends within a message"):
        list(typed())


def test_a_quoted_message_may_look_like_a_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/etc/passwd")
    assert "put a message that begins with /" in capsys.readouterr().err
    assert chat.take("/exit", quoted=True) and chat.messages[0]["content"] == "/exit"


def test_stats_tell_of_the_last_answer_and_the_session(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/stats")
    assert "last answer" not in capsys.readouterr().err
    chat.take("hello")
    chat.take("/stats")
    err = capsys.readouterr().err
    assert "6 tokens in" in err and "of 128 tokens" in err and "session: decode" in err


def test_set_alone_shows_what_is_set(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/set")
    assert "max_tokens=6, temperature=0.0, ignore_eos=True" in capsys.readouterr().err


def test_help_names_every_command(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/help")
    out = capsys.readouterr().out
    assert all(name in out for name in (*chat.commands, "/exit"))
    assert max(len(line) for line in out.splitlines()) < 80


def test_exit_ends_the_chat_and_an_empty_line_does_not(chat: Chat) -> None:
    assert not chat.take("/exit")
    assert chat.take("   ") and chat.messages == []


def test_an_answer_that_fills_the_context_says_so_and_the_next_one_gives_advice(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(LocalTalker(llm), {"ignore_eos": True, "seed": 1})
    chat.take("fill it")
    assert "(the context of 128 tokens is full: /reset starts anew" in capsys.readouterr().err
    before = list(chat.messages)
    chat.take("one more")
    err = capsys.readouterr().err
    assert "maximum context length is 128 tokens" in err and "use /reset to start over" in err
    assert chat.messages == before
    chat.take("/reset")
    chat.take("short")
    assert len(chat.messages) == 2


def test_lines_may_be_piped_in(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def f():\n/set seed x\n/exit\nnever"))
    flags = ["--max-tokens", "4", "--temperature", "0", "--quiet", "--system", "Be brief."]
    assert main(["chat", "demo", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and not out.startswith("> ")
    assert "seed: 'x' is not a whole number" in err


def test_a_chat_says_that_it_shows_no_log_probabilities(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    assert main(["chat", "demo", "--logprobs", "1", "--threads", "1"]) == 0
    assert "log-probabilities are not shown in a chat" in capsys.readouterr().err


def test_closed_standard_input_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", "demo"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_user_without_a_home_can_chat(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    with line_editing(lambda line: []):
        pass
    assert ("is not kept: Could not determine home" in capsys.readouterr().err) is terminal


class Terminal:
    """`quire chat demo` on a terminal of its own, with checks that make it slow: there is time to interrupt it."""

    def __init__(self, home: Path) -> None:
        self.master, slave = pty.openpty()
        command = ["chat", "demo", "--quiet", "--threads", "1", "--ignore-eos", "--check-invariants"]
        environment = os.environ | {"HOME": str(home), "TERM": "dumb", "EDITOR": "", "VISUAL": ""}
        self.process = WarmProcess(COMMAND, *command, environment=environment, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text = ""

    def expect(self, what: str, seconds: float = 60.0) -> None:
        """Wait until `what` has appeared, and forget all up to it."""
        deadline = time.monotonic() + seconds
        while what not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{what!r} did not appear in {self.text!r}"
            self.text += os.read(self.master, 4096).decode(errors="replace")
        self.text = self.text[self.text.index(what) + len(what) :]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_ctrl_c_stops_the_answer_ctrl_d_leaves_and_lines_are_kept(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        terminal.expect("> ")
        terminal.type("def f(x):\r")
        terminal.expect("def f(x):\r\n")
        terminal.expect(" ")  # the answer has begun, and would go on to the end of the context
        terminal.process.send_signal(signal.SIGINT)
        terminal.expect("(interrupted; what came stays")
        terminal.expect("> ")
        terminal.type("/sta\t\r")
        terminal.expect("last answer")
        terminal.expect("> ")
        terminal.type("/set max_tokens 4\r")
        terminal.expect("max_tokens is 4")
        terminal.type("/edit\r")
        terminal.expect("def f(x):")  # the last message, to be changed
        terminal.type(" pass\r")
        terminal.expect("stopped after max_tokens=4")
        terminal.type('"""one\rtwo"""\r')
        terminal.expect("... ")
        terminal.expect("stopped after max_tokens=4")
        terminal.type("/retry\r")
        terminal.expect("stopped after max_tokens=4")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    history = tmp_path / ".local/state/quire/chat_history"
    assert history.read_text().split("\n")[:2] == ["def f(x):", "/stats"]
    assert history.stat().st_mode & 0o777 == 0o600
