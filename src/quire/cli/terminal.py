"""Output of commands for people: consoles, tables, and text without control characters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """A closed pipe ends the command with the exit code that it always has (`main`), not with rich's."""

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled


def console(stderr: bool = False) -> Console:
    """Standard output or error, without rich's markup, highlighting and emoji."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def visible(text: str) -> str:
    """The text without control characters, so that a model cannot control the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def note(text: str) -> None:
    """Print a remark on standard error, dimmed."""
    to = console(stderr=True)
    to.print(text, style="dim", soft_wrap=True)


def tell(text: str) -> None:
    """Print a message about a conversation on standard error, after what was printed so far."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, rows: Iterable[tuple[str, str]], stderr: bool = True) -> None:
    """Print a table of two columns: a box on a terminal, otherwise plain lines."""
    rows = list(rows)
    to = console(stderr=stderr)
    if not to.is_terminal:
        width = max((len(name) for name, _ in rows), default=0)
        stream = sys.stderr if stderr else sys.stdout
        print(title, *(f"  {name:{width}}  {value}" for name, value in rows), sep="\n", file=stream)
        return
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, border_style="dim")
    table.add_column(style="cyan")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    to.print(table)


@contextmanager
def loading(what: str) -> Iterator[Callable[[str, float], None] | None]:
    """Show a bar on standard error while `what` loads. Yields a function to update it; None if there is no terminal."""
    to = console(stderr=True)
    if not to.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
    with Progress(*columns, console=to, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda phase, share: progress.update(task, description=f"{what}: {phase}", completed=share)
