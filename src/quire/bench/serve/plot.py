"""Plots of a run: a self-contained HTML page, or PNG if matplotlib is installed."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.serve.records import Record
from quire.bench.serve.summary import LATENCIES
from quire.errors import ConfigError

MOST_POINTS = 400
"""Most points of a curve; more would not be visible."""
BINS = 120
"""Time slices of a run."""
WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 22, 30, 42

_STYLE = """
:root { color-scheme: light dark; --line: #2563b8; --grid: #ddd; --text: #222; --back: #fff }
@media (prefers-color-scheme: dark) { :root { --line: #6fa8ec; --grid: #333; --text: #ddd; --back: #161616 } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2em auto;
  max-width: 980px; padding: 0 1em }
pre { overflow-x: auto; font-size: 13px }
.charts { display: flex; flex-wrap: wrap; gap: 1em }
svg { max-width: 100%; height: auto }
text { fill: var(--text); font: 11px system-ui, sans-serif }
.title { font-size: 13px; font-weight: 600 }
.grid { stroke: var(--grid); stroke-width: 1 }
.curve { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round }
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One curve. `step` draws it as a step function."""

    title: str
    x: str
    y: str
    points: list[tuple[float, float]]
    step: bool = False


def check(path: str) -> None:
    """Check before the run that the plot can be written.

    Raises:
        ConfigError: the name does not end in .html or .png, its folder is missing, or PNG cannot be made here.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".html", ".png"):
        raise ConfigError(f"--plot {path}: its name must end in .html or .png")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {Path(path).parent} does not exist; make it first")
    if kind == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: PNG needs matplotlib, which is not installed; write .html, or install it")


def write(path: str, title: str, table: str, records: Sequence[Record]) -> None:
    """Plot the run that `table` summarizes.

    Raises:
        OSError: the file cannot be written.
    """
    drawn = figures(records)
    if Path(path).suffix.lower() == ".png":
        _write_png(path, title, drawn)
    else:
        Path(path).write_text(page(title, table, drawn), encoding="utf-8")


def figures(records: Sequence[Record]) -> list[Figure]:
    """The curves of a run: the distributions of its latencies, and its course over time."""
    good = [record for record in records if record.error is None]
    values = {
        "ttft": [r.ttft for r in good if r.ttft is not None],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap, count in r.gaps() for _ in range(count)],
        "e2e": [r.e2e for r in good],
    }
    spread = [
        Figure(text[0].upper() + text[1:], "ms", "share of tokens" if name == "itl" else "share", cdf(values[name]))
        for name, text in LATENCIES.items()
        if values[name]
    ]
    return [*spread, *_over_time(records)]


def cdf(seconds: Iterable[float]) -> list[tuple[float, float]]:
    """The cumulative distribution of some latencies, as (milliseconds, share up to that), thinned out."""
    values = sorted(1000 * value for value in seconds)
    count = len(values)
    places = {round(i * (count - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)} if count > MOST_POINTS else None
    return [(values[place], (place + 1) / count) for place in sorted(places if places is not None else range(count))]


def _over_time(records: Sequence[Record]) -> list[Figure]:
    if not records:
        return []
    start, end = min(r.sent for r in records), max(r.end for r in records)
    if end <= start:
        return []
    width = (end - start) / BINS
    tokens, running = [0] * BINS, [0] * (BINS + 1)

    def border(at: float) -> int:
        """The first boundary between slices that is not before this time."""
        return min(BINS, math.ceil((at - start) / width))

    for record in records:
        for at, count in zip(record.times, record.counts, strict=True):
            tokens[min(BINS - 1, int((at - start) / width))] += count
        running[border(record.sent)] += 1  # gives the number at each boundary
        running[border(record.end)] -= 1
    open_now, level = [], 0
    for change in running[:BINS]:
        level += change
        open_now.append(level)
    rate = [(i * width, count / width) for i, count in enumerate(tokens)]
    flight = [(i * width, float(count)) for i, count in enumerate(open_now)]
    return [
        Figure("Output tokens per second", "seconds", "tokens/s", rate, step=True),
        Figure("Requests in flight", "seconds", "requests", flight, step=True),
    ]


def page(title: str, table: str, drawn: Sequence[Figure]) -> str:
    """One self-contained HTML page."""
    charts = "\n".join(svg(figure) for figure in drawn)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f'<pre>{html.escape(table)}</pre>\n<div class="charts">\n{charts}\n</div></body></html>\n'
    )


def ticks(high: float) -> list[float]:
    """Round axis values from 0 to the first that is at least `high`, in three to six steps."""
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(high))
    step = next(part * size / 10 for part in (2, 5, 10, 20) if high / (part * size / 10) <= 5.001)
    count = math.ceil(high / step - 1e-9)
    return [i * step for i in range(count + 1)]


def svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    xs, ys = ticks(max(x for x, _ in figure.points)), ticks(max(y for _, y in figure.points))
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + inner_width * x / xs[-1], _TOP + inner_height * (1 - y / ys[-1])

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{html.escape(figure.title)}">',
        f'<text class="title" x="{_LEFT}" y="18">{html.escape(figure.title)}</text>',
    ]
    for y in ys:
        _, at = place(0, y)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:,.6g}</text>')
    for x in xs:
        at, _ = place(x, 0)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:,.6g}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(figure.x)}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="18" text-anchor="end">{html.escape(figure.y)}</text>')
    parts.append(f'<path class="curve" d="{_path([place(x, y) for x, y in figure.points], figure.step)}"/></svg>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], step: bool) -> str:
    (x, y), *rest = points
    moves = [f"M{x:.1f} {y:.1f}"]
    moves += [f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f} {y:.1f}" for x, y in rest]
    return "".join(moves)


def _write_png(path: str, title: str, drawn: Sequence[Figure]) -> None:
    plots: Any = importlib.import_module("matplotlib.figure")
    rows = max(1, -(-len(drawn) // 2))
    canvas = plots.Figure(figsize=(10, 3 * rows), layout="constrained")
    canvas.suptitle(title, parse_math=False)
    for number, figure in enumerate(drawn, 1):
        axes = canvas.add_subplot(rows, 2, number)
        axes.plot(*zip(*figure.points, strict=True), drawstyle="steps-post" if figure.step else "default")
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=150, format="png")
