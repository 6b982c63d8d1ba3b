"""F: experts and latent attention of one layer alone, each against what the device allows.

Calls are recorded as a graph, as the engine records its steps, and repeated. They read different experts, and
different layers of the cache, so that no cache of the device holds what the next call reads.

What is counted, for `bound.seconds`:
- **experts**: bytes of the weights of those that at least one row chose; operations, 6 * hidden * inner for each pair
  of a row and one of its experts;
- **latent attention**: bytes of the cache's rows of each context, which serve all heads; operations,
  2 * heads * (row + latent) for each position. Mapping queries into the latent space and results out of it is left out.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bound import limit, seconds
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Step
from benchmarks.gpu.workloads import figure
from quire.bench.ceilings import Cost
from quire.ops import KVCache
from quire.ops.triton.kernels import TritonKernels


class Layer(NamedTuple):
    """A layer's experts."""

    model: str
    experts: int
    top_k: int
    hidden: int
    inner: int


class Sizes(NamedTuple):
    """How large it is.

    Attributes:
        layers, rows: of the experts.
        calls: of one graph.
        heads: of latent attention, by model.
        batches, context, latent, rope: of its decodes.
        cache_layers: whose attention is one graph.
    """

    layers: tuple[Layer, ...] = (
        Layer("Qwen3-30B-A3B", 128, 8, 2048, 768),
        Layer("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
    )
    rows: tuple[int, ...] = (1, 8, 32, 4096)
    calls: int = 16
    heads: tuple[tuple[str, int], ...] = (("DeepSeek-V2-Lite", 16), ("DeepSeek-V3", 128))
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 8192
    latent: int = 512
    rope: int = 64
    cache_layers: int = 16


TINY = Sizes(
    layers=(Layer("Qwen3-30B-A3B", 4, 2, 64, 32), Layer("DeepSeek-V2-Lite", 4, 2, 64, 32)),
    rows=(1, 3),
    calls=2,
    heads=(("DeepSeek-V2-Lite", 2), ("DeepSeek-V3", 4)),
    batches=(1, 2),
    context=24,
    latent=32,
    rope=8,
    cache_layers=2,
)
"""For a rehearsal."""


def run(job: Job) -> None:
    """Experts for few rows and for many, then latent attention of decodes."""
    size = TINY if job.rehearse else Sizes()
    dtype = torch.float16 if job.rehearse else torch.bfloat16  # Triton's interpreter cannot multiply the latter
    for layer in size.layers:
        _experts(job, size, layer, dtype)
    for batch in size.batches:
        _latent(job, size, batch, dtype)


@torch.inference_mode()
def _experts(job: Job, size: Sizes, layer: Layer, dtype: torch.dtype) -> None:
    kernels = TritonKernels(job.device)
    shapes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
    gate_up, down = (torch.empty(layer.experts, *shape, dtype=dtype, device=job.device) for shape in shapes)
    experts = kernels.experts(*([kernels.pack([one]) for one in all_.normal_(0.0, 0.02)] for all_ in (gate_up, down)))
    for rows in size.rows:
        job.check_time()
        x = torch.randn(rows, layer.hidden, device=job.device).to(dtype)
        generator = torch.Generator(job.device).manual_seed(rows)
        chosen_each = [chosen(layer, rows, generator) for _ in range(size.calls)]
        weights = torch.full((rows, layer.top_k), 1 / layer.top_k, device=job.device)
        took = seconds_a_call(job, [functools.partial(experts, x, ids, weights) for ids in chosen_each])
        read = sum(len(ids.unique()) for ids in chosen_each) / size.calls
        numbers = 3 * layer.hidden * layer.inner
        cost = Cost(round(read * numbers * dtype.itemsize), 2 * rows * layer.top_k * numbers, 0)
        _figure(job, layer.model, f"experts, rows: {rows:,}", took, cost)


def chosen(layer: Layer, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Random experts of each row, [rows, top_k]."""
    scores = torch.rand(rows, layer.experts, generator=generator, device=generator.device)
    return scores.topk(layer.top_k, dim=1).indices.sort(dim=1).values


@torch.inference_mode()
def _latent(job: Job, size: Sizes, batch: int, dtype: torch.dtype) -> None:
    """A token behind each of some contexts, whose rows lie anywhere."""
    kernels, row, width = TritonKernels(job.device), size.latent + size.rope, size.latent
    step = Step([(size.context - 1, 1)] * batch, 16)
    kv = KVCache(step.num_blocks, size.cache_layers, 1, row, 16, dtype, device=job.device, sides=1)
    kv.numbers.normal_()
    for model, heads in size.heads:
        job.check_time()
        spans = step.on_device(job.device)  # plans of other heads are of no use
        q = torch.randn(batch, heads, row, device=job.device).to(dtype)
        attend = functools.partial(kernels.attend_latent, q, kv, spans, scale=row**-0.5, width=width)
        calls = [functools.partial(attend, layer=layer) for layer in range(size.cache_layers)]
        seen = batch * size.context
        cost = Cost(seen * row * dtype.itemsize, 0, 2 * seen * heads * (row + width))
        setting = f"latent attention, {batch} x {size.context:,}"
        _figure(job, model, setting, seconds_a_call(job, calls), cost)


def _figure(job: Job, model: str, setting: str, took: float, cost: Cost) -> None:
    fields: dict[str, Any] = {"seconds": took, "share": None, "bound": None}
    if job.rates is not None:
        fields |= {"share": seconds(cost, job.rates) / took, "bound": limit(cost, job.rates)}
    figure(job, "F", model, setting, 1e6 * took, "µs a layer", **fields)
