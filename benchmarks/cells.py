"""Quire against transformers, same sitting: the cells of `quire bench offline`, in turns, the best of the rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, checkpoint, main, tell

ROUNDS = 2


def run(options: Options) -> Result:
    """Quire's rates, their shares of the ceiling, those of transformers, and how many times faster Quire is."""
    result = Result(
        ("cell", "Quire", "of the ceiling", "transformers", "ratio"),
    )
    compare(result, checkpoint(options), options)
    return result


def compare(result: Result, folder: Path, options: Options, cells: str | None = None, label: str = "") -> None:
    """Alternate the engines on one checkpoint, so that a drift of the machine's speed meets both.

    Args:
        result: gets a row a rate, and the lines of both engines.
        cells: which; None: all (tiny ones when quick).
        label: what a row's name begins with.
    """
    here = Path(__file__).parent
    engines = {
        "quire": [sys.executable, "-m", "quire.cli.main", "bench", "offline", str(folder), "--json=-"],
        "transformers": [sys.executable, str(here / "run_transformers.py"), str(folder)],
    }
    cells = "2x16+8,1x64+1" if options.quick else cells
    more = (["--threads", str(options.threads)] if options.threads else []) + (["--cells", cells] if cells else [])
    best: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in engines}
    for round_number in range(1 if options.quick else ROUNDS):
        for name, command in engines.items():
            tell(f"cells: {label}{name}, round {round_number + 1}")
            for line in _lines([*command, *more]):
                result.raw.append(line)
                _keep_best(best[name], line)
    for cell, ours in best["quire"].items():
        theirs = best["transformers"][cell]
        for kind in ("decode", "prefill"):
            rate = f"{kind}_tok_s"
            if rate in ours:
                result.rows.append(
                    (
                        f"{label}{cell}, {kind} tok/s",
                        f"{ours[rate]:,.1f}",
                        f"{ours[f'{kind}_share']:.0%}",
                        f"{theirs[rate]:,.1f}",
                        f"{ours[rate] / theirs[rate]:.2f}",
                    )
                )


def _lines(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _keep_best(best: dict[str, dict[str, Any]], line: dict[str, Any]) -> None:
    """Each rate of a cell, with its share, from the round in which it was best."""
    kept = best.setdefault(line["cell"], {})
    for kind in ("decode", "prefill"):
        rate = f"{kind}_tok_s"
        if rate in line and line[rate] > kept.get(rate, 0.0):
            kept |= {name: line[name] for name in (rate, f"{kind}_share") if name in line}


if __name__ == "__main__":
    main(run)
