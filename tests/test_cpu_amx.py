"""The products in tile registers (AMX), which are emulated here: exact to the bit, and the same in any company."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.ops import Kernels
from quire.ops.cpu import experts, instruction_sets, library, linear
from quire.ops.cpu import rows as row_kernels
from quire.ops.cpu.instruction_sets import INSTRUCTION_SETS
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.cpu.library import Library
from quire.ops.experts import Experts, HeadProducts, LoopedExperts, LoopedHeads
from quire.ops.linear import Product
from quire.ops.memory import Scratch
from quire.ops.quantized import Quantization, QuantizedWeight, quantize
from quire.parallel.group import Gather
from tests.compiled import KERNELS, ROOT, compiled
from tests.test_cpu_experts import EXPERTS, HIDDEN, draw_layer, draw_routes
from tests.test_cpu_linear import SCHEMES, SHAPES, draw

ROWS = (1, 4, 5, 16, 17, 33, 50)
"""Few rows, one tile, two of nearly one height, three, and four whose last one shares rows with the one before."""


class InTiles(Kernels):
    """The products of the emulating library, and the experts' and heads'; the rest is torch's."""

    threads = CpuKernels.threads

    def __init__(self, lib: Library) -> None:
        self._lib, self._scratch = lib, Scratch()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return linear.CpuProduct(self._lib, weight, bias, self._scratch)

    def pack_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Product:
        return linear.CpuProduct(self._lib, weight, bias, self._scratch)

    def experts(self, gate_up: Sequence[Product], down: Sequence[Product], inner: Gather | None = None) -> Experts:
        return experts.CpuExperts(self._lib, gate_up, down, Scratch())

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        return experts.CpuHeads(self._lib, products, Scratch())

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return row_kernels.silu_mul(self._lib, x)


