"""A progress bar for a batch: on standard error, or in a notebook as an output of its cell that is drawn anew."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from quire.notebook import Display, Picture, notebook_display


class Progress(Protocol):
    """How many prompts are done, and how many tokens a second are made."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, done: int, tokens: int) -> None:
        """Show that `done` prompts have finished, and the engine's count of output tokens stands at `tokens`."""


def batch_progress(total: int) -> Progress:
    """The progress of so many prompts, as it can be shown here."""
    display = notebook_display()
    return BatchProgress(total) if display is None else NotebookProgress(total, display)


class _Rate:
    """Tokens a second since the first update."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: int | None = None

    def of(self, tokens: int) -> float:
        if self._first is None:
            self._first = tokens
        return (tokens - self._first) / max(self.seconds, 1e-3)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


class BatchProgress:
    """A bar of rich's, on standard error."""

    def __init__(self, total: int) -> None:
        self._rate = _Rate()
        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("prompts", total=total, rate="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, done: int, tokens: int) -> None:
        """See `Progress`."""
        self._progress.update(self._task, completed=done, rate=f"{self._rate.of(tokens):,.0f} tok/s")


class NotebookProgress:
    """An output of the cell, which is replaced.

    Args:
        total: prompts.
        display: IPython's.
    """

    def __init__(self, total: int, display: Display) -> None:
        self._total, self._display, self._rate = total, display, _Rate()
        self._shown: tuple[int, int] = (0, 0)

    def __enter__(self) -> Self:
        self._picture = Picture(self._display, self._text(), 0.0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._draw()

    def update(self, done: int, tokens: int) -> None:
        """See `Progress`."""
        self._rate.of(tokens)  # the first counts
        self._shown = (done, tokens)
        if self._picture.is_due:
            self._draw()

    def _draw(self) -> None:
        self._picture.draw(self._text(), self._shown[0] / max(self._total, 1))

    def _text(self) -> str:
        done, tokens = self._shown
        return f"{done:,}/{self._total:,} prompts, {self._rate.of(tokens):,.0f} tok/s, {self._rate.seconds:.0f} s"
