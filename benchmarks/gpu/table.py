"""From records to Markdown: the section of `benchmarks/gpu.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.explained import as_table, explained, of

Record = Mapping[str, Any]

BEGIN, END = "<!-- begin gpu -->", "<!-- end gpu -->"

WORKLOADS = {
    "A": "A: 256 requests, prompts and outputs of 100 to 1,024 tokens",
    "B": "B: decode steps alone, requests x context; and a prompt alone",
    "C": "C: worst gap between tokens while a 16,384-token prompt arrives, against the median before",
    "D": "D: prefill with a shared prefix, against unshared prompts",
    "E": "E: from the command to the first token",
    "F": "F: of one layer alone, the experts of some rows, and latent attention of a token behind each context",
    "G": "G: decode steps with drafts of a recording, and of a head with random weights, against none; "
    "where the host waits for a step before it launches the next one, that is in its time",
    "H": "H: attention of one layer alone, with torch's SDPA over keys and values side by side beside it",
    "I": "I: products of one layer alone, with the constants in the sources, and cuBLAS beside them",
}
"""What each is, for people."""


def report(records: Sequence[Record], date: str) -> str:
    """All tables, in Markdown."""
    parts = [_machine(records, date), _figures(records), *_details(records), *explained(records)]
    parts += [_checks(records), _sections(records)]
    return "\n\n".join(part for part in parts if part)


def with_section(text: str, content: str) -> str:
    """The text with what stands between the markers replaced.

    Raises:
        ValueError: the markers are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"gpu.md has no markers {BEGIN} and {END}")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}"


def _machine(records: Sequence[Record], date: str) -> str:
    for record in of(records, "machine"):
        versions = ", ".join(
            f"{name} {record[name]}" for name in ("torch", "triton", "cuda", "python") if name in record
        )
        return (
            f"{date}: {record['device']}, compute capability {record['capability']}, "
            f"{record['memory'] / 2**30:.0f} GiB; {versions}. "
            f"Measured: copies {record['copy_rate'] / 1e12:.2f} TB/s (read + written), "
            f"bf16 products {record['matmul_rate'] / 1e12:.0f} TFLOP/s."
        )
    return f"{date}: the device could not be measured, so no share of its bound is known."


def _figures(records: Sequence[Record]) -> str:
    found = list(of(records, "figure"))
    if not found:
        return ""
    headings = ("workload", "model", "", "measured", "of the bound", "host, ms a step", "aim", "reached")
    rows = []
    for record in sorted(found, key=lambda record: record["workload"]):
        share = "" if record.get("share") is None else f"{record['share']:.0%} ({record['bound']})"
        host = f"{record['host_ms']:.2f}" if record.get("host_ms") is not None else ""
        met = {None: "", True: "yes", False: "**no**"}[record.get("met")]
        note = f" ({record['note']})" if record.get("note") else ""
        measured = f"{_number(record['value'])} {record['unit']}{note}"
        start = (record["workload"], record["model"], record["setting"])
        rows.append((*start, measured, share, host, record.get("aim") or "", met))
    known = sorted({record["workload"] for record in found})
    legend = "\n".join(f"- {WORKLOADS[name]}" for name in known)
    aims = "`of the bound`: the least time in which the device could have done these steps, over the time that they "
    aims += "took; `benchmarks/gpu/bound.py`, and of F, H and I the files of their sections, say what is counted. "
    aims += "`host`: without waiting for the device."
    return "\n\n".join(filter(None, [legend, as_table(headings, rows), aims, _cost(found)]))


def _cost(found: Sequence[Record]) -> str:
    """What deterministic=False gains, where both were measured."""
    plain = {
        (one["workload"], one["model"], one["setting"]): one for one in found if "deterministic" not in one["setting"]
    }
    lines = []
    for one in found:
        setting, separator, _ = one["setting"].rpartition("deterministic=False")
        other = plain.get((one["workload"], one["model"], setting.removesuffix(", "))) if separator else None
        if other is not None:
            rate = one["value"] / other["value"] if one["unit"] == "tok/s" else other["value"] / one["value"]
            name = f"{one['workload']} {one['model']} {setting.removesuffix(', ')}".strip()
            lines.append(f"{name} runs at {rate:.0%} of its speed")
    return f"With `deterministic=False` {' and '.join(lines)}; the aim is at most 110 %." if lines else ""


def _details(records: Sequence[Record]) -> list[str]:
    """C in milliseconds, and E phase by phase."""
    parts = []
    gaps = [record for record in of(records, "figure") if "worst_ms" in record]
    if gaps:
        names = ("median_before_ms", "median_ms", "p99_ms", "worst_ms")
        rows = [(record["setting"], *(f"{record[name]:.2f}" for name in names)) for record in gaps]
        parts.append(as_table(("C, ms between tokens", "median before", "median", "p99", "worst"), rows))
    starts = [record for record in of(records, "figure") if "phases" in record]
    if starts:
        phases = list(dict.fromkeys(phase for record in starts for phase in record["phases"]))
        rows = [(phase, *(_seconds(record["phases"].get(phase)) for record in starts)) for phase in phases]
        parts.append(as_table(("E, seconds until", *(record["setting"] for record in starts)), rows))
    return parts


def _checks(records: Sequence[Record]) -> str:
    """A row a section; each check that failed is named."""
    sections: dict[str, list[Record]] = {}
    for record in of(records, "check"):
        sections.setdefault(record["section"], []).append(record)
    if not sections:
        return ""
    rows = []
    for name, checks in sections.items():
        near = max((check["worst"] / check["tolerance"] for check in checks if check["tolerance"]), default=None)
        share = "" if near is None else f"{near:.0%}"
        rows.append((name, str(len(checks)), str(sum(check["ok"] for check in checks)), share))
    text = as_table(("checks", "run", "passed", "greatest difference, of its tolerance"), rows)
    failed = [check for checks in sections.values() for check in checks if not check["ok"]]
    lines = [
        f"- **failed**: {one['section']}: {one['name']}: {one['worst']:.3g}, allowed {one['tolerance']:.3g}"
        for one in failed
    ]
    return "\n\n".join(filter(None, [text, "\n".join(lines)]))


def _sections(records: Sequence[Record]) -> str:
    """What did not come to its end."""
    lines = []
    for record in of(records, "section"):
        if record["status"] != "done":
            last = record["tail"].strip().splitlines()[-1:] or [""]
            lines.append(
                f"- **{record['section']}: {record['status']}** after {record['seconds']:.0f} s. {last[0][:300]}"
            )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
