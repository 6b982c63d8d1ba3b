"""The process of a cluster member: it ties itself to the life of its parent, then executes the member's program."""

from __future__ import annotations

import os
import signal

import msgspec

from quire import child


class Start(msgspec.Struct):
    """The program to execute, and the file for its output."""

    command: list[str]
    log: str


def main() -> None:
    start = child.begin(Start)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # ignored signals would stay ignored in the new program
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for standard, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, standard)
    os.execvp(start.command[0], start.command)


if __name__ == "__main__":
    main()
