"""One case of each of the larger kernels under NVIDIA's compute-sanitizer: no access beyond what is theirs.

python -m benchmarks.gpu.accesses DEVICE      # the case by itself
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.job import Job, OutOfTime
from benchmarks.gpu.parity import Step, fp8_weight
from quire.ops import CodedWeight, KVCache
from quire.ops.coded import Scheme
from quire.ops.triton.kernels import TritonKernels

TOOL = "compute-sanitizer"
USUAL = Path("/usr/local/cuda/bin")


def run(job: Job) -> None:
    """Record how many errors the tool has found; where there is no tool, the case runs by itself, and that is said."""
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=str(USUAL))
    command = [sys.executable, "-m", "benchmarks.gpu.accesses", job.device]
    watched = [tool, "--tool", "memcheck", "--print-limit", "5"] if tool and not job.rehearse else []
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor an allocation, whose end is seen
    try:
        done = subprocess.run(
            [*watched, *command],
            capture_output=True,
            text=True,
            env=environment,
            timeout=max(1.0, job.deadline - time.monotonic()),
        )
    except subprocess.TimeoutExpired as error:
        raise OutOfTime(f"{job.section}: the tool was not done when its time was over") from error
    text = done.stdout + done.stderr
    if not watched:
        job.check("kernels that fail, without a tool that watches them", float(done.returncode != 0), 0)
        return
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if summary is None or (done.returncode and summary[1] == "0"):
        raise RuntimeError(f"{TOOL} ended with {done.returncode}:\n{text[-3000:]}")
    job.check(f"errors that {TOOL} has found{': ' + text[:300] if summary[1] != '0' else ''}", int(summary[1]), 0)


@torch.inference_mode()
def case(device: str) -> None:
    """Attention of a decode and a prompt, a dense, an int8 and an fp8 product of 1 and 70 rows, and a norm."""
    kernels = TritonKernels(device, deterministic=True)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    step = Step([(20, 1), (0, 37)], 16, pad_rows=2, pad_spans=1)
    kv = KVCache(step.num_blocks, 1, 2, 64, 16, dtype, device=device)
    kv.numbers.normal_()
    q = torch.randn(step.rows + 2, 4, 64, device=device).to(dtype)
    kernels.attend(q, kv, step.on_device(device), layer=0, scale=0.125, window=None)
    weight = torch.randn(200, 520, device=device).to(dtype)
    products = [kernels.pack([weight])]
    codes = torch.randint(-127, 128, (200, 520), dtype=torch.int8)
    products.append(kernels.pack_coded([CodedWeight(Scheme("W8", 8, 0), codes, factors=torch.ones(200))]))
    products.append(kernels.pack_fp8([fp8_weight(200, 520)], dtype))
    for rows in (1, 70):
        for product in products:
            product.matmul(torch.randn(rows, 520, device=device).to(dtype))
    kernels.rms_norm(torch.randn(3, 520, device=device).to(dtype), torch.ones(520, device=device, dtype=dtype), 1e-6)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    case(sys.argv[1])
