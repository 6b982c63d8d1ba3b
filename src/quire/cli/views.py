"""Views of the results of `quire generate`, while they grow."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quire.cli.inputs import Job
from quire.cli.terminal import console, visible
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput

MAX_PANELS = 8
"""Maximum number of prompts with a panel each; for more, there is only a bar."""

MIN_PANEL_LINES = 3
FRAME_SECONDS = 0.08
"""Minimum time between two frames, so that drawing takes little time from the model."""


class View:
    """Shows nothing; the base class of the others."""

    def update(self, index: int, output: RequestOutput) -> None:
        """Called when the output of job `index` has grown or ended."""

    def close(self) -> None:
        """End the display. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def choose_view(jobs: Sequence[Job], output: str | None, quiet: bool) -> View:
    """The view for this number of jobs and this output.

    Raises:
        ConfigError: the output file cannot be written.
    """
    out, err = console(), console(stderr=True)
    bar = ProgressBar(jobs, err) if err.is_terminal and not quiet else None
    if output:
        return JsonLines(jobs, output, bar)
    choices = sum(job.params.n for job in jobs)
    if choices == 1:
        return Stream(jobs[0], out)
    if bar and out.is_terminal and choices == len(jobs) and Panels.fits(len(jobs), out):
        return Panels(jobs, out, bar)
    return InOrder(jobs, out, bar)


def choice_text(choice: CompletionOutput) -> str:
    """A choice's text (without a tokenizer, its token ids), and its error if there is one."""
    text = choice.text or " ".join(map(str, choice.token_ids))
    return f"{text}[error: {choice.error}]" if choice.error else text


def shown_titles(jobs: Sequence[Job]) -> list[str]:
    """The prompts as shown: leading lines that all have in common are left out."""
    lines = [job.title.splitlines(keepends=True) for job in jobs]
    if len(jobs) == 1:
        return ["".join(lines[0])]
    same = takewhile(lambda row: len(set(row)) == 1, zip(*(own[:-1] for own in lines), strict=False))
    head = sum(1 for _ in same)
    return [("...\n" if head else "") + "".join(own[head:]) for own in lines]


