"""Talk with a model, here or on a server. The answer streams; Ctrl-C stops it, and Ctrl-D leaves.

/help shows the commands."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from quire.cli.options import (
    Given,
    add_engine_options,
    add_sampling_options,
    given_options,
    parse_value,
    sampling_params,
)
from quire.config import unknown_option
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, PromptTooLongError, QuireError

if TYPE_CHECKING:
    from quire.cli.talk import Answer, Talker

HELP = """\
/set NAME VALUE  change a sampling parameter, as in /set temperature 0.7;
                 the value none goes back to the default
/set             show what is set
/system TEXT     set the system message, and start anew
/reset           forget the conversation
/stats           tokens and speed of the last answer, and of the session
/help            this
/exit            leave (or Ctrl-D); Ctrl-C stops an answer,
                 and a second one within 1.5 seconds leaves"""

HISTORY = Path("~/.local/state/quire/chat_history")
HISTORY_LINES = 1000
WAIT_SECONDS, MAX_WAIT_SECONDS = 120.0, 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire chat`."""
    parser.usage = "quire chat MODEL [options]\n       quire chat --url URL [--api-key KEY] [--model NAME] [options]"
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder, org/name to download, or 'demo'")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="no notes and no memory plan")
    group = parser.add_argument_group("a model on a server")
    group.add_argument("--url", metavar="URL", help="talk to the server there, as in http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="the server's key, or @FILE that holds it")
    group.add_argument(
        "--wait", metavar="SECONDS", type=float, help=f"wait for a server that is loading (default: {WAIT_SECONDS:g})"
    )
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves."""
    if args.name and hasattr(args, "model"):
        raise ConfigError(f"the model is named twice, {args.name!r} and --model {args.model!r}; give one of them")
    given = given_options(args, args.name, sampling=True)

    from quire.cli.inputs import need_stdin

    need_stdin()
    with _talker(args, given) as talker:
        chat = Chat(talker, given.sampling, args.system)
        if sys.stdin.isatty():
            print("Ctrl-D leaves, Ctrl-C stops an answer, /help shows the commands.", file=sys.stderr)
        with _history():
            for line in _lines():
                if not chat.take(line):
                    break
    return 0


@contextmanager
def _talker(args: argparse.Namespace, given: Given) -> Iterator[Talker]:
    """What answers: a server's model, or one that is loaded here."""
    if args.url is None:
        for flag, value in (("--api-key", args.api_key), ("--wait", args.wait)):
            if value is not None:
                raise ConfigError(f"{flag} is about a server; name it with --url, or leave {flag} out")
        with _local(args, given) as local:
            yield local
    else:
        with _remote(args, given) as remote:
            yield remote


@contextmanager
def _local(args: argparse.Namespace, given: Given) -> Iterator[Talker]:
    _check_fields(given.sampling)

    from quire.cli.start import start
    from quire.cli.talk import LocalTalker
    from quire.cli.terminal import note
    from quire.models.hub import EMBEDDED_MODELS

    if not args.quiet and not given.sampling.keys().isdisjoint(("logprobs", "prompt_logprobs")):
        note("log-probabilities are not shown in a chat; 'quire generate --output FILE.jsonl' writes them")
    with start(given, args.quiet) as llm:
        llm.render_chat([{"role": "user", "content": "?"}])  # without a template: say so now
        if not args.quiet and (description := EMBEDDED_MODELS.get(given.engine["model"])):
            note(description)
        yield LocalTalker(llm)


@contextmanager
def _remote(args: argparse.Namespace, given: Given) -> Iterator[Talker]:
    if args.name:
        raise ConfigError(f"{args.name!r} names a model to load here, but --url a server; use --model {args.name}")
    for name in [*(["preset"] if given.preset else []), *given.engine]:
        if name != "model":
            raise ConfigError(f"{name} is an option of the engine, which with --url is the server's; set it there")
    wait = WAIT_SECONDS if args.wait is None else args.wait
    if not (math.isfinite(wait) and 0 <= wait <= MAX_WAIT_SECONDS):
        raise ConfigError(f"--wait is {wait}; it must be from 0 to {MAX_WAIT_SECONDS:g} seconds")

    from quire.cli.remote import RemoteTalker
    from quire.cli.terminal import note
    from quire.server.config import ServerConfig, read_keys

    _check_fields(given.sampling, RemoteTalker.refused)
    keys = ServerConfig(api_key=read_keys((args.api_key,) if args.api_key is not None else ())).api_key
    if len(keys) > 1:
        raise ConfigError(f"--api-key {args.api_key} holds {len(keys)} keys; a chat sends one")
    talker = RemoteTalker(args.url, keys[0] if keys else None, given.engine.get("model"), wait)
    try:
        if not args.quiet:
            context = "" if talker.context is None else f", context {talker.context:,} tokens"
            note(f"{talker.model} at {talker.url}{context}")
        yield talker
    finally:
        talker.close()


def _lines() -> Iterator[str]:
    """The user's lines; Ctrl-C drops the one that is being typed."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not text in UTF-8: {error}") from error
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()


@contextmanager
def _history() -> Iterator[None]:
    """Line editing with the lines of earlier chats, on a terminal only. A history that cannot be kept is no error."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    _try(lambda: _read_history(readline.read_history_file))
    try:
        yield
    finally:
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


class Chat:
    """One conversation.

    Attributes:
        messages: what was said, the system message first if there is one.
        fields: sampling parameters that were set.
        last: the last answer.
    """

    def __init__(self, talker: Talker, fields: dict[str, Any], system: str | None = None) -> None:
        self.talker = talker
        self.fields = dict(fields)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._set_system,
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda _: print(HELP),
        }
        self._forget()

    def take(self, line: str) -> bool:
        """Answer a line or do what it commands; False if it was /exit. A mistake is told and changes nothing."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return True
        if word in ("/exit", "/quit"):
            return False
        try:
            if not word.startswith("/"):
                self._answer(line.strip())
            elif word in self._commands:
                self._commands[word](rest.strip())
            else:
                raise ConfigError(unknown_option(word, [*self._commands, "/exit"]).replace("option", "command"))
        except QuireError as error:
            _tell(f"error: {error}")
        return True

    def _forget(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _reset(self, _: str) -> None:
        self._forget()
        _tell("The conversation starts anew.")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self._forget()
        _tell("The system message is set; the conversation starts anew." if text else "There is no system message now.")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            _tell(", ".join(f"{key}={value}" for key, value in self.fields.items()) or "Nothing is set.")
            return
        hints = get_type_hints(SamplingParams)
        if name not in hints:
            raise ConfigError(unknown_option(name, list(hints)))
        if not value.strip():
            raise ConfigError(f"/set {name} needs a value, as in /set temperature 0.7; none is back to the default")
        fields = {key: kept for key, kept in self.fields.items() if key != name}
        if value.strip().lower() != "none":
            fields[name] = parse_value(name, hints[name], value.strip())
        _check_fields(fields, self.talker.refused)
        self.fields = fields
        _tell(f"{name} is {fields.get(name, 'the default')}")

    def _answer(self, text: str) -> None:
        """Stream the answer to `text`. What was said is kept only if there is an answer, or a part of one."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self.talker.answer(messages, self.fields, _show)
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"{error}; or /reset to start anew ({len(messages)} messages are in the conversation)"
            ) from error
        print(flush=True)
        self.last = answer
        if answer.text or answer.reason == "stop":
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._say_why(answer)

    def _say_why(self, answer: Answer) -> None:
        """Say why an answer ended, where that is not plain."""
        used, context = answer.context_used, self.talker.context
        if answer.reason == "error":
            _tell(f"error: {answer.error}")
        elif answer.reason == "abort":
            _tell("(stopped)")
        elif answer.reason == "length" and used is not None and context is not None and used >= context:
            _tell(f"(the context of {context} tokens is full: /reset starts anew; {self.talker.more_context})")
        elif answer.reason == "length" and "max_tokens" in self.fields:
            _tell(f"(stopped after max_tokens={self.fields['max_tokens']}; /set max_tokens changes it)")
        elif answer.reason == "length":
            _tell("(stopped at the server's limit: /set max_tokens asks for more, /reset starts anew)")

    def _stats(self, _: str) -> None:
        from quire.cli.terminal import print_table

        print_table(
            "Statistics", [*(_answer_rows(self.last, self.talker.context) if self.last else []), *self.talker.session()]
        )