@pytest.fixture(scope="module")
def tiles() -> Iterator[Kernels]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (g++) to build the emulation with")
    simplest = [
        isa for isa in ("avx2", "neon") if library.NEEDS[isa] <= library.cpu_flags()
    ]  # with fused multiply-adds
    if not simplest:
        pytest.skip("this machine has no fused multiply-adds to compare with")
    path = emulation(compiler, simplest[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "built", lambda: {"amx": path})
        patch.setattr(library, "cpu_flags", lambda: frozenset(library.NEEDS["amx"]))
        yield InTiles(Library("amx", {**linear.PROTOTYPES, **row_kernels.PROTOTYPES, **experts.PROTOTYPES}))


@pytest.mark.parametrize("granted", [True, False])
def test_where_linux_refuses_tile_registers_the_next_best_is_taken(
    monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    assert instruction_sets._granted_tiles() in (True, False)  # the true answer, whatever it is here
    monkeypatch.setattr(instruction_sets, "_processor_flags", lambda: frozenset(library.NEEDS["amx"]))
    monkeypatch.setattr(instruction_sets, "_granted_tiles", lambda: granted)
    monkeypatch.setattr(library, "cpu_flags", library.cpu_flags.__wrapped__)
    monkeypatch.setattr(library, "built", lambda: {isa: Path(f"lib_{isa}.so") for isa in ("amx", "avx512_bf16")})
    assert library.usable() == (["amx", "avx512_bf16"] if granted else ["avx512_bf16"])
    assert library.missed() is None
    if not granted:
        with pytest.raises(ConfigError, match="cannot run the kernels for 'amx': it lacks amx_tile; this machine has"):
            Library("amx", {})


def emulation(compiler: str, isa: str) -> Path:
    """A library of the products and what is made of them, for any machine: tile registers are emulated."""
    script = runpy.run_path(str(ROOT / "scripts" / "compile_kernels.py"), run_name="options")
    names = ("experts.cpp", "group.cpp", "library.cpp", "linear.cpp", "pack.cpp", "route.cpp", "rows.cpp", "team.cpp")
    flags = [*script["OPTIONS"], *INSTRUCTION_SETS[isa].options, "-O1", "-DQUIRE_EMULATE_AMX", "-Werror", "-shared"]
    return compiled("lib_amx", [KERNELS / name for name in names], flags, compiler)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_products_equal_those_in_fp64(tiles: Kernels, shape: tuple[int, int]) -> None:
    weight, bias = draw(*shape, dtype=torch.bfloat16, seed=1), draw(shape[0], dtype=torch.bfloat16, seed=2)
    for used in (None, bias):
        product = tiles.pack([weight], used)
        for rows in ROWS:
            x = draw(rows, shape[1], dtype=torch.bfloat16, seed=rows)
            expected = x.double() @ weight.double().T + (0 if used is None else used.double())
            wide = product.matmul(x, torch.float32)
            torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-3)
            assert torch.equal(product.matmul(x), wide.to(torch.bfloat16))


def as_documented(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T as TDPBF16PS computes it, 32 inputs at a time: the first and the second numbers of the pairs are summed
    apart, from zero and in ascending order, then both sums' sum is added; fp64 holds each step until it is rounded."""
    inputs = x.shape[1] + -x.shape[1] % 32
    x, weight = (torch.nn.functional.pad(t.double(), (0, inputs - t.shape[1])) for t in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for first in range(0, inputs, 32):
        sums = torch.zeros(2, len(x), len(weight))
        for j in range(first, first + 32):
            sums[j % 2] = (sums[j % 2].double() + torch.outer(x[:, j], weight[:, j])).float()
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize("shape", [(40, 32), (33, 66), (70, 257)])
def test_bf16_products_have_the_bits_that_intel_documents(tiles: Kernels, shape: tuple[int, int]) -> None:
    weight, x = draw(*shape, dtype=torch.bfloat16, seed=1), draw(37, shape[1], dtype=torch.bfloat16, seed=2)
    assert torch.equal(tiles.pack([weight]).matmul(x, torch.float32), as_documented(x, weight))


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (33, 384), (160, 1024)])
def test_quantized_products_have_the_bits_of_their_reference(
    tiles: Kernels, shape: tuple[int, int], how: Quantization
) -> None:
    weight, bias = quantize(draw(*shape, seed=1), how), draw(shape[0], seed=2)
    for used in (None, bias):
        ours, reference = tiles.pack_quantized(weight, used), Kernels().pack_quantized(weight, used)
        for rows in ROWS:
            x = draw(rows, shape[1], dtype=torch.bfloat16, seed=rows)
            assert torch.equal(ours.matmul(x, torch.float32), reference.matmul(x, torch.float32))


def test_groups_of_32_may_end_within_a_tile(tiles: Kernels) -> None:
    weight, x = quantize(draw(40, 96), Quantization("int4", 32)), draw(20, 96, seed=3)
    assert torch.equal(tiles.pack_quantized(weight).matmul(x), Kernels().pack_quantized(weight).matmul(x))


def test_int8_takes_inputs_that_fill_no_tile(tiles: Kernels) -> None:
    for inputs in (1, 70, 129):
        weight, x = quantize(draw(40, inputs), Quantization("int8")), draw(20, inputs, seed=3)
        assert torch.equal(tiles.pack_quantized(weight).matmul(x), Kernels().pack_quantized(weight).matmul(x))


@pytest.mark.parametrize("how", SCHEMES[:2], ids=str)
def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_gives_zeros(tiles: Kernels, how: Quantization) -> None:
    product = tiles.pack_quantized(quantize(draw(40, 64), how))
    x = draw(20, 64, seed=4)
    x[0, 3], x[1, 60], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
    out = product.matmul(x)
    assert out[:3].isnan().all()
    assert (out[3] == 0).all()
    assert torch.equal(out[4:], product.matmul(x[4:]))


def test_a_bf16_row_that_is_not_finite_leaves_the_others_alone(tiles: Kernels) -> None:
    product, x = tiles.pack([draw(40, 70, dtype=torch.bfloat16)]), draw(20, 70, dtype=torch.bfloat16, seed=4)
    expected = product.matmul(x)
    x[7, 69], x[9, 0] = torch.nan, torch.inf
    out = product.matmul(x)
    assert out[7].isnan().all() and not out[9].isfinite().any()
    rest = [row for row in range(20) if row not in (7, 9)]
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.parametrize("how", [None, *SCHEMES], ids=str)
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_on_threads(tiles: Kernels, how: Quantization | None) -> None:
    weight = draw(72, 192 if how is None else 256)
    product = tiles.pack([weight.bfloat16()]) if how is None else tiles.pack_quantized(quantize(weight, how))
    x = draw(150, weight.shape[1], dtype=torch.bfloat16, seed=5)
    whole = product.matmul(x)
    for rows in (*range(1, 70), 127, 149):
        for first in (0, 150 - rows):
            part = slice(first, first + rows)
            assert torch.equal(product.matmul(x[part]), whole[part]), (rows, first)
    with tiles.threads(3):
        assert torch.equal(product.matmul(x), whole)
        assert torch.equal(product.matmul(x[:7]), whole[:7])


@pytest.mark.parametrize("form", [torch.bfloat16, *SCHEMES[:2]], ids=str)
def test_experts_and_heads_have_the_bits_of_their_products_one_by_one(
    tiles: Kernels, form: torch.dtype | Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.ops.experts.silu_mul", tiles.silu_mul)
    layer = draw_layer(tiles, form)
    grouped, looped = tiles.experts(*layer), LoopedExperts(*layer)
    for tokens in (*ROWS, 150):
        x = draw(tokens, HIDDEN, dtype=torch.bfloat16, seed=tokens)
        for top_k in (1, EXPERTS):
            routes = draw_routes(tokens, top_k)
            assert torch.equal(grouped(x, *routes), looped(x, *routes)), (tokens, top_k)
        each = x.view(tokens, 1, HIDDEN).expand(-1, EXPERTS, -1)
        assert torch.equal(tiles.heads(layer[0])(each), LoopedHeads(layer[0])(each))
