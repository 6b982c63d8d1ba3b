"""What tests cost: the CPU-seconds of each, its processes' included, and what they were spent on.

`make test` ends with the costliest files. With `--costs FILE` each test is a line of that file, and the causes are
counted, too: `benchmarks/tests.py` makes the tables of `benchmarks/tests.md` of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

TICK = os.sysconf("SC_CLK_TCK")
SHOWN = 10
"""Files that the summary names."""

CAUSES = {
    "engines built": ("quire.engine.engine:Engine.__init__",),
    "steps computed": ("quire.runner.model_runner:ModelRunner.launch", "quire.runner.model_runner:LaunchedStep.wait"),
    "models made": (
        "tests.oracle:save_checkpoint",
        "tests.oracle:load_reference",
        "quire.models.random_checkpoint:write_checkpoint",
    ),
    "references computed": ("tests.oracle:reference_logits", "tests.oracle:reference_greedy"),
    "Triton interpreted": ("triton.runtime.interpreter:GridExecutor.__call__",),
}
"""Functions of the tests' own processes, by what their time is counted as. One that another calls counts alone."""


def cpu_seconds() -> float:
    """What this process, its live descendants and all that these have waited for have computed so far (Linux)."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + sum(_alive(os.getpid()))


def _alive(pid: int) -> Iterator[float]:
    """The CPU-seconds of each live descendant, with those of its own children that have ended."""
    for child in children(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b") ")[2].split()
        except OSError:
            continue  # it has ended
        yield sum(map(int, fields[11:15])) / TICK  # utime, stime, cutime, cstime
        yield from _alive(child)


def children(pid: int) -> list[int]:
    """The live children of a process; none of one that has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    except OSError:
        pass
    return found


class Causes:
    """Counts the CPU-seconds that a process's threads spend in `CAUSES`.

    Attributes:
        seconds, calls: by cause.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = threading.local()

    def watch(self) -> None:
        """Have all of them that are imported counted from now on, under whichever name a test module knows them."""
        for cause, places in CAUSES.items():
            for place in places:
                module, _, path = place.partition(":")
                if module not in sys.modules:
                    continue
                *outer, name = path.split(".")
                owner = functools.reduce(getattr, outer, importlib.import_module(module))
                real = getattr(owner, name)
                counted = self._counted(cause, real)
                setattr(owner, name, counted)
                for other in [each for each in sys.modules if each.startswith("tests.")]:
                    if not outer and getattr(sys.modules[other], name, None) is real:
                        setattr(sys.modules[other], name, counted)

    def _counted(self, cause: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*given: Any, **more: Any) -> Any:
            outer = getattr(self._inner, "seconds", 0.0)
            self._inner.seconds = 0.0
            begin = time.thread_time()
            try:
                return call(*given, **more)
            finally:
                spent = time.thread_time() - begin
                self.seconds[cause] += spent - self._inner.seconds
                self.calls[cause] += 1
                self._inner.seconds = outer + spent

        return counted


class Costs:
    """A pytest plugin: measures where tests run, and adds up where their results arrive.

    Args:
        file: where every test goes as a line of JSON, [id, CPU-seconds, seconds], followed by one that counts causes;
            "" for nowhere.
    """

    def __init__(self, file: str = "") -> None:
        self._file = file
        self._output: dict[str, Any] | None = None
        self._before = self._began = 0.0
        self._collecting = 0.0
        self._by_file: Counter[str] = Counter()
        self._causes = Causes()
        self._totals = Causes()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._output = getattr(session.config, "workeroutput", None)  # of a worker of xdist

    def pytest_collection_finish(self) -> None:
        self._before = cpu_seconds()
        self._collecting += self._before
        if self._file:
            self._causes.watch()

    def pytest_runtest_logstart(self) -> None:
        self._began = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, Any]:
        report = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.user_properties.append(("cost", (now - self._before, time.monotonic() - self._began)))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = dict(report.user_properties).get("cost")
        if self._output is not None or report.when != "teardown" or cost is None:
            return
        self._by_file[report.nodeid.partition("::")[0]] += cost[0]
        self._write([report.nodeid, *cost])

    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            counted = (self._collecting, dict(self._causes.seconds), dict(self._causes.calls))
            self._output["costs"] = counted
        else:
            self._totals.seconds += self._causes.seconds
            self._totals.calls += self._causes.calls

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        collecting, seconds, calls = getattr(node, "workeroutput", {}).get("costs", (0.0, {}, {}))
        self._collecting += collecting
        self._totals.seconds += Counter(seconds)
        self._totals.calls += Counter(calls)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._output is not None:
            return
        if self._file:
            causes = {cause: [seconds, self._totals.calls[cause]] for cause, seconds in self._totals.seconds.items()}
            self._write(["causes", {**causes, "tests collected": [self._collecting, 1]}, 0.0])
        if len(self._by_file) > 1:
            total, files = sum(self._by_file.values()), len(self._by_file)
            tell = terminalreporter.write_line
            tell(f"{total:,.0f} CPU-seconds in {files} files, {self._collecting:,.0f} to collect them; the costliest:")
            for name, seconds in self._by_file.most_common(SHOWN):
                tell(f"{seconds:9.1f}  {name}")

    def _write(self, line: list[Any]) -> None:
        if self._file:
            with open(self._file, "a") as file:
                file.write(json.dumps(line) + "\n")
