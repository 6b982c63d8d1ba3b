"""Keyboard input of a chat: messages of one or several lines, history, completion, and editing a message."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape, iglob
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError

HISTORY = Path("~/.local/state/quire/chat_history")
HISTORY_LINES = 1000
QUOTES = '"""'
PROMPT, CONTINUED = "> ", "... "

Complete = Callable[[str], Sequence[str]]
"""Completions of the last word of the line up to the cursor."""


class Typed(NamedTuple):
    """A message or command. `quoted` text is a message, whatever it begins with."""

    text: str
    quoted: bool = False


def typed() -> Iterator[Typed]:
    """Yields messages and commands. A line that ends in a backslash is continued on the next line; text between
    \"\"\" and \"\"\" is one message. Ctrl-C drops the current input.

    Raises:
        ConfigError: standard input is not text, or ends within a message.
    """
    terminal = sys.stdin.isatty()
    while True:
        try:
            first = _line(PROMPT if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        try:
            yield _whole(first, CONTINUED if terminal else "")
        except (EOFError, KeyboardInterrupt) as error:
            if not terminal:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise ConfigError(
                    f"standard input ends within a message; end the message with {QUOTES} on its last line"
                ) from error
            print("\n(dropped)", file=sys.stderr)


def _line(prompt: str) -> str:
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text in UTF-8: {error}") from error


def _whole(line: str, prompt: str) -> Typed:
    """The message or command that begins with this line. Raises EOFError if the input ends before it does."""
    if line.lstrip().startswith(QUOTES):
        text = line.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + _line(prompt)
        return Typed(text.rstrip()[: -len(QUOTES)].strip("\n"), quoted=True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(prompt))
    return Typed("\n".join(lines))


def ask(question: str) -> str:
    """The user's answer to a question, in lower case, not in the history; empty at Ctrl-D."""
    sys.stdout.flush()
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
    return answer.strip().lower()


def edited(text: str) -> str:
    """The text, edited by the user in $VISUAL or $EDITOR, or in the terminal if it is a single line.

    Raises:
        ConfigError: there is no editor for it, or the editor failed.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if editor:
        return _from_editor(editor, text)
    if "\n" in text or not sys.stdin.isatty():
        raise ConfigError(
            "a message of several lines needs an editor; set $EDITOR, or give the new message: /edit TEXT"
        )
    import readline

    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return _line(PROMPT)
    except (EOFError, KeyboardInterrupt):
        print()
        return text
    finally:
        readline.set_startup_hook()


def _from_editor(editor: str, text: str) -> str:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text + "\n", encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor), str(path)])
            if done.returncode:
                raise ConfigError(f"the editor {editor!r} ended with exit code {done.returncode}; nothing was changed")
            return path.read_text(encoding="utf-8").strip("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the editor {editor!r} could not be used: {error}; set $EDITOR to another one"
            ) from error


def files(prefix: str) -> list[str]:
    """Paths with this prefix; those of folders end with a slash."""
    expanded = os.path.expanduser(prefix)
    found = sorted(path + "/" * Path(path).is_dir() for path in iglob(escape(expanded) + "*"))
    return [prefix + path[len(expanded) :] for path in found]


@contextmanager
def line_editing(complete: Complete) -> Iterator[None]:
    """Line editing with the history of earlier chats, on a terminal. If the history cannot be read or written, that is
    noted only.

    Args:
        complete: for the Tab key.
    """
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    found: list[str] = []

    def completer(_: str, state: int) -> str | None:
        if state == 0:
            found[:] = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[state] if state < len(found) else None

    readline.set_completer(completer)
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    _try(lambda: _read_history(readline.read_history_file))
    try:
        yield
    finally:
        readline.set_completer(None)
        readline.set_history_length(HISTORY_LINES)
        _try(lambda: _write_history(readline.write_history_file))


def _read_history(read: Callable[[Path], None]) -> None:
    path = HISTORY.expanduser()
    if path.is_file():
        read(path)


def _write_history(write: Callable[[Path], None]) -> None:
    path = HISTORY.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    write(path)


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = getattr(error, "strerror", None) or error
        print(f"note: the history in {HISTORY} is not kept: {reason}", file=sys.stderr)
