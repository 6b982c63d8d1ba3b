"""Measure Quire and other engines on the same cells, in one sitting, from nothing.

usage: python -m benchmarks.peers [--shape ...] [--write] [--work DIR] [--repeat N] [--weights ...] [--only ...]
                                  [--cells ...]

Environments and converted checkpoints are made where they are missing and kept in the working folder. Then, for
each kind of weights, all engines are loaded, and each cell is measured on one engine after the other, `--repeat`
times. An engine that cannot be installed or fails is in the table as not available, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import run_all
from benchmarks.common import json_line, machine, tell
from benchmarks.peers import checkpoints
from benchmarks.peers.recipes import (
    DEFAULT_WORK,
    QUANTIZED_BY_EACH,
    QUIRE,
    RECIPES,
    WEIGHTS,
    PeerError,
    Recipe,
    environment,
)
from benchmarks.peers.table import Line, tables
from benchmarks.peers.worker import Worker
from quire.bench.ceilings import measure_machine
from quire.bench.cells import CELLS, WARM_UP, Cell, parse_cells
from quire.errors import ConfigError
from quire.models.random_checkpoint import SHAPES

RAW = run_all.HERE / "results-peers.jsonl"
SECTIONS = {
    "qwen3-0.6b": "peers",
    "qwen3-moe-1b": "peers qwen3-moe-1b",
    "deepseek-v2-lite-1b": "peers deepseek-v2-lite-1b",
}
"""The shapes whose tables the README has, and between which markers."""
OTHER_PROCESSORS = {("qwen3-0.6b", "AMD EPYC, family 25 model 17"): "peers zen4"}
"""Tables of their own, by shape and processor; on any other, `SECTIONS` says which one is replaced."""
DEFAULT_SHAPE = "qwen3-0.6b"
LOAD_SECONDS, PREFILL_RATE, DECODE_RATE = 10, 280, 110
"""About what an engine needs to load and makes per second: for the estimate alone."""


@dataclass(frozen=True)
class Sitting:
    """What to measure, and how."""

    recipes: Sequence[Recipe]
    weights: Sequence[str]
    cells: Sequence[Cell]
    repeat: int
    threads: int
    shape: str
    work: Path

    def pairs(self) -> list[tuple[Recipe, str]]:
        """Each engine with each kind of weights that it runs."""
        return [
            (recipe, weights) for weights in self.weights for recipe in self.recipes if weights in recipe.checkpoints
        ]

    def estimate(self) -> float:
        """About how many minutes measuring takes, with all environments and checkpoints there."""
        run = sum(
            cell.batch * cell.prompt / PREFILL_RATE + cell.batch * (cell.output - 1) / min(DECODE_RATE, 22 * cell.batch)
            for cell in self.cells
        )
        return len(self.pairs()) * (LOAD_SECONDS + self.repeat * run) / 60


def main() -> int:
    """Exit code 1 where nothing could be measured."""
    sitting, write = _arguments()
    prepared, unavailable = _prepare(sitting)
    tell(f"measuring takes about {sitting.estimate():.0f} minutes; leave the machine alone meanwhile")
    busy = os.getloadavg()[0]
    if busy > 0.7:
        tell(f"the machine is busy (load {busy:.1f}): wait until it is idle, or the figures are worth little")
    on = machine() | {"threads": sitting.threads}
    done: list[Line] = []
    for weights in sitting.weights:
        mine = {recipe: place for (recipe, kind), place in prepared.items() if kind == weights}
        missing = [line for line in unavailable if line["weights"] == weights]
        done += [
            {"benchmark": "peers", "shape": sitting.shape, **line, "on": on}
            for line in missing + _measure_weights(sitting, weights, mine)
        ]
        (sitting.work / "last.jsonl").write_text(_jsonl(done), "utf-8")
        if write:  # after each kind, so that an interruption costs one
            _write(done)
    print(f"\n{tables(done)}\n")
    return int(not any(line["kind"] == "run" for line in done))


def _write(done: Sequence[Line]) -> None:
    """Replace the lines of the table's kinds of weights that were measured, and the table in the README."""
    measured = {_what(line) for line in done}
    old = [json.loads(line) for line in RAW.read_text("utf-8").splitlines()] if RAW.exists() else []
    lines = [*(line for line in old if _what(line) not in measured), *done]
    RAW.write_text(_jsonl(lines), "utf-8")
    [section] = {section for section, _ in measured}
    readme = run_all.README.read_text("utf-8")
    text = run_all.section(tables([line for line in lines if _what(line)[0] == section]), done[-1]["on"])
    run_all.README.write_text(run_all.with_section(readme, section, text), "utf-8")


def _what(line: Line) -> tuple[str, str]:
    """Table and weights of a line. The first ones that were written do not say a shape."""
    shape = line.get("shape", DEFAULT_SHAPE)
    return OTHER_PROCESSORS.get((shape, line["on"]["cpu"]), SECTIONS.get(shape, shape)), line["weights"]


def _jsonl(lines: Sequence[Line]) -> str:
    return "".join(f"{json_line(line)}\n" for line in lines)


