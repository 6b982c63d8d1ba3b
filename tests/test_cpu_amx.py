"""Products and attention in tile registers (AMX), emulated here: exact to the bit, and a row's bits are its own."""

from __future__ import annotations

import platform
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import amx_counts

from quire.errors import ConfigError
from quire.ops import Kernels, KVCache, store_kv
from quire.ops.cpu import attention, experts, instruction_sets, latent, library, linear, rows
from quire.ops.cpu.instruction_sets import INSTRUCTION_SETS
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.cpu.library import Library
from quire.ops.experts import LoopedExperts, LoopedHeads
from quire.ops.kv_cache import KVCacheDtype
from quire.ops.memory import Scratch, WeightMemory
from tests import test_cpu_attention as plain
from tests import test_cpu_latent as absorbed
from tests import test_trees as trees
from tests.compiled import KERNELS, ROOT, compiled
from tests.test_coded import KINDS, Kind, coded, inputs_of, names
from tests.test_cpu_experts import EXPERTS, HIDDEN, Format, draw_layer, draw_routes
from tests.test_cpu_linear import SCHEMES, SHAPES, draw

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86_64's tile registers")

ROWS = (1, 4, 5, 16, 17, 33, 50)
"""Few rows, one tile, two of nearly one height, three, and four whose last one shares rows with the one before."""


class InTiles(CpuKernels):
    """What the emulating library has: products, experts, heads, rows and attention."""

    MODULES = attention, experts, latent, linear, rows

    def __init__(self) -> None:
        Kernels.__init__(self)
        self.name = "amx"
        prototypes = {name: what for module in self.MODULES for name, what in module.PROTOTYPES.items()}
        self.lib = self._lib = Library("amx", prototypes | amx_counts.PROTOTYPES)
        self._scratch, self._workspace, self._weights = Scratch(), Scratch(), WeightMemory()


@pytest.fixture(scope="module")
def tiles() -> Iterator[InTiles]:
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
        yield InTiles()


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


def of_name(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.scheme.name == name)


def emulation(compiler: str, isa: str) -> Path:
    """A library of what uses tile registers, for any machine: they are emulated."""
    script = runpy.run_path(str(ROOT / "scripts" / "compile_kernels.py"), run_name="options")
    names = ("attention", "experts", "group", "latent", "library", "linear", "pack", "route", "rows", "team")
    flags = [*script["OPTIONS"], *INSTRUCTION_SETS[isa].options, "-O1", *amx_counts.WATCHING, "-Werror", "-shared"]
    return compiled("lib_amx", [*(KERNELS / f"{name}.cpp" for name in names), amx_counts.COUNTER], flags, compiler)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_products_equal_those_in_fp64(tiles: CpuKernels, shape: tuple[int, int]) -> None:
    weight, bias = draw(*shape, dtype=torch.bfloat16, seed=1), draw(shape[0], dtype=torch.bfloat16, seed=2)
    for used in (None, bias):
        product = tiles.pack([weight], used)
        for count in ROWS:
            x = draw(count, shape[1], dtype=torch.bfloat16, seed=count)
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
def test_bf16_products_have_the_bits_that_intel_documents(tiles: CpuKernels, shape: tuple[int, int]) -> None:
    weight, x = draw(*shape, dtype=torch.bfloat16, seed=1), draw(37, shape[1], dtype=torch.bfloat16, seed=2)
    assert torch.equal(tiles.pack([weight]).matmul(x, torch.float32), as_documented(x, weight))


@names
def test_coded_products_have_the_bits_of_their_reference(tiles: CpuKernels, kind: Kind) -> None:
    for outputs, most in ((1, 256), (33, 600), (160, 1100)):
        inputs = inputs_of(kind, most)
        weight, bias = coded(kind, outputs, inputs), draw(outputs, seed=2)
        ours, reference = tiles.pack_coded([weight], bias), Kernels().pack_coded([weight], bias)
        for count in ROWS:
            x = draw(count, inputs, dtype=torch.bfloat16, seed=count)
            assert torch.equal(ours.matmul(x, torch.float32), reference.matmul(x, torch.float32)), (outputs, count)


def test_inputs_may_fill_no_tile(tiles: CpuKernels) -> None:
    for inputs in (1, 70, 129):
        weight, x = coded(of_name("W8 of rows"), 40, inputs), draw(20, inputs, seed=3)
        assert torch.equal(tiles.pack_coded([weight]).matmul(x), Kernels().pack_coded([weight]).matmul(x))


