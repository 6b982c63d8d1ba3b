"""What `quire up` shows: in a terminal, a live table of the members; elsewhere, one line per change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.cluster.keeper import Kept, State

STYLES: dict[State, str] = {"ready": "green", "unhealthy": "yellow", "restarting": "yellow", "failed": "bold red"}


class Screen(Protocol):
    """Shows the members' states. A context manager."""

    def __enter__(self) -> Screen: ...

    def __exit__(self, *_: object) -> None: ...

    def changed(self, kept: Kept) -> None:
        """A member's state has changed."""


def make_screen(console: Console, title: str, kept: Sequence[Kept]) -> Screen:
    """The screen for this console; `kept` are the members."""
    return TableScreen(console, title, kept) if console.is_terminal else LineScreen(console)


class LineScreen:
    """One line per change, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def changed(self, kept: Kept) -> None:
        """Print the member's new state."""
        why = f" ({kept.why})" if kept.why and kept.state in ("restarting", "failed") else ""
        self._console.print(f"{kept.member.name:12} {kept.state}{why}  {kept.member.url}", soft_wrap=True)


class TableScreen:
    """For people."""

    def __init__(self, console: Console, title: str, kept: Sequence[Kept]) -> None:
        self._title, self._kept = title, kept
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=2)

    def __enter__(self) -> TableScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def changed(self, kept: Kept) -> None:
        """Draw the table again."""
        self._live.refresh()

    def _table(self) -> Group:
        table = Table(title=self._title, title_justify="left", title_style="bold", border_style="dim")
        for name in ("name", "state", "for", "where", "URL", "restarts", "last exit"):
            table.add_column(name, justify="right" if name in ("for", "restarts") else "left")
        for kept in self._kept:
            table.add_row(
                kept.member.name,
                Text(kept.state, STYLES.get(kept.state, "dim")),
                duration(time.monotonic() - kept.since),
                kept.running.describe() if kept.running else "",
                kept.member.url,
                str(kept.restarts),
                kept.why,
            )
        return Group(table, Text("Ctrl-C stops it after running requests have finished; twice: at once", "dim"))


def duration(seconds: float) -> str:
    """A duration for people, such as "5 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes:.0f} min" if minutes < 60 else f"{hours:.0f} h {minutes % 60:.0f} min"
