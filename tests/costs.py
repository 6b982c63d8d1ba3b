"""What tests cost: the CPU-seconds of each, its processes' included, and what they were spent on.

`make test` ends with the ten costliest files. `scripts/test_costs.py` has the causes counted, too, and writes
`benchmarks/tests.md`.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

TICK = os.sysconf("SC_CLK_TCK")
SHOWN = 10
"""Files that the summary names."""


def cpu_seconds() -> float:
    """What this process, its live descendants and all that these have waited for have computed so far (Linux)."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + sum(_alive(os.getpid()))


def _alive(pid: int) -> Iterator[float]:
    """The CPU-seconds of each live descendant, with those of its own children that have ended."""
    for child in _children(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b") ")[2].split()
        except OSError:
            continue
        yield sum(map(int, fields[11:15])) / TICK  # utime, stime, cutime, cstime
        yield from _alive(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    except OSError:
        pass  # it has ended
    return found


class Costs:
    """A pytest plugin: measures where tests run, and adds up where results arrive.

    Args:
        file: where every test's seconds go, a line of JSON each; "" for nowhere.
    """

    def __init__(self, file: str = "") -> None:
        self._file = file
        self._output: dict[str, float] | None = None
        self._before = 0.0
        self._by_file: dict[str, float] = defaultdict(float)
        self._collecting = 0.0

    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._output = getattr(session.config, "workeroutput", None)  # of a worker of xdist

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self._before = cpu_seconds()
        self._collecting += self._before
        if self._output is not None:
            self._output["collecting"] = self._before

    @pytest.hookimpl
    def pytest_runtest_logstart(self) -> None:
        self._began = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.user_properties.append(("cost", (now - self._before, time.monotonic() - self._began)))
            self._before = now
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._output is not None or report.when != "teardown":
            return
        for name, value in report.user_properties:
            if name == "cost":
                self._by_file[report.nodeid.partition("::")[0]] += value[0]
                if self._file:
                    with open(self._file, "a") as file:
                        file.write(json.dumps([report.nodeid, *value]) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._collecting += node.workeroutput.get("collecting", 0.0) if hasattr(node, "workeroutput") else 0.0

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self._by_file.values())
        if len(self._by_file) <= 1:
            return
        costliest = sorted(self._by_file.items(), key=lambda each: -each[1])[:SHOWN]
        lines = [f"  {seconds:7.1f}  {name}" for name, seconds in costliest]
        terminalreporter.write_line(
            f"CPU-seconds: {total:.0f} in {len(self._by_file)} files, {self._collecting:.0f} to collect them;"
            " the costliest files:"
        )
        terminalreporter.write_line("\n".join(lines))
