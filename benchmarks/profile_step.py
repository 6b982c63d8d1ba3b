"""Where a decode step's time goes: kernels, Python between them, sampling, scheduling; at 1, 8 and 32 requests.

An engine is started as ever, and its steps are timed. Then a layer that was one call becomes calls of its kernels one
by one, and a timer is put around each method of the kernels, around each product with a weight, and around a few
methods of the runner and the scheduler. A part's time is its own, without that of the parts called from it. Random
weights of Qwen3-0.6B's shape, contexts of some 150 tokens.

Beside it is what the machine could do at best: the bytes at the rate of a long sum, the operations at that of a large
product, measured before each kind of weights. `quire bench` takes the larger of the two sums for the ceiling, as if all
reading were hidden behind computing or the other way round.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Options, Result, checkpoint, main, tell, tokens
from quire import LLM, SamplingParams
from quire.bench.ceilings import Ceilings, Machine, Work, measure_machine, work_of
from quire.layers.linear import Linear
from quire.ops import Kernels

PROMPT, STEPS = 128, 16
RUNS = ((1, False), (8, False), (32, False), (32, True))
"""Requests, and whether they are sampled with temperature and top_p."""

NOT_OF_A_STEP = {"describe", "experts", "heads", "pack", "pack_coded", "quantize_groups", "threads", "whole_layer"}
"""What kernels offer beside what a step calls."""

SAMPLING = {"edit_logits", "sample", "token_scores"}
"""Which of the kernels are the sampler's."""

SUMMARY = ("products with weights", "other kernels", "sampling", "Python and the rest")


class Profile:
    """Seconds by part, each without the parts called from it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._inner = [0.0]  # of each call that is running: seconds of the calls inside

    def timed(self, group: str, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted as that part of that group (one of `SUMMARY`)."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[group, part] += took - self._inner.pop()
                self._inner[-1] += took

        return wrapper

    def watch(self, owner: Any, method: str, group: str, part: str) -> None:
        """Put a timer around a method of one object."""
        setattr(owner, method, self.timed(group, part, getattr(owner, method)))


class TimedProduct:
    """A packed weight with a timer around its product."""

    def __init__(self, weight: Any, part: str, profile: Profile) -> None:
        self._weight = weight
        self.matmul = profile.timed("products with weights", part, weight.matmul)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)


def run(options: Options) -> Result:
    """One column a kind of weights and number of requests: milliseconds of a step."""
    columns: list[str] = []
    found: list[dict[tuple[str, str], float]] = []
    raw: list[dict[str, Any]] = []
    least: list[dict[str, float]] = []
    for weights in ("bf16", "int8", "int4"):
        machine = measure_machine(torch.bfloat16, options.threads or torch.get_num_threads())
        how: dict[str, Any] = {} if weights == "bf16" else {"quantization": weights}
        for batch, sampled in RUNS if weights == "bf16" else RUNS[:-1]:
            name = f"{weights}, {batch}{' sampled' if sampled else ''}"
            tell(f"profile: {name}")
            with LLM(str(checkpoint(options)), prefix_cache="off", threads=options.threads, **how) as llm:
                plain, parts = _measure(llm, batch, sampled, 4 if options.quick else STEPS)
                least.append(_least(work_of(llm), machine, batch))
            columns.append(name)
            found.append(parts)
            flat = {f"{group}: {part}": round(seconds * 1e3, 4) for (group, part), seconds in parts.items()}
            raw.append(
                {"weights": weights, "batch": batch, "sampled": sampled, "plain_ms": plain * 1e3, "parts_ms": flat}
                | {"least_ms": {part: round(seconds * 1e3, 4) for part, seconds in least[-1].items()}}
            )
    result = Result(("ms a step", *columns), raw=raw)
    _fill(result, found, [line["plain_ms"] for line in raw])
    for part in least[0]:
        result.rows.append((part, *(f"{of_one[part] * 1e3:.2f}" for of_one in least)))
    return result


def _least(work: Work, machine: Machine, batch: int) -> dict[str, float]:
    """Seconds that a step would take at the machine's rates: what it reads, what it computes, and the ceiling."""
    cost, weights = work.step(batch, PROMPT + STEPS), work.weights_read(batch)
    rate = machine.int8_rate if work.int8_products else machine.matrix_rate
    parts = {
        "– reading weights": weights / machine.read_rate,
        "– reading keys and values": (cost.num_bytes - weights) / machine.read_rate,
        "– computing products": cost.products / rate,
        "– computing attention": cost.attention / machine.matrix_rate,
    }
    return {"**the machine's least**": Ceilings(work, machine).seconds(cost), **parts}


