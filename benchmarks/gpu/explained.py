"""Tables of what explains a figure: clocks, kernels, sweeps, and what was found of the vendor's products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

MOST_KERNELS = 6
"""Of a step, in the tables; the records have more."""

SHOWN_CHOICES = 5


def explained(records: Sequence[Record]) -> list[str]:
    """A table of each kind that there are records of."""
    return [text for text in (_kernels(records), _choices(records), _vendor(records), _clocks(records)) if text]


def _kernels(records: Sequence[Record]) -> str:
    steps: dict[tuple[str, str], list[Record]] = {}
    for record in of(records, "kernel"):
        steps.setdefault((record["model"], record["setting"]), []).append(record)
    rows = []
    for (model, setting), kernels in steps.items():
        step, busy = kernels[0]["step_us"], kernels[0]["busy_us"]
        parts = [f"{one['name'][:40]} {one['us']:.0f} ({one['count']:.0f}x)" for one in kernels[:MOST_KERNELS]]
        rows.append((f"{model}: {setting}", f"{step:.0f}", f"{busy / step:.0%}", "; ".join(parts)))
    headings = ("profiled: one step", "µs", "device busy", "µs in the kernels that take most (launches)")
    return as_table(headings, rows) if rows else ""


def _choices(records: Sequence[Record]) -> str:
    rows = []
    for module in dict.fromkeys(record["module"] for record in of(records, "sweep")):
        found = [one for one in of(records, "sweep") if one["module"] == module and "factor" in one]
        for one in sorted(found, key=lambda one: float(one["factor"]))[:SHOWN_CHOICES]:
            rows.append((module.rpartition(".")[2], one["choice"], f"{one['factor']:.3f}"))
    chosen = [
        f"{one['module'].rpartition('.')[2]}.{name}={value}"
        for one in of(records, "constants")
        if not one["kept"]
        for name, value in one["values"].items()
    ]
    said = f"The workloads were computed with {', '.join(chosen)}." if chosen else ""
    headings = ("constants of", "choice", "time, over the best of each case")
    return "\n\n".join(filter(None, [as_table(headings, rows), said])) if rows else ""


def _vendor(records: Sequence[Record]) -> str:
    words = {True: "the same", False: "not the same"}
    rows = [(one["kind_of"], words[one["holds"]], f"{one['took']:.2f} s") for one in of(records, "vendor")]
    return as_table(("cuBLASLt's product", "a row's bits in any company", "tried in"), rows) if rows else ""


def _clocks(records: Sequence[Record]) -> str:
    rows = []
    for one in of(records, "clocks"):
        sm, memory = (f"{one[f'least_{name}']:.0f} to {one[f'most_{name}']:.0f}" for name in ("sm", "memory"))
        rest = (f"{one['most_power']:.0f}", f"{one['most_temperature']:.0f}", f"{one['reasons']:#x}")
        rows.append((one["section"], sm, memory, *rest))
    headings = ("clocks, MHz", "multiprocessors", "memory", "most W", "most °C", "reasons to be lower")
    return as_table(headings, rows) if rows else ""


def as_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column flush left, the others flush right."""
    rule = ["---"] + ["--:"] * (len(headings) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, rule, *rows))


def of(records: Iterable[Record], kind: str) -> Iterable[Record]:
    """Those of a kind."""
    return (record for record in records if record["kind"] == kind)
