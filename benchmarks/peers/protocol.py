"""What the engines' scripts share: the options they take, how a cell is timed, and how they talk to the driver.

A script is started by `driver.Worker`, loads its model and prints one line that says so. It then reads one line of
JSON a cell from standard input and answers each with one line: the seconds of one run. Everything else that the
engine prints goes to standard error. Only the standard library is needed here: the script runs in a virtual
environment that knows nothing of Quire.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LOWEST_ID = 10
"""Ids below may have a meaning, such as the end of a text."""


@dataclass(frozen=True)
class Options:
    """What an engine is started with.

    Attributes:
        checkpoint: the model in the format that the engine reads.
        weights: "bf16", "int8" or "int4": what of it to measure.
        threads: how many a step may use.
        vocab_size: prompts are of ids below it.
    """

    checkpoint: str
    weights: str
    threads: int
    vocab_size: int


class Watch:
    """Times one run: an engine calls `start` when all is prepared, and `step` whenever requests got tokens."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._begin = self._first = self._last = time.perf_counter()
        self._made = self._made_first = 0
        self._all_started = False

    def start(self) -> None:
        """The requests are handed in from now on."""
        self._begin = time.perf_counter()

    def step(self, started: int, made: int) -> None:
        """`started` requests have a token by now, and all together have `made`."""
        self._last, self._made = time.perf_counter(), made
        if started == self._batch and not self._all_started:
            self._all_started, self._first, self._made_first = True, self._last, made

    def times(self, output: int) -> dict[str, float | int]:
        """Seconds until each request had its first token, seconds from there to the end, tokens made in these.

        Raises:
            RuntimeError: the engine did not make `output` tokens for each request; it would look too fast.
        """
        if not self._all_started or self._made != self._batch * output:
            raise RuntimeError(f"the engine made {self._made} tokens, where {self._batch} x {output} were asked for")
        return {
            "first_s": self._first - self._begin,
            "rest_s": self._last - self._first,
            "rest_tokens": self._made - self._made_first,
        }


Schemas = Sequence[str | None] | None
Replies = list[str | None]
"""Texts of outputs that ended by themselves; None for one that was cut."""


class Engine(Protocol):
    """An engine with its model loaded."""

    version: str

    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> Replies | None:
        """Make `output` greedy tokens for each prompt, all handed in at once, whatever the tokens mean.

        Args:
            schemas: for each prompt, the JSON Schema that its output must meet (it may end before then), or None;
                then texts are returned.
        """
        ...


def serve(make: Callable[[Options], Engine], extra: Callable[[Any], dict[str, Any]] = lambda engine: {}) -> None:
    """Load an engine, say so, and measure what standard input asks for, until it ends.

    Args:
        make: loads the engine.
        extra: more to say of the loaded engine.
    """
    parser = argparse.ArgumentParser()
    for name, kind in (("checkpoint", str), ("weights", str), ("threads", int), ("vocab-size", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = Options(**vars(parser.parse_args()))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine and its children print is not an answer
    begin = time.perf_counter()
    engine = make(options)
    load = round(time.perf_counter() - begin, 2)
    print(json.dumps({"version": engine.version, "load_s": load} | extra(engine)), file=answers)
    for seed, line in enumerate(sys.stdin):
        cell = json.loads(line)
        generator = random.Random(seed)
        ids = range(LOWEST_ID, options.vocab_size)
        prompts = [generator.choices(ids, k=cell["prompt"]) for _ in range(cell["batch"])]
        watch = Watch(cell["batch"])
        texts = engine.run(prompts, cell["output"], watch, cell.get("schemas"))
        answer = {"texts": texts} if cell.get("ends") else watch.times(cell["output"])
        print(json.dumps(answer), file=answers)
