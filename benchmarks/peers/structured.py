"""Structured output of Quire and other engines, in turns: what schemas leave of the throughput, and what is valid.

usage: python -m benchmarks.peers.structured [--rows N] [--repeat N] [--shape ...] [--work DIR] [--only ...] [--write]

Each engine makes the same number of tokens for as many requests, without a form and with a JSON Schema of its own for
each request; these schemas let no reply end before. An engine's two figures compare: prompts, batch and the number of
tokens are the same. The time to the first token has the compiling of all schemas, which an engine sees for the first
time. Then each makes replies to schemas that do let them end, and those that ended are checked with `jsonschema`.
(Where any white space may come, a model may come to no end of it.)

Weights are random, and the tokenizer is made up (`checkpoints`): what the model would say is never of the form, so the
mask decides at every token. (llama.cpp's grammar is asked about one token first, here mostly in vain.) Environments and
checkpoints are those of `python -m benchmarks.peers`; transformers has no structured output of its own.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks import run_all
from benchmarks.common import Result, machine, tell
from benchmarks.peers import checkpoints
from benchmarks.peers.recipes import DEFAULT_WORK, RECIPES, PeerError, Recipe, environment
from benchmarks.peers.worker import Worker
from benchmarks.structured import TOOL
from quire.bench.cells import Cell
from quire.models.random_checkpoint import SHAPES

SECTION = "structured peers"
NAMES = ("run_quire", "run_llama_cpp", "run_openvino", "run_vllm")
PROMPT = 32
TOKENS = 64
FEW, ENOUGH = 8, 400
"""Replies that may end by themselves, and tokens for each."""


def endless(number: int) -> str:
    """A schema whose replies do not end before `TOKENS`; each is another one."""
    line = {
        "type": "object",
        "properties": {f"key_{number}": {"type": "string", "minLength": 20}, "count": {"type": "integer"}},
        "required": [f"key_{number}", "count"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": line, "minItems": 200})


def ending(number: int) -> str:
    """A tool's schema, with strings that are short; each is another one."""
    short = {"type": "string", "maxLength": 12}
    properties = {**TOOL["properties"], "location": short, f"note_{number}": short}
    return json.dumps({**TOOL, "properties": properties, "required": [*properties]})


CHECKER = jsonschema.FormatChecker()
"""Formats as `jsonschema` checks them, but for dates: Python's `datetime` has no year 0."""


@CHECKER.checks("date")
def is_date(text: object) -> bool:
    """Whether a string is a full-date of RFC 3339; whatever else is none of its business."""
    match = re.fullmatch(r"(\d{4})-(0[1-9]|1[0-2])-(\d{2})", text, re.ASCII) if isinstance(text, str) else None
    if match is None:
        return not isinstance(text, str)
    year, month, day = map(int, match.groups())
    return 1 <= day <= calendar.mdays[month] + (month == 2 and calendar.isleap(year))


def valid(schemas: Sequence[str], texts: Sequence[str | None]) -> int:
    """How many of the texts that have ended meet their schemas."""
    good = 0
    for schema, text in zip(schemas, texts, strict=True):
        if text is None:
            continue
        try:
            jsonschema.validate(json.loads(text), json.loads(schema), format_checker=CHECKER)
        except (ValueError, jsonschema.ValidationError) as error:
            tell(f"not valid: {str(error).splitlines()[0]}: {text[:200]!r}")
        else:
            good += 1
    return good


def measure(worker: Worker, rows: int, first: int) -> dict[str, Any]:
    """One turn of an engine: tokens a second without and with schemas, after the first of each request, and the seconds
    to there. `first` numbers the schemas, which an engine sees once."""
    cell = Cell("structured", rows, PROMPT, TOKENS)
    kinds = {"plain": [None] * rows, "schemas": [endless(first + i) for i in range(rows)]}
    found: dict[str, Any] = {}
    for kind, schemas in kinds.items():
        times = worker.measure(cell, schemas)
        found |= {kind: times["rest_tokens"] / times["rest_s"], f"{kind}_first_s": times["first_s"]}
    return found


