"""From the raw lines of a comparison to its tables: a table a kind of weights, a row an engine, a column a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common import Result
from benchmarks.peers.recipes import QUIRE, RECIPES, WEIGHTS
from quire.bench.ceilings import Ceilings, Machine, Work
from quire.bench.cells import Cell

Line = dict[str, Any]
TITLES = {"bf16": "bf16 weights", "int8": "8-bit weights", "int4": "4-bit weights"}
SAME_FILE = "the same file, {}"
NONE = "–"


def rate(line: Line) -> float:
    """Tokens per second: of decoding where the cell decodes, else of the prompts."""
    return float(line["prefill_tok_s"] if line["output"] == 1 else line["decode_tok_s"])


def tables(lines: Sequence[Line]) -> str:
    """Everything as Markdown; what is not available is said below its table, with the reason."""
    return "\n\n".join(
        _part([line for line in lines if line["weights"] == weights], weights) for weights in _kinds(lines)
    )


def _kinds(lines: Iterable[Line]) -> list[str]:
    present = {line["weights"] for line in lines}
    return [weights for weights in WEIGHTS if weights in present]


def _part(lines: Sequence[Line], weights: str) -> str:
    runs = [line for line in lines if line["kind"] == "run"]
    cells = list(
        {line["cell"]: Cell(*(line[name] for name in ("cell", "batch", "prompt", "output"))) for line in runs}.values()
    )
    result = Result((TITLES.get(weights, SAME_FILE.format(weights)), *(cell.name for cell in cells), "loading"))
    for recipe in RECIPES:
        mine = [line for line in lines if line.get("engine") == recipe.name]
        if mine:
            result.rows.append(_engine_row(recipe.label(weights), mine, cells))
    ceilings = _ceilings(lines)
    if ceilings:
        result.rows.append(("*ceiling*", *(f"*{ceiling_rate(ceilings, cell):,.1f}*" for cell in cells), ""))
    result.rows.append(("**Quire / the best of the others**", *(_ratio(runs, cell) for cell in cells), ""))
    if ceilings:
        result.rows.append(("**Quire, of the ceiling**", *(_share(runs, cell, ceilings) for cell in cells), ""))
    notes = [f"- {_who(line)}: not available: {line['reason']}" for line in lines if line["kind"] == "unavailable"]
    return "\n".join([result.table(), *(["", *notes] if notes else []), "", _machine_note(lines)]).rstrip()


def _engine_row(label: str, lines: Sequence[Line], cells: Sequence[Cell]) -> tuple[str, ...]:
    runs = [line for line in lines if line["kind"] == "run"]
    version = f" {runs[0]['version']}" if runs else ""
    best = [best_rate(runs, cell) for cell in cells]
    load = f"{min(line['load_s'] for line in runs):.1f} s" if runs else NONE
    return (f"{label}{version}", *("not available" if value is None else f"{value:,.1f}" for value in best), load)


def best_rate(runs: Iterable[Line], cell: Cell) -> float | None:
    """The best of the rounds."""
    return max((rate(line) for line in runs if line["cell"] == cell.name), default=None)


def _ratio(runs: Sequence[Line], cell: Cell) -> str:
    """Quire's rate over that of the best other engine, with its name."""
    ours = best_rate([line for line in runs if line["engine"] == QUIRE.name], cell)
    theirs = [line for line in runs if line["engine"] != QUIRE.name and line["cell"] == cell.name]
    if ours is None or not theirs:
        return NONE
    best = max(theirs, key=rate)
    return f"**{ours / rate(best):.2f}** ({best['engine'].partition(' ')[0]})"


def _share(runs: Sequence[Line], cell: Cell, ceilings: Ceilings) -> str:
    ours = best_rate([line for line in runs if line["engine"] == QUIRE.name], cell)
    return NONE if ours is None else f"{ours / ceiling_rate(ceilings, cell):.0%}"


def ceiling_rate(ceilings: Ceilings, cell: Cell) -> float:
    """Tokens per second that the machine could do at most."""
    if cell.output == 1:
        return cell.batch * cell.prompt / ceilings.prefill_seconds(cell)
    return cell.batch * (cell.output - 1) / ceilings.decode_seconds(cell)


def _ceilings(lines: Sequence[Line]) -> Ceilings | None:
    """Quire's work on this machine at the best rates that were measured; None where Quire did not run."""
    works = [line["work"] for line in lines if line["kind"] == "work"]
    machines = [Machine(**line["machine"]) for line in lines if line["kind"] == "machine"]
    if not works or not machines:
        return None

    def best(of: Callable[[Machine], float]) -> float:
        return max(map(of, machines))

    work = Work(**(works[-1] | {"windows": tuple(works[-1]["windows"])}))
    rates = (best(lambda m: m.read_rate), best(lambda m: m.matrix_rate), best(lambda m: m.int8_rate))
    return Ceilings(work, Machine(machines[0].threads, *rates))


def _who(line: Line) -> str:
    return f"{line['engine']}, {line['cell']}" if "cell" in line else str(line["engine"])


def _machine_note(lines: Sequence[Line]) -> str:
    """The machine's rates before and after, since they drift."""
    machines = [line["machine"] for line in lines if line["kind"] == "machine"]
    if not machines:
        return ""
    parts = []
    for name, unit in (("read_rate", "GB/s read"), ("matrix_rate", "GFLOP/s bf16"), ("int8_rate", "GOP/s int8")):
        parts.append(f"{' and '.join(f'{machine[name] / 1e9:,.0f}' for machine in machines)} {unit}")
    when = {line["on"]["date"]: None for line in lines if "on" in line}
    return f"The machine before and after{''.join(f' ({date})' for date in when)}: {', '.join(parts)}."
