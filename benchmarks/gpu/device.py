"""Versions, the device, and what it does at best: copies within its memory, and bf16 products."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence

import torch
import triton

from benchmarks.gpu.job import Job
from benchmarks.gpu.rehearsal import device_of

COPY_BYTES = 4 * 2**30
"""Far more than any cache holds."""

SQUARE = 8192


def run(job: Job) -> None:
    """Record the machine, with its rates."""
    numbers = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if job.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        name, capability = found.name, f"{found.major}.{found.minor}"
        numbers |= {"cuda": str(torch.version.cuda)}
        job.record("machine", device=name, capability=capability, memory=found.total_memory, **numbers, **_rates(job))
    else:
        job.record("machine", device="CPU (rehearsal)", capability="", memory=0, **numbers, **_rates(job))


def _rates(job: Job) -> dict[str, float]:
    return {"copy_rate": _copy_rate(job), "matmul_rate": _matmul_rate(job)}


def _copy_rate(job: Job) -> float:
    """Bytes read and written a second."""
    source = torch.ones(COPY_BYTES // (256 if job.rehearse else 1), dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    return 2 * len(source) / best(job, lambda: target.copy_(source))


def _matmul_rate(job: Job) -> float:
    """Operations a second, on random numbers: zeros would cost less power, and so go faster."""
    square = SQUARE // (32 if job.rehearse else 1)
    x, weight = (torch.randn(square, square, device=job.device).to(torch.bfloat16) for _ in range(2))
    return 2 * square**3 / best(job, lambda: x @ weight)


def best(job: Job, call: Callable[[], object]) -> float:
    """Seconds of a call: the best of five means of ten, after one mean that does not count.

    Means, since a short burst runs at a clock that the device cannot keep.
    """
    means, turns, calls = [], 6, 10
    if job.rehearse:
        turns, calls = 2, 1
    for _ in range(turns):
        wait(job)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait(job)
        means.append((time.perf_counter() - begin) / calls)
    return min(means[1:])


def seconds_a_call(job: Job, calls: Sequence[Callable[[], object]]) -> float:
    """The mean of all calls, after one run that compiles; as one graph, so that the host takes no part."""

    def everything() -> tuple[()]:
        for call in calls:
            call()
        return ()

    everything()
    replay, _ = device_of(job).record(everything)
    return best(job, replay) / len(calls)


def wait(job: Job) -> None:
    """Until the device has done all that it was told."""
    if job.device == "cuda":
        torch.cuda.synchronize()
