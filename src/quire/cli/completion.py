"""Print a shell script that completes quire's commands and options.

source <(quire completion bash)                                    # in ~/.bashrc; for zsh: zsh
quire completion fish > ~/.config/fish/completions/quire.fish"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

SHELLS = "bash", "zsh", "fish"
MODELS = "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `quire completion`."""
    parser.usage = "quire completion bash|zsh|fish"
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    options = options_of_commands()
    print(fish_script(options) if args.shell == "fish" else bash_script(options, zsh=args.shell == "zsh"))
    return 0


def options_of_commands() -> dict[str, dict[str, str]]:
    """The flags of each command, with their help texts."""
    from quire.cli.main import COMMANDS
    from quire.cli.options import CommandParser

    found = {}
    for name in COMMANDS:
        command = importlib.import_module(f"quire.cli.{name}")
        parser = CommandParser(prog=f"quire {name}", description="")
        command.add_arguments(parser)
        found[name] = {
            flag: (action.help or "").replace("%%", "%")
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
            if flag.startswith("--")
        }
    return found


def bash_script(options: Mapping[str, Mapping[str, str]], zsh: bool = False) -> str:
    """The script for bash; with `zsh`, for zsh, which runs it, too."""
    cases = "\n".join(f"        {name}) words={_quoted(' '.join(flags))} ;;" for name, flags in options.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_quire() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {_quoted(" ".join(options))} -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W {MODELS} -- "$word") $(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _quire quire"""


def fish_script(options: Mapping[str, Mapping[str, str]]) -> str:
    """The script for fish."""
    from quire.cli.main import COMMANDS

    first = "not __fish_seen_subcommand_from " + " ".join(options)
    lines = [f"complete -c quire -f -n '{first}' -a {name} -d {_quoted(COMMANDS[name])}" for name in options]
    for name, flags in options.items():
        for flag, text in flags.items():
            about = text.partition(";")[0][:60]
            lines.append(f"complete -c quire -n '__fish_seen_subcommand_from {name}' -l {flag[2:]} -d {_quoted(about)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
