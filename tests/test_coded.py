"""Weights as published files store them: what their codes stand for, and the products with them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.models.checkpoint import Checkpoint
from quire.models.registry import load_model
from quire.models.safetensors_file import FLOAT_DTYPES
from quire.ops import CodedWeight, Kernels, choose_kernels
from quire.ops.activations import quantize_activations, quantize_rows
from quire.ops.coded import Scheme
from quire.ops.cpu import library
from quire.ops.experts import LoopedExperts
from quire.ops.linear import Product
from tests.oracle import chunked_logits, random_prompt, save_checkpoint

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
    codes: tuple[int, int] = (-128, 127)


def _kind(
    name: str, bits: Any, group: int, *types: Any, factors: bool = False, codes: Any = (-128, 127), **more: Any
) -> Kind:
    return Kind(Scheme(name, bits, group, **more), *types, factors=factors, codes=codes)


F16, BF16, F32, U8, I8 = torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int8
KINDS = [
    _kind("Q4_0", 4, 32, F16, table=LINES),
    _kind("Q4_1", 4, 32, F16, F16),
    _kind("Q8_0", 8, 32, F16),
    _kind("Q5_0", 8, 32, F16, codes=(-16, 15)),
    _kind("8 bits in two levels", 8, 32, I8, I8, F16, block=256),
    _kind("Q2_K", 4, 16, U8, U8, F16, block=256),
    _kind("Q4_K", 4, 32, U8, U8, F16, block=256),
    _kind("Q5_K", 8, 32, U8, U8, F16, block=256, codes=(0, 31)),
    _kind("Q6_K", 8, 16, I8, None, F16, block=256, codes=(-32, 31)),
    _kind("IQ4_XS", 4, 32, I8, None, F16, block=256, table=TABLE),
    _kind("int4", 4, 32, U8, U8, F16, block=256, activations="group"),
    _kind("int4 of 192", 4, 32, U8, U8, F16, block=192, activations="group"),
    _kind("AWQ", 4, 128, F16, U8),
    _kind("GPTQ 8", 8, 64, F16, I8),
    _kind("W4 in bf16", 4, 64, BF16, table=LINES),
    _kind("W4 in fp32", 4, 256, F32, F32),
    _kind("W4 of 512", 4, 512, BF16, BF16, table=LINES),
    _kind("W4 of 48", 4, 48, BF16, table=TABLE),
    _kind("W4 of rows", 4, 0, None, table=LINES, factors=True),
    _kind("NVFP4", 4, 16, F32, factors=True, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
    _kind("W4A8", 4, 32, F16, table=LINES, activations="row"),
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
        least, most = kind.codes
        codes = torch.randint(least, most + 1, (outputs, inputs), generator=random_).to(I8)
    step = 1 / max(map(abs, kind.codes if scheme.bits == 8 else scheme.table or (16,)))
    unit = step / 64 if scheme.block else step
    return CodedWeight(
        scheme,
        codes,
        drawn(kind.scales, scheme.group, 0.5 * step, 1.5 * step),
        drawn(kind.offsets, scheme.group, -2.0, 2.0),
        drawn(kind.blocks, scheme.block or 0, 0.5 * unit, 1.5 * unit),
        drawn(kind.blocks if kind.offsets else None, scheme.block or 0, 0.0, 1 / 64),
        (0.5 + torch.rand(outputs, generator=random_)) * (1.0 if scheme.group else step) if kind.factors else None,
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
        each = weight.scheme.shared
        codes, scales = quantize_activations(x, each)
        rounded = (codes.double().view(len(x), -1, each) * scales.double()[:, :, None]).flatten(1)[:, : x.shape[1]]
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


# The products in C++


needs_kernels = pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")


@pytest.fixture(params=library.usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param)


@needs_kernels
@names
def test_products_in_cpp_equal_their_reference(kernels: Kernels, kind: Kind) -> None:
    for outputs, most, dtype in ((1, 256, F32), (70, 1200, BF16), (33, 2304, F16)):
        inputs = inputs_of(kind, most)
        weight, bias = coded(kind, outputs, inputs), draw(outputs, seed=1)
        assert kernels.keeps(weight)
        ours, reference = kernels.pack_coded([weight], bias), Kernels().pack_coded([weight], bias)
        assert (ours.out_features, ours.in_features) == (outputs, inputs)
        for rows in (0, 1, 5, 25):
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            found = ours.matmul(x, F32)
            torch.testing.assert_close(found, reference.matmul(x, F32), rtol=2e-6, atol=3e-5)
            assert torch.equal(ours.matmul(x), found.to(dtype))


@needs_kernels
@names
def test_a_rows_bits_do_not_depend_on_its_company_or_threads(kernels: Kernels, kind: Kind) -> None:
    inputs = inputs_of(kind, 600)
    product, x = kernels.pack_coded([coded(kind, 70, inputs)]), draw(100, inputs, dtype=BF16, seed=5)
    whole = product.matmul(x)
    for rows in (*range(1, 26), 99):
        assert torch.equal(product.matmul(x[100 - rows :]), whole[100 - rows :]), rows
    with kernels.threads(2):
        assert torch.equal(product.matmul(x), whole)
        assert torch.equal(product.matmul(x[:7]), whole[:7])


def fused() -> list[str]:
    """Instruction sets that multiply and add with one rounding: all others have other bits."""
    return [isa for isa in library.usable() if isa != "sse2"]


@names
def test_products_give_the_same_bits_on_every_instruction_set(kind: Kind) -> None:
    inputs = inputs_of(kind, 600)
    weight, x = coded(kind, 70, inputs), draw(9, inputs, dtype=BF16)
    outs = [choose_kernels(isa).pack_coded([weight]).matmul(x) for isa in fused()]
    assert all(torch.equal(out, outs[0]) for out in outs)


ALL_OF_768 = [kind for kind in KINDS if 768 % inputs_of(kind, 256) == 0]


@needs_kernels
def test_parts_of_several_schemes_in_cpp(kernels: Kernels) -> None:
    sizes = [random.Random(1).choice((32, 7, 64, 40)) for _ in ALL_OF_768]
    parts = [coded(kind, size, 768, seed) for seed, (kind, size) in enumerate(zip(ALL_OF_768, sizes, strict=True))]
    parts[1:1] = [coded(ALL_OF_768[0], 20, 768, 99), parts[0].outputs(range(1, 3))]  # these are one weight
    bias = draw(sum(part.out_features for part in parts))
    whole = kernels.pack_coded(parts, bias)
    for rows in (1, 6, 30):
        x = draw(rows, 768, dtype=BF16, seed=rows)
        alone = torch.cat([kernels.pack_coded([part]).matmul(x, F32) for part in parts], 1) + bias
        assert torch.equal(whole.matmul(x, F32), alone)
    own = [part.outputs(range(part.out_features // 2, part.out_features)) for part in parts]
    columns = torch.cat([torch.arange(len(part.codes)) >= len(part.codes) // 2 for part in parts])
    assert torch.equal(kernels.pack_coded(own, bias[columns]).matmul(x), whole.matmul(x)[:, columns])


def experts_of(kernels: Kernels) -> tuple[list[Product], list[Product]]:
    """Five experts' products, whose gates have other schemes than the rest, and with one expert unlike the others."""
    gate, up, down = (next(kind for kind in KINDS if kind.scheme.name == name) for name in ("Q6_K", "Q4_K", "Q8_0"))

    def product(expert: int, *parts: CodedWeight) -> Product:
        return kernels.pack_coded(parts, draw(sum(part.out_features for part in parts), seed=expert))

    kinds = [(gate, up)] * 4 + [(up, up)]
    gates = [product(e, *(coded(kind, 96, 256, 2 * e + i) for i, kind in enumerate(of))) for e, of in enumerate(kinds)]
    return gates, [product(e, coded(down, 256, 96, e)) for e in range(5)]


