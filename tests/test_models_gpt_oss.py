"""What gpt-oss asks of the kernels: sinks in attention, experts with biases and a clamped gate."""

from __future__ import annotations

import random

import pytest
import torch

from quire.ops import Kernels, paged_attention
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.elementwise import activate
from quire.ops.experts import LoopedExperts
from quire.ops.linear import Product
from quire.ops.triton import rows
from quire.ops.triton.kernels import TritonKernels
from tests import test_triton_attention as of_triton
from tests.quantized import coded
from tests.test_cpu_attention import LAYER, Request, batch_of
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
ON_CPU = [Kernels(), *(CpuKernels(isa) for isa in library.usable())]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- sinks ---------------------------------------------------------------------------------------------------------


def with_sinks(request: Request, sinks: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """By the definition, in float64: a score more in each row, whose value is 0."""
    q, k, v = (part.double().transpose(0, 1) for part in (request.q, request.k, request.v))
    k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
    near = torch.arange(q.shape[1])
    distance = near[:, None] - near
    seen = (distance >= 0) & (distance < (window or len(near)))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    column = sinks.double().view(-1, 1, 1).expand(-1, len(near), 1)
    return (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v).transpose(0, 1)


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("window", [None, 50])
def test_a_sink_is_a_score_more(kernels: Kernels, window: int | None) -> None:
    """Small ones, large ones, and such that leave nothing for the keys."""
    request, sinks = Request(300, (6, 2, 24), torch.float32, 1), torch.tensor([-20.0, -1.0, 0.0, 1.0, 5.0, 200.0])
    kv, tables = of_triton.stored([request], 16, "auto")
    out = kernels.attend(request.q, kv, batch_of([(0, 300)], tables, 16), LAYER, 0.2, window, sinks)
    expected = with_sinks(request, sinks, 0.2, window)
    assert expected[:, :5].abs().mean(dim=(0, 2)).gt(1e-4).all() and expected[:, 5].abs().max() < 1e-20
    torch.testing.assert_close(out.view(expected.shape).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_rows_with_sinks_do_not_know_how_they_were_cut(kernels: Kernels) -> None:
    request, sinks = Request(300, (4, 2, 32), torch.bfloat16, 1), draw(4)
    kv, tables = of_triton.stored([request], 16, "auto")
    whole = kernels.attend(request.q, kv, batch_of([(0, 300)], tables, 16), LAYER, 0.2, 100, sinks)
    for start, count in ((299, 1), (130, 40), (0, 7)):
        part = slice(start, start + count)
        cut = kernels.attend(request.q[part], kv, batch_of([(start, count)], tables, 16), LAYER, 0.2, 100, sinks)
        assert torch.equal(cut, whole[part])


@pytest.mark.quick("dtype0-auto-None")
@pytest.mark.parametrize("dtype, how, window", [(torch.float32, "auto", None), (torch.float16, "int8", 150)])
def test_sinks_in_triton_are_the_references(dtype, how, window, monkeypatch: pytest.MonkeyPatch) -> None:
    """In spans with one split, with several, and with several side by side; however they are cut."""
    monkeypatch.setattr(of_triton.splits, "SPLIT", of_triton.SPLIT)
    spans = [(290, 1), (0, 40), (100, 160)]
    requests = [Request(sum(span), (4, 2, 32), dtype, seed) for seed, span in enumerate(spans)]
    kv, tables = of_triton.stored(requests, 16, how)
    q = torch.cat([request.q[start:] for request, (start, _) in zip(requests, spans, strict=True)])
    sinks, kernels = torch.tensor([-3.0, 0.0, 2.0, 5.0]), TritonKernels("cpu", deterministic=True)
    out = kernels.attend(q, kv, of_triton.on_device(spans, tables, 16), LAYER, 0.2, window, sinks)
    exact = paged_attention(q.float(), kv, batch_of(spans, tables, 16), LAYER, 0.2, window, sinks).flatten(1)
    last_place = {torch.float32: 1e-6, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.float(), exact, atol=2 * last_place, rtol=2 * last_place)
    alone = of_triton.on_device([(259, 1)], tables[2:], 16)
    assert torch.equal(kernels.attend(q[-1:], kv, alone, LAYER, 0.2, window, sinks), out[-1:])


# -- experts -------------------------------------------------------------------------------------------------------


def test_the_clamped_gate_is_the_definition() -> None:
    x = draw(5, 140) * 6
    gate, up = x.double()[:, :70].clamp(max=7.0), x.double()[:, 70:].clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    assert (x[:, :70] > 7).any() and (x[:, 70:] < -7).any()
    torch.testing.assert_close(activate(x, "clamped_swiglu").double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.activate(x, "clamped_swiglu"), activate(x, "clamped_swiglu"), rtol=1e-6, atol=1e-6)
    x[2, 3], x[3, 71] = torch.nan, torch.nan
    for out in (activate(x, "clamped_swiglu"), rows.activate(x, "clamped_swiglu")):
        assert out.isnan().sum(dim=1).tolist() == [0, 0, 1, 1, 0]


def biased(kernels: Kernels, form: str, dtype: torch.dtype) -> tuple[list[Product], list[Product]]:
    """Five experts' products, of 64 inputs and 96 inner columns, with biases."""

    def product(outputs: int, inputs: int, seed: int) -> Product:
        weight, bias = draw(outputs, inputs, seed=seed) * 0.4, draw(outputs, seed=seed + 50).to(dtype)
        if form == "dense":
            return kernels.pack([weight.to(dtype)], bias)
        return kernels.pack_coded([coded(weight, form)], bias)

    return [product(192, 64, seed) for seed in range(5)], [product(64, 96, seed) for seed in range(10, 15)]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
@pytest.mark.parametrize("kernels", [*ON_CPU[1:], TritonKernels("cpu", True)], ids=lambda kernels: kernels.name)
def test_experts_with_biases_and_a_clamped_gate_are_those_one_by_one(kernels: Kernels, form: str) -> None:
    dtype = torch.float16 if kernels.name == "triton" else torch.bfloat16
    gate_up, down = biased(kernels, form, dtype)
    grouped = kernels.experts(gate_up, down, None, "clamped_swiglu")
    looped = LoopedExperts(gate_up, down, None, "clamped_swiglu")
    rnd = random.Random(0)
    x, weights = draw(40, 64, dtype=dtype, seed=3) * 2, draw(40, 2, seed=4).abs()
    ids = torch.tensor([sorted(rnd.sample(range(5), 2)) for _ in range(40)])
    found, expected = grouped(x, ids, weights), looped(x, ids, weights)
    last_place = {torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]  # exp may differ in its last bit
    torch.testing.assert_close(found, expected, rtol=4 * last_place, atol=40 * last_place)
    assert torch.equal(grouped(x[7:9], ids[7:9], weights[7:9]), found[7:9])
    plain = kernels.experts(gate_up, down)(x, ids, weights)
    assert (plain.float() - found.float()).abs().max() > 1
