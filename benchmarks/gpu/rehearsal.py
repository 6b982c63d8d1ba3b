"""Where there is no GPU: engines on a device that works by itself, as far as they can tell.

So a rehearsal runs the lines that run on a GPU: steps are told to the device and waited for later, sizes are recorded
and replayed, kernels read spans from tensors. What stands for the device is that of the tests; kernels by themselves
are Triton's, interpreted, and within engines plain torch behind the same interface, since the interpreter takes
minutes for what is measured here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.gpu.job import Job
from quire.runner.device import Device, open_device


def device_of(job: Job) -> Device:
    """What a section works on by itself."""
    if not job.rehearse:
        return open_device(job.device)
    from tests.devices import DelayedDevice

    return DelayedDevice()


def engines_of(job: Job, strict: bool = False) -> AbstractContextManager[Any]:
    """Engines that start within run on the GPU, or in a rehearsal on what stands for it.

    Args:
        strict: it fails where it is waited for while a step is launched.
    """
    if not job.rehearse:
        return nullcontext()
    from tests.devices import SpanKernels, StrictDevice, on_device, opaque

    if strict:
        return on_device(StrictDevice(), opaque(SpanKernels()))
    return on_device(device_of(job), SpanKernels())
