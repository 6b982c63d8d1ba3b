"""Load-test an OpenAI-compatible server, and report latency and throughput as its clients see them.

Any such server works: Quire, vLLM, SGLang, llama.cpp.

  quire bench serve --url http://127.0.0.1:8000
  quire bench serve --url ... --rate 4 --num-requests 200 --goodput ttft:500 --goodput tpot:50
  quire bench serve --url ... --workload multi-turn --conversations 32 --think-time 1-5
  quire bench serve --url ... --trace trace.jsonl --scale 64 --speedup 10 --json run.json --plot run.html

workloads:
  random         prompts that share nothing
  shared-prefix  one of --groups prefixes (of --prefix-len tokens), then a unique part (--input-len)
  multi-turn     conversations: each turn's prompt has all previous turns
  trace          lengths, shared prefixes and arrival times of a trace

loads:
  closed loop    --concurrency requests at a time; when one ends, the next one is sent
  open loop      --rate new requests per second, at random times, regardless of those still running

what is measured, as this client sees it:
  time to first token    from sending a request to the first chunk with tokens
  inter-token latency    the gap between chunks with tokens; for a chunk of k tokens, k times 1/k of its gap
  end to end             from sending a request to the end of its stream
  time per output token  (end to end - time to first token) / (tokens - 1), one value per request
  throughput             of successful requests, from the first start to the last end
  goodput                requests per second that met every --goodput target

Exit codes: 0 done; 1 no request succeeded, or the server went away; 2 an option is invalid; 130 Ctrl-C (the report
then covers the requests so far)."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

from quire.bench.serve.config import LoadConfig
from quire.cli.bench import json_file
from quire.cli.options import add_fields
from quire.errors import BenchmarkError, ConfigError
from quire.version import __version__

if TYPE_CHECKING:
    from rich.progress import Progress

    from quire.bench.serve.driver import Driver
    from quire.bench.serve.summary import Summary

BAR_AFTER = 2.0
"""Seconds before a progress bar appears."""
FRAME = 0.5
"""Seconds between its updates, since drawing affects the measurement."""

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench serve`."""
    parser.usage = "quire bench serve --url URL [options]"
    add_fields(parser.add_argument_group("load options"), LoadConfig)
    group = parser.add_argument_group("report options")
    group.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON document to FILE, or to standard output"
    )
    group.add_argument("--details", action="store_true", help="with --json: every request, with its chunks' times")
    group.add_argument("--plot", metavar="FILE", help="a picture: .html, or .png where matplotlib is installed")


def run(args: argparse.Namespace) -> int:
    """Send the load and report; returns 1 if nothing succeeded or the server went away, 130 after Ctrl-C."""
    config = _config(args)
    from quire.bench.serve import plot, summary, table
    from quire.cli.terminal import visible

    if args.plot:
        plot.check(args.plot)
    with json_file(args.json) as file:
        driver, about = _measure(config)
        found = summary.summarize(config, driver.records, driver.most_running, driver.broken_off, driver.stopped)
        text = "\n".join(visible(line) for line in table.render(config, found, about).split("\n"))
        print(text, file=sys.stderr if file is sys.stdout else sys.stdout, flush=True)
        if file:
            _write_json(file, summary.report(config, found, driver.records, about, args.details))
    if args.plot:
        _plot(args.plot, about, text, driver)
    return _verdict(found)


def _verdict(found: Summary) -> int:
    from quire.bench.serve.openai_client import hint

    if found.stopped == "interrupted":
        return INTERRUPTED
    if not found.succeeded:
        kind, failures = next(iter(found.failures.items()), ("", None))
        reason = f"{kind}: {failures.message}{hint(kind)}" if failures else "none was sent"
        raise BenchmarkError(f"no request succeeded; {reason}")
    return int(found.stopped is not None)