def main() -> int:
    """Exit code 1 where nothing could be measured."""
    args = _arguments()
    result = Result(["bf16 weights", "plain", "with schemas", "ratio", "first token", "with schemas", "valid"])
    with ExitStack() as stack:
        workers: dict[Recipe, Worker] = {}
        turns: dict[Recipe, list[dict[str, Any]]] = {recipe: [] for recipe in args.recipes}
        for recipe in args.recipes:
            with _reported(recipe, result):
                workers[recipe] = stack.enter_context(_worker(recipe, args))
        for turn in range(args.repeat + 1):  # the first one warms up
            for recipe in [*workers][:: -1 if turn % 2 else 1]:
                with _reported(recipe, result, workers):
                    found = measure(workers[recipe], args.rows, 1 + turn * args.rows)
                    tell(f"{recipe.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
                    turns[recipe] += [found] if turn else []
        for recipe, worker in [*workers.items()]:
            with _reported(recipe, result, workers):
                schemas = [ending(i) for i in range(min(args.rows, FEW))]
                texts = worker.measure(Cell("ends", len(schemas), PROMPT, ENOUGH), schemas, ends=True)["texts"]
                ended = sum(text is not None for text in texts)
                good = f"{valid(schemas, texts)} of {ended} ended of {len(texts)}"
                _add(result, recipe, worker, turns[recipe], good)
    print(f"\n{result.table()}\n")
    if args.write:
        text = run_all.section(result.table(), machine() | {"threads": args.threads})
        readme = run_all.README.read_text("utf-8")
        run_all.README.write_text(run_all.with_section(readme, SECTION, text), "utf-8")
    return int(not workers)


@contextlib.contextmanager
def _reported(recipe: Recipe, result: Result, workers: dict[Recipe, Worker] | None = None) -> Iterator[None]:
    """What an engine cannot do is told in the table, and it is asked no more."""
    try:
        yield
    except PeerError as error:
        tell(f"{recipe.name} is not available: {error}")
        result.add([recipe.name, "–", "–", "–", "–", "–", error.reason], engine=recipe.name, reason=error.reason)
        if workers is not None:
            del workers[recipe]


def _add(result: Result, recipe: Recipe, worker: Worker, turns: Sequence[dict[str, Any]], good: str) -> None:
    middle = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    ratio = statistics.median(turn["schemas"] / turn["plain"] for turn in turns)
    seconds = [f"{middle[f'{kind}_first_s']:.2f} s" for kind in ("plain", "schemas")]
    rates = [f"{middle[kind]:.1f}" for kind in ("plain", "schemas")]
    name = f"{recipe.name} {worker.about['version']}"
    result.add([name, *rates, f"**{ratio:.2f}**", *seconds, good], engine=recipe.name, **middle, ratio=ratio)


def _worker(recipe: Recipe, args: argparse.Namespace) -> Any:
    """An engine with the checkpoint that has a tokenizer, to be closed at the end."""
    tell(f"loading {recipe.name}")
    kind, vocab_size = f"words-{recipe.checkpoints['bf16']}", SHAPES[args.shape]["vocab_size"]
    python, checkpoint = environment(recipe, args.work), checkpoints.make(kind, args.shape, args.work)
    return contextlib.closing(Worker(recipe, "bf16", python, checkpoint, args.threads, vocab_size, args.work))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.structured", description=__doc__.partition("\n")[0]
    )
    known = [name.removeprefix("run_") for name in NAMES]
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="requests at once (default: 32)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="of the random weights")
    parser.add_argument(
        "--work", type=Path, default=DEFAULT_WORK, help=f"keeps what was made (default: {DEFAULT_WORK})"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default=",".join(known), help=f"engines: some of {','.join(known)}")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"{unknown[0]!r} is not known; known: {', '.join(known)}")
    if args.rows < 1 or args.repeat < 1 or args.threads < 1:
        parser.error("--rows, --repeat and --threads must be 1 or more")
    args.recipes = [recipe for recipe in RECIPES if recipe.script.removeprefix("run_") in chosen]
    args.work = args.work.expanduser().resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())
