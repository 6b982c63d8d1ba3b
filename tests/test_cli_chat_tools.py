"""`quire chat --tools FILE.py`: functions as tools, what may not be one, cards, approval, and results."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jsonschema import Draft202012Validator

from quire import LLM
from quire.cli import keyboard
from quire.cli.answer_view import AnswerView
from quire.cli.conversation import DECLINED, MAX_ROUNDS, STOPPED, Chat
from quire.cli.main import main
from quire.cli.talk import NO_TOOLS, Answer, LocalTalker, Show, ToolUse
from quire.cli.tools import MAX_RESULT, read_tools
from quire.errors import ConfigError
from quire.text.reply import ContentText, ReasoningText, Reply, ReplyEvent, ToolCall, ToolCallArguments, ToolCallBegin

TOOLS = '''
"""Tools."""
from __future__ import annotations
import os.path
from typing import Annotated, Literal

asked = []

def weather(city: Literal["Rome", "Oslo"], days: int = 1) -> str:
    """Tell the weather.

    In a few words.

    Args:
        city: where; one of two
        days (int): for so many days,
            from today on

    Returns:
        words
    """
    asked.append((city, days))
    return f"sunny in {city}"

def total(numbers: list[float], scale: Annotated[float, "a factor"], *, names: dict[str, str | None] | None = None):
    return {"total": sum(numbers) * scale}

def _helper(x): return x
'''


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "tools.py"
        path.write_text(text)
        return str(path)

    return write


# -- functions -----------------------------------------------------------------------------------------------


def test_hints_and_docstrings_become_a_schema(file: Callable[[str], str]) -> None:
    weather, total = read_tools(file(TOOLS))
    assert weather.definition == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather.\n\nIn a few words.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"], "description": "where; one of two"},
                    "days": {"type": "integer", "default": 1, "description": "for so many days, from today on"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    parameters = total.definition["function"]["parameters"]
    assert parameters["required"] == ["numbers", "scale"] and "description" not in total.definition["function"]
    assert parameters["properties"]["scale"] == {"type": "number", "description": "a factor"}
    assert [tool.signature for tool in (weather, total)] == ["weather(city, days)", "total(numbers, scale, names)"]
    valid = Draft202012Validator(parameters)
    for given in ({"numbers": [1, 2.5], "scale": 2}, {"numbers": [], "scale": 0, "names": {"a": None, "b": "c"}}):
        assert valid.is_valid(given)
        assert json.loads(total.run(json.dumps(given))) == {"total": sum(given["numbers"]) * given["scale"]}  # type: ignore[arg-type, operator, call-overload]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"city": "Rome", "x": 1}', "no parameter 'x'; it has: city, days"),
        ('{"days": 1}', "needs the argument 'city'"),
        ('{"city": "Paris"}', "the argument 'city': Invalid enum value 'Paris'"),
        ('{"city": "Rome", "days": "2"}', "the argument 'days': Expected `int`, got `str`"),
    ],
)
def test_arguments_that_do_not_meet_the_hints_are_an_error_for_the_model(
    file: Callable[[str], str], arguments: str, words: str
) -> None:
    tool = read_tools(file(TOOLS))[0]
    assert tool.run(arguments).startswith("error: ") and words in tool.run(arguments)
    assert tool.function.__globals__["asked"] == []


def test_what_a_function_raises_or_returns_goes_back_as_text(file: Callable[[str], str]) -> None:
    text = """
