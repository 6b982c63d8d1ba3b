"""Where the time of a step goes: the device's time by kernel, from torch's profiler.

Recorded are the kernels that take most, in µs a step, how often each runs, what all take together, and how long a step
took by the clock without the profiler, which makes the first graphs that are replayed under it milliseconds longer. The
difference is time in which the device stood still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.device import wait
from benchmarks.gpu.engines import Bench, bench
from benchmarks.gpu.job import Job
from benchmarks.gpu.workloads import MORE_THAN_ENOUGH, WARM_STEPS, shape, sizes

STEPS = 16
MOST = 14
"""Kernels that are recorded of a step."""
PROMPT = 2048


def run(job: Job, model: str) -> None:
    """Decodes of B's batches, and a prompt."""
    size, cases = sizes(job), dict(sizes(job).decodes)[model]
    prompt = size.prompt if job.rehearse else PROMPT
    with bench(
        job, shape(job, model), prefix_cache="off", max_num_seqs=max(16, *(batch for batch, _ in cases))
    ) as under:
        for batch, context in cases:
            _decodes(under, model, batch, context, f"{batch} x {context:,}")
        for _ in range(2):
            _prefill(under, prompt)
        _profiled(under, model, f"prefill of {prompt:,}", 1, partial(_prefill, under, prompt))


def _prefill(under: Bench, prompt: int) -> None:
    under.add(prompt, 1)
    under.run()


def _decodes(under: Bench, model: str, batch: int, context: int, setting: str) -> None:
    mine = [under.add(context, MORE_THAN_ENOUGH) for _ in range(batch)]
    under.run(lambda: min(under.tokens[number] for number in mine) >= WARM_STEPS)

    def steps() -> None:
        for _ in range(STEPS):
            under.step()

    _profiled(under, model, setting, STEPS, steps)
    under.drop_all()


def _profiled(under: Bench, model: str, setting: str, steps: int, run: Callable[[], None]) -> None:
    job = under.job
    job.check_time()
    kind = ProfilerActivity.CPU if job.rehearse else ProfilerActivity.CUDA
    wait(job)
    begin = time.perf_counter()
    run()
    wait(job)
    elapsed = time.perf_counter() - begin
    with profile(activities=[kind]) as profiler:
        run()
        wait(job)
    found = []
    for event in profiler.key_averages():
        took = event.self_cpu_time_total if job.rehearse else event.self_device_time_total
        if took > 0 and (job.rehearse or event.device_type == torch.autograd.DeviceType.CUDA):
            found.append((took / steps, event.count / steps, event.key))
    found.sort(reverse=True)
    busy = sum(took for took, _, _ in found)
    step = {"model": model, "setting": setting, "step_us": 1e6 * elapsed / steps, "busy_us": busy}
    for took, count, name in found[:MOST]:
        job.record("kernel", name=name[:120], us=took, count=count, **step)