def _arguments() -> tuple[Sitting, bool]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n")[0])
    names = [recipe.script.removeprefix("run_") for recipe in RECIPES]
    parser.add_argument("--write", action="store_true", help="write results-peers.jsonl and the tables in README.md")
    parser.add_argument(
        "--work", type=Path, default=DEFAULT_WORK, help=f"keeps what was made (default: {DEFAULT_WORK})"
    )
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="time each cell N times; the best counts")
    parser.add_argument("--only", help=f"engines: some of {','.join(names)}")
    parser.add_argument("--weights", help=f"some of {','.join(WEIGHTS)} (default: {','.join(QUANTIZED_BY_EACH)})")
    parser.add_argument("--cells", help="names, or BATCHxPROMPT+OUTPUT")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", choices=list(SHAPES), default=DEFAULT_SHAPE, help="of the random weights")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else names
    weights = args.weights.split(",") if args.weights else list(QUANTIZED_BY_EACH)
    for given, known in ((chosen, names), (weights, WEIGHTS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is not known; known: {', '.join(known)}")
    if args.repeat < 1 or args.threads < 1:
        parser.error("--repeat and --threads must be 1 or more")
    if args.write and (args.only or args.cells):
        parser.error("a part of the engines or cells is no comparison and is not written; drop --write")
    if args.write and args.shape not in SECTIONS:
        parser.error(f"README.md has no place for {args.shape}, only for {', '.join(SECTIONS)}; drop --write")
    try:
        cells = parse_cells(args.cells) if args.cells else CELLS
    except ConfigError as error:
        parser.error(str(error))
    recipes = [recipe for recipe, name in zip(RECIPES, names, strict=True) if name in chosen]
    work = args.work.expanduser().resolve()
    return Sitting(recipes, weights, cells, args.repeat, args.threads, args.shape, work), args.write


def _prepare(sitting: Sitting) -> tuple[dict[tuple[Recipe, str], tuple[Path, Path]], list[Line]]:
    """The Python and the checkpoint of each engine and kind of weights, and a line for each that has none."""
    prepared, lines = {}, []
    for recipe, weights in sitting.pairs():
        try:
            python = environment(recipe, sitting.work)
            prepared[recipe, weights] = (
                python,
                checkpoints.make(recipe.checkpoints[weights], sitting.shape, sitting.work),
            )
        except PeerError as error:
            lines.append(_unavailable(recipe, weights, error))
    return prepared, lines


def _measure_weights(sitting: Sitting, weights: str, places: dict[Recipe, tuple[Path, Path]]) -> list[Line]:
    """All engines on all cells, with one kind of weights; the machine's rates before and after."""
    lines = [_machine_line(sitting, weights)]
    workers: dict[Recipe, Worker] = {}
    with ExitStack() as stack:
        for recipe, (python, checkpoint) in places.items():
            tell(f"{weights}: loading {recipe.name}")
            vocab_size = SHAPES[sitting.shape]["vocab_size"]
            try:
                worker = Worker(recipe, weights, python, checkpoint, sitting.threads, vocab_size, sitting.work)
                stack.callback(worker.close)
                worker.measure(WARM_UP)
            except PeerError as error:
                lines.append(_unavailable(recipe, weights, error))
                continue
            workers[recipe] = worker
            if recipe is QUIRE:
                lines.append({"kind": "work", "weights": weights, "work": worker.about["work"]})
        for cell in sitting.cells:
            for line in _measure_cell(sitting, weights, cell, workers):
                lines.append(line)
    return [*lines, _machine_line(sitting, weights)]


def _measure_cell(sitting: Sitting, weights: str, cell: Cell, workers: dict[Recipe, Worker]) -> Iterator[Line]:
    """One cell on one engine after the other, every second time backwards, so that a drift meets all alike."""
    for number in range(sitting.repeat):
        order = list(workers)
        for recipe in reversed(order) if number % 2 else order:
            worker = workers[recipe]
            try:
                times = worker.measure(cell)
            except PeerError as error:
                del workers[recipe]
                yield _unavailable(recipe, weights, error) | {"cell": cell.name}
                continue
            line = _run_line(recipe, weights, cell, times) | {"round": number + 1, **_told(worker)}
            speed = line.get("decode_tok_s", line["prefill_tok_s"])
            tell(f"{weights}: {cell.name}, {recipe.name}: {speed:,.1f} tokens/s")
            yield line


def _run_line(recipe: Recipe, weights: str, cell: Cell, times: dict[str, Any]) -> Line:
    line: Line = {"kind": "run", "weights": weights, "engine": recipe.name, "cell": cell.name}
    line |= {"batch": cell.batch, "prompt": cell.prompt, "output": cell.output}
    line["prefill_tok_s"] = round(cell.batch * cell.prompt / times["first_s"], 1)
    if cell.output > 1:
        line["decode_tok_s"] = round(times["rest_tokens"] / times["rest_s"], 1)
    return line


def _told(worker: Worker) -> Line:
    """What an engine said of itself, but the work."""
    return {name: value for name, value in worker.about.items() if name != "work"}


def _unavailable(recipe: Recipe, weights: str, error: PeerError) -> Line:
    tell(f"{weights}: {recipe.name} is not available: {error}")
    return {"kind": "unavailable", "weights": weights, "engine": recipe.name, "reason": error.reason}


def _machine_line(sitting: Sitting, weights: str) -> Line:
    tell(f"{weights}: measuring the machine's ceilings")
    return {"kind": "machine", "weights": weights, "machine": asdict(measure_machine(torch.bfloat16, sitting.threads))}


if __name__ == "__main__":
    sys.exit(main())
