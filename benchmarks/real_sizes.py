"""Models of a real size in 4 bits: Qwen3-8B's and Qwen3-30B-A3B's shapes with random weights, beside llama.cpp's Q4_0.

Weights are written a tensor at a time in each engine's format: 5.2 and 15.7 GiB for Quire, about as much for llama.cpp.
One engine after the other is a process with its model loaded; the best of the rounds counts. So 24 GiB of memory do,
and 45 GB of disk. Peak memory is the most that was resident, mapped weights included.

llama.cpp is installed in an environment of its own, as for `benchmarks.peers`; QUIRE_PEERS names the folder of these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Result, main, tell
from benchmarks.peers.recipes import DEFAULT_WORK, QUIRE, RECIPES, PeerError, Recipe, environment, log_file
from benchmarks.peers.recipes import run as run_command
from benchmarks.peers.table import ceiling_rate
from benchmarks.peers.worker import Worker
from quire.bench.ceilings import Ceilings, Machine, Work, measure_machine
from quire.bench.cells import CELLS, WARM_UP, Cell, parse_cells
from quire.models.fields import Fields
from quire.models.random_checkpoint import model_config, random_checkpoint, tensor_shapes
from quire.runner.memory_plan import format_size

MODELS = ("qwen3-8b", "qwen3-30b-a3b")
MEASURED = tuple(cell for cell in CELLS if cell.name in ("decode-1", "decode-8", "prefill-1k"))
ROUNDS = 2
[LLAMA] = [recipe for recipe in RECIPES if recipe.name == "llama.cpp"]


def run(options: Options, recipes: Sequence[Recipe] = (QUIRE, LLAMA)) -> Result:
    """Each model on each engine."""
    names = [f"{cell.name}{more}" for cell in MEASURED for more in ("", ", of the ceiling")]
    result = Result(("model", "engine", "file", "loaded in, s", "peak memory", *names))
    threads = options.threads or torch.get_num_threads()
    machine = measure_machine(torch.bfloat16, threads, repeat=2 if options.quick else 7)
    for shape in ("qwen3-tiny", "qwen3-moe-tiny") if options.quick else MODELS:
        work: Work | None = None  # Quire says what a step has to read and to multiply
        for recipe in recipes:
            try:
                raw = _measured(recipe, shape, options, threads)
            except PeerError as error:
                tell(f"{shape}: {recipe.name} is not available: {error}")
                result.add((shape, recipe.name, f"not available: {error.reason}", *["-"] * (2 + len(names))))
                continue
            work = Work(**raw["work"]) if "work" in raw else work
            result.add(_row(raw, work, machine), **raw, machine=[machine.read_rate, machine.matrix_rate])
    return result


def _row(raw: dict[str, Any], work: Work | None, machine: Machine) -> list[str]:
    row = [raw["model"], f"{raw['engine']} {raw['version']}", format_size(raw["file_bytes"]), f"{raw['load_s']:.1f}"]
    row.append(format_size(raw["peak_bytes"]))
    for cell in raw["cells"]:
        ceiling = ceiling_rate(Ceilings(work, machine), Cell(*cell["cell"])) if work else None
        row += [f"{cell['tok_s']:,.1f}", f"{cell['tok_s'] / ceiling:.0%}" if ceiling else "-"]
    return row


def _measured(recipe: Recipe, shape: str, options: Options, threads: int) -> dict[str, Any]:
    peers = Path(os.environ.get("QUIRE_PEERS", DEFAULT_WORK))
    python, checkpoint = environment(recipe, peers), _checkpoint(recipe, shape, options, peers)
    file = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
    tell(f"{shape}: loading {recipe.name}")
    vocab_size = model_config(shape)["vocab_size"]
    cells = parse_cells("1x16+4,2x16+4,1x64+1") if options.quick else MEASURED
    best = dict.fromkeys((cell.name for cell in cells), 0.0)
    with closing(Worker(recipe, "int4", python, checkpoint, threads, vocab_size, peers)) as worker:
        worker.measure(WARM_UP)
        for _ in range(1 if options.quick else ROUNDS):
            for cell in cells:
                best[cell.name] = max(best[cell.name], _rate(cell, worker.measure(cell)))
                tell(f"{shape}: {cell.name}, {recipe.name}: {best[cell.name]:,.1f} tokens/s")
        peak = worker.peak_bytes()
    return {
        "model": shape,
        "engine": recipe.name,
        **worker.about,
        "file_bytes": file.stat().st_size,
        "peak_bytes": peak,
        "cells": [{"cell": [c.name, c.batch, c.prompt, c.output], "tok_s": best[c.name]} for c in cells],
    }


def _rate(cell: Cell, times: dict[str, Any]) -> float:
    """Tokens per second: of decoding where the cell decodes, else of the prompts."""
    if cell.output == 1:
        return float(cell.batch * cell.prompt / times["first_s"])
    return float(times["rest_tokens"] / times["rest_s"])


def _checkpoint(recipe: Recipe, shape: str, options: Options, peers: Path) -> Path:
    """In the engine's format, written where it is missing."""
    if recipe is QUIRE:
        with random_checkpoint(shape, options.workdir, how="int4") as folder:
            return folder
    file, folder = Path(options.workdir) / f"{shape}-q4_0.gguf", Path(options.workdir) / f"{shape}-shapes"
    if not file.exists():
        tell(f"writing {file.name}")
        folder.mkdir(parents=True, exist_ok=True)
        config = model_config(shape)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        shapes = tensor_shapes(Fields(config, "config.json"), as_published=True)
        (folder / "shapes.json").write_text(json.dumps(shapes), "utf-8")
        partial = file.with_name(f"{file.name}.partial")
        partial.unlink(missing_ok=True)
        command = [str(environment(recipe, peers)), "-m", "benchmarks.peers.random_gguf", str(folder), str(partial)]
        run_command(command, log_file(peers, f"random-gguf-{shape}"))
        partial.rename(file)
    return file


if __name__ == "__main__":
    main(run)
