"""Benchmark a model on this machine (offline), a running server (serve), KV transfer between processes (transfer), or
loading a prefix against computing it (kv).

`offline` runs workload cells, each a batch of greedy requests with random prompts and no prefix cache, and prints
tokens per second, also as a share of the machine's ceiling: its measured memory bandwidth and matrix throughput.
Figures are only meaningful on an idle machine.

`serve`, `transfer` and `kv` have their own options; see, for example, 'quire bench serve --help'."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from quire.cli.options import Given, add_engine_options, given_options
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.ceilings import Machine
    from quire.bench.cells import Cell, OnToken
    from quire.llm import LLM
    from quire.models.formats.quantizing import Quantization

FORCED = {"prefix_cache": "off", "generation_config": "off"}
"""Options whose values the cells' definition requires."""

FRAME_SECONDS = 0.1
"""Least time between updates of the progress bar, so that drawing hardly affects the measurement."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire bench`."""
    parser.usage = (
        "quire bench offline MODEL [options]\n       quire bench kv MODEL [options]\n"
        "       quire bench serve --url URL [options]\n       quire bench transfer"
    )
    parser.add_argument(
        "words", nargs="*", metavar="offline MODEL", help="the model: folder, GGUF file, org/name on the Hub, or 'demo'"
    )
    parser.add_argument(
        "--cells",
        metavar="CELL,...",
        help="cells to run: decode-1, decode-8, decode-32, prefill-1k (default: all), or BATCHxPROMPT+OUTPUT",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write one JSON line per cell to FILE, or to standard output instead of the table",
    )
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="repeat each run N times; the best counts")
    parser.add_argument(
        "--random", metavar="SHAPE", help="use random weights of this shape instead of MODEL, e.g. qwen3-0.6b"
    )
    parser.add_argument("--workdir", metavar="DIR", help="keep --random's checkpoint here (default: a temporary one)")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 if a cell given by name was refused, or all were."""
    given = _given(args)
    from quire.bench.cells import CELLS, parse_cells

    cells = parse_cells(args.cells) if args.cells else list(CELLS)
    with ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        lines = stack.enter_context(json_file(args.json))
        if args.random:
            given.engine["model"] = str(stack.enter_context(_random_checkpoint(args.random, args.workdir, given)))
        began = time.perf_counter()
        from quire.cli.start import start

        llm = stack.enter_context(start(given))
        report = Report(lines, args.random or given.engine["model"], llm, time.perf_counter() - began)
        refused = _run_cells(llm, cells, args.repeat, report)
    return int(len(refused) == len(cells) or bool(refused and args.cells))


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within this context, SIGTERM and SIGHUP act like Ctrl-C, so that a temporary checkpoint is removed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _given(args: argparse.Namespace) -> Given:
    """The engine's options.

    Raises:
        ConfigError: no model or two, something other than `offline`, or an option that would change the cells.
    """
    words = list(args.words)
    if not words or words[0] != "offline":
        raise ConfigError(
            f"{' '.join(['quire bench', *words[:1]])}: choose what to measure: 'quire bench offline MODEL', "
            "'quire bench kv MODEL', 'quire bench serve --url URL', or 'quire bench transfer'"
        )
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat} is out of range; allowed: 1 or more")
    if args.workdir and not args.random:
        raise ConfigError("--workdir needs --random, whose checkpoint it keeps; add --random, or leave it out")
    model = words[1] if len(words) > 1 else None
    if len(words) > 2:
        raise ConfigError(f"unexpected argument {' '.join(words[2:])!r}; give one model")
    given = given_options(args, model)
    if args.random and "model" in given.engine:
        raise ConfigError(f"model {given.engine['model']!r} and --random {args.random} were both given; remove one")
    if not args.random and "model" not in given.engine:
        hint = f" (--json took {args.json!r} as its file; write --json after the model)" if args.json else ""
        raise ConfigError(f"no model was given{hint}; give a folder, org/name or 'demo', or --random qwen3-0.6b")
    for name, value in FORCED.items():
        if given.engine.setdefault(name, value) != value:
            raise ConfigError(f"{name}={given.engine[name]!r}: the cells require {value!r}; leave the option out")
    return given


@contextmanager
def json_file(path: str | None) -> Iterator[IO[str] | None]:
    """The file for JSON, if requested. Opened before the run, so that no run is wasted."""
    if path is None or path == "-":
        yield None if path is None else sys.stdout
        return
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror or error}") from error
    with file:
        yield file


def table_row(texts: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table. Columns of a negative width are left-aligned."""
    pairs = zip(texts, widths, strict=True)
    return "  ".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in pairs).rstrip()


@contextmanager
def _random_checkpoint(shape: str, workdir: str | None, given: Given) -> Iterator[Path]:
    """A checkpoint of this shape with random weights, quantized as the engine asks.

    Raises:
        ConfigError: the shape is unknown, or there is no room for it on the disk or in memory.
    """
    from quire.cli.terminal import loading

    with ExitStack() as stack:
        with loading(shape) as on_load:
            if on_load:
                on_load("importing torch", 0.0)
            from quire.models.random_checkpoint import random_checkpoint

            def progress(share: float) -> None:
                if on_load:
                    on_load("writing random weights", share)

            how = given.engine.get("quantization")
            _check_memory(shape, how, given.engine.get("device", "auto"))
            folder = stack.enter_context(random_checkpoint(shape, workdir, progress, how))
        yield folder


