"""What deciding costs, without any model: steps, prefix matches, blocks, the queue; and what starting costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Options, Result, main, tell
from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.block_pool import BlockPool
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import SpanResult, StepPlan, StepResult
from quire.ops import Kernels, RaggedBatch
from quire.ops.sampling import Filters
from quire.parallel.group import OneRank
from quire.runner.device import Device
from quire.runner.device_forward import DeviceForward
from quire.runner.model_runner import ModelRunner

BLOCK = 16


def run(options: Options) -> Result:
    """One row a goal. Times are medians."""
    result = Result(("what", "measured", "worst", "goal"))
    scale = 20 if options.quick else 1
    tell("scheduler: steps, matches, blocks, queue")
    _steps(result, 256, 300 // scale)
    _host_work(result, 256, 300 // scale)
    _match(result, 32_768 // scale)
    _blocks(result, 100_000 // scale)
    _queue(result, 100_000 // scale)
    tell("scheduler: starting")
    _start(result, "import quire", "import quire", 0.3, 2 if options.quick else 5)
    _start(result, 'LLM("demo") ready', "from quire import LLM; LLM('demo')", 2.5, 1 if options.quick else 5)
    return result


def make_scheduler(num_blocks: int, **options: object) -> Scheduler:
    """A scheduler over a pool of its own."""
    config = EngineConfig(model="none", **options)
    kv = KVManager([KVGroup(num_blocks)], BLOCK, config.prefix_cache, BlockHasher(bytes(32), "benchmark"))
    return Scheduler(config, kv, config.max_model_len or 40_960)


def make_request(number: int, prompt: list[int], max_tokens: int) -> Request:
    """A greedy request."""
    return Request(number, prompt, SamplingParams(temperature=0.0), max_tokens=max_tokens)


def answer(plan: StepPlan) -> StepResult:
    """What a runner would say, without computing: some token for each span that samples."""
    return StepResult(plan.number, [SpanResult([3] if span.num_sampled else []) for span in plan.spans])


def _row(result: Result, what: str, seconds: list[float], goal: float | None, unit: str = "ms") -> None:
    factor = {"s": 1, "ms": 1e3, "us": 1e6}[unit]
    median, worst = statistics.median(seconds), max(seconds)
    result.add(
        (
            what,
            f"{median * factor:.3g} {unit}",
            f"{worst * factor:.3g} {unit}" if len(seconds) > 1 else "",
            "" if goal is None else f"< {goal * factor:g} {unit}",
        ),
        what=what,
        median_s=median,
        worst_s=worst,
        goal_s=goal,
    )


def _steps(result: Result, running: int, steps: int) -> None:
    scheduler = make_scheduler(20_000, max_num_seqs=running)
    for number in range(running):
        scheduler.add(make_request(number, list(range(number, number + 64)), steps + 10))
    while len(scheduler.running) < running:
        scheduler.commit(plan := scheduler.schedule(0.0), answer(plan), 0.0)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0)
        middle = time.perf_counter()
        told = answer(plan)
        again = time.perf_counter()
        scheduler.commit(plan, told, 0.0)
        times.append(middle - begin + time.perf_counter() - again)
    _row(result, f"`schedule` + `commit`, {running} running requests", times, 1e-3)


class NullKernels(Kernels):
    """Stands for a device's kernels: takes what they take, and computes nothing."""

    reads_spans = True

    def place(self, tokens: Tensor, span_of_row: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        return tokens, tokens, tokens

    def finite_rows(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), dtype=torch.bool)

    def sample(self, logits: Tensor, filters: Filters) -> Tensor:
        return torch.full((len(logits),), 3)


