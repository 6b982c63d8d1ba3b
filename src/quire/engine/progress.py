"""A progress bar for a batch, on standard error."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quire.engine.outputs import RequestOutput


class BatchProgress:
    """How many prompts are done, and how many tokens a second are made."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._outputs = outputs
        self._begin = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("prompts", total=len(outputs), rate="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, changed: list[RequestOutput]) -> None:
        """Take in a step."""
        done = sum(output.finished for output in changed)
        tokens = sum(len(choice.token_ids) for output in self._outputs for choice in output.outputs)
        seconds = time.perf_counter() - self._begin
        self._progress.update(self._task, advance=done, rate=f"{tokens / seconds:,.0f} tok/s")
