"""Plots of time to first token by prefix length, on logarithmic axes: for a terminal, and as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from quire.bench.kv import COMPUTED, NAMES, Row

MARKS = dict(zip(NAMES, "CPHDMS", strict=True))
"""The letter of each curve."""

LINES, COLUMN = 14, 6
"""The terminal plot's height, and the width of one length."""

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 130, 20, 44
COLOURS = dict(zip(NAMES, ("#444444", "#2563b8", "#2a9d4e", "#c2410c", "#9333ea", "#be185d"), strict=True))


def _seconds(rows: Sequence[Row]) -> list[float]:
    return [each for row in rows for each in row.seconds.values() if each]


def text_plot(rows: Sequence[Row]) -> str:
    """A plot with a letter for each curve, and `*` where several meet. Empty if there are fewer than two lengths."""
    if len(rows) < 2:
        return ""
    low, high = math.log(min(_seconds(rows))), math.log(max(_seconds(rows)))
    grid = [[" "] * (COLUMN * len(rows)) for _ in range(LINES)]
    for number, row in enumerate(rows):
        for source, seconds in row.seconds.items():
            if seconds:
                share = (math.log(seconds) - low) / (high - low) if high > low else 0.0
                line, column = round((LINES - 1) * (1 - share)), COLUMN * number + COLUMN // 2
                grid[line][column] = MARKS[source] if grid[line][column] == " " else "*"
    names = [source for source in NAMES if any(source in row.seconds for row in rows)]
    lines = ["time to first token, ms: " + ", ".join(f"{MARKS[name]} {NAMES[name]}" for name in names) + ", * several"]
    for line, cells in enumerate(grid):
        at = math.exp(high + (low - high) * line / (LINES - 1)) * 1e3
        lines.append(
            f"{at:>9,.3g} |" + "".join(cells).rstrip() if line % 3 == 0 else " " * 9 + " |" + "".join(cells).rstrip()
        )
    lines.append(" " * 10 + "+" + "-" * (COLUMN * len(rows)))
    lines.append(" " * 11 + "".join(_short(row.tokens).center(COLUMN) for row in rows).rstrip() + " tokens")
    return "\n".join(lines)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def svg(title: str, rows: Sequence[Row]) -> str:
    """The plot as an SVG document."""
    seconds = _seconds(rows)
    low, high = math.floor(math.log10(min(seconds) * 1e3)), math.ceil(math.log10(max(seconds) * 1e3))
    high = max(high, low + 1)
    first, last = math.log(rows[0].tokens), math.log(max(rows[-1].tokens, rows[0].tokens + 1))

    def place(tokens: int, milliseconds: float) -> tuple[float, float]:
        across = (math.log(tokens) - first) / (last - first)
        up = (math.log10(milliseconds) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - RIGHT) * across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="11"><title>{html.escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for power in range(low, high + 1):
        _, y = place(rows[0].tokens, 10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g} ms</text>')
    for row in rows:
        x, _ = place(row.tokens, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(row.tokens)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">tokens of the prefix</text>')
    names = [source for source in NAMES if any(row.seconds.get(source) for row in rows)]
    for number, source in enumerate(names):
        points = [place(row.tokens, each * 1e3) for row in rows if (each := row.seconds.get(source))]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        width = 2.5 if source == COMPUTED else 1.5
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[source]}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[source]}"/>' for x, y in points]
        y = TOP + 16 * number + 10
        parts.append(
            f'<text x="{WIDTH - RIGHT + 14}" y="{y}" fill="{COLOURS[source]}">{html.escape(NAMES[source])}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
