"""Whether cuBLASLt's products give a row the same bits in any company, with each weight of the models measured and
with the parts of it that ranks would have.

What the engine asks of wide weights at start (`quire.ops.triton.linear_vendor`), asked of all; it holds or not, neither
is a failure: where it does not, Triton's kernel multiplies.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.sweep_products import TINY, WEIGHTS
from quire.ops.triton.linear_vendor import Kind, Library


@torch.inference_mode()
def run(job: Job) -> None:
    library = Library() if job.rehearse else Library.settled()
    dtype = torch.float32 if job.rehearse else torch.bfloat16
    for weight in TINY if job.rehearse else WEIGHTS:
        job.check_time()
        numbers = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=job.device).normal_(
            0.0, 0.02
        )
        for out_dtype in {dtype, torch.float32} if weight.name == "head" else {dtype}:
            kind = Kind(weight.out_features, weight.in_features, dtype, out_dtype, biased=False)
            begin = time.perf_counter()
            holds = library.holds(kind, numbers)
            job.record("vendor", kind_of=str(kind), holds=holds, took=time.perf_counter() - begin)