def _check_memory(shape: str, how: Quantization | None, device: str) -> None:
    """Check that the weights fit into memory, before spending minutes on writing them.

    Raises:
        ConfigError: they do not fit.
    """
    from quire.devices import find_device
    from quire.models.formats.quantizing import QUANTIZATIONS
    from quire.models.random_checkpoint import model_config, weight_bytes
    from quire.runner.memory_plan import format_size, free_memory

    if (find_device()[0] if device == "auto" else device) != "cpu":
        return
    config, free = model_config(shape), free_memory()
    needed = weight_bytes(config, how)
    if needed > free:
        sizes = (f"{name} {format_size(weight_bytes(config, name))}" for name in QUANTIZATIONS)
        raise ConfigError(
            f"the weights of {shape} in {how or 'bfloat16'} take {format_size(needed)}, and {format_size(free)} of "
            f"memory are free; choose a smaller shape, or --quantization ({', '.join(sizes)})"
        )


def _run_cells(llm: LLM, cells: Sequence[Cell], repeat: int, report: Report) -> list[Cell]:
    """Run and report each cell; returns those that were refused."""
    from quire.bench.ceilings import Ceilings, measure_machine, record, work_of
    from quire.bench.cells import measure, refusal, shape_of, warm_up
    from quire.cli.terminal import loading

    with loading("machine") as on_load:
        if on_load:
            on_load("measuring its ceilings", 0.0)
        machine = measure_machine(llm.model.dtype, llm.threads, device=llm.model.kernels.device)
    ceilings = Ceilings(work_of(llm), machine)
    report.machine(machine)
    warm_up(llm)
    refused = []
    for cell in cells:
        reason = refusal(cell, llm)
        if reason:
            refused.append(cell)
            report.refused(shape_of(cell), reason)
            continue
        with _progress(cell, repeat) as on_token:
            timing = measure(llm, cell, repeat, on_token)
        report.cell(record(cell, timing, ceilings))
    return refused


@contextmanager
def _progress(cell: Cell, repeat: int) -> Iterator[OnToken | None]:
    """A progress bar on standard error while a cell runs; None if that is not a terminal."""
    from quire.cli.terminal import loading

    runs = 2 if cell.output > 1 else 1
    total = repeat * cell.batch * (cell.output + (runs - 1))
    done = before = 0
    drawn = 0.0
    with loading(cell.name) as on_load:
        if on_load is None:
            yield None
            return

        def on_token(made: int) -> None:
            nonlocal done, before, drawn
            done += made - before if made >= before else made  # a new run counts from the start
            before = made
            if time.monotonic() - drawn >= FRAME_SECONDS:
                drawn = time.monotonic()
                on_load(f"{done:,} of {total:,} tokens", min(1.0, done / total))

        yield on_token


class Report:
    """Writes results as they come: as lines of a table, or as JSON lines."""

    HEADINGS = ("cell", "prefill tok/s", "of ceiling", "decode tok/s", "of ceiling", "bound by", "seconds")
    WIDTHS = (-16, 13, 10, 12, 10, 8, 8)

    def __init__(self, lines: IO[str] | None, model: str, llm: LLM, startup: float) -> None:
        self._lines = lines
        self._table = sys.stderr if lines is sys.stdout else sys.stdout
        self._common = {
            "engine": "quire",
            "model": model,
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "quantization": llm.model.quantization,
            "startup_s": round(startup, 2),
        }

    def machine(self, machine: Machine) -> None:
        """Print the machine's ceilings, to which the shares refer."""
        read, matrix, int8 = (
            round(rate / 1e9, 1) for rate in (machine.read_rate, machine.matrix_rate, machine.int8_rate)
        )
        self._common |= {
            "threads": machine.threads,
            "read_gb_s": read,
            "matrix_gflop_s": matrix,
            "int8_gop_s": int8,
        }
        rates = f"{read} GB/s read, {matrix:,} GFLOP/s {self._common['dtype']}, {int8:,} GOP/s int8"
        ceilings = f"{rates} with {machine.threads} threads" if machine.threads else rates
        print(f"Started in {self._common['startup_s']} s. Ceilings: {ceilings}.", file=self._table)
        self._row(self.HEADINGS)

    def cell(self, record: dict[str, Any]) -> None:
        """Report a cell that ran."""
        decode = record.get("decode_tok_s")
        self._row(
            (
                record["cell"],
                f"{record['prefill_tok_s']:,.1f}",
                f"{record['prefill_share']:.0%}",
                "-" if decode is None else f"{decode:,.1f}",
                "-" if decode is None else f"{record['decode_share']:.0%}",
                record.get("decode_bound", "-"),
                f"{record['total_s']:.2f}",
            )
        )
        for what, why in record.get("above_ceiling", {}).items():
            print(f"  {what} is above its ceiling: {why}", file=self._table, flush=True)
        self._line(record)

    def refused(self, shape: dict[str, Any], reason: str) -> None:
        """Report a cell that this engine cannot run."""
        print(f"{shape['cell']:{-self.WIDTHS[0]}} refused: it {reason}", file=self._table, flush=True)
        self._line(shape | {"refused": reason})

    def _row(self, texts: Sequence[str]) -> None:
        print(table_row(texts, self.WIDTHS), file=self._table, flush=True)

    def _line(self, record: dict[str, Any]) -> None:
        if self._lines:
            self._lines.write(msgspec.json.encode(record | self._common).decode() + "\n")
            self._lines.flush()
