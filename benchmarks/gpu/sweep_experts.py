"""F, with other tiles: the experts of one layer alone, dense and in 8 and 4 bits, and which tiles are best.

Few rows and many have tiles of their own, which are swept one after the other, on the layer of Qwen3-30B-A3B. Only
what changes no bits is tried.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from benchmarks.gpu import sparse
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.sweep import Choice, sweep, tile_words
from benchmarks.gpu.sweep_quantized import FEW, FORMATS, MANY, OtherBits, choices, product_of
from quire.ops.experts import Experts
from quire.ops.triton import coded, experts
from quire.ops.triton import weights as dense_weights
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_dense import Tile

FEW_ROWS, MANY_ROWS = (1, 8, 32), (1024, 4096)
CALLS = 8
"""Of one graph, each with other choices of experts."""
DENSE: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "FEW": (FEW_ROWS, ((16, 64, 128, 4, 3), (16, 128, 64, 4, 4), (16, 128, 128, 4, 3), (16, 64, 128, 2, 4))),
    "SOME": ((256,), ((32, 128, 64, 4, 4), (32, 128, 128, 4, 3))),
}
"""Rows of a call, and tiles beside those of the sources."""
TALL = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)
QUANTIZED = {
    "FEW": (FEW, FEW_ROWS, FORMATS),
    "MANY_WHOLE": (MANY, MANY_ROWS, ("int8",)),
    "MANY": (MANY, MANY_ROWS, ("int4",)),
}


@torch.inference_mode()
def run(job: Job) -> None:
    """Dense experts, then those in fewer bits."""
    for name, (rows, others) in DENSE.items():
        tiles: list[Choice] = [{}, *({name: Tile(*other)} for other in others)]
        _sweep(job, {name: experts}, tiles, ("dense",), rows)
    _sweep(job, {"TALL": dense_weights}, [{}, *({"TALL": tile} for tile in TALL)], ("dense",), MANY_ROWS)
    for name, (others, rows, formats) in QUANTIZED.items():
        _sweep(job, {name: coded}, choices(name, others), formats, rows)


def _sweep(
    job: Job, modules: dict[str, ModuleType], tiles: list[Choice], formats: tuple[str, ...], rows: tuple[int, ...]
) -> None:
    timed = functools.partial(_timed, job, formats, rows, {})
    sweep(job, modules, tiles[:2] if job.rehearse else tiles, timed, tile_words)


def _timed(
    job: Job,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    found: dict[tuple[str, int], torch.Tensor],
    sources: bool,
) -> dict[tuple[str, int], float]:
    """Seconds of each case that there was time for; `found`: results of the sources' tiles, to compare with."""
    times: dict[tuple[str, int], float] = {}
    size = sparse.TINY if job.rehearse else sparse.Sizes()
    layer, dtype = size.layers[0], torch.float16 if job.rehearse else torch.bfloat16
    for how in formats:
        layers = _experts(job, how, layer, dtype)
        for count in (min(rows[0], 32),) if job.rehearse else rows:
            if job.late:
                return times
            generator = torch.Generator(job.device).manual_seed(count)
            x = torch.randn(count, layer.hidden, generator=generator, device=job.device).to(dtype)
            weights = torch.full((count, layer.top_k), 1 / layer.top_k, device=job.device)
            chosen = [sparse.chosen(layer, count, generator) for _ in range(1 if job.rehearse else CALLS)]
            result = layers(x, chosen[0], weights)
            if not torch.equal(found.setdefault((how, count), result), result):
                raise OtherBits(f"{how}, {count} rows: other bits")
            calls = [functools.partial(layers, x, ids, weights) for ids in chosen]
            times[how, count] = seconds_a_call(job, calls)
    return times


def _experts(job: Job, how: str, layer: sparse.Layer, dtype: torch.dtype) -> Experts:
    """A layer's, of random codes or numbers, made on the device."""
    kernels = TritonKernels(job.device, deterministic=True)
    shapes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
    gate_up, down = ([product_of(job, how, *shape, seed, dtype) for seed in range(layer.experts)] for shape in shapes)
    return kernels.experts(gate_up, down)
