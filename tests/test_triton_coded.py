"""Products and experts with weights in codes, in Triton: the bits of their references, and a row's in any company."""

from __future__ import annotations

import random
import re

import pytest
import torch

from quire.ops import CodedWeight, Kernels
from quire.ops import activations as of_torch
from quire.ops.coded import Scheme
from quire.ops.experts import LoopedExperts
from quire.ops.linear import Product
from quire.ops.triton import activations, coded, linear_chunks
from quire.ops.triton.activations import Shares
from quire.ops.triton.coded import assembly
from quire.ops.triton.experts_coded import CodedExperts
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_chunks import Chunks
from tests.test_coded import ALL_OF_768, KINDS, Kind, draw, inputs_of
from tests.test_coded import coded as coded_weight
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

OF = {kind.scheme.name: kind for kind in KINDS}
QUICK = ("Q4_1", "Q2_K", "Q6_K", "AWQ", "W4 in fp32", "NVFP4", "W8A8", "W8 of rows")
COMPILED = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "int4", "AWQ", "W4 in bf16", "NVFP4", "W8A8", "W8 of rows")
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.scheme.name)
ours = TritonKernels("cpu", deterministic=True)


def launch_all() -> None:
    """Few rows and many of weights whose kernels differ, and experts of a GGUF file's schemes and of another."""
    for name in COMPILED:
        product = ours.pack_coded([coded_weight(OF[name], 1024, 3072)])
        for rows in (16, 600):
            product.matmul(torch.empty(rows, 3072, dtype=torch.bfloat16))
    for gate, up, down in (("Q4_K", "Q4_K", "Q6_K"), ("W4 in bf16", "W4 in bf16", "W4 in bf16")):
        gate_up = ours.pack_coded([coded_weight(OF[gate], 512, 512), coded_weight(OF[up], 512, 512)])
        experts = CodedExperts([gate_up] * 16, [ours.pack_coded([coded_weight(OF[down], 512, 512)])] * 16)
        for tokens in (1, 256):
            ids, weights = torch.empty(tokens, 8, dtype=torch.int64), torch.empty(tokens, 8)
            experts(torch.empty(tokens, 512, dtype=torch.bfloat16), ids, weights)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_with_few_spills_and_with_matrix_instructions(arch: int) -> None:
    used = compile_all("tests.test_triton_coded", arch)
    instructions = {80: {"mma.sync"}, 90: {"wgmma"}, 100: {"tcgen05", "mma.sync"}}[arch]
    for kernel in used:
        assert kernel["stack"] <= (192 if arch == 100 else 0), kernel  # bytes a thread
        assert kernel["shared"] <= 99 * 1024, kernel  # what a consumer's card has
        assert ("_coded" in kernel["kernel"]) == bool(kernel["matrix"]) and set(kernel["matrix"]) <= instructions, (
            kernel
        )


# Codes


def executed(program: str, codes: int) -> int:
    """What the assembly makes of a word, in $0."""
    found = {"$1": codes}
    for line in re.findall(r"[^;{}]+(?=;)", program):
        operation, *operands = re.split(r"[\s,]+", line.strip())
        if operation == ".reg":
            continue
        to, *given = operands
        numbers = [found[each] if each in found else int(each, 0) for each in given]
        a, b, c = (*numbers, 0, 0)[:3]
        eight = a | b << 32
        found[to] = {
            "mov.b32": a,
            "and.b32": a & b,
            "or.b32": a | b,
            "xor.b32": a ^ b,
            "shr.b32": a >> min(b, 32),
            "mad.lo.u32": (a * b + c) & 0xFFFFFFFF,
            "prmt.b32": sum((eight >> 8 * (c >> 4 * i & 15) & 255) << 8 * i for i in range(4)),  # chooses bytes
        }[operation]
    return found["$0"]


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "IQ4_XS", "NVFP4"])
def test_the_assembly_finds_what_codes_stand_for(name: str) -> None:
    table = OF[name].scheme.table or tuple(range(16))
    rnd = random.Random(0)
    for byte in range(256):
        four = bytes([byte, *rnd.randbytes(3)])
        for program, shift in zip(assembly(table), (0, 4), strict=True):
            made = executed(program, int.from_bytes(four, "little")).to_bytes(4, "little")
            assert list(made) == [table[each >> shift & 15] & 255 for each in four]


# Activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [Shares(256, None), Shares(32, 32), Shares(256, 16), Shares(0, 64)], ids=str)
def test_rows_become_the_codes_and_scales_of_the_reference(
    shares: Shares, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "NUMBERS", 512)  # several programs a row
    inputs, padded = 1100, 1280
    x = draw(8, inputs, dtype=dtype, seed=1)
    x[0, 149], x[1, 70], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
    x[4] = torch.arange(inputs).to(dtype) % 150 / 2  # halves, once 127 is the largest
    x[4, ::32], x[5], x[6] = 127, x[5] * 1e-38, 1e-38
    codes, scales, sums = activations.quantize_activations(x, padded, shares)
    if shares.scaled:
        wanted, wanted_scales = of_torch.quantize_activations(x, shares.scaled)
    else:
        wanted, of_rows = of_torch.quantize_rows(x)
        wanted_scales = of_rows[:, None]
    assert torch.equal(codes[:, :inputs], wanted[:, :inputs]) and not codes[:, inputs:].any()
    count = wanted_scales.shape[1]
    torch.testing.assert_close(scales[:count].t(), wanted_scales, rtol=0, atol=0, equal_nan=True)
    if shares.summed is not None and sums is not None:
        wanted_sums = codes.float().view(len(x), -1, shares.summed).sum(-1)
        if shares.summed == shares.scaled:
            wanted_sums *= torch.nn.functional.pad(wanted_scales, (0, wanted_sums.shape[1] - count))
        found = sums[: wanted_sums.shape[1]].t()
        torch.testing.assert_close(found, wanted_sums, rtol=0, atol=0, equal_nan=True)


# Products


