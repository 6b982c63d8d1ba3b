"""What is shown in a notebook: outputs of a cell that are drawn anew, without control characters or widgets."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FRAME_SECONDS = 0.1
"""Least time between two pictures: each is a message to the browser."""

BAR_WIDTH = 30

Display = Callable[..., Any]


def notebook_display() -> Display | None:
    """IPython's `display` where this process is the kernel of a notebook; else None. What is not there is not
    imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:  # none, or IPython in a terminal
        return None
    display: Display = importlib.import_module("IPython.display").display
    return display


class Picture:
    """An output of the cell, which is replaced.

    Args:
        display: IPython's.
        text: what stands there first; `share` of the bar is filled.
    """

    def __init__(self, display: Display, text: str, share: float = 0.0) -> None:
        self._drawn = time.perf_counter()
        self._handle = display(_formats(text, share), raw=True, display_id=True)

    def draw(self, text: str, share: float | None) -> None:
        """Replace it. `share`: how much of a bar is filled; None: no bar."""
        self._drawn = time.perf_counter()
        if self._handle is not None:
            self._handle.update(_formats(text, share), raw=True)

    @property
    def is_due(self) -> bool:
        """The last one has been seen for long enough."""
        return time.perf_counter() - self._drawn >= FRAME_SECONDS


def _formats(text: str, share: float | None) -> dict[str, str]:
    """By MIME type: the front end takes what it can show best."""
    if share is None:
        return {"text/plain": text, "text/html": html.escape(text)}
    filled = int(BAR_WIDTH * share)
    return {
        "text/plain": f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}",
        "text/html": f'<progress value="{share:.3f}" max="1"></progress> {html.escape(text)}',
    }


@contextmanager
def loading(what: str) -> Iterator[Callable[[str, float], None] | None]:
    """How far loading is, as an output of the cell; None where this is no notebook."""
    display = notebook_display()
    if display is None:
        yield None
        return
    began = time.perf_counter()
    picture = Picture(display, f"{what}: loading")
    last: tuple[str, float] = ("loading", 0.0)

    def on_load(phase: str, share: float) -> None:
        nonlocal last
        changed, last = phase != last[0], (phase, share)
        if changed or picture.is_due:
            picture.draw(f"{what}: {phase}", share)

    try:
        yield on_load
    except BaseException:
        picture.draw(f"{what}: not loaded", None)
        raise
    picture.draw(f"{what}: loaded in {time.perf_counter() - began:.1f} s", None)
