"""One conversation of `quire chat`: its messages, the commands, and the tools that the model calls.

A turn is a user's message and everything that follows from it: an answer, or answers that call tools, the results, and
a final answer. A complete turn stays in the conversation, and so does the partial text of an answer that was
interrupted or failed. A turn without any text or tool result leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from quire.cli.answer_view import AnswerView, exact
from quire.cli.keyboard import ask, edited, files
from quire.cli.options import parse_value, sampling_params
from quire.cli.talk import ToolUse
from quire.cli.terminal import print_table, tell, visible
from quire.config import unknown_option
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, PromptTooLongError, QuireError
from quire.text.reply import ToolCall
from quire.typed_json import BAD_JSON

if TYPE_CHECKING:
    from quire.cli.talk import Answer, Talker
    from quire.cli.tools import Tool

HELP = """\
/retry           answer the last message again
/edit            change the last message, in $EDITOR or here; or /edit TEXT
/undo            remove the last message and its answer
/set NAME VALUE  change a sampling parameter, as in /set temperature 0.7;
                 the value none goes back to the default
/set             show what is set
/system TEXT     set the system message and start a new conversation
/reset           forget the conversation
/save FILE       write the conversation to a file; /load FILE goes on with it
/reasoning       show what the model thought before its last answer;
                 /reasoning on shows it as it comes, off folds it
/tools           the functions that the model may call
/stats           tokens and speed of the last answer, and of the session
/help            this
/exit            leave (or Ctrl-D)

Ctrl-C stops an answer, and what came of it stays in the conversation; a second
one within 1.5 seconds leaves. A line that ends in \\ goes on in the next one.
What stands between \"\"\" and \"\"\" is one message. Tab completes commands."""

MAX_ROUNDS = 10
"""Maximum answers to one message that call tools; the next one must not."""

MAX_SAVED_BYTES = 64 << 20
INTERRUPTED = "interrupted"
"""Key of an answer's message, here and in saved files, that marks it as interrupted; it is not sent."""

DECLINED = "The user declined this call."
STOPPED = "The user interrupted this call."


