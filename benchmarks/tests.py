"""What `make test` takes, by file and by cause; with --write, as the tables of benchmarks/tests.md.

usage: python -m benchmarks.tests [--write] [--target "check test"]

It runs `make test` with every test's CPU-seconds written down (`tests/costs.py`), and looks at all processes that
come of it a few times a second: one that lives shorter than that is missed, and counted with the tests that started
it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from tests.costs import TICK, children  # noqa: E402

from benchmarks.common import machine  # noqa: E402

PAGE, COSTS = HERE / "tests.md", ROOT / "build" / "costs.jsonl"
INTERVAL = 0.25
"""Seconds between two looks at the processes."""
PF_FORKNOEXEC = 0x40
"""Of a process's flags (Linux, include/linux/sched.h): it is a fork, and has executed nothing."""
FILES = 30
"""Files that the page names."""

KINDS = {
    "pytest itself": r"-m pytest|exec\(eval\(sys\.stdin",
    "kernels compiled": r"cc1plus|/as |/ld |collect2|g\+\+|clang",
    "Chromium": r"chromium|chrome_crashpad",
    "types, lint, format": r"bin/(mypy|ruff|lint-imports)",
    "ranks": r"-m quire\.engine\.(rank|joining)",
    "servers' engines": r"-m quire\.ipc\.engine_process",
    "servers' HTTP processes": r"-m quire\.server\.http_process",
    "tokenizer workers": r"-m quire\.text\.tokenizer",
    "commands (supervisors, routers, clusters, the command line)": r"-m quire|bin/quire",
    "forks (ranks of a test's engine, servers that begin)": r"forkserver|resource_tracker",
    "other Python": r"python",
}
"""Kinds of processes, by what their command lines match first."""


@dataclass
class Seen:
    """A process: its command line, its own CPU-seconds, and whether it imported torch itself."""

    command: str
    seconds: float
    torch: bool


class Watch:
    """Looks at all descendants of a process, from a thread, until it is told to end."""

    def __init__(self, root: int) -> None:
        self.seen: dict[tuple[int, int], Seen] = {}
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> list[Seen]:
        self._ended.set()
        self._thread.join()
        return list(self.seen.values())

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            for pid in _descendants(self._root):
                self._look(pid)

    def _look(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            seconds, began = (int(fields[11]) + int(fields[12])) / TICK, int(fields[19])
            before = self.seen.get((pid, began))
            torch = before.torch if before else False
            if not torch and not int(fields[6]) & PF_FORKNOEXEC and "python" in command:
                torch = "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return  # it has ended
        self.seen[pid, began] = Seen(command or (before.command if before else ""), seconds, torch)


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def main() -> int:
    """Exit code 1 when the tests failed: then nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into tests.md")
    parser.add_argument("--target", default="test", help="what make is asked for (default: test)")
    args = parser.parse_args()
    COSTS.parent.mkdir(exist_ok=True)
    COSTS.unlink(missing_ok=True)
    begin = time.monotonic()
    with subprocess.Popen(
        ["make", *args.target.split()], cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": f"--costs {COSTS}"}
    ) as running:
        watch = Watch(running.pid)
    seconds, processes = time.monotonic() - begin, watch.end()
    if running.returncode:
        return 1
    text = page(args.target, seconds, [json.loads(line) for line in COSTS.read_text().splitlines()], processes)
    print(text)
    if args.write:
        PAGE.write_text(text, "utf-8")
    return 0


def page(target: str, seconds: float, lines: Iterable[tuple[str, float, float]], processes: list[Seen]) -> str:
    """The tables, as Markdown.

    Args:
        seconds: that all of it took. lines: of the files that `tests/costs.py` writes.
    """
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    waiting = 0.0
    for name, cost, took in lines:
        if name == "causes":
            assert isinstance(cost, dict)
            causes += Counter({cause: spent for cause, (spent, _) in cost.items()})
            calls += Counter({cause: times for cause, (_, times) in cost.items()})
            continue
        files[name.partition("::")[0]] += cost
        tests[name.partition("::")[0]] += 1
        waiting += max(0.0, took - cost)
    others = [name for name, _ in files.most_common()[FILES:]]
    kinds = _by_kind(processes)
    on = machine()
    measured = f"{time.strftime('%Y-%m-%d')}: {on['cpu']}, {os.cpu_count()} processors, Python {on['python']}"
    return f"""# What `make {target}` takes

Written by `python -m benchmarks.tests --write`, which runs it. Measured on {measured}.

**{seconds / 60:.1f} minutes**, {sum(spent for spent, _ in kinds.values()):,.0f} CPU-seconds of all processes; \
{sum(tests.values()):,} tests.

## By cause

Of the processes that tests run in:

| cause | times | CPU-seconds |
|---|--:|--:|
{_rows((cause, f"{calls[cause]:,}", f"{spent:,.0f}") for cause, spent in causes.most_common())}
| waiting for something else (seconds of one test at a time, not of a processor) | | {waiting:,.0f} |

Of all processes; {sum(one.torch for one in processes):,} of them imported torch, which takes {_import_seconds():.1f} \
CPU-seconds each:

| kind | processes | CPU-seconds |
|---|--:|--:|
{_rows((kind, f"{count:,}", f"{spent:,.0f}") for kind, (spent, count) in kinds.items())}

## By file

| the costliest files | tests | CPU-seconds |
|---|--:|--:|
{_rows((f"`{name}`", f"{tests[name]:,}", f"{spent:.1f}") for name, spent in files.most_common(FILES))}
| {max(0, len(files) - FILES)} others | {sum(tests[name] for name in others):,} \
| {sum(files[name] for name in others):.1f} |
| **all** | {sum(tests.values()):,} | {sum(files.values()):.1f} |
"""


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _by_kind(processes: Iterable[Seen]) -> dict[str, tuple[float, int]]:
    """CPU-seconds and number of processes, the costliest kind first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for one in processes:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, one.command)), "others")
        spent[kind] += one.seconds
        count[kind] += 1
    return {kind: (seconds, count[kind]) for kind, seconds in spent.most_common()}


def _import_seconds() -> float:
    """CPU-seconds that importing torch takes a process: the least of three."""
    code = "import time; import torch; print(time.process_time())"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))


if __name__ == "__main__":
    sys.exit(main())
