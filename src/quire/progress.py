"""A progress bar for a batch, on standard error."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BatchProgress:
    """How many prompts are done, and how many tokens a second are made."""

    def __init__(self, total: int) -> None:
        self._begin = time.perf_counter()
        self._first_tokens: int | None = None
        self._progress = Progress(
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
        """Show that `done` prompts have finished, and the engine's count of output tokens stands at `tokens`."""
        if self._first_tokens is None:
            self._first_tokens = tokens
        rate = (tokens - self._first_tokens) / (time.perf_counter() - self._begin)
        self._progress.update(self._task, completed=done, rate=f"{rate:,.0f} tok/s")
