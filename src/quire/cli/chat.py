"""Chat with a model, local or on a server. Ctrl-C stops an answer, Ctrl-D exits.

/help lists the commands, such as /retry, /edit and /save."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.cli.options import Given, add_engine_options, add_sampling_options, given_options
from quire.cli.start import add_detail_options, detail, start
from quire.errors import ConfigError
from quire.tls import CACERT

if TYPE_CHECKING:
    from quire.cli.talk import Talker
    from quire.cli.tools import Tool

WAIT_SECONDS, MAX_WAIT_SECONDS = 120.0, 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire chat`."""
    parser.usage = "quire chat MODEL [options]\n       quire chat --url URL [--api-key KEY] [--model NAME] [options]"
    parser.add_argument("words", nargs="*", metavar="MODEL", help="folder, GGUF file, org/name on the Hub, or 'demo'")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_detail_options(parser, "no notes")
    group = parser.add_argument_group("tools")
    group.add_argument("--tools", metavar="FILE.py", help="the model may call the functions in this Python file")
    group.add_argument("--yes", action="store_true", help="call them without asking")
    group.add_argument(
        "--tool-choice",
        choices=("auto", "required"),
        default="auto",
        help="required: the first answer to a message must be a call; auto: the model decides (default: auto)",
    )
    group = parser.add_argument_group("a model on a server")
    group.add_argument(
        "--url", metavar="URL", help="chat with the server at this URL, such as http://127.0.0.1:8000 or unix:PATH"
    )
    group.add_argument("--api-key", metavar="KEY", help="the server's API key, or @FILE to read it from a file")
    group.add_argument("--cacert", metavar="FILE", help=CACERT)
    group.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        help=f"how long to wait for a server that is loading (default: {WAIT_SECONDS:g})",
    )
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves."""
    name, *prompts = args.words or [None]
    if name and hasattr(args, "model"):
        raise ConfigError(f"two models were given, {name!r} and --model {args.model!r}; remove one")
    if prompts:
        raise ConfigError(
            f"unexpected argument {prompts[0]!r}: a chat reads messages from the terminal; for a single answer use "
            f"'quire generate {name} --chat PROMPT'"
        )
    given = given_options(args, name, sampling=True)

    from quire.cli.conversation import Chat
    from quire.cli.inputs import need_stdin
    from quire.cli.keyboard import line_editing, typed
    from quire.cli.terminal import note

    need_stdin()
    tools = _tools(args)
    with _talker(args, given, tools) as talker:
        for field, value in talker.suggested.items():
            if field not in given.sampling and not args.quiet:
                note(f"{field} {value:g}, as the model is small and its files give none (/set {field} changes it)")
        approve = (lambda _: True) if args.yes else None
        chat = Chat(talker, given.sampling, args.system, tools, args.tool_choice, approve)
        if sys.stdin.isatty():
            print("Ctrl-D leaves, Ctrl-C stops an answer, /help shows the commands.", file=sys.stderr)
        with line_editing(chat.complete):
            for text, quoted in typed():
                if not chat.take(text, quoted):
                    break
    return 0


def _tools(args: argparse.Namespace) -> list[Tool]:
    """The functions of --tools.

    Raises:
        ConfigError: see `read_tools`; or there are none, and another flag is about them.
    """
    if args.tools is None:
        for flag, given in (("--yes", args.yes), ("--tool-choice", args.tool_choice != "auto")):
            if given:
                raise ConfigError(f"{flag} needs tools; add --tools FILE.py, or leave {flag} out")
        return []
    from quire.cli.terminal import note
    from quire.cli.tools import read_tools

    tools = read_tools(args.tools)
    if not args.quiet:
        note(f"tools: {', '.join(tool.signature for tool in tools)}")
    return tools


@contextmanager
def _talker(args: argparse.Namespace, given: Given, tools: list[Tool]) -> Iterator[Talker]:
    """What answers: a server's model, or one that is loaded here."""
    if args.url is None:
        for flag, value in (("--api-key", args.api_key), ("--cacert", args.cacert), ("--wait", args.wait)):
            if value is not None:
                raise ConfigError(f"{flag} needs a server; add --url URL, or leave {flag} out")
        with _local(args, given, tools) as local:
            yield local
    else:
        with _remote(args, given) as remote:
            yield remote


@contextmanager
def _local(args: argparse.Namespace, given: Given, tools: list[Tool]) -> Iterator[Talker]:
    from quire.cli.conversation import check_fields

    check_fields(given.sampling)

    from quire.cli.talk import LocalTalker
    from quire.cli.terminal import note
    from quire.models.hub import EMBEDDED_MODELS

    if not args.quiet and not given.sampling.keys().isdisjoint(("logprobs", "prompt_logprobs")):
        note("log-probabilities are not shown in a chat; 'quire generate --output FILE.jsonl' writes them")
    with start(given, detail(args)) as llm:
        # Without a template, or one that shows how to call tools: say so now.
        definitions = [tool.definition for tool in tools] or None
        llm.abort(llm.add_chat([{"role": "user", "content": "?"}], tools=definitions))
        if not args.quiet and (description := EMBEDDED_MODELS.get(given.engine["model"])):
            note(description)
        yield LocalTalker(llm)


@contextmanager
def _remote(args: argparse.Namespace, given: Given) -> Iterator[Talker]:
    if args.words:
        name = args.words[0]
        raise ConfigError(
            f"{name!r} is a model to load here, but --url is a server; use --model {name} to choose a model there"
        )
    for name in [*(["preset"] if given.preset else []), *given.engine]:
        if name != "model":
            raise ConfigError(f"{name} is an engine option, and with --url the engine is the server's; set it there")
    wait = WAIT_SECONDS if args.wait is None else args.wait
    if not (math.isfinite(wait) and 0 <= wait <= MAX_WAIT_SECONDS):
        raise ConfigError(f"--wait is {wait}; it must be from 0 to {MAX_WAIT_SECONDS:g} seconds")

    from quire.cli.conversation import check_fields
    from quire.cli.remote import RemoteTalker
    from quire.cli.terminal import note
    from quire.server.http_options import HttpOptions, read_keys

    check_fields(given.sampling, RemoteTalker.refused)
    keys = HttpOptions(api_key=read_keys((args.api_key,) if args.api_key is not None else ())).api_key
    if len(keys) > 1:
        raise ConfigError(f"--api-key {args.api_key} has {len(keys)} keys; give a file with one")
    talker = RemoteTalker(args.url, keys[0] if keys else None, given.engine.get("model"), wait, args.cacert)
    try:
        if not args.quiet:
            context = "" if talker.context is None else f", context {talker.context:,} tokens"
            note(f"{talker.model} at {talker.url}{context}")
        yield talker
    finally:
        talker.close()
