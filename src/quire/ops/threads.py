"""How many threads of a CPU there are for the kernels to use."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")

ASIDE = 10
"""By how much nicer a thread is that works beside steps: where all cores are busy, Linux gives it a tenth of one."""


def usable_threads() -> int:
    """One a core that this process may use: what torch found (affinity, OMP_NUM_THREADS), within the group's quota."""
    quota = cpu_quota()
    return torch.get_num_threads() if quota is None else min(torch.get_num_threads(), max(1, math.ceil(quota)))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the process's control group, or one around it, has (`docker run --cpus`); None: all.

    See "cpu.max" in the kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        path = next(line[3:].strip("/") for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None  # no such system, or groups of the first version
    group, quotas = cgroups / path, []
    for each in (group, *group.parents):
        if not each.is_relative_to(cgroups):
            break
        try:
            quota, period = (each / "cpu.max").read_text().split()
            quotas.append(float(quota) / float(period))
        except (OSError, ValueError):
            continue  # the outermost has no such file; "max" is no number
    return min(quotas, default=None)


def step_aside() -> None:
    """From now on the calling thread leaves the cores to others that want them, all but a tenth of one."""
    if sys.platform == "linux":  # elsewhere that is a matter of whole processes
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + ASIDE))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """For a while, torch's own operations use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
