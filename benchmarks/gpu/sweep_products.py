"""I: products of one layer alone, cuBLAS's beside ours, and which tiles are best for ours.

Each weight of the models measured is multiplied with 1 to 2,048 rows, once with each choice of tiles. The choice whose
products take least, as a geometric mean over all of them relative to the best of each, becomes that of the workloads.
What limits a product is the larger of its bytes over the copy rate and its operations over the matmul rate.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from benchmarks.gpu.bound import limit, seconds
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.sweep import Choice, sweep
from benchmarks.gpu.workloads import figure
from quire.bench.ceilings import Cost
from quire.ops.triton import linear_dense
from quire.ops.triton.linear_dense import DenseProduct, Tile
from quire.ops.triton.linear_vendor import VendorProduct

L2_BYTES = 200 * 2**20
"""So many bytes of weights are gone through in turn: more than any cache of the device holds."""

MOST_COPIES = 32


class Weight(NamedTuple):
    """One of a model's."""

    model: str
    name: str
    out_features: int
    in_features: int

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.out_features * self.in_features


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
    tiles = [{"SHORT": short, "TALL": tall} for short, tall in choices()]
    timed = functools.partial(_timed, job)
    sweep(job, {"SHORT": linear_dense, "TALL": linear_dense}, tiles[:3] if job.rehearse else tiles, timed, _words)


def _timed(job: Job, sources: bool) -> dict[tuple[Weight, int], float]:
    """Seconds of each product that there was time for. Those of the sources are figures, with cuBLAS beside them."""
    times: dict[tuple[Weight, int], float] = {}
    weights, rows = (TINY, (1, 70)) if job.rehearse else (WEIGHTS, ROWS)
    dtype = torch.float16 if job.rehearse else torch.bfloat16
    for weight in weights:
        numbers = [
            torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=job.device).normal_(0.0, 0.02)
            for _ in range(copies(job, 2 * weight.size))
        ]
        ours = [DenseProduct(one, None) for one in numbers]
        for count in rows:
            if job.late:
                return times
            x = torch.randn(count, weight.in_features, device=job.device).to(dtype)
            took = seconds_a_call(job, [functools.partial(one.matmul, x) for one in ours])
            times[weight, count] = took
            if sources:
                vendors = [VendorProduct(one, None) for one in numbers]
                beside = seconds_a_call(job, [functools.partial(one.matmul, x) for one in vendors])
                _figure(job, weight, count, took, beside)
    return times


def copies(job: Job, num_bytes: int) -> int:
    """So many of a weight of this size that no cache holds it when its turn comes again."""
    return 1 if job.rehearse else max(1, min(MOST_COPIES, L2_BYTES // num_bytes))


def _figure(job: Job, weight: Weight, rows: int, took: float, beside: float) -> None:
    fields: dict[str, object] = {"seconds": took, "share": None, "bound": None, "beside_us": 1e6 * beside}
    if job.rates is not None:
        size = weight.size
        num_bytes = 2 * (size + rows * (weight.out_features + weight.in_features))
        cost = Cost(num_bytes, 2 * rows * size, 0)
        fields |= {"share": seconds(cost, job.rates) / took, "bound": limit(cost, job.rates)}
    fields["note"] = f"cuBLAS {1e6 * beside:.3g}"
    figure(job, "I", weight.model, f"{weight.name}, rows: {rows:,}", 1e6 * took, "µs", **fields)


def _words(values: Choice) -> str:
    pair = values["SHORT"], values["TALL"]
    return " and ".join("x".join(map(str, tile[:3])) + f" {tile.warps} warps {tile.stages} stages" for tile in pair)
