"""I, with weights in 8 and 4 bits: products of one layer alone, and which tiles are best; and fp8, which has a limit.

As `sweep_products`, for int8, int4 and fp8, with cuBLAS's products in bf16 beside them, and beside those of fp8 also
torch's with activations in fp8, which Quire does not use (docs/gpu.md). Few rows and many have tiles of their own, so
they are swept one after the other. Whatever the tile, the bits are the same: a choice that gives others is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from benchmarks.gpu.bound import limit, seconds
from benchmarks.gpu.device import seconds_a_call
from benchmarks.gpu.job import Job
from benchmarks.gpu.sweep import Choice, sweep, tile_words
from benchmarks.gpu.sweep_products import TINY, Weight, copies
from benchmarks.gpu.workloads import figure
from quire.bench.ceilings import Cost
from quire.ops import CodedWeight, Fp8Weight, Product
from quire.ops.quantize_groups import scheme_of
from quire.ops.triton import coded, linear_fp8
from quire.ops.triton.coded import Tile
from quire.ops.triton.kernels import TritonKernels

WEIGHTS = (
    Weight("0.6B", "gate, up", 6144, 1024),
    Weight("14B", "o", 5120, 5120),
    Weight("14B", "gate, up", 34816, 5120),
    Weight("14B", "down", 5120, 17408),
)
FEW_ROWS, MANY_ROWS, FP8_ROWS = (1, 8, 16), (64, 256, 2048), (1, 64, 512, 1024, 2048)
FORMATS = ("int8", "int4")

FEW = ((16, 4, 3), (16, 4, 6), (16, 8, 4), (16, 2, 4), (32, 4, 4))
"""Rows, warps and stages, beside those of the sources; the likeliest first, since time may be over."""
MANY = ((32, 4, 4), (64, 4, 3), (64, 4, 2), (64, 8, 3), (32, 4, 3), (128, 8, 3))
RESTORED_FROM = (256, 512, 2048, 4096)
"""Rows from which on a weight in fp8 is restored once."""


class OtherBits(Exception):
    """A choice of tiles changes a product."""


def choices(name: str, tiles: tuple[tuple[int, int, int], ...]) -> list[Choice]:
    """Of one constant, that of the sources first."""
    return [{}, *({name: Tile(*tile)} for tile in tiles)]


@torch.inference_mode()
def run(job: Job) -> None:
    """Few rows, many rows, and fp8."""
    swept = (("FEW", FEW, FEW_ROWS, FORMATS), ("MANY_WHOLE", MANY, MANY_ROWS, ("int8",)))
    for name, tiles, rows, formats in (*swept, ("MANY", MANY, MANY_ROWS, ("int4",))):
        found: dict[tuple[str, Weight, int], torch.Tensor] = {}
        timed = functools.partial(_timed, job, formats, rows, found)
        picked = choices(name, tiles[:1] if job.rehearse else tiles)
        sweep(job, {name: coded}, picked, timed, tile_words)
    limits: list[Choice] = [{}, *({"MANY_ROWS": rows} for rows in RESTORED_FROM)]
    timed = functools.partial(_timed, job, ("fp8",), FP8_ROWS, {})
    sweep(job, {"MANY_ROWS": linear_fp8}, limits[:2] if job.rehearse else limits, timed, tile_words)


def _timed(
    job: Job,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    found: dict[tuple[str, Weight, int], torch.Tensor],
    sources: bool,
) -> dict[tuple[str, Weight, int], float]:
    """Seconds of each product that there was time for; `found`: products, of the sources' tiles, to compare with."""
    times: dict[tuple[str, Weight, int], float] = {}
    dtype = torch.float16 if job.rehearse else torch.bfloat16
    weights, rows = (TINY[:1], rows[:1]) if job.rehearse else (WEIGHTS, rows)
    for how, weight in itertools.product(formats, weights):
        num_bytes = round(weight.size * BYTES[how])
        shape = weight.out_features, weight.in_features
        products = [product_of(job, how, *shape, seed, dtype) for seed in range(copies(job, num_bytes))]
        for count in rows:
            if job.late:
                return times
            cell = how, weight, count
            generator = torch.Generator(job.device).manual_seed(count)
            x = torch.randn(count, weight.in_features, generator=generator, device=job.device).to(dtype)
            if not torch.equal(found.setdefault(cell, products[0].matmul(x)), products[0].matmul(x)):
                raise OtherBits(f"{how}, {weight.out_features} x {weight.in_features}, {count} rows: other bits")
            times[cell] = seconds_a_call(job, [functools.partial(one.matmul, x) for one in products])
            if sources:
                _figure(job, how, weight, count, num_bytes, times[cell], _beside(job, how, weight, x))
    return times


