"""Routing equals its reference; all experts of a layer in one call, and all heads, have their products' bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from quire.ops import Kernels, choose_kernels, experts
from quire.ops.cpu import library
from quire.ops.cpu.linear import CpuProduct
from quire.ops.experts import LoopedExperts, LoopedHeads, Routing
from quire.ops.linear import Product
from quire.ops.memory import HUGE_PAGE
from tests.quantized import coded

pytestmark = pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")

Format = torch.dtype | Literal["int8", "int4", "int6"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS: tuple[Format, ...] = (*DTYPES, "int8", "int4", "int6")
EXPERTS, HIDDEN, INNER = 6, 96, 64

Layer = tuple[list[Product], list[Product]]
"""The products gate_up and down of each expert."""
Routes = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=library.usable())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose_kernels(request.param)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activations(form: Format) -> torch.dtype:
    """The data type of x that the tests give to weights in a format."""
    return form if isinstance(form, torch.dtype) else torch.bfloat16


def draw_product(kernels: Kernels, shape: tuple[int, int], form: Format, seed: int) -> Product:
    weight, bias = draw(*shape, seed=seed) / shape[1] ** 0.5, draw(shape[0], seed=seed + 1000)
    if isinstance(form, str):
        return kernels.pack_coded([coded(weight, form)], bias)
    return kernels.pack([weight.to(form)], bias.to(form))


def draw_layer(kernels: Kernels, form: Format, count: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER) -> Layer:
    gate_up = [draw_product(kernels, (2 * inner, hidden), form, 2 * expert) for expert in range(count)]
    down = [draw_product(kernels, (hidden, inner), form, 2 * expert + 1) for expert in range(count)]
    return gate_up, down


class InFP64:
    """A dense product in fp64, rounded once: torch's own in fp16 is coarse on some machines."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight.double(), None if bias is None else bias.double()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(x.double(), self._weight, self._bias).to(out_dtype or x.dtype)


class ReferenceInFP64(Kernels):
    """The reference, with dense products in fp64."""

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return InFP64(torch.cat(list(parts)), bias)


def draw_routes(rows: int, top_k: int, seed: int = 0) -> Routes:
    ids = draw(rows, EXPERTS, seed=seed).topk(top_k).indices.sort(dim=-1).values
    return ids, draw(rows, top_k, seed=seed + 1).softmax(-1)


ROUTINGS = {
    "qwen3": Routing(128, 8),
    "mixtral": Routing(8, 2),
    "unnormalized": Routing(60, 4, normalize=False, scale=1.5),
    "all": Routing(5, 5),
    "one": Routing(17, 1, scoring="sigmoid"),
    "v2": Routing(160, 6, groups=8, top_groups=3, normalize=False, scale=16.0),
    "v3": Routing(256, 8, scoring="sigmoid", groups=8, top_groups=4, group_score="top2", scale=2.5),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_equal_the_reference(kernels: Kernels, name: str) -> None:
    how = ROUTINGS[name]
    for rows in (0, 1, 2, 150):
        logits = 2 * draw(rows, how.num_experts, seed=rows)
        coarse = logits.round()  # many scores are equal
        for scores in (logits, coarse, torch.zeros_like(logits), 1000 * coarse):
            for bias in (None, draw(how.num_experts).round()):
                ids, weights = kernels.route(scores, how, bias)
                expected_ids, expected_weights = experts.route(scores, how, bias)
                assert torch.equal(ids, expected_ids)
                torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-30)


def test_a_tokens_route_does_not_depend_on_the_other_tokens_or_on_threads(kernels: Kernels) -> None:
    how, bias, logits = ROUTINGS["v3"], draw(256), draw(90, 256, seed=1)
    logits[3] = torch.nan
    ids, weights = kernels.route(logits, how, bias)
    assert weights[3].isnan().all() and weights[4:].isfinite().all()
    assert torch.equal(ids[3], experts.route(logits[3:4], how, bias)[0][0])
    for part in (slice(4, 5), slice(4, 17), slice(50, 90)):
        assert all(map(torch.equal, kernels.route(logits[part], how, bias), (ids[part], weights[part])))
    with kernels.threads(2):
        assert all(map(torch.equal, kernels.route(logits[4:], how, bias), (ids[4:], weights[4:])))