def _show(delta: str) -> None:
    """Print a piece of an answer."""
    from quire.cli.terminal import visible

    sys.stdout.write(visible(delta))
    sys.stdout.flush()


def _answer_rows(answer: Answer, context: int | None) -> list[tuple[str, str]]:
    """Statistics of one answer; a dash stands for what a server did not tell."""

    def shown(number: int | None) -> str:
        return "-" if number is None else f"{number:,}"

    first = answer.first_seconds
    return [
        ("last answer", f"{shown(answer.output_tokens)} tokens in {answer.seconds:.2f} s"),
        ("time to first token", "-" if first is None else f"{first * 1000:,.0f} ms"),
        ("prompt tokens", f"{shown(answer.prompt_tokens)}, of them cached {shown(answer.cached_tokens)}"),
        ("context used", f"{shown(answer.context_used)} of {shown(context)} tokens"),
    ]


def _check_fields(fields: dict[str, Any], refused: Sequence[str] = ()) -> None:
    """Refuse what a conversation cannot use, and values that are not valid.

    Raises:
        SamplingParamsError, ConfigError: the message says which.
    """
    if sampling_params(fields).n != 1:
        raise ConfigError(f"n={fields['n']} is for 'quire generate'; a chat has one answer at a time")
    for name in refused:
        if name in fields:
            raise ConfigError(f"{name} is not shown in a chat with a server, and not sent to it; leave it out")


def _tell(text: str) -> None:
    """Say something that is not part of the conversation."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
