"""Weights as published files store them: what their codes stand for, and the products with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.ops import CodedWeight, Kernels
from quire.ops.coded import Scheme
from quire.ops.quantized import BLOCK, quantize_activations, quantize_rows

LINES = tuple(range(-8, 8))
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Not evenly spaced, as that of IQ4_NL."""


@dataclass(frozen=True)
class Kind:
    """A scheme, and the types of its tensors; None: there is no such one."""

    scheme: Scheme
    scales: torch.dtype | None = torch.float16
    offsets: torch.dtype | None = None
    blocks: torch.dtype | None = None
    factors: bool = False


def _kind(name: str, bits: Any, group: int, *types: Any, factors: bool = False, **more: Any) -> Kind:
    return Kind(Scheme(name, bits, group, **more), *types, factors=factors)


F16, BF16, F32, U8, I8 = torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int8
KINDS = [
    _kind("Q4_0", 4, 32, F16, table=LINES),
    _kind("Q4_1", 4, 32, F16, F16),
    _kind("Q8_0", 8, 32, F16),
    _kind("Q2_K", 4, 16, U8, U8, F16, block=256),
    _kind("Q4_K", 4, 32, U8, U8, F16, block=256),
    _kind("Q5_K", 8, 32, U8, U8, F16, block=256),
    _kind("Q6_K", 8, 16, I8, None, F16, block=256),
    _kind("IQ4_XS", 4, 32, I8, None, F16, block=256, table=TABLE),
    _kind("AWQ", 4, 128, F16, U8),
    _kind("GPTQ 8", 8, 64, F16, I8),
    _kind("W4 in bf16", 4, 64, BF16, table=LINES),
    _kind("W4 in fp32", 4, 256, F32, F32),
    _kind("W4 of 512", 4, 512, BF16, BF16, table=LINES),
    _kind("W4 of 48", 4, 48, BF16, table=TABLE),
    _kind("W4 of rows", 4, 0, None, table=LINES, factors=True),
    _kind("NVFP4", 4, 16, F32, factors=True, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
    _kind("W8A8", 8, 0, None, factors=True, activations="row"),
    _kind("W8 of rows", 8, 0, None, factors=True),
]
names = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.scheme.name)


def coded(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> CodedWeight:
    """A weight of random codes, whose numbers are around 1."""
    random_ = torch.Generator().manual_seed(seed)
    scheme = kind.scheme

    def drawn(dtype: torch.dtype | None, size: int, low: float = 0.5, high: float = 1.5) -> torch.Tensor | None:
        if not size or dtype is None:
            return None
        shape = outputs, inputs // size
        if dtype in (U8, I8):
            least, most = (0, 64) if dtype == U8 else (-32, 32)
            return torch.randint(least, most, shape, generator=random_).to(dtype)
        return (low + (high - low) * torch.rand(shape, generator=random_)).to(dtype)

    if scheme.bits == 4:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=U8, generator=random_)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=random_).to(I8)
    step = 1 / max(map(abs, scheme.table or (16,))) if scheme.bits == 4 else 1 / 128
    unit = step / 64 if scheme.block else step
    return CodedWeight(
        scheme,
        codes,
        drawn(kind.scales, scheme.group, 0.5 * step, 1.5 * step),
        drawn(kind.offsets, scheme.group, -2.0, 2.0),
        drawn(kind.blocks, scheme.block or 0, 0.5 * unit, 1.5 * unit),
        drawn(kind.blocks if kind.offsets else None, scheme.block or 0, 0.0, 1 / 64),
        0.5 + torch.rand(outputs, generator=random_) if kind.factors else None,
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(kind: Kind, most: int) -> int:
    """So many inputs, or fewer, as there may be."""
    step = kind.scheme.block or kind.scheme.group or 16
    return max(most // step, 1) * step


def exact(x: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    """The product in fp64 with activations quantized as the scheme says."""
    if weight.scheme.activations == "row":
        codes, scales = quantize_rows(x)
        rounded = codes.double() * scales.double()[:, None]
    else:
        codes, scales = quantize_activations(x)
        rounded = (codes.double().view(len(x), -1, BLOCK) * scales.double()[:, :, None]).flatten(1)[:, : x.shape[1]]
    return rounded @ weight.restored().double().T


@names
def test_products_are_those_of_the_numbers_with_quantized_activations(kind: Kind) -> None:
    inputs = inputs_of(kind, 1200)
    weight, bias, x = coded(kind, 70, inputs), draw(70, seed=1), draw(5, inputs, seed=2)
    out = Kernels().pack_coded([weight], bias).matmul(x)
    torch.testing.assert_close(out.double(), exact(x, weight) + bias.double(), rtol=1e-5, atol=1e-4)
    near = x.double() @ weight.restored().double().T + bias.double()
    assert (out - near).norm() / near.norm() < 0.02
    assert torch.equal(Kernels().pack_coded([weight], bias).matmul(x[3:4]), out[3:4])


def test_parts_of_several_schemes_come_side_by_side() -> None:
    parts, x = [coded(kind, 7, inputs_of(kind, 768)) for kind in KINDS if 768 % inputs_of(kind, 768) == 0], draw(3, 768)
    parts = [part for part in parts if part.in_features == 768]
    whole = Kernels().pack_coded(parts).matmul(x)
    assert torch.equal(whole, torch.cat([Kernels().pack_coded([part]).matmul(x) for part in parts], 1))
    own = parts[1].outputs(range(2, 5))
    assert torch.equal(Kernels().pack_coded([own]).matmul(x), whole[:, 9:12])


def test_numbers_that_are_not_finite_are_refused() -> None:
    for kind in random.Random(0).sample(KINDS, 6):
        weight = coded(kind, 4, inputs_of(kind, 512))
        for scales in (weight.scales, weight.block_scales, weight.factors):
            if scales is not None and scales.is_floating_point():
                kept = scales[-1].clone()
                scales[-1] = torch.nan
                with pytest.raises(CheckpointError, match=rf"{kind.scheme.name}: \w+ are not all finite"):
                    Kernels().pack_coded([weight])
                scales[-1] = kept