import sys
def fails() -> str: raise LookupError("no data")
def leaves() -> str: sys.exit("bye")
def long() -> str: return "x" * 1_000_000
def odd() -> object: return {1: {2, 3}, "a": object}
def half() -> str: return "\\ud800"
def nothing() -> None: pass
def interrupted() -> None: raise KeyboardInterrupt
"""
    by_name = {tool.name: tool for tool in read_tools(file(text))}
    assert by_name["fails"].run("{}") == "error: LookupError: no data"
    assert by_name["leaves"].run("") == "error: SystemExit: bye"
    assert by_name["nothing"].run("{}") == "null" and by_name["half"].run("{}") == "?"
    assert by_name["long"].run("{}") == "x" * MAX_RESULT + "... (cut: 1000000 characters in all)"
    assert "2" in by_name["odd"].run("{}")
    with pytest.raises(KeyboardInterrupt):
        by_name["interrupted"].run("{}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ndef f(a): pass", "line 2: f: the parameter a has no type hint"),
        ("def f(a: set[str]): pass", r"line 1: f: the parameter a: the hint set\[str\] is not supported; allowed"),
        ("def f(a: bytes): pass", "the hint bytes is not supported"),
        ("def f(a: dict[int, str]): pass", "not supported"),
        ("def f(a: list): pass", "the hint list is not supported"),
        ("def f(a: list[int] | list[str]): pass", "the parameter a: .*more than one array-like"),
        ("def f(a: 'nowhere'): pass", "its type hints cannot be read: name 'nowhere'"),
        ("def f(*a: int): pass", r"the parameter \*a: int cannot be passed by name"),
        ("def f(a: int, /): pass", "cannot be passed by name"),
        ("async def f(): pass", "is async or a generator"),
        ("def f(): yield 1", "is async or a generator"),
        ("x = 1", "defines no functions"),
        ("\n\ndef f(:", "line 3: invalid syntax"),
        ("import math\nx = 1 / 0", "line 2: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_its_line(file: Callable[[str], str], text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_tools(file(text))


def test_a_file_that_is_not_there_or_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tools(str(tmp_path / "no.py"))
    with pytest.raises(ConfigError, match="is not a Python file"):
        read_tools("tools.txt")


def test_all_names_what_is_offered(file: Callable[[str], str]) -> None:
    text = "__all__ = ['join']\nfrom shlex import join\ndef other(x: int): pass\n"
    with pytest.raises(ConfigError, match="the parameter split_command has no type hint"):
        read_tools(file(text))
    assert [tool.name for tool in read_tools(file("__all__ = ['_a']\ndef _a(): pass\ndef b(x): pass\n"))] == ["_a"]


# -- with the demo model, whose calls are forced --------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, tool_format="hermes") as engine:
        yield engine


FIELDS: dict[str, Any] = {"max_tokens": 80, "temperature": 0.0}


def test_a_forced_call_runs_after_a_yes_and_its_result_goes_back(
    llm: LLM, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    tools = read_tools(file(TOOLS))[:1]
    approved: list[ToolCall] = []
    chat = Chat(LocalTalker(llm), FIELDS, None, tools, "required", lambda call: not approved.append(call))
    chat.take("Will it rain?")
    out, err = capsys.readouterr()
    user, called, result, answer = chat.messages
    [call] = called["tool_calls"]
    assert user == {"role": "user", "content": "Will it rain?"} and [each.id for each in approved] == [call["id"]]
    city = json.loads(call["function"]["arguments"])["city"]
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": f"sunny in {city}"}
    assert "╭ weather\n│ " in err and call["function"]["arguments"] in err and f"→ sunny in {city}" in err
    assert answer["role"] == "assistant" and out == answer["content"] + "\n"
    # The model was given the call and its result by its own template.
    prompt = llm.render_chat(chat.messages[:3])
    assert chat.last is not None and chat.last.prompt_tokens is not None
    assert chat.last.prompt_tokens >= len(prompt)
    chat.take("/retry")
    assert len(chat.messages) == 4 and len(approved) == 2


def test_a_call_that_is_declined_does_not_run(llm: LLM, file: Callable[[str], str]) -> None:
    tools = read_tools(file(TOOLS))[:1]
    chat = Chat(LocalTalker(llm), FIELDS, None, tools, "required", lambda call: False)
    chat.take("Will it rain?")
    assert chat.messages[2]["content"] == DECLINED and tools[0].function.__globals__["asked"] == []


def test_a_call_that_is_cut_does_not_run(
    llm: LLM, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(LocalTalker(llm), FIELDS | {"max_tokens": 22}, None, read_tools(file(TOOLS)), "required")
    chat.take("Will it rain?")
    assert "within a call, which does not run" in capsys.readouterr().err and chat.messages == []


def test_the_command_line_takes_tools(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(TOOLS)
    flags = ["--tools", path, "--max-tokens", "60", "--num-kv-blocks", "64", "--seed", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("/tools\nx\n"))
    assert main(["chat", "demo", *flags, "--tool-format", "hermes", "--tool-choice", "required", "--yes"]) == 0
    err = capsys.readouterr().err
    assert "tools: weather(city, days), total(numbers, scale, names)" in err and "Tell the weather." in err
    assert "╭ " in err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "demo", *flags]) == 2
    assert "no way to call tools could be found in this model's chat template" in capsys.readouterr().err
    assert main(["chat", "demo", "--yes"]) == 2
    assert "--yes needs tools" in capsys.readouterr().err


# -- with scripted answers ------------------------------------------------------------------------------------


class Scripted:
    """Answers as they are written, and remembers what it was asked."""

    context: int | None = None
    more_context = ""
    refused: tuple[str, ...] = ()
    suggested: ClassVar[dict[str, float]] = {}

    def __init__(self, *answers: list[ReplyEvent]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[dict[str, Any]], ToolUse]] = []

    def answer(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Show, use: ToolUse = NO_TOOLS
    ) -> Answer:
        self.asked.append(([dict(message) for message in messages], use))
        events = self.answers.pop(0)
        for event in events:
            show(event)
        return Answer(reply=Reply.of(events), reason="stop")

    def session(self) -> list[tuple[str, str]]:
        return []


def call(arguments: str, name: str = "weather", index: int = 0) -> list[ReplyEvent]:
    return [ToolCallBegin(index, f"id{index}", name), ToolCallArguments(index, arguments)]


ROME = call('{"city": "Rome"}')
DONE: list[ReplyEvent] = [ContentText("Done.")]


def test_calls_have_a_bound_and_the_last_answer_must_do_without(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    talker = Scripted(*[ROME] * MAX_ROUNDS, DONE)
    chat = Chat(talker, {}, None, read_tools(file(TOOLS)), "required", lambda call: True)
    chat.take("go on for ever")
    assert [use.choice for _, use in talker.asked] == ["required", *["auto"] * (MAX_ROUNDS - 1), "none"]
    assert chat.messages[-1] == {"role": "assistant", "content": "Done."}
    assert "now the model must answer without" in capsys.readouterr().err
    stubborn = Chat(Scripted(*[ROME] * (MAX_ROUNDS + 1)), {}, None, read_tools(file(TOOLS)), "auto", lambda call: True)
    stubborn.take("go on for ever")
    assert stubborn.messages[-1] == {"role": "assistant", "content": ""}


def test_an_unknown_tool_is_told_to_the_model(file: Callable[[str], str]) -> None:
    chat = Chat(Scripted(call("{}", "rm"), DONE), {}, None, read_tools(file(TOOLS)), "auto", lambda call: True)
    chat.take("x")
    assert chat.messages[2]["content"] == "error: there is no tool 'rm'; there are: weather, total"


@pytest.mark.parametrize(
    ("typed", "ran"),
    [("y\n", 1), ("YES\n", 1), ("what\nn\n", 0), ("\n", 0), ("", 0), ("always\n", 2), ("y\nn\n", 1), ("y\ny\n", 2)],
)
def test_each_call_is_asked_for_until_always(
    file: Callable[[str], str], typed: str, ran: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    tools = read_tools(file(TOOLS))
    two = [*ROME, *call('{"city": "Oslo"}', index=1)]
    chat = Chat(Scripted(two, DONE), {}, None, tools)
    chat.take("x")
    assert len(tools[0].function.__globals__["asked"]) == ran
    assert [message["content"] == DECLINED for message in chat.messages[2:4]].count(False) == ran


def test_without_a_terminal_nothing_runs(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    chat = Chat(Scripted(ROME, DONE), {}, None, read_tools(file(TOOLS)))
    chat.take("x")
    assert chat.messages[2]["content"] == DECLINED and "--yes runs tools" in capsys.readouterr().err


def test_ctrl_c_at_the_question_ends_the_turn_and_it_stays(file: Callable[[str], str]) -> None:
    def interrupt(call: ToolCall) -> bool:
        raise KeyboardInterrupt

    two = [*ROME, *call('{"city": "Oslo"}', index=1)]
    talker = Scripted(two, DONE)
    chat = Chat(talker, {}, None, read_tools(file(TOOLS)), "auto", interrupt)
    chat.take("x")
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert chat.messages[2]["content"] == chat.messages[3]["content"] == STOPPED
    assert chat.messages[-1]["interrupted"] is True
    chat.take("go on")
    assert "interrupted" not in talker.asked[1][0][4], "the mark is for people, and is not sent"


def test_reasoning_is_folded_kept_and_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    thought: list[ReplyEvent] = [ReasoningText("first thi"), ReasoningText("s, then\nthat\x1b"), ContentText("42")]
    talker = Scripted(thought, thought, DONE)
    chat = Chat(talker, {})
    chat.take("why?")
    out, err = capsys.readouterr()
    assert out == "42\n" and err == "(thought for 4 words; /reasoning shows them)\n"
    assert chat.messages[-1]["reasoning_content"] == "first this, then\nthat\x1b"
    chat.take("/reasoning")
    assert capsys.readouterr().err == "first this, then\nthat\N{REPLACEMENT CHARACTER}\n"
    chat.take("/reasoning on")
    chat.take("why?")
    out, err = capsys.readouterr()
    assert out == "42\n" and "first this, then\nthat" in err and "thought for" not in err
    chat.take("/reasoning maybe")
    chat.take("/reasoning off")
    chat.take("and now?")
    chat.take("/reasoning")
    err = capsys.readouterr().err
    assert "use on, off" in err and "came without reasoning" in err


def test_a_card_shows_what_would_run_and_nothing_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    view = AnswerView()
    for event in [ContentText("I look."), *call('{"a":\n"\u202egnp.exe\x1b[8m"}', "we\x1bather")]:
        view.show(event)
    view.close()
    out, err = capsys.readouterr()
    assert out == "I look.\n"
    plain = err.replace("\x1b[36m", "").replace("\x1b[0m", "")
    bad = "\N{REPLACEMENT CHARACTER}"
    assert plain == f'╭ we{bad}ather\n│ {{"a":\n│ "{bad}gnp.exe{bad}[8m"}}\n╰\n'


def test_the_question_at_the_terminal_stays_out_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" Y \n"))
    assert keyboard.ask("Run it? ") == "y" and keyboard.ask("Run it? ") == ""
