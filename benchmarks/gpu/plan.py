"""What is run, in which order, and how long each part may take.

Every section is a process of its own, since an illegal access on the device ends all that its process could still do,
and since a process can be ended when its time is out. Checks take their time to compile and time nothing, so they share
the device; whatever is timed has it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOTAL_SECONDS = 2400.0
"""For everything, unless `--seconds` says otherwise: a machine that is lent for 45 minutes has some left."""

LEAST_SECONDS = 15.0
"""A section is not begun with less: it would hardly have imported torch and found the device."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the whole.

    Attributes:
        name: see `worker.SECTIONS`.
        kind: what `--only` chooses it by.
        seconds: most that it may take, its process's start included.
        quick: `--quick` runs it too.
    """

    name: str
    kind: str
    seconds: float
    quick: bool = False


def _checks() -> tuple[Section, ...]:
    parts = ("rows", "products", "attention", "heads", "experts", "latent", "trees")
    parity = [f"parity {part} {dtype}" for part in parts for dtype in ("bf16", "fp16")]
    models = ("plain", "wide", "quantized", "experts", "latent", "demo", "speculation")
    determinism = [f"determinism {model}" for model in models]
    return (
        *(Section(name, "parity", 200, quick=True) for name in (*parity, "parity sampling")),
        *(Section(name, "determinism", 240, quick=True) for name in determinism),
        Section("unwaited", "unwaited", 120, quick=True),
    )


STEPS: tuple[tuple[Section, ...], ...] = (
    (Section("device", "device", 40, quick=True),),
    _checks(),
    (Section("vendor products", "vendor", 90),),
    (Section("sweep products", "sweep", 150),),
    (Section("sweep attention", "sweep", 100),),
    (Section("determinism with the chosen", "sweep", 120),),
    (Section("A 0.6B", "A", 60, quick=True),),
    (Section("B 0.6B", "B", 60, quick=True),),
    (Section("kernels 0.6B", "kernels", 60),),
    (Section("A 14B", "A", 100),),
    (Section("B 14B", "B", 70),),
    (Section("kernels 14B", "kernels", 60),),
    (Section("cost of determinism", "cost", 90),),
    (Section("sweep quantized", "sweep", 120),),
    (Section("sweep experts", "sweep", 100),),
    (Section("F", "F", 60),),
    (Section("G", "G", 90),),
    (Section("G heads", "G", 90),),
    (Section("C", "C", 60),),
    (Section("D", "D", 50),),
    (Section("E", "E", 90),),
    (Section("accesses", "accesses", 150),),
)
"""In the order of what one would miss most if time ran out; those of a step run side by side."""

KINDS = tuple(dict.fromkeys(section.kind for step in STEPS for section in step))


def chosen(kinds: Sequence[str] | None, quick: bool) -> list[list[Section]]:
    """The steps with the sections that were asked for; `device` is always there, since shares need its rates.

    Raises:
        ValueError: an unknown kind; the message names the known ones.
    """
    for kind in kinds or ():
        if kind not in KINDS:
            raise ValueError(f"unknown section {kind!r}; known: {', '.join(KINDS)}")
    wanted = {"device", *(kinds or KINDS)}
    steps = [[one for one in step if one.kind in wanted and (one.quick or not quick)] for step in STEPS]
    return [step for step in steps if step]
