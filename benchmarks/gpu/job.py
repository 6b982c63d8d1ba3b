"""What a section is given: where it runs, how long it may take, and where its results go."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.bound import Rates


class OutOfTime(Exception):
    """The section's time is over; what it has recorded stands."""


@dataclass(frozen=True)
class Job:
    """A section's surroundings.

    Attributes:
        section: its name.
        device: "cuda", or "cpu" in a rehearsal.
        rehearse: tiny shapes on a CPU, to try the harness itself; figures mean nothing.
        rates: of the device; None where they could not be measured.
        workdir: an empty folder for files.
        records: the file to which results go at once, so that nothing is lost with the process.
        deadline: on the clock of `time.monotonic`.
    """

    section: str
    device: str
    rehearse: bool
    rates: Rates | None
    workdir: Path
    records: Path
    deadline: float

    def record(self, kind: str, **fields: Any) -> None:
        """One result: "check", "figure", "kernel", "sweep", "constants", "machine" or "section"."""
        records.append(self.records, {"kind": kind, "section": self.section, **fields})

    def check(self, name: str, worst: float, tolerance: float) -> None:
        """The result of a check: passed where `worst` is at most the tolerance (a NaN is not)."""
        self.record("check", name=name, worst=worst, tolerance=tolerance, ok=bool(worst <= tolerance))

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def check_time(self) -> None:
        """Raises OutOfTime once the deadline has passed."""
        if self.late:
            raise OutOfTime(f"{self.section}: its time is over")
