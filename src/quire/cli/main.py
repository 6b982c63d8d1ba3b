"""The command `quire`: finds and runs the subcommand, and turns errors into one line and an exit code.

Exit codes: 0 success; 1 failure; 2 the command, an option, the model or a prompt is not valid; 130 Ctrl-C; 141 the
reader of the output closed it. A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`; only the
requested one is imported, so that `quire --help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, cast

from quire.errors import INVALID, ConfigError, QuireError, RequestError
from quire.other_options import OTHER_COMMANDS
from quire.version import __version__

COMMANDS = {
    "generate": "complete prompts from arguments, standard input or a file",
    "chat": "chat with a model",
    "serve": "serve a model over HTTP, with an OpenAI-compatible API",
    "batch": "process a file of requests; an interrupted batch can be resumed",
    "health": "check whether the server on this machine accepts requests",
    "route": "route each request to the server where it costs least",
    "up": "start a cluster: a router, its servers and Redis",
    "down": "stop a cluster",
    "rank": "join an engine on another machine with ranks on this one",
    "quantize": "save a model with int8 or int4 weights",
    "trace": "show what the scheduler does, step by step",
    "bench": "benchmark a model, a server, or KV transfer",
    "inspect": "describe a model and the memory it needs, without loading it",
    "completion": "print a completion script for bash, zsh or fish",
    "doctor": "check this machine: kernels, packages, and what is missing",
}

SUBCOMMANDS = {
    ("bench", "kv"): "bench_kv",
    ("bench", "serve"): "bench_serve",
    ("bench", "transfer"): "bench_transfer",
}
"""Commands of two words with their own module and options."""

ALIASES = {"run": "chat", "run-batch": "batch"}
"""`ollama run` and `vllm run-batch`, whose arguments work, too."""

FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


class Command(Protocol):
    """The interface of a subcommand's module. Its docstring is the command's help text."""

    __doc__: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `quire` with these arguments (default: the process's); returns the exit code."""
    if sys.stderr is None:  # closed by the caller: messages are dropped, and must not go to another file
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.set_inheritable(2, True)  # `dup2` does nothing if the file got this number at once
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        return _fail(ConfigError("standard output is closed; redirect it to a file or to /dev/null"), USAGE)
    _never_fail_on_encoding()
    # With plain torch, OpenMP's threads wait for one another; on a busy machine, long spinning takes the processors
    # from the threads that others wait for. Torch reads this when it is loaded, here and in child processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:  # most likely a full disk
        named = f"{error.filename}: " if error.filename else ""
        return _fail(QuireError(f"{named}{error.strerror or error}"), FAILED)
    finally:
        _drop_what_cannot_be_written()


def _drop_what_cannot_be_written() -> None:
    """Replace streams that cannot be written, since Python flushes them at exit and would report an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: list[str]) -> int:
    """Run the command; returns its exit code, whatever it raises."""
    try:
        return _dispatch(arguments)
    except (*INVALID, RequestError) as error:
        return _fail(error, USAGE)
    except QuireError as error:
        return _fail(error, FAILED)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "quire":
            raise
        return _fail(
            QuireError(f"a package is missing: {error.name}; 'pip install .' in a checkout installs all"), FAILED
        )
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:  # argparse after --help
        return end.code if isinstance(end.code, int) else FAILED


def _never_fail_on_encoding() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _fail(error: Exception, code: int) -> int:
    with suppress(OSError):  # standard error may be what is full or gone; the exit code still tells
        print("quire: error: " + " ".join(str(error).split()), file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else USAGE
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(f"quire {__version__}")
        return 0
    name = ALIASES.get(name, name)
    if name in OTHER_COMMANDS and name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; {OTHER_COMMANDS[name]}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    module = SUBCOMMANDS.get((name, rest[0] if rest else ""))
    if module:
        name, rest = f"{name} {rest[0]}", rest[1:]
    from quire.cli.options import CommandParser  # not for --help

    command = cast(Command, importlib.import_module(f"quire.cli.{module or name}"))
    parser = CommandParser(prog=f"quire {name}", description=command.__doc__ or "")
    command.add_arguments(parser)
    return command.run(parser.parse(rest))


def _overview() -> str:
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: quire COMMAND ...", "", "commands:", *lines, "", "'quire COMMAND --help' shows a command's options."]
    )


if __name__ == "__main__":
    sys.exit(main())
