"""What sweeps share: each choice of constants is timed on the same cases, and the best one is what workloads use."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

from benchmarks.gpu.job import Job, OutOfTime

Choice = Mapping[str, Any]
"""Constants that differ from the sources, by name."""
Times = Mapping[Hashable, float]
"""Seconds of each case that there was time for."""


def sweep(
    job: Job,
    modules: Mapping[str, ModuleType],
    choices: Sequence[Choice],
    timed: Callable[[bool], Times],
    words: Callable[[Choice], str],
) -> None:
    """Time choices while there is time, and record what each loses against the best of every case, as a geometric mean.

    The constants that lose least are those of later sections. A choice that fails, of a compiler or for too little
    shared memory, is one choice less.

    Args:
        modules: where each constant is.
        choices: the first one is that of the sources, which must work.
        timed: times all cases; told whether the constants are those of the sources.
        words: a choice for people.
    """
    name = next(iter(modules.values())).__name__
    taken: dict[int, Times] = {}
    for index, values in enumerate(choices):
        if job.late:
            break
        try:
            with ExitStack() as changed:
                for constant, value in values.items():
                    changed.enter_context(mock.patch.object(modules[constant], constant, value))
                taken[index] = timed(index == 0)
        except OutOfTime:
            break
        except Exception as error:
            if index == 0:
                raise
            job.record("sweep", module=name, choice=words(values), failed=str(error)[-300:])
    cases = max((len(times) for times in taken.values()), default=0)
    whole = {index: times for index, times in taken.items() if cases and len(times) == cases}
    if 0 not in whole:
        return
    best = {case: min(times[case] for times in whole.values()) for case in whole[0]}
    lost = {
        index: math.exp(sum(math.log(times[case] / best[case]) for case in best) / len(best))
        for index, times in whole.items()
    }
    for index, factor in lost.items():
        job.record("sweep", module=name, choice=words(choices[index]), factor=factor)
    chosen = min(lost, key=lambda index: lost[index])
    for constant, value in choices[chosen].items():
        kept = list(value) if isinstance(value, tuple) else value
        job.record("constants", module=modules[constant].__name__, values={constant: kept}, kept=chosen == 0)


def tile_words(values: Choice) -> str:
    """A choice of tiles, and of numbers."""
    parts = [
        f"{name} {'x'.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in values.items()
    ]
    return ", ".join(parts) or "as in the sources"