@needs_kernels
def test_experts_of_several_schemes(kernels: Kernels) -> None:
    rnd = random.Random(0)
    x, weights = draw(60, 256, dtype=BF16, seed=3), draw(60, 2, seed=4).abs()
    ids = torch.tensor([sorted(rnd.sample(range(5), 2)) for _ in range(60)])
    layer = kernels.experts(*experts_of(kernels))
    found = layer(x, ids, weights)
    assert torch.equal(layer(x[7:8], ids[7:8], weights[7:8]), found[7:8])
    looped = LoopedExperts(*experts_of(kernels))
    torch.testing.assert_close(found, looped(x, ids, weights), rtol=2**-7, atol=2**-5)
    with kernels.threads(2):
        assert torch.equal(layer(x, ids, weights), found)


IN_MODELS = {
    "v_proj": _kind("six", 8, 16, I8, None, F16, block=32, codes=(-32, 31)),
    "gate_proj": _kind("eight", 8, 32, F16),
    "down_proj": _kind("lines", 4, 32, BF16, table=LINES),
}
OTHERS = _kind("four", 4, 32, U8, U8, F16, block=32)


class InCodes(Checkpoint):
    """Has random projections in codes, of which those that are one product have several schemes."""

    def coded(self, name: str, rows: range | None = None) -> CodedWeight | None:
        """See `Checkpoint`."""
        module = name.removesuffix(".weight").rpartition(".")[2]
        if not module.endswith("_proj"):
            return None
        kind, size = IN_MODELS.get(module, OTHERS), self.entries[name].shape[1] ** 0.5
        weight = coded(kind, *self.entries[name].shape, seed=zlib.crc32(name.encode()) % 1000)
        smaller = torch.full((weight.out_features,), 2 / size)
        return CodedWeight(
            *(weight.scheme, weight.codes, weight.scales, weight.offsets, weight.block_scales, weight.block_offsets),
            factors=smaller,
        )

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """See `Checkpoint`."""
        weight = self.coded(name)
        return super().tensor(name, dtypes) if weight is None else weight.restored()


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_models_products_of_several_schemes_in_a_layer(architecture: str, tmp_path: Path, kernels: Kernels) -> None:
    folder, prompt = save_checkpoint(tmp_path, architecture), random_prompt(30)
    reference = load_model(folder, kernels=Kernels(), open_checkpoint=InCodes)
    model = load_model(folder, kernels=kernels, open_checkpoint=InCodes)
    expected, found = chunked_logits(reference, prompt, 30), chunked_logits(model, prompt, 30)
    assert (found - expected).square().mean().sqrt() < 0.02 * expected.std()
    assert torch.equal(chunked_logits(model, prompt, 7), found)