def _beside(job: Job, how: str, weight: Weight, x: torch.Tensor) -> dict[str, float]:
    """Seconds of torch's products with x: of cuBLAS, and where the weight is in fp8, of both in fp8 with a scale a row
    each, without rounding x, if this device has it."""
    shape = weight.out_features, weight.in_features

    def numbers(seed: int) -> torch.Tensor:
        generator = torch.Generator(job.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=job.device)

    def seconds_with(call: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> float:
        weights = [numbers(seed).to(dtype) for seed in range(copies(job, dtype.itemsize * weight.size))]
        return seconds_a_call(job, [functools.partial(call, one) for one in weights])

    found = {"cuBLAS in 16 bits": seconds_with(lambda one: F.linear(x, one), x.dtype)}
    if how == "fp8":
        codes, scales = x.to(torch.float8_e4m3fn), [torch.ones(n, 1, device=job.device) for n in (len(x), shape[0])]
        rest = {"scale_a": scales[0], "scale_b": scales[1].t(), "out_dtype": torch.bfloat16}
        with contextlib.suppress(RuntimeError, ValueError):  # another compute capability, or a rehearsal
            found["torch, both in fp8"] = seconds_with(
                lambda one: torch._scaled_mm(codes, one.t(), **rest), torch.float8_e4m3fn
            )
    return found


BYTES = {"int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32 + 4 / 256, "fp8": 1 + 4 / 128}
"""Of a number, with its share of scales."""


def product_of(job: Job, how: str, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> Product:
    """With a weight of random codes, or of numbers if it is "dense", made on the device."""
    kernels = TritonKernels(job.device, deterministic=True)
    generator = torch.Generator(job.device).manual_seed(seed)

    def codes(columns: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randint(0, 127, (outputs, columns), dtype=torch.int16, generator=generator, device=job.device)
        return numbers.to(dtype)

    def units(columns: int) -> torch.Tensor:
        return torch.full((outputs, columns), 0.001, dtype=torch.bfloat16, device=job.device)

    if how == "dense":
        numbers = torch.randn(outputs, inputs, generator=generator, device=job.device) * 0.02
        return kernels.pack([numbers.to(dtype)])
    if how == "fp8":
        scales = torch.full((outputs, -(-inputs // 128)), 0.001, device=job.device)
        both = torch.randint(0, 254, (outputs, inputs), generator=generator, dtype=torch.int16, device=job.device)
        finite = (both + (both > 126)).to(torch.uint8)  # 127 and 255 are no numbers
        return kernels.pack_fp8([Fp8Weight(finite, scales, 128)], dtype)
    scheme = scheme_of(how, inputs)
    groups, blocks = inputs // scheme.group, inputs // (scheme.block or inputs)
    if how == "int8":
        return kernels.pack_coded([CodedWeight(scheme, codes(inputs, torch.int8), units(groups))])
    scales, offsets = (codes(groups, torch.uint8) for _ in range(2))
    packed = codes(inputs // 2, torch.uint8)
    return kernels.pack_coded([CodedWeight(scheme, packed, scales, offsets, units(blocks), units(blocks))])


def _figure(
    job: Job, how: str, weight: Weight, rows: int, num_bytes: int, took: float, beside: Mapping[str, float]
) -> None:
    fields: dict[str, object] = {"seconds": took, "share": None, "bound": None}
    fields |= {"beside_us": 1e6 * next(iter(beside.values()))}
    fields |= {"note": "; ".join(f"{name} {1e6 * took:.3g}" for name, took in beside.items())}
    if job.rates is not None:
        size = weight.size
        cost = Cost(num_bytes + 2 * rows * (weight.out_features + weight.in_features), 2 * rows * size, 0)
        fields |= {"share": seconds(cost, job.rates) / took, "bound": limit(cost, job.rates)}
    figure(job, "I", weight.model, f"{weight.name} in {how}, rows: {rows:,}", 1e6 * took, "µs", **fields)
