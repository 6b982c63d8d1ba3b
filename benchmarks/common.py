"""What the benchmark scripts share: results, tables, and driving an engine.

Each script has `run(options) -> Result` and can be run by itself: `python -m benchmarks.NAME`. `run_all.py` runs
them all and writes the tables into README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from quire import LLM
from quire.cli.doctor import cpu_name
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import RequestOutput
from quire.models.random_checkpoint import random_checkpoint


@dataclass(frozen=True)
class Options:
    """How to run: `quick` makes everything tiny, to try the script itself; its figures mean nothing."""

    workdir: str
    threads: int | None = None
    quick: bool = False


@dataclass
class Result:
    """A section of the README: a Markdown table, and each of its rows as it was measured."""

    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Sequence[str], **raw: Any) -> None:
        self.rows.append(row)
        self.raw.append(raw)

    def table(self) -> str:
        """The first column flush left, numbers flush right."""
        rule = ["---"] + ["--:"] * (len(self.headings) - 1)
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.headings, rule, *self.rows))


def main(run: Callable[[Options], Result]) -> None:
    """Run one script by itself and print its table."""
    with options_from(argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)) as (options, _):
        print(run(options).table())


@contextmanager
def options_from(parser: argparse.ArgumentParser):
    """Parsed options and all arguments; the working folder is a temporary one unless it was named."""
    parser.add_argument("--workdir", help="where the random checkpoint is kept (default: a temporary folder)")
    parser.add_argument("--threads", type=int, help="threads of a step (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the scripts; figures mean nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-benchmarks-") as temporary:
        yield Options(args.workdir or temporary, args.threads, args.quick), args


def tell(text: str) -> None:
    """Progress, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def checkpoint(options: Options) -> Path:
    """The folder of the random 0.6B checkpoint (a tiny one when quick), written at the first call."""
    shape = "qwen3-tiny" if options.quick else "qwen3-0.6b"
    with random_checkpoint(shape, options.workdir) as folder:
        return folder


def tokens(generator: random.Random, count: int, vocab_size: int = 500) -> list[int]:
    """A prompt of random token ids."""
    return generator.choices(range(vocab_size), k=count)


def greedy(count: int) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def finish(llm: LLM) -> list[RequestOutput]:
    """Step until nothing is left; the finished outputs in the order of their ends."""
    ended: list[RequestOutput] = []
    while not llm.idle:
        ended += [output for output in llm.step() if output.finished]
    failed = [choice.error for output in ended for choice in output.outputs if choice.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return ended


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    return {
        "cpu": cpu_name(cpuinfo.read_text() if cpuinfo.exists() else ""),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))
