"""I: products of one layer alone, cuBLAS's beside ours, and which tiles are best for ours.

Each weight of the models measured is multiplied with 1 to 2,048 rows, once with each choice of tiles. The choice whose
products take least, as a geometric mean over all of them relative to the best of each, becomes that of the workloads.
What limits a product is the larger of its bytes over the copy rate and its operations over the matmul rate.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from benchmarks.gpu.bound import limit, seconds
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.workloads import figure
from quire.bench.ceilings import Cost
from quire.ops.triton import linear_dense
from quire.ops.triton.linear_dense import DenseProduct, Tile
from quire.ops.triton.linear_vendor import VendorProduct

MODULE = linear_dense.__name__
L2_BYTES = 200 * 2**20
"""So many bytes of weights are gone through in turn: more than any cache of the device holds."""

MOST_COPIES = 32


class Weight(NamedTuple):
    """One of a model's."""

    model: str
    name: str
    out_features: int
    in_features: int


WEIGHTS = (
    Weight("0.6B", "q, k, v", 4096, 1024),
    Weight("0.6B", "gate, up", 6144, 1024),
    Weight("0.6B", "down", 1024, 3072),
    Weight("14B", "q, k, v", 7168, 5120),
    Weight("14B", "o", 5120, 5120),
    Weight("14B", "gate, up", 34816, 5120),
    Weight("14B", "down", 5120, 17408),
    Weight("14B", "head", 151936, 5120),
)
TINY = (Weight("0.6B", "q, k, v", 192, 64), Weight("14B", "down", 64, 384))
ROWS = (1, 8, 64, 256, 2048)


def choices() -> list[tuple[Tile, Tile]]:
    """Tiles for few rows and for many, those of the sources first; both have the same outputs and inputs."""
    found = [(linear_dense.SHORT, linear_dense.TALL)]
    for outputs, inputs in ((128, 64), (128, 128), (64, 128), (256, 64)):
        for short, tall in ((3, 2), (4, 3), (5, 4), (6, 4)):
            pair = Tile(64, outputs, inputs, 4, short), Tile(128, outputs, inputs, 8, tall)
            if pair not in found and all(_shared(tile) <= SHARED_BYTES for tile in pair):
                found.append(pair)
    return found


SHARED_BYTES = 227 * 1024
"""That a program may have on sm_90."""


def _shared(tile: Tile) -> int:
    return 2 * (tile.rows + tile.outputs) * tile.inputs * tile.stages


@torch.inference_mode()
def run(job: Job) -> None:
    """All weights with the tiles in the sources and with cuBLAS; then with other tiles, while there is time."""
    weights, rows = (TINY, (1, 70)) if job.rehearse else (WEIGHTS, ROWS)
    tiles = choices()[:3] if job.rehearse else choices()
    taken: dict[int, dict[tuple[Weight, int], float]] = {}
    for index, pair in enumerate(tiles):
        if job.late:
            break
        try:
            taken[index] = _one_choice(job, weights, rows, index, pair)
        except Exception as error:  # of a compiler, or too little shared memory: one choice less
            if index == 0:  # that of the sources must work
                raise
            job.record("sweep", module=MODULE, choice=_words(pair), failed=str(error)[-300:])
    whole = {index: times for index, times in taken.items() if len(times) == len(weights) * len(rows)}
    if not whole:
        return
    best = {cell: min(times[cell] for times in whole.values()) for cell in next(iter(whole.values()))}
    lost = {
        index: math.exp(sum(math.log(times[cell] / best[cell]) for cell in best) / len(best))
        for index, times in whole.items()
    }
    for index, factor in lost.items():
        job.record("sweep", module=MODULE, choice=_words(tiles[index]), factor=factor)
    chosen = min(lost, key=lambda index: lost[index])
    short, tall = tiles[chosen]
    job.record("constants", module=MODULE, values={"SHORT": list(short), "TALL": list(tall)}, kept=chosen == 0)


def _one_choice(
    job: Job, weights: tuple[Weight, ...], rows: tuple[int, ...], index: int, pair: tuple[Tile, Tile]
) -> dict[tuple[Weight, int], float]:
    """Seconds of each product that there was time for. The first choice's are figures, with cuBLAS beside them."""
    times = {}
    dtype = torch.float16 if job.rehearse else torch.bfloat16
    for weight in weights:
        shape = weight.out_features, weight.in_features
        copies = 1 if job.rehearse else max(1, min(MOST_COPIES, L2_BYTES // (2 * math.prod(shape))))
        numbers = [torch.empty(shape, dtype=dtype, device=job.device).normal_(0.0, 0.02) for _ in range(copies)]
        ours = [DenseProduct(one, None, pair) for one in numbers]
        for count in rows:
            if job.late:
                return times
            x = torch.randn(count, weight.in_features, device=job.device).to(dtype)
            took = seconds_a_call(job, [functools.partial(one.matmul, x) for one in ours])
            times[weight, count] = took
            if index == 0:
                vendors = [VendorProduct(one, None) for one in numbers]
                beside = seconds_a_call(job, [functools.partial(one.matmul, x) for one in vendors])
                _figure(job, weight, count, took, beside)
    return times


def _figure(job: Job, weight: Weight, rows: int, took: float, beside: float) -> None:
    fields: dict[str, object] = {"seconds": took, "share": None, "bound": None, "beside_us": 1e6 * beside}
    if job.rates is not None:
        size = weight.out_features * weight.in_features
        num_bytes = 2 * (size + rows * (weight.out_features + weight.in_features))
        cost = Cost(num_bytes, 2 * rows * size, 0)
        fields |= {"share": seconds(cost, job.rates) / took, "bound": limit(cost, job.rates)}
    fields["note"] = f"cuBLAS {1e6 * beside:.3g}"
    figure(job, "I", weight.model, f"{weight.name}, rows: {rows:,}", 1e6 * took, "µs", **fields)


def _words(pair: tuple[Tile, Tile]) -> str:
    return " and ".join("x".join(map(str, tile[:3])) + f" {tile.warps} warps {tile.stages} stages" for tile in pair)
