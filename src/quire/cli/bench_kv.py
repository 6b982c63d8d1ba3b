"""Find the prefix length from which loading KV beats computing it, for this model on this machine.

  quire bench kv MODEL
  quire bench kv MODEL --from pool,disk --disk-kv-path /mnt/nvme/kv --prefixes 256,1024,4096
  quire bench kv MODEL --seconds 1800 --json kv.json --plot kv.svg

what is measured: time to first token of a prompt with a prefix of each length and one more token, median of --repeat
  computed        prompts that share nothing
  pool            the prefix is in the KV pool
  host            it is in host memory, and the pool is empty
  disk            it is in a folder (a temporary one, or --disk-kv-path), and not in the page cache
  shared_memory,  it is in the host tier of another engine, a process that this command starts
  socket

Engine options apply to both engines. "-" means that the prefix was computed anyway, as a single block always is.
Figures are only meaningful on an idle machine.
Exit codes: 0 done; 1 failed; 2 an option is invalid, or the model cannot be measured; 130 Ctrl-C."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from quire.cli.bench import json_file
from quire.cli.options import Given, add_engine_options, given_options
from quire.config import EngineConfig
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.kv import PrefixTimer, Progress, Row

LENGTHS = tuple(1 << power for power in range(4, 16))
"""16 to 32,768 tokens."""

ENGINES = "shared_memory", "socket"
SOURCES = "pool", "host", "disk", *ENGINES

SET_HERE = (
    *("kv_role", "prefill_url", "prefill_min_tokens", "kv_directory"),
    *("kv_transport", "kv_host", "kv_port", "cluster_key_file"),
)
"""Options about several engines, which this command sets itself."""

TEMPORARY = "quire-bench-kv-"
"""Prefix of the names of temporary folders."""

HOST_SHARE = 8
"""This fraction of free memory (1/N) is the host tier of each engine, which takes only what is used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire bench kv`."""
    parser.usage = "quire bench kv MODEL [options]"
    parser.add_argument(
        "model_name", nargs="?", metavar="MODEL", help="folder, GGUF file, org/name on the Hub, or 'demo'"
    )
    parser.add_argument(
        "--from", dest="sources", metavar="WHERE,...", help=f"some of {', '.join(SOURCES)} (default: all)"
    )
    parser.add_argument(
        "--prefixes", metavar="N,...", help="prefix lengths in tokens (default: 16, 32, and so on up to 32768)"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=3,
        metavar="N",
        help="measurements of each; the median counts (default: 3)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        metavar="N",
        help="stop measuring after this many seconds (default: 300)",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write one JSON line per prefix to FILE, or to standard output instead of the table",
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="plot the results")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    given, sources, lengths = _given(args), _sources(args.sources), _lengths(args.prefixes)
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat} is out of range; allowed: 1 or more")
    if not args.seconds > 0:
        raise ConfigError(f"--seconds {args.seconds:g} is out of range; allowed: more than 0")
    if args.plot is not None:
        _check_plot(args.plot)
    with json_file(args.json) as lines, ExitStack() as stack:
        to = sys.stderr if lines is sys.stdout else sys.stdout
        timer, most = _open(stack, given, sources)
        too_long = [each for each in lengths if each > most]
        if len(too_long) == len(lengths):
            raise ConfigError(
                f"--prefixes: the shortest has {lengths[0]:,} tokens, but context, pool and tiers have room for only "
                f"{most:,}; raise --kv-cache-memory or --host-kv-memory, or give shorter ones"
            )
        print(_line(["tokens", *(_name(each) for each in ("computed", *sources))]), file=to, flush=True)
        rows, left = _measure(timer, [each for each in lengths if each <= most], sources, args, to, lines)
    if left:
        print(f"left out: {left}", file=to)
    if too_long:
        print(f"left out: {_listed(too_long)}: context, pool and tiers have room for {most:,}", file=to)
    _conclude(rows, sources, to)
    if args.plot is not None:
        _plot(args.plot, given.engine["model"], rows)
    return 0


def _given(args: argparse.Namespace) -> Given:
    given = given_options(args, args.model_name)
    if "model" not in given.engine:
        raise ConfigError("no model was given; give a folder, org/name or 'demo'")
    if given.engine.get("prefix_cache") == "off":
        raise ConfigError("prefix_cache=off: this benchmark measures the prefix cache; leave the option out")
    for name in SET_HERE:
        if name in given.engine:
            raise ConfigError(f"{name} is set by this command, which starts the other engine itself; leave it out")
    EngineConfig.from_options({"host_kv_memory": "1GiB", **given.engine}, given.preset)  # before torch is imported
    return given


def _sources(text: str | None) -> list[str]:
    names = list(SOURCES) if text is None else list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SOURCES:
            raise ConfigError(f"--from {name!r} is unknown; known: {', '.join(SOURCES)}")
    return names


def _lengths(text: str | None) -> list[int]:
    if text is None:
        return list(LENGTHS)
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(
            f"--prefixes {text!r} is not a list of token counts; give, for example, 64,256,1024"
        ) from None
    if lengths[0] < 1:
        raise ConfigError(f"--prefixes {text!r}: {lengths[0]} is out of range; allowed: 1 or more")
    return lengths


def _check_plot(path: str) -> None:
    if not path.endswith(".svg"):
        raise ConfigError(f"--plot {path}: the name must end in .svg")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {Path(path).parent} does not exist; make it first")


def _open(stack: ExitStack, given: Given, sources: Sequence[str]) -> tuple[PrefixTimer, int]:
    """Start the engines; returns the longest prefix that they have room for, too."""
    from quire.bench.kv import NEVER, PrefixTimer
    from quire.bench.kv_prefill import prefill_process
    from quire.cli.start import start
    from quire.cli.terminal import loading
    from quire.runner.memory_plan import free_memory

    options: dict[str, Any] = {"max_num_seqs": 2, "host_kv_memory": str(free_memory() // HOST_SHARE)} | given.engine
    transports = [each for each in ENGINES if each in sources]
    most = None
    if transports:
        there = {name: value for name, value in options.items() if not name.startswith("disk_kv")}
        with loading(options["model"]) as on_load:
            if on_load:
                on_load("starting the other engine", 0.0)
            there = dataclasses.asdict(EngineConfig.from_options(there, given.preset))
            other = stack.enter_context(prefill_process(there))
        most = other.most_tokens
        options |= {
            "kv_role": "decode",
            "prefill_url": other.address,
            "prefill_min_tokens": NEVER,
            "cluster_key_file": other.key_file,
        }
    if "disk" in sources:
        folder = options.get("disk_kv_path") or stack.enter_context(_temporary())
        options["disk_kv_path"] = folder
    llm = stack.enter_context(start(Given(options, {}, given.preset), say="nothing"))
    if "disk" in sources and llm._engine.tiers.disk is None:
        raise ConfigError(next(note for note in llm.notes if note.startswith("disk_kv_path")))
    timer = PrefixTimer(llm, transports)
    return timer, min(timer.most_tokens, most or timer.most_tokens)


@contextmanager
def _temporary() -> Iterator[str]:
    """A folder for the disk tier, which is removed afterwards; those of killed runs are removed, too."""
    from quire.kv.disk import LOCK_FILE
    from quire.server.processes import remove_stale

    remove_stale(Path(tempfile.gettempdir()), TEMPORARY, LOCK_FILE)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        yield folder


def _measure(
    timer: PrefixTimer,
    lengths: Sequence[int],
    sources: Sequence[str],
    args: argparse.Namespace,
    to: IO[str],
    lines: IO[str] | None,
) -> tuple[list[Row], str]:
    """Measure; returns the rows, and the prefixes for which there was no time."""
    from quire.bench.kv import Budget

    rows: list[Row] = []
    with _progress() as progress:
        progress("warming up")
        timer.measure(min(lengths[0], 64), sources, 1, progress)
    budget = Budget(args.seconds)
    for number, tokens in enumerate(lengths):
        if not budget.allows(tokens):
            took = f"{tokens:,} would take about {budget.expected(tokens):,.0f} s, and --seconds is {args.seconds:g}"
            return rows, f"{_listed(lengths[number:])}: {took}"
        begin = time.monotonic()
        with _progress() as progress:
            rows.append(timer.measure(tokens, sources, args.repeat, progress))
        budget.took(tokens, time.monotonic() - begin)
        print(_texts(rows[-1]), file=to, flush=True)
        if lines:
            lines.write(msgspec.json.encode(rows[-1]).decode() + "\n")
            lines.flush()
    return rows, ""


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show what is being measured on standard error, if that is a terminal."""
    from quire.cli.terminal import loading

    with loading("quire bench kv") as on_load:
        yield lambda what: on_load(what, 0.0) if on_load else None


def _conclude(rows: Sequence[Row], sources: Sequence[str], to: IO[str]) -> None:
    from quire.bench.kv import verdict
    from quire.bench.kv_plot import text_plot

    print(file=to)
    for source in sources:
        print(verdict(rows, source), file=to)
    if plot := text_plot(rows):
        print(f"\n{plot}", file=to, flush=True)


def _plot(path: str, model: str, rows: Sequence[Row]) -> None:
    from quire.bench.kv_plot import svg

    try:
        Path(path).write_text(svg(f"Time to first token of {model} by where the prefix comes from", rows), "utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def _name(source: str) -> str:
    from quire.bench.kv import NAMES

    return f"{NAMES[source]}, ms"


def _texts(row: Row) -> str:
    times = (
        "-" if each is None else f"{each * 1e3:,.{0 if each >= 0.1 else 1 if each >= 0.01 else 2}f}"
        for each in row.seconds.values()
    )
    return _line([f"{row.tokens:,}", *times])


def _line(texts: Sequence[str]) -> str:
    first, *others = texts
    return "  ".join([first.rjust(7), *(text.rjust(17 if n == 4 else 12) for n, text in enumerate(others))])


def _listed(lengths: Sequence[int]) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]:,} tokens"
    return f"{lengths[0]:,} to {lengths[-1]:,} tokens"
