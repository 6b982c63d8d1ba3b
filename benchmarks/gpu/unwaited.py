"""No step is waited for while one is launched: else the device stands still, and overlap hides nothing.

On a GPU torch itself objects (`set_sync_debug_mode`); in a rehearsal what stands for the device does.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.engines import bench
from benchmarks.gpu.job import Job, OutOfTime
from quire.core.step import StepPlan
from quire.engine.executor import Executor, PendingResult

STEPS = 24
"""Before the watch begins: what compiles and records waits for the device, and may."""


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"temperature": 0.7, "logit_bias": {5: 1.0}, "allowed_token_ids": (4, 5, 6), "min_tokens": 4},
    {"temperature": 0.0, "prompt_logprobs": 2},
)
"""What requests ask for: each has operations of its own, beside the model's."""


class Watched:
    """Stands before an executor: a launch that waits for the GPU raises."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, plan: StepPlan) -> PendingResult:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._inner.submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def close(self) -> None:
        self._inner.close()


def run(job: Job) -> None:
    """Prompts that arrive beside decodes, with all that requests may ask for, in sizes that are recorded before."""
    wide: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "cuda_graphs": "eager"}
    with bench(job, "qwen3-tiny", strict=True, async_scheduling=True, prefix_cache="off", **wide) as under:
        for temperature in (0.0, 0.8):
            under.add(40, 2 * STEPS, temperature=temperature)
        under.run(lambda: min(under.tokens.values()) >= STEPS // 2)
        if not job.rehearse:
            under.meter.inner = Watched(under.meter.inner)
        waited, what = 0, "none"
        try:
            for kind in KINDS:
                under.add(50, STEPS, **kind)
                for _ in range(3):
                    under.step()
            under.run()
        except (KeyboardInterrupt, OutOfTime):
            raise
        except BaseException as error:  # a test's stand-in raises what no program should catch
            waited, what = 1, str(error)[:500]
        job.check(f"launches that wait for the device ({what})", waited, 0)
