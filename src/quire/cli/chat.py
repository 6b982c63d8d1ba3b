"""Talk with a model. The answer streams; Ctrl-C stops it, and Ctrl-D leaves.

/help shows the commands."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_type_hints

from quire.cli.options import add_engine_options, add_sampling_options, given_options, parse_value, sampling_params
from quire.config import unknown_option
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, PromptTooLongError, QuireError

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput
    from quire.llm import LLM

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire chat`."""
    parser.usage = "quire chat MODEL [options]"
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder, org/name to download, or 'demo'")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="no notes and no memory plan")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves."""
    if args.name and hasattr(args, "model"):
        raise ConfigError(f"the model is named twice, {args.name!r} and --model {args.model!r}; give one of them")
    given = given_options(args, args.name, sampling=True)
    _check_fields(given.sampling)

    from quire.cli.inputs import need_stdin
    from quire.cli.start import start
    from quire.cli.terminal import note

    need_stdin()
    if not args.quiet and not given.sampling.keys().isdisjoint(("logprobs", "prompt_logprobs")):
        note("log-probabilities are not shown in a chat; 'quire generate --output FILE.jsonl' writes them")

    with start(given, args.quiet) as llm:
        llm.render_chat([{"role": "user", "content": "?"}])  # without a template: say so now
        chat = Chat(llm, given.sampling, args.system)
        if sys.stdin.isatty():
            print("Ctrl-D leaves, Ctrl-C stops an answer, /help shows the commands.", file=sys.stderr)
        with _history():
            for line in _lines():
                if not chat.take(line):
                    break
    return 0


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
    """

    def __init__(self, llm: LLM, fields: dict[str, Any], system: str | None = None) -> None:
        self.llm = llm
        self.fields = dict(fields)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: RequestOutput | None = None
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
        _check_fields(fields)
        self.fields = fields
        _tell(f"{name} is {fields.get(name, 'the default')}")

    def _answer(self, text: str) -> None:
        """Stream the answer to `text`. What was said is kept only if there is an answer, or a part of one."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            output = self._stream(self.llm.render_chat(messages))
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"{error}; or /reset to start anew ({len(messages)} messages are in the conversation)"
            ) from error
        [choice] = output.outputs
        self.last = output
        if choice.text or choice.finish_reason == "stop":
            self.messages = [*messages, {"role": "assistant", "content": choice.text}]
        self._say_why(output)

    def _stream(self, prompt: list[int]) -> RequestOutput:
        """Run one request, printing its text as it comes; Ctrl-C aborts it between two steps."""
        from quire.cli.terminal import visible

        request = self.llm.add_request(prompt, sampling_params(self.fields))
        with _interrupt() as interrupted:
            while True:
                for output in self.llm.abort(request) if interrupted() else self.llm.step():
                    sys.stdout.write(visible(output.outputs[0].delta))
                    sys.stdout.flush()
                    if output.finished:
                        print(flush=True)
                        return output

    def _say_why(self, output: RequestOutput) -> None:
        """Say why an answer ended, where that is not plain."""
        [choice] = output.outputs
        used = len(output.prompt_token_ids) + len(choice.token_ids)
        if choice.finish_reason == "error":
            _tell(f"error: {choice.error}")
        elif choice.finish_reason == "abort":
            _tell("(stopped)")
        elif choice.finish_reason == "length" and used >= self.llm.max_model_len:
            _tell(
                f"(the context of {self.llm.max_model_len} tokens is full: /reset starts anew; "
                "a larger --max-model-len would hold more, up to what the model was made for)"
            )
        elif choice.finish_reason == "length":
            _tell(f"(stopped after max_tokens={self.fields.get('max_tokens')}; /set max_tokens changes it)")

    def _stats(self, _: str) -> None:
        from quire.cli.report import rate
        from quire.cli.terminal import print_table

        rows: list[tuple[str, str]] = []
        if self.last is not None:
            metrics, [choice] = self.last.metrics, self.last.outputs
            first = metrics.time_to_first_token
            rows += [
                ("last answer", f"{len(choice.token_ids)} tokens in {metrics.total_seconds:.2f} s"),
                ("time to first token", "-" if first is None else f"{first * 1000:,.0f} ms"),
                ("prompt tokens", f"{len(self.last.prompt_token_ids):,}, of them cached {self.last.cached_tokens:,}"),
                ("context used", f"{self._context_used(self.last):,} of {self.llm.max_model_len:,} tokens"),
            ]
        stats = self.llm.stats
        rows += [
            ("session: prefill", rate(stats.prefill_tokens, stats.prefill_seconds)),
            ("session: decode", rate(stats.decode_tokens, stats.decode_seconds)),
            ("session: cached tokens", f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens"),
            ("session: KV blocks used", f"{stats.peak_blocks:,} of {stats.num_blocks:,} at most"),
        ]
        print_table("Statistics", rows)

    def _context_used(self, output: RequestOutput) -> int:
        return len(output.prompt_token_ids) + len(output.outputs[0].token_ids)


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuse what a conversation cannot use, and values that are not valid.

    Raises:
        SamplingParamsError, ConfigError: the message says which.
    """
    if sampling_params(fields).n != 1:
        raise ConfigError(f"n={fields['n']} is for 'quire generate'; a chat has one answer at a time")


def _tell(text: str) -> None:
    """Say something that is not part of the conversation."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag that the yielded function tells, since a step must not be left half-way.

    A second Ctrl-C within a second and a half of the first, when a step hangs, ends the program.
    """
    pressed: list[float] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if pressed and now - pressed[-1] < 1.5:
            raise KeyboardInterrupt
        pressed.append(now)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