def _fill(result: Result, found: list[dict[tuple[str, str], float]], plain: list[float]) -> None:
    """A row a group and, below it, a row a part; the largest first."""
    for group in SUMMARY:
        parts = {part for of_one in found for (its_group, part) in of_one if its_group == group}
        sums = [sum(value for (its_group, _), value in of_one.items() if its_group == group) for of_one in found]
        result.rows.append((f"**{group}**", *(f"**{value * 1e3:.2f}**" for value in sums)))
        for part in sorted(parts, key=lambda part: -sum(of_one.get((group, part), 0.0) for of_one in found)):
            result.rows.append((f"– {part}", *(f"{of_one.get((group, part), 0.0) * 1e3:.2f}" for of_one in found)))
    result.rows.append(("**all, so divided**", *(f"{sum(of_one.values()) * 1e3:.2f}" for of_one in found)))
    result.rows.append(("**all, as it runs**", *(f"{value:.2f}" for value in plain)))


def _measure(llm: LLM, batch: int, sampled: bool, steps: int) -> tuple[float, dict[tuple[str, str], float]]:
    """Mean seconds of a decode step without timers, and its parts with them."""
    generator = random.Random(0)
    how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 1} if sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=2 * steps + 8, ignore_eos=True, **how)
    prompts = [tokens(generator, PROMPT) for _ in range(batch)]
    llm.generate(prompts, params)  # once, so that the system has handed out the cache's memory
    for prompt in prompts:
        llm.add_request(prompt, params)
    while len(llm.step()) < batch:  # until all of them decode
        pass
    _steps(llm, batch, 1)
    plain = _steps(llm, batch, steps)
    profile = instrument(llm)
    _steps(llm, batch, steps)
    return plain, {key: seconds / steps for key, seconds in profile.seconds.items()}


def _steps(llm: LLM, batch: int, count: int) -> float:
    """Mean seconds of some decode steps."""
    begin = time.perf_counter()
    for _ in range(count):
        outputs = llm.step()
        if len(outputs) != batch or any(output.finished for output in outputs):
            raise RuntimeError(f"{len(outputs)} of {batch} requests got a token: some failed; the log says why")
    return (time.perf_counter() - begin) / count


def instrument(llm: LLM) -> Profile:
    """Put timers into an engine, for the rest of its life."""
    profile = Profile()
    model, engine = llm.model, llm._engine
    runner = engine.executor._runner  # type: ignore[attr-defined]
    _time_kernels(profile, model.kernels)
    layers = model.layers
    for layer in layers:
        layer._whole = None  # its kernels are called one by one from now on
    for part in (model, *layers, *(part for layer in layers for part in (layer.attention, layer.mlp))):
        for name, value in vars(part).items():
            if isinstance(value, Linear):
                value.product = TimedProduct(value.product, name, profile)
    rest = "Python and the rest"
    for owner, method, group, part in (
        (model, "forward", rest, "between the layers' kernels"),
        (model, "logits", rest, "around the head"),
        (runner, "launch", rest, "runner"),
        (runner._forward, "batches", rest, "preparing the batch"),
        (runner.sampler, "launch", "sampling", "Python of the sampler"),
        (engine.scheduler, "schedule", rest, "scheduler"),
        (engine.scheduler, "commit", rest, "scheduler"),
        (llm, "step", rest, "engine and outputs"),
    ):
        profile.watch(owner, method, group, part)
    return profile


def _time_kernels(profile: Profile, kernels: Kernels) -> None:
    """A timer around each kernel; those of sampling are a group of their own."""
    for name in dir(type(kernels)):
        if name.startswith("_") or name in NOT_OF_A_STEP or not callable(getattr(kernels, name)):
            continue
        profile.watch(kernels, name, "sampling" if name in SAMPLING else "other kernels", name)


if __name__ == "__main__":
    main(run)