@pytest.mark.parametrize("name", ["W8 of rows", "Q8_0", "Q4_K"])
def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_gives_zeros(tiles: CpuKernels, name: str) -> None:
    kind = of_name(name)
    inputs = inputs_of(kind, 64)
    product, x = tiles.pack_coded([coded(kind, 40, inputs)]), draw(20, inputs, seed=4)
    x[0, 3], x[1, 60], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf, 0
    out = product.matmul(x)
    assert out[:3].isnan().all()
    assert (out[3] == 0).all()
    assert torch.equal(out[4:], product.matmul(x[4:]))


def test_a_bf16_row_that_is_not_finite_leaves_the_others_alone(tiles: CpuKernels) -> None:
    product, x = tiles.pack([draw(40, 70, dtype=torch.bfloat16)]), draw(20, 70, dtype=torch.bfloat16, seed=4)
    expected = product.matmul(x)
    x[7, 69], x[9, 0] = torch.nan, torch.inf
    out = product.matmul(x)
    assert out[7].isnan().all() and not out[9].isfinite().any()
    rest = [row for row in range(20) if row not in (7, 9)]
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.parametrize("name", ["bf16", "W8 of rows", "Q8_0", "Q4_K", "Q6_K"])
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_on_threads(tiles: CpuKernels, name: str) -> None:
    inputs = 192 if name == "bf16" else 256
    product = (
        tiles.pack([draw(72, inputs, dtype=torch.bfloat16)])
        if name == "bf16"
        else tiles.pack_coded([coded(of_name(name), 72, inputs)])
    )
    x = draw(150, inputs, dtype=torch.bfloat16, seed=5)
    whole = product.matmul(x)
    for count in (*range(1, 70), 127, 149):
        for first in (0, 150 - count):
            part = slice(first, first + count)
            assert torch.equal(product.matmul(x[part]), whole[part]), (count, first)
    with tiles.threads(3):
        assert torch.equal(product.matmul(x), whole)
        assert torch.equal(product.matmul(x[:7]), whole[:7])


