"""E: time from the command to the first token, and where it goes.

The model lies in a file, as a user's does. The command is a process that makes an `LLM` and asks it for a token; the
first run compiles Triton's kernels, the others find them compiled, as every start after a machine's first does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Job, OutOfTime
from benchmarks.gpu.workloads import figure, shape
from quire.models.random_checkpoint import random_checkpoint

WARM_STARTS = 2
"""One in a rehearsal."""

READY_SECONDS = 10.0
"""A 0.6B model should be ready this soon, with files and kernels warm."""


def run(job: Job) -> None:
    """One cold start, then some warm ones, of which the fastest counts."""
    with random_checkpoint(shape(job, "0.6B"), str(job.workdir)) as folder:
        cache = job.workdir / "triton"
        cold = first_token(job, folder, cache)
        figure(job, "E", "0.6B", "kernels not compiled yet", cold["first token"], "s", phases=cold)
        starts = [first_token(job, folder, cache) for _ in range(1 if job.rehearse else WARM_STARTS)]
    warm = min(starts, key=lambda start: start["first token"])
    aim: dict[str, Any] = {"aim": f"at most {READY_SECONDS:g}", "met": warm["first token"] <= READY_SECONDS}
    figure(job, "E", "0.6B", "kernels compiled before", warm["first token"], "s", phases=warm, **aim)


def first_token(job: Job, folder: Path, cache: Path) -> dict[str, float]:
    """When each phase of a start had begun, and when the first token was there; seconds from the command on.

    Raises:
        RuntimeError: the process failed.
        OutOfTime: there is none left for it.
    """
    job.check_time()
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.gpu.first_token", str(folder), job.device, str(time.monotonic())]
    seconds = max(1.0, job.deadline - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise OutOfTime(f"{job.section}: no first token after {seconds:.0f} s, when its time was over") from error
    if done.returncode:
        raise RuntimeError(f"the start failed:\n{done.stderr[-4000:]}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phases