class Saved(msgspec.Struct):
    """A conversation in a file."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any] = {}


class Chat:
    """One conversation.

    Args:
        talker: answers the messages.
        fields: sampling parameters.
        system: the system message.
        tools: tools that the model may call.
        tool_choice: for the first answer to a message; "required" makes it call a tool.
        approve: decides whether a call may run; None: ask at the terminal, if there is one.
        edit: lets the user edit a text.

    Attributes:
        messages: the conversation, beginning with the system message if there is one.
        fields: sampling parameters that were set.
        last: the last answer.
    """

    def __init__(
        self,
        talker: Talker,
        fields: dict[str, Any],
        system: str | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        approve: Callable[[ToolCall], bool] | None = None,
        edit: Callable[[str], str] = edited,
    ) -> None:
        self.talker = talker
        self.fields = dict(fields)
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.last: Answer | None = None
        self._failed: str | None = None  # the last message, if it is not in the conversation since it got no answer
        self._tools = {tool.name: tool for tool in tools}
        self._tool_choice = tool_choice
        self._approve = approve or self._ask
        self._always: set[str] = set()  # tools that run without asking
        self._edit_text = edit
        self._unfold = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/retry": self._retry,
            "/edit": self._edit,
            "/undo": self._undo,
            "/set": self._set,
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/reasoning": self._reasoning,
            "/tools": self._show_tools,
            "/stats": self._stats,
            "/help": lambda _: print(HELP),
        }
        self._forget()

    # -- commands ------------------------------------------------------------------------------------------

    def take(self, line: str, quoted: bool = False) -> bool:
        """Answer a message or run a command; False if it was /exit. Errors are shown, and change nothing.

        Args:
            quoted: the line is a message, even if it looks like a command.
        """
        text = line.strip()
        word, _, rest = text.partition(" ")
        if not word:
            return True
        if word in ("/exit", "/quit") and not quoted:
            return False
        try:
            if quoted or not word.startswith("/"):
                self._answer(text)
            elif word in self.commands:
                self.commands[word](rest.strip())
            else:
                hint = unknown_option(word, [*self.commands, "/exit"]).replace("option", "command")
                raise ConfigError(f'{hint} (put a message that begins with / between """ and """)')
        except QuireError as error:
            tell(f"error: {error}")
        return True

    def complete(self, line: str) -> list[str]:
        """Completions of the last word of a line."""
        word, space, rest = line.partition(" ")
        if not line.startswith("/"):
            return []
        if not space:
            return [name for name in (*self.commands, "/exit") if name.startswith(word)]
        if word == "/set":
            names = [name for name in SamplingParams.__struct_fields__ if name not in ("n", *self.talker.refused)]
            return [name + " " for name in names if name.startswith(rest)] if " " not in rest else []
        if word == "/reasoning":
            return [name for name in ("on", "off") if name.startswith(rest)]
        return files(line.rpartition(" ")[2]) if word in ("/save", "/load") else []

    def _forget(self) -> None:
        self._failed = None
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _reset(self, _: str) -> None:
        self._forget()
        tell("Started a new conversation.")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self._forget()
        tell(
            "The system message is set; this is a new conversation."
            if text
            else "There is no system message now; this is a new conversation."
        )

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            tell(", ".join(f"{key}={value}" for key, value in self.fields.items()) or "Nothing is set.")
            return
        hints = get_type_hints(SamplingParams)
        if name not in hints:
            raise ConfigError(unknown_option(name, list(hints)))
        if not value.strip():
            raise ConfigError(f"/set {name} needs a value, as in /set temperature 0.7; none restores the default")
        fields = {key: kept for key, kept in self.fields.items() if key != name}
        if value.strip().lower() != "none":
            fields[name] = parse_value(name, hints[name], value.strip())
        check_fields(fields, self.talker.refused)
        self.fields = fields
        tell(f"{name} is {({**self.talker.suggested, **fields}).get(name, 'the default')}")

    def _last_turn(self) -> tuple[list[dict[str, Any]], str]:
        """The messages before the user's last message, and that message.

        Raises:
            ConfigError: there is none.
        """
        if self._failed is not None:
            return self.messages, self._failed
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                return self.messages[:index], self.messages[index]["content"]
        raise ConfigError("there is no message yet; type one first")

    def _retry(self, _: str) -> None:
        before, text = self._last_turn()
        if "seed" in self.fields:
            tell(f"(seed={self.fields['seed']} is set, so the answer will be the same; /set seed none)")
        self._answer(text, before)

    def _edit(self, text: str) -> None:
        before, old = self._last_turn()
        new = text or self._edit_text(old).strip()
        if not new or new == old:
            tell("The message is as it was; /retry answers it again.")
            return
        self._answer(new, before)

    def _undo(self, _: str) -> None:
        self.messages, text = self._last_turn()
        self._failed = None
        tell(f"Removed: {_shortened(text)}")

    def _reasoning(self, text: str) -> None:
        if text in ("on", "off"):
            self._unfold = text == "on"
            tell("Reasoning is shown as it comes." if self._unfold else "Reasoning is folded into one line.")
        elif text:
            raise ConfigError(f"/reasoning {text!r} is unknown; use on, off, or nothing")
        else:
            thought = self.last.reply.reasoning if self.last else ""
            tell(visible(thought.strip()) or "The last answer came without reasoning.")

    def _show_tools(self, _: str) -> None:
        for tool in self._tools.values():
            about = tool.definition["function"].get("description", "").partition("\n")[0]
            tell(
                f"{tool.signature}{': ' if about else ''}{about}{' (always runs)' if tool.name in self._always else ''}"
            )
        if not self._tools:
            tell("There are none; 'quire chat --tools FILE.py' makes tools of the functions in a Python file.")

    def _stats(self, _: str) -> None:
        last = answer_rows(self.last, self.talker.context) if self.last else []
        print_table("Statistics", [*last, *self.talker.session()])

    # -- files ---------------------------------------------------------------------------------------------

    def _save(self, name: str) -> None:
        path = _path("/save", name)
        if path.exists():
            try:
                _read_saved(path)
            except ConfigError as error:
                raise ConfigError(f"{path} exists and is not a conversation; choose another name") from error
        part = path.with_name(path.name + ".part")
        try:
            encoded = msgspec.json.encode(Saved(self.messages, self.fields))
            part.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
        tell(f"Saved {len(self.messages)} messages to {path}; /load {path} continues with them.")

    def _load(self, name: str) -> None:
        from quire.text.chat_template import check_messages, joined

        saved = _read_saved(_path("/load", name))
        checked = check_messages(saved.messages) if saved.messages else []
        messages = [{**message, "content": joined(message["content"]) or ""} for message in checked]
        check_fields(saved.sampling, self.talker.refused)
        self.messages, self.fields, self._failed, self.last = messages, saved.sampling, None, None
        first = messages[0] if messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        tell(f"Loaded a conversation of {len(messages)} messages.")

    # -- answers -------------------------------------------------------------------------------------------

    def _answer(self, text: str, before: list[dict[str, Any]] | None = None) -> None:
        """Stream the answer to `text`.

        Args:
            before: the messages before it; default: the whole conversation. Later ones are replaced by this turn as
                soon as there is an answer.
        """
        before = self.messages if before is None else before
        self._failed = text if before is self.messages else None
        turn: list[dict[str, Any]] = [{"role": "user", "content": text}]
        for number in range(MAX_ROUNDS + 1):
            answer = self._one_answer([*before, *turn], number)
            calls = answer.reply.tool_calls if answer.reason == "stop" and number < MAX_ROUNDS else []
            if not calls:
                break
            turn.append(_message_of(answer, calls))
            if not self._run_calls(calls, turn):
                self._keep([*before, *turn, {"role": "assistant", "content": "", INTERRUPTED: True}])
                tell("(interrupted; what was called stays in the conversation, /undo removes it)")
                return
        kept = bool(answer.reply.content) or answer.reason == "stop" or len(turn) > 1
        if kept:
            self._keep([*before, *turn, _message_of(answer)])
        self._say_why(answer, kept)

    def _keep(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self._failed = messages, None

    def _one_answer(self, messages: list[dict[str, Any]], number: int) -> Answer:
        """The answer to the messages, after `number` answers to the same user message that called tools."""
        choice = self._tool_choice if number == 0 else "auto" if number < MAX_ROUNDS else "none"
        if number == MAX_ROUNDS:
            tell(f"(tools were called {MAX_ROUNDS} times: now the model must answer without)")
        view = AnswerView(self._unfold)
        sent = [{key: value for key, value in message.items() if key != INTERRUPTED} for message in messages]
        use = ToolUse([tool.definition for tool in self._tools.values()], choice)
        try:
            self.last = self.talker.answer(sent, {**self.talker.suggested, **self.fields}, view.show, use)
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"{error}; or use /reset to start over ({len(messages)} messages are in the conversation)"
            ) from error
        finally:
            view.close()
        return self.last

    def _say_why(self, answer: Answer, kept: bool) -> None:
        """Tell why an answer ended, unless it is complete."""
        used, context = answer.context_used, self.talker.context
        call = ", within a call, which does not run" if answer.reply.tool_calls else ""
        if answer.reason == "error":
            tell(f"error: {answer.error}")
        elif answer.reason == "abort" and kept:
            tell("(interrupted; what came stays in the conversation: /retry answers anew, /undo removes it)")
        elif answer.reason == "abort":
            tell("(interrupted before any text came: nothing of it stays; /retry asks again)")
        elif answer.reason == "length" and used is not None and context is not None and used >= context:
            tell(f"(the context of {context} tokens is full{call}: /reset starts anew; {self.talker.more_context})")
        elif answer.reason == "length" and "max_tokens" in self.fields:
            tell(f"(stopped after max_tokens={self.fields['max_tokens']}{call}; /set max_tokens changes it)")
        elif answer.reason == "length":
            tell(f"(stopped at the server's limit{call}: /set max_tokens asks for more, /reset starts anew)")

    # -- tools ---------------------------------------------------------------------------------------------

    def _run_calls(self, calls: Sequence[ToolCall], turn: list[dict[str, Any]]) -> bool:
        """Add the results of calls to a turn; False if the user interrupted them."""
        for index, call in enumerate(calls):
            try:
                result = self._result(call)
            except KeyboardInterrupt:
                print(file=sys.stderr)
                turn += [_result_message(left, STOPPED) for left in calls[index:]]
                return False
            tell(f"→ {_shortened(exact(result))}")
            turn.append(_result_message(call, result))
        return True

    def _result(self, call: ToolCall) -> str:
        """The result of a call, for the model."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools)}"
        if call.name not in self._always and not self._approve(call):
            return DECLINED
        return tool.run(call.arguments)

    def _ask(self, call: ToolCall) -> bool:
        if not sys.stdin.isatty():
            tell("(there is no terminal to ask at; --yes runs tools without asking)")
            return False
        while True:
            answer = ask(f"Run {exact(call.name)}? [y]es, [n]o, [a]lways: ")
            if answer in ("a", "always"):
                self._always.add(call.name)
            if answer in ("y", "yes", "a", "always"):
                return True
            if answer in ("n", "no", ""):
                return False


