"""Engines with random weights, what is asked of them, and what their steps could have taken at best."""

from __future__ import annotations

import functools
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.bound import limit, seconds, step_cost
from benchmarks.gpu.job import Job
from benchmarks.gpu.rehearsal import engines_of
from quire.bench.ceilings import Work
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.engine.engine import Engine
from quire.engine.executor import Executor, PendingResult
from quire.models.eagle import Eagle
from quire.models.fields import Fields
from quire.models.random_checkpoint import SPREAD, RandomCheckpoint, model_config
from quire.runner.proposer import Proposer


class Meter:
    """Stands before an engine's executor, `inner`: keeps the plans, and how long the host waited for their results."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.clear()

    def clear(self) -> None:
        """Forget all so far."""
        self.plans: list[StepPlan] = []  # costed when they are asked for: that takes as long as planning did
        self.waited = 0.0

    def submit(self, plan: StepPlan) -> PendingResult:
        self.plans.append(plan)
        pending = self.inner.submit(plan)

        def wait() -> StepResult:
            begin = time.perf_counter()
            result = pending()
            self.waited += time.perf_counter() - begin
            return result

        return wait

    def close(self) -> None:
        self.inner.close()


@dataclass
class Bench:
    """An engine under measurement.

    Attributes:
        tokens, texts: how many each request has made, and which.
    """

    job: Job
    engine: Engine
    meter: Meter
    tokens: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, prompt: int | Sequence[int], output: int, **more: Any) -> int:
        """Queue a request for `output` tokens, whatever ends a text; returns its number.

        Args:
            prompt: token ids, or how many random ones.
            more: sampling parameters; greedy unless they say otherwise.
        """
        number = len(self.tokens)
        ids = self.random_tokens(prompt) if isinstance(prompt, int) else list(prompt)
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, "ignore_eos": True, **more}).resolved()
        self.tokens[number], self.texts[number] = 0, []
        self.engine.add(Request(number, ids, params, max_tokens=output, arrived=time.monotonic()))
        return number

    def random_tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self.engine.model.vocab_size), k=count)

    def step(self) -> list[int]:
        """One step; the requests that got a token.

        Raises:
            RuntimeError: a request ended with an error.
        """
        grown = []
        for update in self.engine.step():
            if update.error is not None:
                raise RuntimeError(f"request {update.request} failed: {update.error}")
            if update.tokens:
                self.tokens[update.request] += len(update.tokens)
                self.texts[update.request] += update.tokens
                grown.append(update.request)
        return grown

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left, or `until` says so. Raises OutOfTime."""
        while not self.engine.idle and not until():
            self.step()
            self.job.check_time()

    def drop_all(self) -> None:
        """End whatever runs."""
        for number in list(self.tokens):
            self.engine.abort(number)
        self.run()

    def measured(self, elapsed: float) -> dict[str, Any]:
        """What the steps since `meter.clear()` took and could have taken: fields of a figure's record.

        `share` is their least time over `elapsed` seconds, and `bound` what limits most of that least time; None where
        the device's rates are not known. `host_ms`: what the host did in a step, waiting for the device left out.
        """
        plans, rates = self.meter.plans, self.job.rates
        host = 1000 * (elapsed - self.meter.waited) / len(plans)
        fields: dict[str, Any] = {
            "seconds": elapsed,
            "steps": len(plans),
            "host_ms": host,
            "share": None,
            "bound": None,
        }
        if rates is not None:
            work = Work.of(self.engine.model, self.engine.memory_plan.kv_bytes_per_token)
            least = {"memory": 0.0, "compute": 0.0}
            for plan in plans:
                cost = step_cost(work, plan.spans)
                least[limit(cost, rates)] += seconds(cost, rates)
            fields |= {"share": sum(least.values()) / elapsed, "bound": max(least, key=lambda name: least[name])}
        return fields


def random_head(job: Job, target: str) -> Path:
    """The folder of an EAGLE head with random weights, for a model of shape `target` (see `engine`)."""
    folder = job.workdir / "head"
    folder.mkdir()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act")
    of_target = model_config(target)
    config = {name: of_target[name] for name in names} | {"model_type": "llama", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(job.device).manual_seed(0)
    tensors = {}
    for name, dimensions in Eagle.read_config(Fields(config, "a random head"), ()).shapes.items():
        tensor = torch.ones(dimensions, dtype=torch.bfloat16, device=job.device)  # norms stay so
        if len(dimensions) > 1:
            tensor.normal_(0.0, SPREAD, generator=generator)
        tensors[name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors")
    return folder


@contextmanager
def engine(
    job: Job,
    config: str | Mapping[str, Any],
    *,
    spread: float = SPREAD,
    proposer: Proposer | None = None,
    strict: bool = False,
    **options: Any,
) -> Iterator[tuple[Engine, Meter]]:
    """An engine on a random model, and what measures its steps; all memory is free again afterwards.

    Args:
        config: a shape's name (see `random_checkpoint.SHAPES`), or a config.json.
        proposer: drafts in place of what `speculative_config` names.
        strict: see `engines_of`.
    """
    fields = model_config(config) if isinstance(config, str) else dict(config)
    folder = job.workdir / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    settings = EngineConfig.from_options({"model": str(folder), "device": job.device, **options})
    weights = functools.partial(RandomCheckpoint, device=job.device, spread=spread)
    with engines_of(job, strict):
        made = Engine(settings, open_checkpoint=weights, proposer=proposer)
    made.executor = meter = Meter(made.executor)
    gc.collect()
    gc.freeze()  # as an engine's process does
    try:
        yield made, meter
    finally:
        made.close()
        del made, meter
        gc.unfreeze()
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def bench(job: Job, config: str, **options: Any) -> Iterator[Bench]:
    """An engine under measurement: see `engine`."""
    with engine(job, config, **options) as (made, meter):
        under = Bench(job, made, meter)
        del made
        try:
            yield under
        finally:
            del under.engine  # or the caller's name for the bench would keep the memory
