"""Parity of the matrix products: cuBLAS's, the batch-invariant one, and those with weights in codes."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, fp8_weight
from quire.models.gguf.types import FP4, IQ4
from quire.ops import CodedWeight, Kernels, Product, choose_kernels
from quire.ops.coded import CodedProduct, Scheme
from quire.ops.quantize_groups import SCHEMES as QUIRES
from quire.ops.quantize_groups import scheme_of
from quire.ops.triton import linear_fp8
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_fp8 import Fp8Product

FP32_TOLERANCE = 1e-3
"""Of a result that is not rounded: sums of up to 17,408 products, in whatever order, and codes of 8 bits that may fall
to the other side. Far below what rounding to bf16 would do."""

ROW_COUNTS = (1, 2, 8, 17, 64, 130, 300)

SCHEMES = (
    Scheme("Q4_K", 4, 32, block=256),
    Scheme("Q6_K", 8, 16, block=256),
    Scheme("Q8_0", 8, 32),
    Scheme("IQ4_NL", 4, 32, table=IQ4),
    Scheme("NVFP4", 4, 16, table=FP4),
    Scheme("AWQ", 4, 128),
    Scheme("W8A8", 8, 0, activations="row"),
)


def run(job: Job, dtype: str) -> None:
    """In the sizes of the models that are measured, and in one that no tile divides."""
    rig = Rig(job, dtype)
    sizes = [(40, 80)] if job.rehearse else [(4096, 1024), (1024, 3072), (7168, 5120), (5120, 17408), (1000, 80)]
    counts = (1, 3, 17) if job.rehearse else ROW_COUNTS
    for out_features, in_features in sizes:
        weight, bias = rig.draw(out_features, in_features, spread=0.02), rig.draw(out_features)
        x = rig.draw(max(counts), in_features)
        exact = x @ weight.t()
        for kernels in (rig.kernels, rig.deterministic):
            form = "deterministic product" if kernels.deterministic else "product"
            what = f"{form}, {out_features} x {in_features}"
            half = out_features // 2
            product = kernels.pack([rig.sent(weight[:half]), rig.sent(weight[half:])], rig.sent(bias))
            _product(rig, what, product, x, exact + bias, counts)
            if kernels.deterministic:
                _same_rows(rig, what, product, x, counts)
    for how in QUIRES:
        for out_features, in_features in [(40, 128)] if job.rehearse else [(4096, 1024), (5120, 17408)]:
            _quantized(rig, how, rig.draw(out_features, in_features, spread=0.02), counts)
    for scheme in SCHEMES:
        _coded(rig, scheme, *((40, 256) if job.rehearse else (2048, 5120)), counts)
    for out_features, in_features in [(40, 200)] if job.rehearse else [(4096, 1024), (5120, 17408), (1000, 200)]:
        _fp8(rig, out_features, in_features, counts)


def _product(rig: Rig, what: str, product: Product, x: Tensor, wanted: Tensor, counts: tuple[int, ...]) -> None:
    for rows in (counts[0], counts[-1]):
        sent = rig.sent(x[:rows])
        rig.near(f"{what}, {rows} rows", product.matmul(sent), wanted[:rows], 1.0)
        rig.within(f"{what}, {rows} rows to fp32", product.matmul(sent, torch.float32), wanted[:rows], FP32_TOLERANCE)


def _same_rows(rig: Rig, what: str, product: Product, x: Tensor, counts: tuple[int, ...]) -> None:
    """A row's bits, whatever the number of rows."""
    whole = product.matmul(rig.sent(x))
    wrong = sum(not torch.equal(product.matmul(rig.sent(x[:rows])), whole[:rows]) for rows in counts)
    wrong += not torch.equal(product.matmul(rig.sent(x[5:7])), whole[5:7])
    rig.job.check(f"{rig.name}: {what}: row counts that change a bit", wrong, 0)


def _fp8(rig: Rig, out_features: int, in_features: int, counts: tuple[int, ...]) -> None:
    """The bits of a dense weight of the same numbers, with few rows and with so many that it is restored first."""
    what = f"fp8 product, {out_features} x {in_features}"
    weight = fp8_weight(out_features, in_features)
    numbers = rig.sent(weight.restored())
    product, dense = rig.deterministic.pack_fp8([weight], rig.dtype), DenseProduct(numbers, None)
    assert isinstance(product, Fp8Product)
    rig.same(f"{what}: numbers", linear_fp8.restored_weight(product.weight, product.scales), numbers)
    x = rig.sent(rig.draw(linear_fp8.MANY_ROWS, in_features))
    for rows in {*(count for count in counts if count <= len(x)), len(x)}:
        rig.same(f"{what}, {rows} rows", product.matmul(x[:rows]), dense.matmul(x[:rows]))


def _coded(rig: Rig, scheme: Scheme, out_features: int, in_features: int, counts: tuple[int, ...]) -> None:
    what, weight = (
        f"{scheme.name} product, {out_features} x {in_features}",
        coded_weight(scheme, out_features, in_features),
    )
    x = rig.draw(counts[-1], in_features)
    product, exact = rig.kernels.pack_coded([weight]), Kernels().pack_coded([weight]).matmul(x)
    _product(rig, what, product, x, exact, counts)
    _same_rows(rig, what, product, x, counts)


def coded_weight(scheme: Scheme, outputs: int, inputs: int, seed: int = 0) -> CodedWeight:
    """Of random codes and scales, and with offsets where codes count from 0, such that products are around 1."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(each: int, factor: float, dtype: torch.dtype = torch.float16) -> Tensor:
        return ((torch.rand(outputs, inputs // each, generator=generator) + 0.5) * factor).to(dtype)

    codes = torch.randint(0, 256, (outputs, inputs * scheme.bits // 8), dtype=torch.uint8, generator=generator)
    step = inputs**-0.5 / (64 if scheme.bits == 8 else max(map(abs, scheme.table or (8,))))
    codes = codes if scheme.bits == 4 else codes.view(torch.int8)
    if not scheme.group:
        return CodedWeight(scheme, codes, factors=numbers(inputs, step, torch.float32).flatten())
    offset = 8 if scheme.bits == 4 and scheme.table is None else None
    if scheme.block is None:
        offsets = None if offset is None else numbers(scheme.group, offset, torch.uint8)
        return CodedWeight(scheme, codes, numbers(scheme.group, step), offsets)
    whole, unit = numbers(scheme.group, 32, torch.uint8), step / 32
    offsets = None if offset is None else numbers(scheme.group, 32, torch.uint8)
    block_offsets = None if offset is None else numbers(scheme.block, offset * unit)
    return CodedWeight(scheme, codes, whole, offsets, numbers(scheme.block, unit), block_offsets)


def _quantized(rig: Rig, how: str, weight: Tensor, counts: tuple[int, ...]) -> None:
    what = f"{how} product, {weight.shape[0]} x {weight.shape[1]}"
    coded = choose_kernels().quantize_groups(weight, scheme_of(how, weight.shape[1]))
    x = rig.draw(counts[-1], weight.shape[1])
    product = rig.kernels.pack_coded([coded])
    exact = CodedProduct([coded]).matmul(x)
    _product(rig, what, product, x, exact, counts)
    _same_rows(rig, what, product, x, counts)
