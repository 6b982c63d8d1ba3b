"""Runs sections in a process of their own: `python -m benchmarks.gpu.worker --records FILE --until T SECTION...`.

A section that fails is reported and the next one goes on; `__main__` reports those of a process that was lost.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.bound import Rates
from benchmarks.gpu.job import Job, OutOfTime
from benchmarks.gpu.records import Record, read

CHECKED_CHOICE = "determinism with the chosen"
"""The section that checks what the first sweeps have chosen."""

SECTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "device": ("device", "run", ()),
    **{
        f"parity {part} {dtype}": (module, "run", (*more, dtype))
        for dtype in ("bf16", "fp16")
        for part, module, more in (
            ("rows", "parity_rows", ()),
            ("products", "parity_products", ()),
            ("attention", "parity_attention", ("attention",)),
            ("heads", "parity_attention", ("heads",)),
            ("experts", "parity_experts", ()),
            ("latent", "parity_latent", ()),
            ("trees", "parity_trees", ()),
        )
    },
    "parity sampling": ("parity_sampling", "run", ()),
    **{
        f"determinism {name}": ("determinism", "run", (name,))
        for name in ("plain", "wide", "quantized", "experts", "latent", "demo")
    },
    "determinism speculation": ("determinism", "speculation", ()),
    CHECKED_CHOICE: ("determinism", "run", ("wide",)),
    "unwaited": ("unwaited", "run", ()),
    "vendor products": ("vendor", "run", ()),
    "sweep products": ("sweep_products", "run", ()),
    "sweep attention": ("sweep_attention", "run", ()),
    "sweep quantized": ("sweep_quantized", "run", ()),
    "sweep experts": ("sweep_experts", "run", ()),
    "kernels 0.6B": ("kernels", "run", ("0.6B",)),
    "kernels 14B": ("kernels", "run", ("14B",)),
    "accesses": ("accesses", "run", ()),
    "A 0.6B": ("workloads", "throughput", ("0.6B",)),
    "A 14B": ("workloads", "throughput", ("14B",)),
    "B 0.6B": ("workloads", "decodes", ("0.6B",)),
    "B 14B": ("workloads", "decodes", ("14B",)),
    "cost of determinism": ("workloads", "deterministic_cost", ()),
    "C": ("workloads", "interference", ()),
    "D": ("workloads", "shared_prefix", ()),
    "E": ("start", "run", ()),
    "F": ("sparse", "run", ()),
    "G": ("workloads", "speculation", ()),
    "G heads": ("workloads", "heads", ()),
}
"""Module, function and what it is given behind its job. A module is imported when its section runs."""

BEFORE_CHOICE = frozenset(
    name for name in SECTIONS if name.startswith(("sweep", "parity")) or name == "vendor products"
)
"""Sections that are about the constants in the sources."""

SETTLING_SECONDS = 5.0
"""Before its time is out a section stops by itself, so that it is not ended in the middle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="when their time is out, by time.monotonic")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    deadline = args.until - SETTLING_SECONDS
    for section in args.sections:
        found = read(args.records)
        rates = known_rates(found)
        if section not in BEFORE_CHOICE:
            use_constants(found)
        with tempfile.TemporaryDirectory(prefix="quire-gpu-") as workdir:
            device = "cpu" if args.rehearse else "cuda"
            run_section(Job(section, device, args.rehearse, rates, Path(workdir), args.records, deadline))


def known_rates(records: Sequence[Record]) -> Rates | None:
    """Those of the device, once its section has recorded them."""
    machines = [record for record in records if record["kind"] == "machine"]
    return Rates(machines[-1]["copy_rate"], machines[-1]["matmul_rate"]) if machines else None


def use_constants(records: Sequence[Record]) -> None:
    """Compute with the constants that the sweeps so far have found best, in place of those in the sources.

    Not with those that failed their check; later sweeps check what they choose themselves.
    """
    checks = [index for index, record in enumerate(records) if record.get("section") == CHECKED_CHOICE]
    failed = [
        index
        for index in checks
        if records[index].get("ok") is False or records[index].get("status") in ("failed", "crashed")
    ]
    for record in records[checks[-1] + 1 :] if failed else records:
        if record["kind"] == "constants":
            module = importlib.import_module(record["module"])
            for name, value in record["values"].items():
                before = getattr(module, name)
                setattr(module, name, type(before)(*value) if isinstance(value, list) else value)


def run_section(job: Job) -> None:
    """Run it, and record how it ended: "done", "out of time" or "failed"."""
    begin, status, tail = time.monotonic(), "done", ""
    module, function, arguments = SECTIONS[job.section]
    try:
        job.check_time()
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(job, *arguments)
    except OutOfTime as error:
        status, tail = "out of time", str(error)
    except Exception:  # the other sections are still worth having
        status, tail = "failed", traceback.format_exc()[-4000:]
    job.record("section", status=status, seconds=round(time.monotonic() - begin, 1), tail=tail)


if __name__ == "__main__":
    main()
