"""Mixture of experts in Triton: equal to its references, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import triton

from quire.ops import Fp8Weight, RaggedBatch
from quire.ops.experts import LoopedExperts, LoopedHeads, Routing, count_experts, route
from quire.ops.linear import Product
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.ragged import DeviceSpans
from quire.ops.triton import expert_rows, experts, linear
from quire.ops.triton import routing as routing_kernel
from quire.ops.triton.experts import GroupedExperts
from quire.ops.triton.heads import GroupedHeads
from quire.ops.triton.kernels import TritonKernels
from quire.ops.triton.linear_dense import DenseProduct, Tile
from quire.ops.triton.linear_mxfp4 import Mxfp4Product
from quire.ops.triton.linear_vendor import VendorProduct
from quire.ops.triton.weights import Weights
from tests.quantized import coded
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
"""The interpreter multiplies bf16 wrongly."""
HIDDEN, INNER, COUNT = 72, 40, 5
"""Neither fills a tile of inputs, nor one of outputs."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}

ROUTINGS = {
    "plain": Routing(8, 2, normalize=False),
    "one of one": Routing(1, 1),
    "all": Routing(5, 5),
    "sigmoid": Routing(12, 4, "sigmoid", normalize=False, scale=2.5),
    "groups by their best": Routing(20, 3, groups=4, top_groups=2, normalize=False, scale=16.0),
    "groups by their two best": Routing(18, 4, "sigmoid", 3, 2, "top2", scale=2.5),
    "as many as remain": Routing(16, 8, "sigmoid", 4, 2, "top2"),
    "every group": Routing(16, 5, groups=4, top_groups=4),
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(count: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> list[Product]:
    weights = draw(count, outputs, inputs, dtype=dtype, seed=seed) * 0.2
    return [linear.pack([weight], None, CPU, (VendorProduct, DenseProduct)[i % 2]) for i, weight in enumerate(weights)]


def layer(dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER) -> tuple[list[Product], list[Product]]:
    return packed(COUNT, 2 * inner, hidden, dtype, 1), packed(COUNT, hidden, inner, dtype, 2)


def quantized_weight(how: str, outputs: int, inputs: int, seed: int = 0) -> Product:
    return TritonKernels("cpu").pack_coded([coded(draw(outputs, inputs, seed=seed) * 0.2, how)])


def launch_all() -> None:
    """Experts of Qwen3-30B-A3B, in MXFP4 and in fp8, routers of DeepSeek V2 and V3, and heads of their attention."""
    _launch((1, 16, 300, 900, 2500))


def launch_few() -> None:
    """Of these, steps of few rows."""
    _launch((16,))


def _launch(steps: Sequence[int]) -> None:
    arch = triton.runtime.driver.active.get_current_target().arch
    options = {"EARLY": True, "launch_pdl": True} if arch >= 90 else {"EARLY": False}
    with mock.patch.object(experts, "launch_options", lambda device: options):
        _launch_experts(steps)
        _launch_routing()


def _launch_experts(steps: Sequence[int]) -> None:
    gate_up, down = torch.empty(1536, 2048, dtype=torch.bfloat16), torch.empty(2048, 768, dtype=torch.bfloat16)
    grouped = GroupedExperts(*([linear.pack([w], None, CPU, DenseProduct)] * 128 for w in (gate_up, down)))
    for tokens in steps:
        ids, weights = torch.empty(tokens, 8, dtype=torch.int64), torch.empty(tokens, 8)
        grouped(torch.empty(tokens, 2048, dtype=torch.bfloat16), ids, weights)
    without_gate = GroupedExperts(
        *([linear.pack([w], None, CPU, DenseProduct)] * 16 for w in (gate_up, down.new_empty(2048, 1536))),
        activation="relu2",
    )
    without_gate(torch.empty(16, 2048, dtype=torch.bfloat16), ids[:16], weights[:16])
    codes = [torch.zeros(*shape, dtype=torch.uint8) for shape in ((768, 8, 16), (768, 8), (256, 12, 16), (256, 12))]
    both = [Mxfp4Product([Mxfp4Weight(*pair)], None, CPU) for pair in (codes[:2], codes[2:])]
    stored = GroupedExperts([both[0]] * 16, [both[1]] * 16)
    for tokens in steps[1::3] or steps:
        ids, weights = torch.empty(tokens, 4, dtype=torch.int64), torch.empty(tokens, 4)
        stored(torch.empty(tokens, 256, dtype=torch.bfloat16), ids, weights)
    codes = [torch.zeros(*shape, dtype=torch.uint8) for shape in ((768, 256), (256, 384))]
    in_fp8 = [Fp8Weight(each, torch.zeros(len(each), each.shape[1] // 128), 128) for each in codes]
    both = [TritonKernels("cpu", True).pack_fp8([each], torch.bfloat16) for each in in_fp8]
    kept = GroupedExperts([both[0]] * 16, [both[1]] * 16)
    for tokens in steps[1::3] or steps:
        ids, weights = torch.empty(tokens, 4, dtype=torch.int64), torch.empty(tokens, 4)
        kept(torch.empty(tokens, 256, dtype=torch.bfloat16), ids, weights)


def _launch_routing() -> None:
    v2 = Routing(160, 6, groups=8, top_groups=3, normalize=False, scale=16.0)
    v3 = Routing(256, 8, "sigmoid", 8, 4, "top2", scale=2.5)
    for routing, bias in ((v2, None), (v3, torch.empty(256))):
        ids, _ = routing_kernel.route(torch.empty(16, routing.num_experts), routing, bias, batch_of(5))
        routing_kernel.count_experts(ids, batch_of(5), torch.empty(routing.num_experts, dtype=torch.int64))
    heads = GroupedHeads([linear.pack([torch.empty(512, 128, dtype=torch.bfloat16)], None, CPU, DenseProduct)] * 16)
    heads(torch.empty(16, 16, 192, dtype=torch.bfloat16)[..., :128])


SPILLED = {
    ("_gate_up_kernel", 100): 8,  # of weights in MXFP4
}
"""Bytes a thread that the assembler gives up, so that two programs fit; all other kernels keep all in registers."""


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus_without_spills_and_with_matrix_instructions(arch: int) -> None:
    used = compile_all("tests.test_triton_experts", arch)
    for kernel in used:
        assert kernel["stack"] <= SPILLED.get((kernel["kernel"], arch), 0), kernel
        assert kernel["shared"] <= 99 * 1024, kernel  # what a consumer's card has
    instructions = {80: {"mma.sync"}, 90: {"wgmma", "mma.sync"}, 100: {"tcgen05", "mma.sync"}}[arch]
    for name in ("_gate_up_kernel", "_down_kernel", "_heads_kernel"):
        found = [kernel for kernel in used if kernel["kernel"] == name]
        assert len(found) == {"_heads_kernel": 1, "_gate_up_kernel": 10, "_down_kernel": 9}[name]
        for kernel in found:
            assert kernel["matrix"] and set(kernel["matrix"]) <= instructions
            assert kernel["asynchronous"] or arch == 100  # weights found by their addresses are read ahead
    for name in ("_route_kernel", "_count_kernel"):
        assert sum(kernel["kernel"] == name for kernel in used) == 2


# Routing


@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize("case", ROUTINGS)
def test_tokens_go_where_the_reference_sends_them(case: str, biased: bool) -> None:
    routing = ROUTINGS[case]
    few = torch.tensor([0.0, 0.3, 1.1, 1.9, 2.6])  # so that many tie
    ties = few[torch.randint(5, (3, routing.num_experts), generator=torch.Generator().manual_seed(5))]
    logits = torch.cat([ties, torch.full_like(ties[:1], -200.0), 3 * draw(2, routing.num_experts)])
    bias = None
    if biased:  # the same within a group, and a dyadic fraction, or rounding would decide between ties
        count = routing.groups if routing.groups > 1 else routing.num_experts
        bias = ((torch.arange(count) % 3 - 1) * 0.25).repeat_interleave(routing.num_experts // count)
    ids, weights = routing_kernel.route(logits, routing, bias)
    expected_ids, expected = route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("case", ROUTINGS)
def test_any_logits_give_valid_experts(case: str) -> None:
    routing = ROUTINGS[case]
    logits = draw(5, routing.num_experts)
    logits[0], logits[1], logits[2], logits[3, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    ids, weights = routing_kernel.route(logits, routing, None)
    assert ids.min() >= 0 and ids.max() < routing.num_experts
    assert all(len(set(row)) == routing.top_k and row == sorted(row) for row in ids.tolist())
    assert weights[0].isnan().all()
    alone, weights_alone = routing_kernel.route(logits[4:], routing, None)
    assert torch.equal(alone[0], ids[4]) and torch.equal(weights_alone[0], weights[4])


def test_no_tokens_have_no_experts() -> None:
    ids, weights = routing_kernel.route(torch.empty(0, 8), Routing(8, 2), None)
    assert ids.shape == weights.shape == (0, 2)
    assert GroupedExperts(*layer(torch.float32))(torch.empty(0, HIDDEN), ids, weights).shape == (0, HIDDEN)


def batch_of(rows: int | None) -> RaggedBatch:
    """A step of so many real rows in two spans, as a device sees it, with padding spans; None: as the host does."""
    none = torch.empty(0, dtype=torch.int64)
    batch = RaggedBatch(none, none, none, [], [], none.view(0, 0), 16)
    if rows is not None:
        ints = torch.zeros(4, dtype=torch.int32)
        row_starts = torch.tensor([0, rows - 1, rows, rows, rows], dtype=torch.int32)
        batch.spans = DeviceSpans(row_starts, ints, ints, ints, ints.view(4, 1))
    return batch


def test_padding_goes_where_the_last_real_row_goes_and_reads_no_expert_of_its_own() -> None:
    logits, routing = draw(24, 40), Routing(40, 4)
    whole, whole_weights = routing_kernel.route(logits, routing, None)
    for real in (None, 2, 23, 24):
        ids, weights = routing_kernel.route(logits, routing, None, batch_of(real))
        taken = torch.arange(24).clamp(max=(real or 24) - 1)
        assert torch.equal(ids, whole[taken])
        assert torch.equal(weights, whole_weights[taken])
    batch = batch_of(1)
    assert batch.spans is not None
    batch.spans.row_starts.zero_()  # as where all sizes are recorded: no row is real
    assert torch.equal(routing_kernel.route(logits, routing, None, batch)[0], whole[:1].expand(24, -1))


@pytest.mark.parametrize("experts", [8, 40])
@pytest.mark.parametrize("real", [None, 1, 23, 24])
def test_every_expert_gets_its_rows_counted_and_padding_none(
    real: int | None, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_kernel, "COUNTED", 16)  # several programs
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:3] for i in range(24)])
    load, expected = (torch.arange(experts) + 2**33 for _ in range(2))  # what earlier steps have left
    routing_kernel.count_experts(ids, batch_of(real), load)
    expected += torch.bincount(ids[:real].flatten(), minlength=experts)
    assert torch.equal(load, expected)
    count_experts(ids, batch_of(real), load)
    assert torch.equal(load, expected + torch.bincount(ids[:real].flatten(), minlength=experts))
    routing_kernel.count_experts(ids[:0], batch_of(None), load)


# Experts

CHOICES = {
    "one token": [[1, 4]],
    "an expert that all chose, one that one chose, and two that none did": [[0, 2]] * 8 + [[0, 3]],
    "all experts": [[0, 1, 2, 3, 4]] * 3,
    "one place": [[4], [0], [4]],
    "more rows than a tile has": [[1, 3]] * 70,
}


@pytest.mark.quick(
    "one token-dtype1",
    "an expert that all chose, one that one chose, and two that none did-dtype1",
    "all experts-dtype1",
    "one place-dtype0",
    "more rows than a tile has-dtype1",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CHOICES)
def test_grouped_experts_equal_looped_ones(case: str, dtype: torch.dtype) -> None:
    gate_up, down = layer(dtype)
    ids = torch.tensor(CHOICES[case])
    x, weights = draw(len(ids), HIDDEN, dtype=dtype, seed=3), draw(*ids.shape, seed=4).abs()
    found = GroupedExperts(gate_up, down)(x, ids, weights)
    expected = LoopedExperts(gate_up, down)(x, ids, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_without_a_gate_equal_looped_ones(dtype: torch.dtype) -> None:
    up, down = packed(COUNT, INNER, HIDDEN, dtype, 1), packed(COUNT, HIDDEN, INNER, dtype, 2)
    x, weights, ids = draw(9, HIDDEN, dtype=dtype, seed=3), draw(9, 2, seed=4).abs(), torch.tensor([[0, 2]] * 9)
    found = GroupedExperts(up, down, activation="relu2")(x, ids, weights)
    expected = LoopedExperts(up, down, None, "relu2")(x, ids, weights)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    with pytest.raises(ValueError, match="do not fit"):
        GroupedExperts(up, down)


@pytest.mark.quick("dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = GroupedExperts(*layer(dtype))
    x, weights = draw(67, HIDDEN, dtype=dtype, seed=3), draw(67, 2, seed=4).abs()
    ids = torch.stack(
        [torch.randperm(COUNT, generator=torch.Generator().manual_seed(i))[:2].sort()[0] for i in range(67)]
    )
    whole = grouped(x, ids, weights)
    for rows in (slice(66, 67), slice(3, 20)):
        assert torch.equal(grouped(x[rows], ids[rows], weights[rows]), whole[rows])
    for name in ("FEW_PAIRS", "MANY_PAIRS"):
        monkeypatch.setattr(expert_rows, name, 16)  # pairs are ordered in several rounds
    other, company = x.clone(), ids.clone()
    other[:30], company[:30] = torch.nan, torch.tensor([1, 2])
    assert torch.equal(grouped(other, company, weights)[30:], whole[30:])


def test_each_number_of_rows_takes_its_tiles_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do those of an expert's last rows, which are computed as fewer."""
    gate_up, down = layer(torch.float16, 128, 64)  # even inputs
    grouped, weights = GroupedExperts(gate_up, down), torch.ones(149, 1)
    x, ids = draw(149, 128, dtype=torch.float16, seed=3), torch.zeros(149, 1, dtype=torch.int64)
    used: list[str] = []
    tile_for = experts.tile_for

    def watched(weights: Weights, dtype: torch.dtype, pairs: int) -> Tile:
        found = tile_for(weights, dtype, pairs)
        used.append(named[found])
        return found

    short, tall = grouped._gate_up.tiles(torch.float16)
    named = {experts.FEW: "few", experts.SOME: "some", short: "short", tall: "tall"}
    monkeypatch.setattr(experts, "tile_for", watched)
    whole = grouped(x, ids, weights)
    assert torch.equal(grouped(x[:40], ids[:40], weights[:40]), whole[:40])
    lone = GroupedExperts(gate_up[:1], down[:1])
    assert torch.equal(lone(x, ids, weights), whole)
    assert torch.equal(lone(x[:64], ids[:64], weights[:64]), whole[:64])
    monkeypatch.setattr(Weights, "low", False)
    assert torch.equal(grouped(x[:40], ids[:40], weights[:40]), whole[:40])
    assert used == ["some", "few", "tall", "short", "short"]


def test_one_token_s_experts_need_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits that they have beside another token; those of another rank (-1) are left out."""
    grouped, x, ids = GroupedExperts(*layer(torch.float16)), draw(2, HIDDEN, dtype=torch.float16), [[0, 2, 4]] * 2
    weights, whole = draw(2, 3, seed=4).abs(), torch.tensor(ids)
    both = grouped(x, whole, weights)
    assert torch.equal(grouped(x[1:], whole[1:], weights[1:]), both[1:])
    assert expert_rows.ordered(whole[1:], COUNT, rows=16)[0] is None
    made = grouped._launch_gate_up(x[1:], None, torch.tensor([0, -1, 4]), whole[1:].shape, experts.FEW)
    wanted = grouped._launch_gate_up(x[1:], None, whole[1], whole[1:].shape, experts.FEW)
    assert torch.equal(made[::2], wanted[::2])


def test_pairs_are_ordered_by_expert_and_no_tile_has_rows_of_two() -> None:
    ids = torch.tensor([[0, 4], [0, 2], [2, 4], [0, 4], [0, 4]])
    order, tiles = expert_rows.ordered(ids, COUNT, rows=2)
    assert order is not None
    assert order.tolist() == [0, 2, 6, 8, 3, 4, 1, 5, 7, 9]
    real = [[0, 0, 4], [0, 2, 4], [2, 4, 6], [4, 6, 10], [4, 8, 10]]
    assert tiles.tolist() == real + [[0, 0, 0]] * (len(tiles) - len(real))


# Heads


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_in_one_launch_equal_one_after_the_other(dtype: torch.dtype) -> None:
    products = packed(3, 40, 24, dtype)
    wide = draw(70, 3, 30, dtype=dtype, seed=1)
    found = GroupedHeads(products)(wide[..., :24])
    torch.testing.assert_close(found, LoopedHeads(products)(wide[..., :24]), rtol=TOLERANCE[dtype], atol=1e-3)
    assert found.is_contiguous()
    turned = wide[..., :24].transpose(1, 2).contiguous().transpose(1, 2)  # a row's numbers lie apart
    assert torch.equal(GroupedHeads(products)(turned), found)
    assert torch.equal(GroupedHeads(products)(wide[69:, :, :24]), found[69:])
    assert GroupedHeads(products)(wide[:0, :, :24]).shape == (0, 3, 40)


def test_many_rows_of_heads_take_taller_tiles_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, x = GroupedHeads(packed(2, 64, 64, torch.float16)), draw(130, 2, 64, dtype=torch.float16)
    short = heads(x)
    monkeypatch.setattr("quire.ops.triton.heads.quicker", lambda short, tall, rows, columns: tall)
    monkeypatch.setattr(heads, "_short", heads._short._replace(warps=None))  # not launched
    assert torch.equal(heads(x), short)


# What is taken


def test_weights_that_kernels_cannot_read_at_once_are_copied() -> None:
    memory = draw(3 * 40 * 24 + 1)[1:].view(3, 40, 24)
    products = [linear.pack([weight], None, CPU, DenseProduct) for weight in memory]
    x = draw(4, 3, 24, seed=1)
    weights = Weights(products)
    assert all(address % 16 == 0 for address in weights.addresses.tolist())
    torch.testing.assert_close(GroupedHeads(products)(x), LoopedHeads(products)(x))


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = layer(torch.float32)
    biased = linear.pack([draw(2 * INNER, HIDDEN)], draw(2 * INNER), CPU, DenseProduct)
    in_codes = quantized_weight("int8", 2 * INNER, 96)
    for product, message in ((biased, "biases"), (in_codes, "dense"), (down[0], "differ")):
        with pytest.raises(ValueError, match=message):
            GroupedExperts([*gate_up[1:], product], down)
    with pytest.raises(ValueError, match="do not fit"):
        GroupedExperts(gate_up, down[1:])
    with pytest.raises(ValueError, match="72 columns"):
        GroupedExperts(gate_up, down)(draw(1, 71), torch.tensor([[0]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="heads take"):
        GroupedHeads(gate_up)(draw(1, COUNT, 71))