@pytest.mark.parametrize("form", [torch.bfloat16, *SCHEMES[:2]], ids=str)
def test_experts_and_heads_have_the_bits_of_their_products_one_by_one(
    tiles: CpuKernels, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.ops.experts.activate", tiles.activate)
    layer = draw_layer(tiles, form)
    grouped, looped = tiles.experts(*layer), LoopedExperts(*layer)
    for tokens in (*ROWS, 150):
        x = draw(tokens, HIDDEN, dtype=torch.bfloat16, seed=tokens)
        for top_k in (1, EXPERTS):
            routes = draw_routes(tokens, top_k)
            assert torch.equal(grouped(x, *routes), looped(x, *routes)), (tokens, top_k)
        each = x.view(tokens, 1, HIDDEN).expand(-1, EXPERTS, -1)
        assert torch.equal(tiles.heads(layer[0])(each), LoopedHeads(layer[0])(each))


def test_panels_that_take_turns_have_the_same_bits(tiles: InTiles) -> None:
    """Of long rows, a part after the other meets several panels, so that the parts stay in the cache."""
    weight, x = coded(of_name("Q4_K"), 64, 4352), draw(140, 4352, dtype=torch.bfloat16)
    assert torch.equal(tiles.pack_coded([weight]).matmul(x), Kernels().pack_coded([weight]).matmul(x))


FORMS = {"bf16": 1 / 32, "8 bits, a scale an output": 1 / 4, "Q8_0": 1, "Q4_K": 1, "Q6_K": 1, "GPTQ": 1 / 2}
"""Stores for each tile product: one for each segment's sums."""


@pytest.mark.parametrize("form", FORMS)
def test_128_rows_take_the_fewest_tile_products_and_a_load_each(tiles: InTiles, form: str) -> None:
    shape, scheme = (128, 1024, 64), amx_counts.FORMATS[form]
    counts = amx_counts.count(tiles.lib, amx_counts.product(tiles, scheme, *shape))
    assert counts.products == amx_counts.least_products(scheme, *shape)
    assert counts.loads == counts.products
    assert counts.stores == FORMS[form] * counts.products


@pytest.mark.quick("bf16-1024", "Q4_K-2048")
@pytest.mark.parametrize(
    "form, inputs", [("bf16", 1024), ("bf16", 5120), ("8 bits, a scale an output", 2048), ("Q4_K", 2048)]
)
def test_many_rows_do_not_come_from_beyond_the_second_level_cache_for_each_panel(
    tiles: InTiles, form: str, inputs: int
) -> None:
    rows, outputs = 512, 256
    call = amx_counts.product(tiles, amx_counts.FORMATS[form], rows, inputs, outputs)
    for caches in (amx_counts.ALONE, amx_counts.SHARED):
        counts = amx_counts.count(tiles.lib, call, caches)
        assert 64 * counts.from_beyond <= 16 * 16 * counts.products, "bytes a cycle; 32 and more if they did"
        assert 64 * (counts.from_second + counts.to_second) <= 1.1 * 64 * 16 * counts.products


def test_a_decoded_tokens_keys_are_multiplied_where_they_lie(tiles: InTiles) -> None:
    counts = amx_counts.count(tiles.lib, amx_counts.attended(tiles, 1, 1, 128, 1))
    keys, values = 128 // 16 * 4, 4 * 128 // 16
    assert counts.products == keys + values
    assert counts.stores == 128 // 16 + 128 // 16


# -- attention ------------------------------------------------------------------------------------------------------


def keys_that_show_their_sums(width: int) -> torch.Tensor:
    """Two keys; that of the second's product with ones is 1 where the first and the second numbers of pairs are summed
    apart, and 0 where each number is added to what came before."""
    keys = torch.zeros(2, 1, width, dtype=torch.bfloat16)
    keys[1, 0, :3] = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    return keys


def test_scores_are_summed_as_tiles_sum(tiles: CpuKernels) -> None:
    q, keys = torch.ones(1, 1, 32, dtype=torch.bfloat16), keys_that_show_their_sums(32)
    values = torch.tensor([0.0, 1.0], dtype=torch.bfloat16).view(2, 1, 1).expand(-1, -1, 32)
    kv, table = KVCache(2, 1, 1, 32, 16, torch.bfloat16), [torch.tensor([1])]
    store_kv(keys, values, kv, plain.batch_of([(0, 2)], table, 16), 0)
    for kernels, score in ((tiles, 1.0), (Kernels(), 0.0)):
        out = kernels.attend(q, kv, plain.batch_of([(1, 1)], table, 16), 0, 1.0, None)
        torch.testing.assert_close(out.float(), torch.full((1, 32), score).sigmoid(), atol=2**-8, rtol=0)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_attention_equals_the_reference(tiles: CpuKernels, stored: KVCacheDtype) -> None:
    plain.test_attention_equals_the_reference(tiles, torch.bfloat16, stored)


@pytest.mark.parametrize("rows", [1, 16])
def test_nothing_behind_the_block_tables_is_read(tiles: CpuKernels, rows: int) -> None:
    plain.test_nothing_behind_the_block_tables_is_read(tiles, rows)


@pytest.mark.quick("shape0-auto-150", "shape1-int8-70", "shape1-fp8-None")
@pytest.mark.parametrize("stored, window", [("auto", None), ("auto", 150), ("int8", 70), ("fp8", None)])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 24)])
def test_bits_of_attention_depend_on_the_request_alone(
    tiles: CpuKernels, shape: tuple[int, int, int], stored: KVCacheDtype, window: int | None
) -> None:
    plain.test_bits_depend_on_the_request_alone(tiles, torch.bfloat16, shape, stored, window)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_to_what_follows(tiles: CpuKernels, window: int | None) -> None:
    plain.test_whole_prompts_see_what_follows_and_not_their_company(tiles, torch.bfloat16, window)


@pytest.mark.quick("int8")
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_trees(tiles: CpuKernels, stored: KVCacheDtype) -> None:
    trees.test_a_row_of_a_tree_has_the_bits_of_its_path_alone(tiles, torch.bfloat16, stored)
    trees.test_a_row_of_a_tree_has_the_bits_of_its_path_alone_in_latent_attention(tiles, stored)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8"])
def test_latent_attention_equals_sums_in_fp64(tiles: CpuKernels, stored: KVCacheDtype) -> None:
    for seed in range(3):
        absorbed.test_attention_equals_sums_in_fp64(tiles, torch.bfloat16, stored, seed)


@pytest.mark.quick("shape0-fp8")
@pytest.mark.parametrize("stored", ["auto", pytest.param("int8", marks=pytest.mark.slow), "fp8"])
@pytest.mark.parametrize("shape", [(3, 24, 8), pytest.param((16, 64, 16), marks=pytest.mark.slow)])
def test_bits_of_latent_attention_depend_on_the_request_alone(
    tiles: CpuKernels, shape: tuple[int, int, int], stored: KVCacheDtype
) -> None:
    absorbed.test_bits_depend_on_the_request_alone(tiles, torch.bfloat16, shape, stored)


def test_a_number_that_is_not_finite_reaches_the_rows_that_see_it(tiles: CpuKernels) -> None:
    plain.test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(tiles, "auto")
    absorbed.test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(tiles, "auto")
    absorbed.test_one_token_has_the_same_bits_whoever_shares_its_splits(tiles)