def _config(args: argparse.Namespace) -> LoadConfig:
    """The load to send.

    Raises:
        ConfigError: see LoadConfig; also if there is no URL.
    """
    if args.details and args.json is None:
        raise ConfigError("--details needs --json, to which it adds every request; add --json")
    given = vars(args)
    options = {field.name: given[field.name] for field in dataclasses.fields(LoadConfig) if field.name in given}
    if "url" not in options:
        raise ConfigError("no server was given; give its URL, as in --url http://127.0.0.1:8000")
    if options.get("api_key", "").startswith("@"):
        from quire.server.http_options import read_keys

        options["api_key"] = read_keys((options["api_key"],))[0]
    if "goodput" in options:
        options["goodput"] = tuple(options["goodput"])
    return LoadConfig(**options)


def _measure(config: LoadConfig) -> tuple[Driver, dict[str, str]]:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_drive(config))


async def _drive(config: LoadConfig) -> tuple[Driver, dict[str, str]]:
    """Send the load; returns what was sent, and to whom."""
    from quire.bench.serve.driver import Driver
    from quire.bench.serve.openai_client import OpenAIClient

    client = OpenAIClient(config)
    driver = Driver(config, client)
    try:
        if config.model is None or config.wait:
            await client.find_model(config.wait)
        with _stopping_on_ctrl_c(driver):
            async with _progress(config, driver):
                if config.warmup:
                    await driver.warm_up()
                await driver.run()
    finally:
        await client.close()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return driver, {"quire": __version__, "date": now, "url": client.root, "model": client.model or ""}


@contextmanager
def _stopping_on_ctrl_c(driver: Driver) -> Iterator[None]:
    """The first Ctrl-C ends the run and still reports, a second one ends the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        driver.stop("interrupted")
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def _progress(config: LoadConfig, driver: Driver) -> AsyncIterator[None]:
    """A progress bar on standard error during the run, if that is a terminal."""
    from quire.cli.terminal import console

    if not console(stderr=True).is_terminal:
        yield
        return
    task = asyncio.create_task(_draw(config, driver))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _draw(config: LoadConfig, driver: Driver) -> None:
    from rich.progress import BarColumn, Progress, TextColumn

    from quire.cli.terminal import console

    await asyncio.sleep(BAR_AFTER)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24))
    with Progress(*columns, console=console(stderr=True), transient=True, auto_refresh=False) as bar:
        bar.add_task("starting", total=1.0)
        while True:
            _frame(bar, config, driver)
            await asyncio.sleep(FRAME)


def _frame(bar: Progress, config: LoadConfig, driver: Driver) -> None:
    """One frame of the bar: what is done, and of how much, if that is known."""
    elapsed = time.perf_counter() - driver.began
    done, failed = len(driver.records), sum(record.error is not None for record in driver.records)
    total = config.warmup if driver.warming else config.limit if config.kind != "multi-turn" else None
    shares = [done / total] if total else []
    if config.duration is not None and not driver.warming:
        shares.append(elapsed / config.duration)
    text = f"{'warming up: ' if driver.warming else ''}{done:,}" + (f" of {total:,}" if total else "")
    text += f" done, {driver.running:,} running" + (f", {failed:,} failed" if failed else "") + f", {elapsed:,.0f} s"
    [task] = bar.task_ids
    bar.update(task, description=text, completed=min(1.0, max(shares, default=0.0)), total=1.0 if shares else None)
    bar.refresh()


def _write_json(file: IO[str], content: dict[str, Any]) -> None:
    import msgspec

    compact = msgspec.json.encode(content)
    file.write((compact if "requests" in content else msgspec.json.format(compact, indent=2)).decode() + "\n")
    file.flush()


def _plot(path: str, about: dict[str, str], text: str, driver: Driver) -> None:
    from quire.bench.serve import plot

    try:
        plot.write(path, f"quire bench serve: {about['model']}", text, driver.records)
    except OSError as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error.strerror or error}") from error