def _message_of(answer: Answer, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """An answer as a message of the conversation, without a call that is incomplete."""
    reply = answer.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning  # the chat template decides how much of it the model sees
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message | ({INTERRUPTED: True} if answer.reason == "abort" else {})


def _result_message(call: ToolCall, result: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _shortened(text: str) -> str:
    """The first line, cut to the terminal's width."""
    first, _, rest = text.partition("\n")
    width = shutil.get_terminal_size().columns - 8
    return first[:width] + ("..." if rest or len(first) > width else "")


def _path(command: str, name: str) -> Path:
    if not name:
        raise ConfigError(f"{command} needs a file name, as in {command} chat.json")
    return Path(os.path.expanduser(name))


def _read_saved(path: Path) -> Saved:
    """Raises ConfigError if the file is not a saved conversation."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SAVED_BYTES + 1)
        if len(content) > MAX_SAVED_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_SAVED_BYTES >> 20} MiB; is it a conversation saved by /save?"
            )
        return msgspec.json.decode(content, type=Saved)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except BAD_JSON as error:
        raise ConfigError(f"{path} is not a conversation saved by /save: {error}") from error


def answer_rows(answer: Answer, context: int | None) -> list[tuple[str, str]]:
    """Statistics of one answer; a dash for what the server did not report."""

    def shown(number: int | None) -> str:
        return "-" if number is None else f"{number:,}"

    first, thought = answer.first_seconds, answer.reasoning_tokens
    reasoning = f", {thought:,} of them reasoning" if thought else ""
    return [
        ("last answer", f"{shown(answer.output_tokens)} tokens in {answer.seconds:.2f} s{reasoning}"),
        ("time to first token", "-" if first is None else f"{first * 1000:,.0f} ms"),
        ("prompt tokens", f"{shown(answer.prompt_tokens)}, of them cached {shown(answer.cached_tokens)}"),
        ("context used", f"{shown(answer.context_used)} of {shown(context)} tokens"),
    ]


def check_fields(fields: Mapping[str, Any], refused: Sequence[str] = ()) -> None:
    """Refuse sampling parameters that a conversation cannot use, or that are not valid.

    Raises:
        SamplingParamsError, ConfigError: the message names the parameter.
    """
    if sampling_params(fields).n != 1:
        raise ConfigError(
            f"n={fields['n']} is not possible in a chat, which has one answer at a time; use 'quire generate'"
        )
    for name in refused:
        if name in fields:
            raise ConfigError(f"{name} is not supported in a chat with a server; leave it out")
