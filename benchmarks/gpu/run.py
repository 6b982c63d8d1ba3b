"""Starts the sections' processes, ends them when their time is out, and keeps the tables up to date meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import clocks
from benchmarks.gpu.plan import LEAST_SECONDS, Section
from benchmarks.gpu.records import append, read

ROOT = Path(__file__).resolve().parents[2]

GRACE_SECONDS = 3.0
"""What a process may take beyond its time before it is ended."""

LOOK_SECONDS = 0.25
"""Between two looks at what runs."""


@dataclass
class Process:
    """One that runs sections.

    Attributes:
        deadline: when it is ended, on the clock of `time.monotonic`.
        log: what it prints.
    """

    sections: Sequence[str]
    process: subprocess.Popen[bytes]
    began: float
    deadline: float
    log: Path


@dataclass
class Run:
    """Runs sections, each in a process of its own.

    Attributes:
        file: the records, to which every process appends as results come.
        scratch: a folder of its own.
        deadline: of everything, on the clock of `time.monotonic`.
        ended: called whenever a process has ended, and after each step: whatever comes later may be cut off.
    """

    file: Path
    scratch: Path
    environment: dict[str, str]
    rehearse: bool
    deadline: float
    ended: Callable[[], None] = field(default=lambda: None)

    def everything(self, steps: Sequence[Sequence[Section]]) -> list[dict[str, Any]]:
        """Run step after step, without the sections that an earlier run has done; all that was recorded."""
        done = {record["section"] for record in self.records() if record["kind"] == "section"}
        for step in steps:
            todo = [section for section in step if section.name not in done]
            if not todo:
                continue
            left = self.deadline - time.monotonic()
            if left < LEAST_SECONDS:
                for section in todo:
                    self._record(section.name, "skipped", 0.0, "the time for everything was over")
                continue
            seconds = {section.name: left if self.rehearse else section.seconds for section in todo}
            print(f"{', '.join(seconds)}: at most {min(left, max(seconds.values())):.0f} s each", flush=True)
            # A rehearsal is one process: the point is the lines that run, not how.
            self.side_by_side([list(seconds)] if self.rehearse else [[name] for name in seconds], seconds)
            self.ended()
        return self.records()

    def records(self) -> list[dict[str, Any]]:
        """All so far."""
        return read(self.file)

    def side_by_side(self, processes: Sequence[Sequence[str]], seconds: dict[str, float]) -> None:
        """Run each list of sections in a process of its own, as many at once as there are cores for.

        Compiling takes three quarters of a core each; where one process is alone, what it measures has the device.
        """
        cores = os.cpu_count() or 1
        width = min(len(processes), max(1, cores * 3 // 4))
        threads = 1 if self.rehearse else max(1, cores // width)  # the references compute on the CPU
        environment = self.environment | {"OMP_NUM_THREADS": str(threads)}
        todo, running = list(processes), list[Process]()
        looks = clocks.Looks() if len(processes) == 1 and not self.rehearse else None
        try:
            while todo or running:
                while todo and len(running) < width:
                    if (one := self._start(todo.pop(0), seconds, environment)) is not None:
                        running.append(one)
                for one in [one for one in running if self._over(one)]:
                    running.remove(one)
                    self._ended(one)
                    self.ended()
                if looks:
                    looks.look()
                time.sleep(LOOK_SECONDS)
        finally:  # Ctrl-C does not reach them
            for one in running:
                end(one.process)
        if looks and looks.found:
            append(self.file, {"kind": "clocks", "section": processes[0][0], **looks.found})

    def command(self, names: Sequence[str], seconds: float) -> list[str]:
        """That of a process."""
        command = [sys.executable, "-m", "benchmarks.gpu.worker", *names, "--records", str(self.file)]
        until = time.monotonic() + seconds  # on a clock that all processes share, since importing torch takes some
        return [*command, "--until", str(until), *(["--rehearse"] if self.rehearse else [])]

    def _start(self, names: Sequence[str], seconds: dict[str, float], environment: dict[str, str]) -> Process | None:
        """None: there is no time for it any more, which is recorded."""
        now = time.monotonic()
        allowed = min(max(seconds[name] for name in names), self.deadline - now)
        if allowed < LEAST_SECONDS and allowed < max(seconds[name] for name in names):
            for name in names:
                self._record(name, "skipped", 0.0, "the time for everything was over")
            return None
        log = self.scratch / f"log of {names[0]}"
        process = start(self.command(names, allowed), environment, log)
        return Process(names, process, now, now + allowed + GRACE_SECONDS, log)

    @staticmethod
    def _over(one: Process) -> bool:
        return one.process.poll() is not None or time.monotonic() >= one.deadline

    def _ended(self, one: Process) -> None:
        """Print how its sections ended; record it for those that could not do it themselves."""
        lost = "out of time" if one.process.poll() is None else "crashed"
        end(one.process)  # with whatever it has started
        taken, log = time.monotonic() - one.began, one.log.read_text("utf-8", "replace")[-4000:]
        found = {record["section"]: record for record in self.records() if record["kind"] == "section"}
        for name in one.sections:
            record = found.get(name) or self._record(name, lost, taken, log)
            print(f"    {name}: {record['status']}, {record['seconds']:.0f} s", flush=True)
            if record["status"] != "done":
                print(record["tail"], flush=True)

    def _record(self, name: str, status: str, seconds: float, tail: str) -> dict[str, Any]:
        record = {"kind": "section", "section": name, "status": status, "seconds": round(seconds, 1), "tail": tail}
        append(self.file, record)
        return record


def start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own, and writes what it prints into a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it has started there."""
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
