"""H: attention of one layer alone, torch's beside ours, and which sizes of splits and tiles are best for ours.

torch's `scaled_dot_product_attention` reads keys and values that lie side by side, ours finds them by block tables.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.bound import limit, seconds
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Step
from benchmarks.gpu.sweep import Choice, sweep
from benchmarks.gpu.workloads import figure
from quire.bench.ceilings import Cost
from quire.ops import KVCache
from quire.ops.triton import attention, splits
from quire.ops.triton.kernels import TritonKernels

DECODE_AIM = 0.85
"""Share of the copy rate at which decodes should read keys and values."""


class Case(NamedTuple):
    """Spans of a layer: `rows` of each of `batch` requests, the last ones of `context` tokens."""

    model: str
    heads: int
    kv_heads: int
    batch: int
    context: int
    rows: int = 1


CASES = (
    Case("0.6B", 16, 8, 8, 1024),
    Case("0.6B", 16, 8, 64, 1024),
    Case("0.6B", 16, 8, 256, 1024),
    Case("0.6B", 16, 8, 8, 8192),
    Case("0.6B", 16, 8, 1, 32768),
    Case("14B", 40, 8, 64, 1024),
    Case("14B", 40, 8, 1, 8192, 8192),
)
TINY = (Case("0.6B", 4, 2, 2, 40), Case("14B", 4, 2, 1, 24, 24))
HEAD_DIM = 128
LAYERS = 4
"""Of the cache, gone through in turn."""

CHOICES: tuple[dict[str, int], ...] = (
    {},
    {"SPLIT": 256},
    {"SPLIT": 1024},
    {"WORKERS": 528},
    {"RESIDENT": 132},
    {"RESIDENT": 528},
    {"TILE_BYTES": 1 << 13},
    {"TILE_BYTES": 1 << 15},
)
"""What differs from the sources."""

MODULES: dict[str, ModuleType] = {
    "TILE_BYTES": attention,
    **dict.fromkeys(("SPLIT", "WORKERS", "RESIDENT"), splits),
}


@torch.inference_mode()
def run(job: Job) -> None:
    """All cases with the constants of the sources, beside torch; then other constants, as many as there is time for."""
    sweep(job, MODULES, CHOICES[:3] if job.rehearse else CHOICES, functools.partial(_timed, job), _words)


def _timed(job: Job, sources: bool) -> dict[Case, float]:
    """Seconds of each case that there was time for."""
    times: dict[Case, float] = {}
    for case in TINY if job.rehearse else CASES:
        if job.late:
            break
        times[case] = _one(job, case, beside=sources)
    return times


def _one(job: Job, case: Case, beside: bool) -> float:
    """Seconds of a layer."""
    dtype = torch.float16 if job.rehearse else torch.bfloat16
    kernels = TritonKernels(job.device, deterministic=True)
    step = Step([(case.context - case.rows, case.rows)] * case.batch, 16)
    head_dim = 16 if job.rehearse else HEAD_DIM
    kv = KVCache(step.num_blocks, LAYERS, case.kv_heads, head_dim, 16, dtype, device=job.device)
    kv.numbers.normal_()
    q = torch.randn(case.batch * case.rows, case.heads, head_dim, device=job.device).to(dtype)
    attend = functools.partial(kernels.attend, q, kv, step.on_device(job.device), scale=head_dim**-0.5, window=None)
    took = seconds_a_call(job, [functools.partial(attend, layer=layer) for layer in range(LAYERS)])
    if beside:
        _figure(job, case, took, _torch(job, case, q))
    return took


def _torch(job: Job, case: Case, q: torch.Tensor) -> float:
    """Seconds that torch takes, with keys and values side by side."""
    head_dim = q.shape[-1]
    queries = q.view(case.batch, case.rows, case.heads, head_dim).transpose(1, 2)
    shape = case.batch, case.kv_heads, case.context, head_dim
    sides = [[torch.randn(shape, device=job.device).to(q.dtype) for _ in range(2)] for _ in range(2)]
    call = functools.partial(
        F.scaled_dot_product_attention, queries, is_causal=case.rows > 1, enable_gqa=case.heads != case.kv_heads
    )
    return seconds_a_call(job, [functools.partial(call, k, v) for k, v in sides])


def _figure(job: Job, case: Case, took: float, beside: float) -> None:
    decode, head_dim = case.rows == 1, HEAD_DIM
    fields: dict[str, Any] = {"seconds": took, "share": None, "bound": None, "beside_us": 1e6 * beside}
    if job.rates is not None:
        first = case.context - case.rows
        pairs = case.batch * (case.rows * first + case.rows * (case.rows + 1) // 2)
        cost = Cost(case.batch * case.context * case.kv_heads * head_dim * 4, 0, 4 * pairs * case.heads * head_dim)
        share = seconds(cost, job.rates) / took
        fields |= {"share": share, "bound": limit(cost, job.rates)}
        if decode and case.batch * case.context >= 64 * 1024:  # fewer keys are read in the time of a launch
            fields |= {"aim": f"{DECODE_AIM:.0%} of the bound", "met": share >= DECODE_AIM}
    fields["note"] = f"torch's SDPA {1e6 * beside:.3g}"
    what = f"decodes {case.batch} x {case.context:,}" if decode else f"prompt of {case.rows:,}"
    figure(job, "H", case.model, what, 1e6 * took, "µs a layer", **fields)


def _words(values: Choice) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "as in the sources"