class ProgressBar:
    """A line with the number of finished prompts, tokens, and tokens per second."""

    def __init__(self, jobs: Sequence[Job], to: Console) -> None:
        self.progress = Progress(
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("prompts  {task.fields[tokens]:,} tokens  {task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            console=to,
            transient=True,
            auto_refresh=False,
        )
        self._total = len(jobs)
        self._tokens: dict[int, int] = {}
        self._done = self._sum = 0
        self._task: TaskID | None = None
        self._began = self._drawn = 0.0

    def count(self, index: int, output: RequestOutput) -> bool:
        """Count a job's output; returns whether it is time for a new frame."""
        now = time.monotonic()
        if self._task is None:  # the first output: the bar of loading the model is gone
            self._task = self.progress.add_task("", total=self._total, tokens=0, rate=0.0)
            self._began = now
        tokens = sum(len(choice.token_ids) for choice in output.outputs)
        self._sum += tokens - self._tokens.get(index, 0)
        self._tokens[index] = tokens
        self._done += output.finished
        due = now - self._drawn >= FRAME_SECONDS or self._done == self._total
        if due:
            self._drawn = now
            rate = self._sum / max(now - self._began, 1e-3)
            self.progress.update(self._task, completed=self._done, tokens=self._sum, rate=rate)
        return due

    def show(self, index: int, output: RequestOutput) -> None:
        """Count a job's output, and draw a frame if it is time."""
        if self.count(index, output):
            self.progress.start()  # does nothing if it is started
            self.progress.refresh()

    def stop(self) -> None:
        """Remove the bar."""
        self.progress.stop()


class Stream(View):
    """Streams the text of a single choice, on a terminal after the prompt."""

    def __init__(self, job: Job, out: Console) -> None:
        self._job, self._out = job, out
        self._started = self._closed = False

    def update(self, index: int, output: RequestOutput) -> None:
        [choice] = output.outputs
        terminal = self._out.is_terminal
        if not self._started and terminal:
            self._out.print(visible(self._job.title), style="dim", end="", soft_wrap=True)
        self._started = True
        delta = choice.delta
        if output.finished and not choice.text:
            delta = choice_text(choice)
        sys.stdout.write(visible(delta) if terminal else delta)
        sys.stdout.flush()

    def close(self) -> None:
        if self._started and not self._closed:
            print(flush=True)
        self._closed = True


class InOrder(View):
    """Prints each result under a heading, once it and all before it have ended; shows a bar meanwhile."""

    def __init__(self, jobs: Sequence[Job], out: Console, bar: ProgressBar | None) -> None:
        self._titles, self._out, self._bar = shown_titles(jobs), out, bar
        self._ended: dict[int, RequestOutput] = {}
        self._next = 0

    def update(self, index: int, output: RequestOutput) -> None:
        if self._bar:
            self._bar.show(index, output)
        if output.finished:
            self._ended[index] = output
        while self._next in self._ended:
            self._show(self._next, self._ended.pop(self._next))
            self._next += 1

    def _show(self, index: int, output: RequestOutput) -> None:
        for choice in output.outputs:
            number = f"{index + 1}.{choice.index + 1}" if len(output.outputs) > 1 else f"{index + 1}"
            print_result(self._out, number, self._titles[index], choice)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def print_result(out: Console, number: str, prompt: str, choice: CompletionOutput) -> None:
    """Print a finished choice, prompt and text: in a box on a terminal, otherwise under a heading."""
    text = choice_text(choice)
    if not out.is_terminal:
        print(f"=== {number} ({choice.finish_reason})\n{prompt}{text}\n", flush=True)
        return
    body = Text(visible(prompt.lstrip("\n")), style="dim").append(visible(text), style="not dim")
    out.print(Panel(body, title=number, title_align="left", subtitle=choice.finish_reason, subtitle_align="right"))


class Panels(View):
    """Shows several texts side by side as they grow, over a bar; at the end prints all of them in full."""

    def __init__(self, jobs: Sequence[Job], out: Console, bar: ProgressBar) -> None:
        self._titles, self._out, self._bar = shown_titles(jobs), out, bar
        self._outputs: dict[int, RequestOutput] = {}
        self._live: Live | None = None
        self._closed = False

    @staticmethod
    def fits(count: int, out: Console) -> bool:
        """Whether a panel for each of `count` prompts fits on the screen."""
        return count <= MAX_PANELS and _panel_lines(count, out) >= MIN_PANEL_LINES

    def take(self, index: int, output: RequestOutput) -> bool:
        """Take a job's output without drawing; returns whether it is time for a new frame."""
        self._outputs[index] = output
        return self._bar.count(index, output)

    def update(self, index: int, output: RequestOutput) -> None:
        due = self.take(index, output)
        if self._live is None:
            self._live = Live(console=self._out, auto_refresh=False, transient=True)
            self._live.start()
        if due:
            self._live.update(self.picture(), refresh=True)

    def picture(self) -> Group:
        """The current panels, and the bar."""
        grid = Table.grid(expand=True)
        columns = _columns(self._out)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [self._panel(index) for index in range(len(self._titles))]
        for first in range(0, len(panels), columns):
            grid.add_row(*panels[first : first + columns])
        return Group(grid, self._bar.progress.get_renderable())

    def _panel(self, index: int) -> Panel:
        lines, width = _panel_lines(len(self._titles), self._out), self._out.width // _columns(self._out) - 4
        output = self._outputs.get(index)
        body = Text(visible(self._titles[index]), style="dim")
        if output:
            body.append(visible(output.outputs[0].text), style="not dim")
        tail = Text("\n").join(body.wrap(self._out, width)[-lines:])
        ended = output is not None and output.finished
        style = "green" if ended else "cyan" if output else "dim"
        return Panel(tail, height=lines + 2, title=str(index + 1), title_align="left", border_style=style)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._live:
            self._live.stop()
        for index, title in enumerate(self._titles):
            output = self._outputs.get(index)
            if output and output.finished:
                print_result(self._out, str(index + 1), title, output.outputs[0])


def _columns(out: Console) -> int:
    return 2 if out.width >= 60 else 1


def _panel_lines(count: int, out: Console) -> int:
    """Lines of text in each of `count` panels, with room for their borders and the bar."""
    rows = -(-count // _columns(out))
    return (out.height - 2) // rows - 2


class JsonLines(View):
    """Writes one JSON object per prompt, as soon as it ends. An existing file is kept until the first of them."""

    def __init__(self, jobs: Sequence[Job], path: str, bar: ProgressBar | None) -> None:
        self._jobs, self._path, self._bar = jobs, path, bar
        self._written = False
        try:  # closed by `close`
            self._file: IO[str] = sys.stdout if path == "-" else Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {error.strerror or error}") from error

    def update(self, index: int, output: RequestOutput) -> None:
        if self._bar:
            self._bar.show(index, output)
        if output.finished:
            line = msgspec.json.encode(record(self._jobs[index], output)).decode() + "\n"
            if self._file is sys.stdout:
                self._write(line)
            else:
                self._write_to_file(line)

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def _write_to_file(self, line: str) -> None:
        """Write to the user's file, replacing its old content.

        Raises:
            QuireError: it cannot be written, for example since the disk is full.
        """
        try:
            if not self._written and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            self._written = True
            self._write(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            raise QuireError(f"--output {self._path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        if self._file is not sys.stdout:
            self._file.close()


def record(job: Job, output: RequestOutput) -> dict[str, Any]:
    """A finished output as a JSON object: the fields of `RequestOutput`, with the user's id."""
    fields: dict[str, Any] = msgspec.to_builtins(output, str_keys=True)
    del fields["request_id"], fields["_handed_out"]
    for choice in fields["outputs"]:
        del choice["delta"]
    if job.messages is not None:
        fields["messages"] = job.messages
    return {"id": job.id, **fields}
