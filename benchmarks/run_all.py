"""Run the benchmarks; with --write, put their tables into README.md and the raw figures into results.jsonl.

usage: python benchmarks/run_all.py [--write] [--only NAME,...] [--workdir DIR] [--threads N] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.common import Options, json_line, machine, options_from, tell  # noqa: E402

NAMES = (
    "cells",
    "cpu",
    "busy",
    "sparse",
    "models",
    "real_sizes",
    "speculation",
    "structured",
    "ablation",
    "profile_step",
    "growth",
    "amx_counts",
    "quality",
    "ranks",
    "scheduler",
    "batching",
    "chunked_prefill",
    "prefix_cache",
    "kv",
    "kv_waste",
    "server",
)
README, RAW = HERE / "README.md", HERE / "results.jsonl"


def main() -> int:
    """Exit code 1 when a benchmark failed; the others still run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    parser.add_argument("--only", help=f"some of {','.join(NAMES)}")
    with options_from(parser) as (options, args):
        names = args.only.split(",") if args.only else list(NAMES)
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(NAMES)}")
        if args.write and options.quick:
            parser.error("--quick figures mean nothing and are not written; leave out --quick or --write")
        return _run(names, options, args.write)


def _run(names: list[str], options: Options, write: bool) -> int:
    failed = 0
    for name in names:
        begin = time.monotonic()
        try:
            result = importlib.import_module(f"benchmarks.{name}").run(options)
        except Exception as error:  # the other benchmarks are still worth having
            tell(f"{name} failed: {error}")
            failed += 1
            continue
        on = machine()
        print(f"\n## {name} ({time.monotonic() - begin:.0f} s)\n\n{result.table()}\n", flush=True)
        if write:
            README.write_text(with_section(README.read_text("utf-8"), name, section(result.table(), on)), "utf-8")
            keep = [line for line in _raw_lines() if f'"benchmark":"{name}"' not in line]
            new = [json_line({"benchmark": name, **raw, "on": on}) for raw in result.raw]
            RAW.write_text("\n".join([*keep, *new]) + "\n", "utf-8")
    return int(failed > 0)


def _raw_lines() -> list[str]:
    return RAW.read_text("utf-8").splitlines() if RAW.exists() else []


def section(table: str, on: dict[str, object]) -> str:
    """A table and what it was measured on."""
    place = f"{on['cpu']} ({on['capability']}), {on['threads']} threads, torch {on['torch']}, Python {on['python']}"
    return f"{table}\n\nMeasured on {on['date']}: {place}."


def with_section(text: str, name: str, content: str) -> str:
    """The text with what stands between the markers of `name` replaced.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"README.md has no markers {begin} and {end}")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{content}\n{end}{tail}"


if __name__ == "__main__":
    sys.exit(main())
