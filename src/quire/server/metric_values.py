"""Counters, gauges and histograms of several processes, each in a small file of doubles that the others can read.

All series are known beforehand (label values come from closed sets), so a file is one fixed array: counting is an
addition in mapped memory, the values of all processes are the sum of the arrays, and those of dead processes remain.
`prometheus_client`'s own multi-process mode does the same with names in the files; it is configured by an environment
variable at import, and counting takes several times as long.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import mmap
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire import child
from quire.version import __version__

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "http-"
_PID, _BEGAN = 0, 1  # the first cells of a file: whose it is, and when that process began, since ids are used again


@dataclass(frozen=True)
class Family:
    """One metric.

    Attributes:
        name: without the `_total` of counters.
        labels: the values of each label; the last one stands for all others.
        buckets: upper bounds of a histogram, ascending; empty for a counter or gauge.
        sparse: series that are zero are left out.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge"] = "counter"
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    sparse: bool = False

    @property
    def series(self) -> list[tuple[str, ...]]:
        """Every combination of label values."""
        return list(itertools.product(*self.labels.values()))

    @property
    def size(self) -> int:
        """Number of cells: `width` per series."""
        return self.width * len(self.series)

    @property
    def width(self) -> int:
        """Cells per series: one; for a histogram, one per bucket, one for larger values, and the sum."""
        return len(self.buckets) + 2 if self.buckets else 1


class Layout:
    """The place of each series in the array of cells."""

    def __init__(self, *families: Family) -> None:
        self.families = {family.name: family for family in families}
        self.offsets: dict[str, int] = {}
        self.cells: dict[tuple[str, ...], int] = {}  # (name, *label values)
        self.size = _BEGAN + 1
        for family in families:
            self.offsets[family.name] = self.size
            for index, values in enumerate(family.series):
                self.cells[family.name, *values] = self.size + index * family.width
            self.size += family.size

    def cell(self, name: str, values: Sequence[str]) -> int:
        """The cell of a series; a label value that is not in its set counts as the last one of the set."""
        found = self.cells.get((name, *values))
        if found is not None:
            return found
        sets = self.families[name].labels.values()
        return self.cells[name, *(v if v in known else known[-1] for v, known in zip(values, sets, strict=True))]

    def families_of(self, cells: Sequence[float], labels_of: Callable[[str], Mapping[str, str]]) -> Iterator[Metric]:
        """The metrics of an array of cells; `labels_of` returns a metric's constant labels."""
        for name, family in self.families.items():
            first, constant = self.offsets[name], labels_of(name)
            own = cells[first : first + family.size]
            names, values = [*constant, *family.labels], list(constant.values())
            if family.buckets:
                histogram = HistogramMetricFamily(name, family.help, labels=names)
                bounds = [*map(str, family.buckets), "+Inf"]
                for series, (*counts, total) in zip(family.series, _pieces(own, family.width), strict=True):
                    if any(counts) or not family.sparse:
                        up_to = list(zip(bounds, itertools.accumulate(counts), strict=True))
                        histogram.add_metric([*values, *series], up_to, total)
                yield histogram
                continue
            metric = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
                name, family.help, labels=names
            )
            for series, value in zip(family.series, own, strict=True):
                if value or not family.sparse:
                    metric.add_metric([*values, *series], value)
            yield metric


def _pieces(cells: Sequence[float], width: int) -> Iterator[Sequence[float]]:
    return (cells[first : first + width] for first in range(0, len(cells), width))


class Histogram:
    """One histogram's cells."""

    __slots__ = ("_bounds", "_cells")

    def __init__(self, bounds: tuple[float, ...], cells: memoryview[float]) -> None:
        self._bounds, self._cells = bounds, cells

    def observe(self, value: float, count: int = 1) -> None:
        """Observe a value `count` times. NaN, infinity and negative values count as zero."""
        if not 0 <= value < math.inf:
            value = 0.0
        self._cells[bisect_left(self._bounds, value)] += count
        self._cells[-1] += value * count


class Values:
    """This process's cells: in memory, or in a file in `folder` that only this user can read."""

    def __init__(self, layout: Layout, folder: Path | None, worker: int) -> None:
        self._layout = layout
        self.path = None if folder is None else folder / f"{PREFIX}{worker}.values"
        self._memory: mmap.mmap | bytearray = bytearray(8 * layout.size)
        if self.path is not None:
            try:
                self._memory = _map_file(self.path, 8 * layout.size)
            except OSError as error:
                logger.warning("metrics of this process are not added to the others': %s", error.strerror or error)
        self.cells = memoryview(self._memory).cast("d")
        self.cells[_PID], self.cells[_BEGAN] = os.getpid(), child.began(os.getpid())
        for family in layout.families.values():
            if family.kind == "gauge":  # from an earlier process with this number
                for index in range(family.size):
                    self.cells[layout.offsets[family.name] + index] = 0.0
        self._histograms = {
            (name, *series): Histogram(family.buckets, self._at(layout.cell(name, series), family.width))
            for name, family in layout.families.items()
            if family.buckets
            for series in family.series
        }

    def count(self, name: str, *labels: str) -> None:
        """Add one to a counter's series."""
        self.cells[self._layout.cell(name, labels)] += 1

    def cell(self, name: str) -> memoryview[float]:
        """All cells of a metric, to be written."""
        return self._at(self._layout.offsets[name], self._layout.families[name].size)

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self._histograms[name, *labels]

    def _at(self, first: int, width: int) -> memoryview[float]:
        return self.cells[first : first + width]


def _map_file(path: Path, size: int) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        present = os.fstat(descriptor).st_size
        missing = bytes(max(0, size - present))
        if os.pwrite(descriptor, missing, present) < len(missing):  # a hole would kill it later, on a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def read_all(layout: Layout, folder: Path | None, own: Values) -> tuple[list[float], list[int]]:
    """The sums over all processes (of gauges, over those that are alive), and the ids of those that are alive."""
    arrays = [array("d", own.cells)]
    for path in sorted(folder.glob(f"{PREFIX}*.values")) if folder else []:
        if path != own.path and (cells := _read(path, layout.size)):
            arrays.append(cells)
    total, pids = [0.0] * layout.size, []
    for cells in arrays:
        pid = int(cells[_PID]) if 0 < cells[_PID] < 2**31 else 0
        if _lives(pid) and child.began(pid) == cells[_BEGAN]:
            pids.append(pid)
        else:
            _clear_gauges(layout, cells)
        total = [a + b for a, b in zip(total, cells, strict=True)]
    return total, pids


class _Scrape(Collector):
    """The families made for one scrape."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> tuple[bytes, str]:
    """These metrics and Quire's version in Prometheus' text format, and its content type."""
    build = GaugeMetricFamily("quire:build_info", "Always 1; the version is a label.", labels=["version"])
    build.add_metric([__version__], 1.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape([*families, build]))
    return generate_latest(registry), CONTENT_TYPE


def _read(path: Path, size: int) -> array[float] | None:
    """A process's cells; None for a file that is just being created, or is gone."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if len(content) == 8 * size:
            return array("d", content)
    return None


def _clear_gauges(layout: Layout, cells: array[float]) -> None:
    for name, family in layout.families.items():
        if family.kind == "gauge":
            first = layout.offsets[name]
            cells[first : first + family.size] = array("d", bytes(8 * family.size))


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