@pytest.mark.quick(*QUICK)
@kinds
def test_products_have_the_bits_of_their_reference(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all inputs are one chunk."""
    monkeypatch.setattr(linear_chunks, "PROGRAMS", 1)
    inputs = inputs_of(kind, 600)
    weight, bias = coded_weight(kind, 40, inputs), draw(40, seed=1)
    assert ours.keeps(weight)
    product, reference = ours.pack_coded([weight], bias), Kernels().pack_coded([weight], bias)
    assert (product.in_features, product.out_features) == (inputs, 40)
    x = draw(17, inputs, dtype=torch.float16, seed=2)
    for rows in (0, 3, 17):
        found = product.matmul(x[:rows], torch.float32)
        assert torch.equal(found, reference.matmul(x[:rows], torch.float32))
        assert torch.equal(product.matmul(x[:rows]), found.half())


@pytest.mark.quick("Q4_K", "NVFP4", "W8A8")
@kinds
def test_a_rows_bits_depend_neither_on_its_company_nor_on_how_chunks_are_summed(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(kind, 768)
    weight = coded_weight(kind, 40, inputs)
    product, x = ours.pack_coded([weight], draw(40)), draw(18, inputs, dtype=torch.float16, seed=5)
    whole = product.matmul(x)
    torch.testing.assert_close(whole, Kernels().pack_coded([weight], draw(40)).matmul(x), rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(coded, "FEW", coded.MANY)
    assert torch.equal(product.matmul(x[2:3]), whole[2:3])
    monkeypatch.setattr(Chunks, "side_by_side", lambda chunks, tiles, sum_bytes: False)
    monkeypatch.setattr(linear_chunks, "add_up", None)  # nothing is left to add up
    assert torch.equal(product.matmul(x[1:]), whole[1:])


def test_parts_of_several_schemes_come_side_by_side_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_chunks, "PROGRAMS", 6)  # of a small device
    monkeypatch.setattr(coded, "AT_ONCE", 16)
    parts = [
        coded_weight(kind, size, 768, size) for kind, size in zip(ALL_OF_768[-6:], (32, 7, 64, 40, 8, 3), strict=True)
    ]
    parts[1:1] = [coded_weight(ALL_OF_768[-6], 20, 768, 99)]  # of the same form as the one before
    bias, x = draw(sum(part.out_features for part in parts)), draw(2, 768, dtype=torch.float16, seed=1)
    whole = ours.pack_coded(parts, bias).matmul(x)
    torch.testing.assert_close(whole, Kernels().pack_coded(parts, bias).matmul(x), rtol=2e-3, atol=2e-3)
    own = [part.outputs(range(part.out_features // 2, part.out_features)) for part in parts]
    columns = torch.cat([torch.arange(len(part.codes)) >= len(part.codes) // 2 for part in parts])
    assert torch.equal(ours.pack_coded(own, bias[columns], len(bias)).matmul(x), whole[:, columns])


def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_gives_zeros() -> None:
    for name in ("Q8_0", "W8A8"):
        product, x = ours.pack_coded([coded_weight(OF[name], 8, 64)]), draw(5, 64, seed=4)
        x[0, 3], x[1, 60], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
        out = product.matmul(x)
        assert out[:3].isnan().all() and (out[3] == 0).all()
        assert torch.equal(out[4], product.matmul(x[4:])[0])


def test_few_inputs_and_codes_at_their_limits_are_taken() -> None:
    weight, x = coded_weight(OF["W8 of rows"], 5, 7), draw(3, 7, seed=3)
    assert torch.equal(ours.pack_coded([weight]).matmul(x), Kernels().pack_coded([weight]).matmul(x))
    codes = torch.full((4, 2048), -128, dtype=torch.int8)
    weight = CodedWeight(Scheme("least", 8, 0), codes, factors=torch.full((4,), 1 / 128))
    out = ours.pack_coded([weight]).matmul(torch.full((1, 2048), -1.0))
    torch.testing.assert_close(out, torch.full((1, 4), 2048.0))


def test_short_segments_are_not_kept() -> None:
    weight = CodedWeight(Scheme("eights", 8, 8), torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 2).half())
    assert not ours.keeps(weight)


# Experts


def experts_of(down: str) -> tuple[list[Product], list[Product]]:
    """Three experts' products, whose gates have another scheme than the rest; one has other schemes than the others."""

    def product(expert: int, *parts: CodedWeight) -> Product:
        return ours.pack_coded(parts, draw(sum(part.out_features for part in parts), seed=expert))

    schemes = [("Q6_K", "Q4_K")] * 2 + [("Q4_K", "Q4_K")]
    gates = [
        product(expert, *(coded_weight(OF[name], 96, 256, 2 * expert + i) for i, name in enumerate(both)))
        for expert, both in enumerate(schemes)
    ]
    return gates, [product(expert, coded_weight(OF[down], 256, 96, expert)) for expert in range(3)]


@pytest.mark.quick("1", "13")
@pytest.mark.parametrize("tokens", [1, 13, 25, 0])
def test_experts_of_several_schemes_have_the_bits_of_looped_ones(tokens: int) -> None:
    gate_up, down = experts_of("Q4_0" if tokens == 13 else "W8A8")  # 25 take the taller tiles
    x, weights = draw(tokens, 256, dtype=torch.float16, seed=3), draw(tokens, 2, seed=4).abs()
    rnd = random.Random(0)
    ids = torch.tensor([sorted(rnd.sample(range(3), 2)) for _ in range(tokens)], dtype=torch.int64).view(tokens, 2)
    found = ours.experts(gate_up, down)(x, ids, weights)
    assert torch.equal(found, LoopedExperts(gate_up, down)(x, ids, weights))


def test_experts_without_a_gate_have_the_bits_of_looped_ones() -> None:
    up = [ours.pack_coded([coded_weight(OF["W8 of rows"], 32, 64, seed)]) for seed in range(2)]
    down = [ours.pack_coded([coded_weight(OF["Q8_0"], 64, 32, seed)]) for seed in range(2)]
    x, ids, weights = draw(3, 64, dtype=torch.float16), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    expected = LoopedExperts(up, down, None, "relu2")(x, ids, weights)
    assert torch.equal(CodedExperts(up, down, activation="relu2")(x, ids, weights), expected)


def test_what_does_not_fit_is_refused() -> None:
    product, dense = ours.pack_coded([coded_weight(OF["Q8_0"], 64, 32)]), ours.pack([draw(64, 32)])
    for other, message in ((dense, "have codes"), (ours.pack_coded([coded_weight(OF["Q8_0"], 8, 32)]), "differ")):
        with pytest.raises(ValueError, match=message):
            CodedExperts([product, other], [product, product])
    with pytest.raises(ValueError, match="do not fit"):
        CodedExperts([product], [product])
    with pytest.raises(ValueError, match="32 columns"):
        product.matmul(draw(2, 33))
    with pytest.raises(ValueError, match="out_dtype"):
        product.matmul(draw(2, 32), torch.float16)
