"""Beside other work: how much of its quiet speed an engine keeps while other processes keep cores busy.

Random bf16 weights in the shape of Qwen3-0.6B. Neighbours are processes that compute without end. The other engines
are those that `make bench-peers` has installed. The rounds go over all neighbours, engines and cells in turn; of Quire
medians are compared, and the others run in the first round alone, since they take long beside neighbours. Where all
threads get the same time, two cores leave two threads two thirds beside one neighbour, and a half beside two.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Result, checkpoint, main, tell, tokens
from benchmarks.peers import checkpoints
from benchmarks.peers.recipes import DEFAULT_WORK, QUIRE, RECIPES, PeerError, Recipe, environment, is_installed
from benchmarks.peers.worker import Worker
from benchmarks.server import serving, together, with_tokenizer
from quire.bench.cells import WARM_UP, Cell, parse_cells
from quire.models.random_checkpoint import SHAPES

ROUNDS = 3
NEIGHBOURS = (0, 1, 2)
NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""What one computes: nothing, until whoever started it is gone."""

MEASURED = (
    Cell("decode-1", batch=1, prompt=32, output=32),
    Cell("decode-8", batch=8, prompt=32, output=32),
    Cell("prefill-1k", batch=1, prompt=1024, output=1),
)
STREAMS = Cell("8 streams", batch=8, prompt=128, output=64)
GOALS = {1: 0.5, 2: 0.3}
"""What Quire is to keep beside so many neighbours."""


def run(options: Options) -> Result:
    result = Result(("what", "quiet, tokens/s", "beside one", "share", "beside two", "share", "goal"))
    folder = with_tokenizer(checkpoint(options))
    cells = parse_cells("2x16+8,1x64+1") if options.quick else MEASURED
    rounds = 1 if options.quick else ROUNDS
    with ExitStack() as stack:
        workers = dict(_workers(options, folder, stack))
        rates = _in_turns(workers, cells, rounds)
        for cell in cells:
            for recipe in workers:
                _add_row(result, recipe, cell, [rates[recipe, cell, count] for count in NEIGHBOURS])
    _two_engines(result, options, folder, cells[1], rounds)
    _served(result, options, folder, rounds)
    return result


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that keep a core busy each."""
    busy = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _worker(options: Options, recipe: Recipe, python: Path, folder: Path) -> Worker:
    threads = options.threads or torch.get_num_threads()
    vocab_size = SHAPES["qwen3-tiny" if options.quick else "qwen3-0.6b"]["vocab_size"]
    worker = Worker(recipe, "bf16", python, folder, threads, vocab_size, DEFAULT_WORK)
    worker.measure(WARM_UP)
    return worker


def _workers(options: Options, folder: Path, stack: ExitStack) -> Iterator[tuple[Recipe, Worker]]:
    """Quire, and the other engines that are there."""
    for recipe in RECIPES[:1] if options.quick else RECIPES:
        if not is_installed(recipe, DEFAULT_WORK):
            tell(f"busy: {recipe.name} is not installed ('make bench-peers' does it) and left out")
            continue
        try:
            own = (
                folder if recipe is QUIRE else checkpoints.make(recipe.checkpoints["bf16"], "qwen3-0.6b", DEFAULT_WORK)
            )
            tell(f"busy: loading {recipe.name}")
            worker = _worker(options, recipe, environment(recipe, DEFAULT_WORK), own)
        except PeerError as error:
            tell(f"busy: {recipe.name} is left out: {error}")
            continue
        stack.callback(worker.close)
        yield recipe, worker


def _in_turns(
    workers: dict[Recipe, Worker], cells: Sequence[Cell], rounds: int
) -> dict[tuple[Recipe, Cell, int], list[float]]:
    """Tokens a second of each engine and cell beside so many neighbours, one of each round."""
    rates = defaultdict(list)
    for number in range(rounds):
        for count in NEIGHBOURS:
            tell(f"busy: beside {count} neighbours, round {number + 1} of {rounds}")
            with neighbours(count):
                for recipe, worker in list(workers.items()) if number == 0 else [(QUIRE, workers[QUIRE])]:
                    try:
                        for cell in cells:
                            rates[recipe, cell, count].append(_rate(worker, cell))
                    except PeerError as error:
                        if recipe is QUIRE:
                            raise
                        tell(f"busy: {recipe.name} is left out: {error}")
                        del workers[recipe]
    return rates


def _rate(worker: Worker, cell: Cell) -> float:
    """Tokens a second: those of the prompts where the cell is a prefill, else those behind the first ones."""
    times = worker.measure(cell)
    return cell.batch * cell.prompt / times["first_s"] if cell.output == 1 else times["rest_tokens"] / times["rest_s"]


def _add_row(result: Result, recipe: Recipe, cell: Cell, rates: Sequence[Sequence[float]]) -> None:
    quiet, one, two = (statistics.median(each) for each in rates)
    goal = f">= {GOALS[1]}, {GOALS[2]}" if recipe is QUIRE else ""
    result.add(
        (
            f"{cell.name}, {recipe.name}",
            f"{quiet:,.1f}",
            *(text for rate in (one, two) for text in (f"{rate:,.1f}", f"{rate / quiet:.2f}")),
            goal,
        ),
        what=cell.name,
        engine=recipe.name,
        rates=[_rounded(each) for each in rates],
    )


def _two_engines(result: Result, options: Options, folder: Path, cell: Cell, rounds: int) -> None:
    """Two of Quire's engines at once, each with as many threads as there are cores."""
    tell("busy: two engines at once")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        workers = [_worker(options, QUIRE, Path(sys.executable), folder) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.close)
        alone: list[float] = []
        both: list[float] = []
        for _ in range(rounds):
            alone.append(_rate(workers[0], cell))
            both.append(min(pool.map(lambda worker: _rate(worker, cell), workers)))
    _add_pair(result, f"{cell.name}, the slower of two engines", alone, both, 0.4)


def _served(result: Result, options: Options, folder: Path, rounds: int) -> None:
    """`quire serve` with streams over HTTP, whose other processes are neighbours too, beside the engine alone."""
    cell = Cell("2 streams", 2, 16, 16) if options.quick else STREAMS
    alone: list[float] = []
    served: list[float] = []
    generator = random.Random(5)
    with ExitStack() as stack, serving(options, str(folder), "--prefix-cache", "off") as server:
        worker = _worker(options, QUIRE, Path(sys.executable), folder)
        stack.callback(worker.close)
        for number in range(rounds):
            tell(f"busy: served, round {number + 1} of {rounds}")
            alone.append(_rate(worker, cell))
            prompts = [tokens(generator, cell.prompt) for _ in range(cell.batch)]
            served.append(_rate_of_streams(together(server, prompts, cell.output)))
    _add_pair(result, f"{cell.name} through `quire serve`, beside the engine alone", alone, served, 0.9)


def _add_pair(result: Result, what: str, alone: Sequence[float], beside: Sequence[float], goal: float) -> None:
    quiet, rate = statistics.median(alone), statistics.median(beside)
    row = (what, f"{quiet:,.1f}", f"{rate:,.1f}", f"{rate / quiet:.2f}", "", "", f">= {goal}")
    result.add(row, what=what, alone=_rounded(alone), beside=_rounded(beside))


def _rate_of_streams(streams: Sequence[Sequence[tuple[float, Any]]]) -> float:
    """Tokens a second from when all have their first one to the end."""
    begin = max(stream[0][0] for stream in streams)
    times = [when for stream in streams for when, _ in stream if when > begin]
    return len(times) / (max(times) - begin)


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(rate, 1) for rate in rates]


if __name__ == "__main__":
    main(run)
