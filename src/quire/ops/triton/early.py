"""Launches that begin before the one before them has ended: on GPUs of compute capability 9.0 and later.

A kernel that is launched so is on the multiprocessors as soon as those of the kernel before have all said that others
may come, or ended, and waits (`gdc_wait`) until that has ended and all that it wrote is there. So starting a kernel
takes no time between two of them, and the last programs of one leave no multiprocessor idle.

Each kernel waits before it says that others may come: then what lies two kernels back has ended, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def launch_options(device: torch.device) -> dict[str, Any]:
    """Of a kernel that takes EARLY, which tells it to wait."""
    return {"EARLY": True, "launch_pdl": True} if major(device) >= 9 else {"EARLY": False}


@functools.cache
def major(device: torch.device) -> int:
    """The first part of its compute capability; 0: it is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