def test_what_does_not_fit_a_router_is_refused(kernels: Kernels) -> None:
    for logits, bias in ((draw(2, 7), None), (draw(8), None), (draw(2, 8), draw(7))):
        with pytest.raises(ValueError, match="for 8 experts"):
            kernels.route(logits, Routing(8, 2), bias)
    for how in (Routing(8, 9), Routing(8, 2, groups=2, top_groups=3)):
        with pytest.raises(ValueError, match="more to choose than"):
            kernels.route(draw(2, 8), how, None)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_experts_have_the_bits_of_their_products_one_by_one(
    kernels: Kernels, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "activate", kernels.activate)  # torch's exp may differ in the last bit
    layer = draw_layer(kernels, form)
    grouped, looped = kernels.experts(*layer), LoopedExperts(*layer)
    for rows in (1, 2, 5, 13, 33, 100):
        x = draw(rows, HIDDEN, dtype=activations(form), seed=rows)
        for top_k in (1, 2, EXPERTS):
            routes = draw_routes(rows, top_k, seed=rows)
            assert torch.equal(grouped(x, *routes), looped(x, *routes)), (rows, top_k)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_experts_equal_the_reference(kernels: Kernels, form: Format) -> None:
    ours, reference = (used.experts(*draw_layer(used, form)) for used in (kernels, ReferenceInFP64()))
    x, routes = draw(40, HIDDEN, dtype=activations(form)), draw_routes(40, 3)
    # About one last place: what is rounded on the way may fall to either side.
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[activations(form)]
    torch.testing.assert_close(ours(x, *routes), reference(x, *routes), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", (torch.float32, torch.bfloat16), ids=str)
def test_sizes_that_fill_no_panel_and_no_vector_are_taken(
    kernels: Kernels, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "activate", kernels.activate)
    for hidden, inner in ((1, 1), (33, 7), (70, 50), (1030, 17)):
        layer = draw_layer(kernels, form, hidden=hidden, inner=inner)
        x, routes = draw(7, hidden, dtype=activations(form)), draw_routes(7, 2)
        assert torch.equal(kernels.experts(*layer)(x, *routes), LoopedExperts(*layer)(x, *routes))


def test_all_tokens_may_choose_one_expert_and_the_others_weights_are_not_read(kernels: Kernels) -> None:
    gate_up, down = draw_layer(kernels, torch.float32)
    x, ids = draw(300, HIDDEN), torch.full((300, 1), 2)
    expected = down[2].matmul(kernels.activate(gate_up[2].matmul(x), "silu"))
    nans = (
        kernels.pack([torch.full((2 * INNER, HIDDEN), torch.nan)]),
        kernels.pack([torch.full((HIDDEN, INNER), torch.nan)]),
    )
    gate_up, down = (
        [product if e == 2 else nan for e, product in enumerate(products)]
        for products, nan in zip((gate_up, down), nans, strict=True)
    )
    assert torch.equal(kernels.experts(gate_up, down)(x, ids, torch.ones(300, 1)), expected)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens_or_on_threads(kernels: Kernels, form: Format) -> None:
    layer = kernels.experts(*draw_layer(kernels, form))
    x, (ids, weights) = draw(200, HIDDEN, dtype=activations(form)), draw_routes(200, 3)
    x[7] = torch.nan  # a row that is lost takes no other with it
    whole = layer(x, ids, weights)
    assert whole[7].isnan().all()
    for rows in (1, 2, 11, 64, 131):
        for first in (8, 200 - rows):
            part = slice(first, min(200, first + rows))
            assert torch.equal(layer(x[part], ids[part], weights[part]), whole[part]), (rows, first)
    with kernels.threads(2):
        assert torch.equal(layer(x[8:], ids[8:], weights[8:]), whole[8:])
        assert torch.equal(layer(x[:1], ids[:1], weights[:1]), whole[:1])


def test_more_tokens_than_are_worked_on_at_a_time(kernels: Kernels) -> None:
    layer = kernels.experts(*draw_layer(kernels, torch.float32, hidden=32, inner=32))
    x, (ids, weights) = draw(1500, 32), draw_routes(1500, EXPERTS)  # 9,000 turns; at a time 4,096
    parts = [slice(first, first + 300) for first in range(0, 1500, 300)]
    assert torch.equal(layer(x, ids, weights), torch.cat([layer(x[part], ids[part], weights[part]) for part in parts]))


def test_strided_tensors_and_no_tokens_are_taken(kernels: Kernels) -> None:
    layer = kernels.experts(*draw_layer(kernels, torch.bfloat16))
    x, (ids, weights) = draw(12, 2 * HIDDEN, dtype=torch.bfloat16), draw_routes(12, 4)
    strided = layer(x[::2, ::2], ids[::2], weights[::2])
    assert torch.equal(strided, layer(x[::2, ::2].contiguous(), ids[::2].contiguous(), weights[::2].contiguous()))
    assert layer(x[:0, :HIDDEN], ids[:0], weights[:0]).shape == (0, HIDDEN)


def test_what_is_no_choice_of_experts_is_refused(kernels: Kernels) -> None:
    layer, x = kernels.experts(*draw_layer(kernels, torch.bfloat16)), draw(1, HIDDEN, dtype=torch.bfloat16)
    for ids in ([1, 0], [1, 1], [-1, 0], [0, EXPERTS]):
        with pytest.raises(IndexError, match="ascending and below 6"):
            layer(x, torch.tensor([ids]), torch.ones(1, 2))
    ids, weights = draw_routes(1, 2)
    for wrong in ((ids.int(), weights), (ids, weights.double()), (ids, weights[:, :1]), (ids[0], weights[0])):
        with pytest.raises(ValueError, match="expected int64 and float32, \\[1, top_k\\]"):
            layer(x, *wrong)
    with pytest.raises(ValueError, match="expected int64"):
        layer(x, ids[:, :0], weights[:, :0])
    with pytest.raises(ValueError, match="the experts take \\[tokens, 96\\]"):
        layer(x[:, 1:], ids, weights)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        layer(x.float(), ids, weights)


def test_products_that_are_no_experts_are_refused(kernels: Kernels) -> None:
    gate_up, down = draw_layer(kernels, torch.bfloat16)
    for wrong in ((gate_up[1:], down), (gate_up, gate_up), (down, gate_up)):
        with pytest.raises(ValueError, match="are not experts' gate_up and down"):
            kernels.experts(*wrong)
    for wrong in (
        ([], []),
        ([*gate_up[1:], down[0]], down),
        (gate_up, draw_layer(kernels, torch.float32)[1][:1] + down[1:]),
    ):
        with pytest.raises(ValueError, match="must be alike"):
            kernels.experts(*wrong)
    with pytest.raises(TypeError, match="PackedWeight"):
        kernels.experts(gate_up, draw_layer(Kernels(), torch.bfloat16)[1])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_heads_have_the_bits_of_their_products_one_by_one(kernels: Kernels, form: Format) -> None:
    for heads, outputs, inputs in ((1, 33, 64), (5, 96, 32), (3, 40, 160)):
        products = [draw_product(kernels, (outputs, inputs), form, head) for head in range(heads)]
        ours, looped = kernels.heads(products), LoopedHeads(products)
        for tokens in (0, 1, 13, 97, 200):
            wide = draw(heads, tokens, inputs + 5, dtype=activations(form), seed=tokens)
            x = wide.transpose(0, 1)[:, :, 3 : 3 + inputs]  # heads apart, tokens and numbers of a wider tensor
            out = ours(x)
            assert out.is_contiguous()
            assert torch.equal(out, looped(x))
            assert torch.equal(ours(x.repeat_interleave(2, dim=2)[:, :, ::2]), out)


def test_heads_bits_do_not_depend_on_threads(kernels: Kernels) -> None:
    layer = kernels.heads([draw_product(kernels, (64, 96), torch.bfloat16, head) for head in range(7)])
    x = draw(100, 7, 96, dtype=torch.bfloat16)
    alone = layer(x)
    with kernels.threads(2):
        assert torch.equal(layer(x), alone)


def test_what_is_not_a_row_for_each_head_is_refused(kernels: Kernels) -> None:
    layer = kernels.heads([draw_product(kernels, (8, 16), torch.float32, head) for head in range(3)])
    for x in (draw(2, 3, 15), draw(2, 2, 16), draw(3, 16), draw(2, 3, 16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the heads take \\[tokens, 3, 16\\]"):
            layer(x)


@pytest.mark.parametrize("form", ["int4", torch.bfloat16], ids=str)
def test_small_weights_of_experts_lie_side_by_side_in_huge_pages(kernels: Kernels, form: Format) -> None:
    layer = draw_layer(kernels, form, count=16, hidden=1024, inner=256)
    products = [product for part in layer for product in part if isinstance(product, CpuProduct)]
    x = draw(3, 1024, dtype=torch.bfloat16)
    before = [product.matmul(x[:, : product.in_features].contiguous()) for product in products]
    kernels.experts(*layer)
    parts = sorted((part.data_ptr(), part.nbytes) for product in products for part in product.parts)
    assert len(parts) == (32 if form is torch.bfloat16 else 32 * 5) and parts[0][0] % HUGE_PAGE == 0
    assert all(end <= start < end + 64 for (at, size), (start, _) in itertools.pairwise(parts) for end in [at + size])
    kernels.experts(*layer)  # what lies there stays: a step may be computing with it
    assert parts == sorted((part.data_ptr(), part.nbytes) for product in products for part in product.parts)
    after = [product.matmul(x[:, : product.in_features].contiguous()) for product in products]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