class NullModel:
    """A model with those kernels; its logits are a column wide."""

    vocab_size = 151_936
    kernels = NullKernels()
    ranks, expert_layers, expert_slots = OneRank(), {}, 0  # type: ignore[var-annotated]

    def forward(self, batches: list[RaggedBatch], kv: object, aux: object = None) -> Tensor:
        return torch.zeros(len(batches[0].token_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def _host_work(result: Result, running: int, steps: int) -> None:
    """A whole step but the device's part: schedule, send, launch the sampler, read what came back, commit."""
    scheduler = make_scheduler(40_000, max_num_seqs=running)
    model: Any = NullModel()
    kv: Any = [SimpleNamespace(block_size=BLOCK, pulse=[0])]
    device = Device()
    forward = DeviceForward(model, kv, device, running, 40_960 // BLOCK)
    runner = ModelRunner(model, kv, 1, torch.get_num_threads(), device, forward)
    for number in range(running):
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=number)
        scheduler.add(Request(number, list(range(number, number + 64)), params.resolved(), max_tokens=steps + 10))
    while len(scheduler.running) < running:
        scheduler.commit(plan := scheduler.schedule(0.0), runner.run(plan), 0.0)
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0)
        scheduler.commit(plan, runner.launch(plan).wait(), 0.0)
        times.append(time.perf_counter() - begin)
    _row(result, f"all of the host's work of a step on a GPU, {running} running, sampled", times, 1.5e-3)


def _match(result: Result, length: int) -> None:
    """Prompts that differ from one another, and from the cached one, in their last block only: nothing that was hashed
    or found for one of them serves another."""
    scheduler = make_scheduler(20_000, max_num_batched_tokens=40_960)
    prompt, differs = list(range(length)), BLOCK // 2
    scheduler.add(make_request(0, prompt, 2))
    while not scheduler.idle:
        scheduler.commit(plan := scheduler.schedule(0.0), answer(plan), 0.0)
    times: dict[str, list[float]] = {"new": [], "hashed": [], "same": []}
    for number in range(1, 12):
        other = [*prompt[:-differs], *[length + number] * differs]
        new, same = make_request(2 * number, other, 2), make_request(2 * number + 1, other, 2)
        for what, request in (("new", new), ("hashed", new), ("same", same)):
            begin = time.perf_counter()
            match = scheduler.kv.match(request)
            times[what].append(time.perf_counter() - begin)
            if match.num_blocks * BLOCK + match.partial_tokens != length - differs:
                raise RuntimeError(f"matched {match.num_blocks} blocks and {match.partial_tokens} tokens of {length}")
    _row(result, f"radix match of a new prompt of {length:,} tokens, with its block hashes", times["new"], None)
    _row(result, "of these, the match, when the block hashes have been made", times["hashed"], 2e-3)
    _row(result, "a request with the same prompt as the one before, such as another choice", times["same"], None, "us")


def _blocks(result: Result, count: int) -> None:
    pool = BlockPool(count + 1)
    begin = time.perf_counter()
    blocks = [pool.allocate() for _ in range(count)]
    middle = time.perf_counter()
    for block in blocks:
        pool.release(block)
        pool.recycle(block)
    end = time.perf_counter()
    _row(result, "allocate a block", [(middle - begin) / count], 2e-6, "us")
    _row(result, "free a block", [(end - middle) / count], 2e-6, "us")


def _queue(result: Result, length: int) -> None:
    """Constant time means: the same at the empty queue and at the long one."""
    scheduler = make_scheduler(1_000)
    requests = [make_request(number, [1, 2, 3], 4) for number in range(length + 1_000)]
    for first, name in ((0, "an empty queue"), (length, f"a queue of {length:,}")):
        for request in requests[len(scheduler.requests) : first]:
            scheduler.add(request)
        times = []
        for request in requests[first : first + 1_000]:
            begin = time.perf_counter()
            scheduler.add(request)
            times.append(time.perf_counter() - begin)
        _row(result, f"add a request to {name}", times, None, "us")


def _start(result: Result, what: str, code: str, goal: float, times: int) -> None:
    """Seconds in fresh interpreters, whose own start is not counted."""
    program = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    seconds = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout))
    _row(result, f"`{what}` in a fresh process", seconds, goal, "s")


if __name__ == "__main__":
    main(run)
