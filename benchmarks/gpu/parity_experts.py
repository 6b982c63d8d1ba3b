"""Parity of routing, of experts together, plain and quantized, and of the products of heads."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig, Step, fp8_weight
from quire.ops import Kernels, choose_kernels
from quire.ops import experts as looped
from quire.ops.coded import CodedProduct
from quire.ops.experts import LoopedExperts, LoopedHeads, Routing
from quire.ops.quantize_groups import scheme_of

WEIGHTS_TOLERANCE = 1e-5
"""Of the routing's weights, fp32: the device's exponentials, and sums of 256 in another order."""

EXPERTS_UNITS = 6.0
"""Gate, up, and twice what is made of them are rounded, then the result; sums over as many errors spread them."""

CODED_TOLERANCE = 0.1
"""Of quantized experts. What is rounded between the products may fall on the next code of 8 bits."""


class Case(NamedTuple):
    """A layer's experts."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return f"{self.top_k} of {self.experts} experts, {self.hidden} x {self.inner}"


CASES = (Case(16, 8, 2048, 768), Case(16, 6, 2048, 1408), Case(5, 2, 80, 40))
"""As wide as those of Qwen3-30B-A3B and DeepSeek-V2-Lite, but fewer; and a size that no tile divides."""
CODED = {"int8": CASES[:2], "int4": CASES[:1]}
TINY_CASES = (Case(4, 2, 64, 64),)

ROUTINGS = {
    "Qwen3-30B-A3B": Routing(128, 8),
    "DeepSeek-V2-Lite": Routing(64, 6, normalize=False),
    "DeepSeek-V2": Routing(160, 6, groups=8, top_groups=3, normalize=False, scale=16.0),
    "DeepSeek-V3": Routing(256, 8, "sigmoid", 8, 4, "top2", scale=2.5),
}

HEADS = ((16, 512, 128), (16, 128, 512), (128, 512, 128), (3, 40, 24))
"""Heads, outputs and inputs: those of DeepSeek's latent attention, and some that no tile divides."""


def run(job: Job, dtype: str) -> None:
    """All of them, from one row to so many that the tall tiles are taken."""
    rig = Rig(job, dtype)
    counts = (1, 4) if job.rehearse else (1, 33, 300)
    for name in ("DeepSeek-V3",) if job.rehearse else ROUTINGS:
        _route(rig, name, ROUTINGS[name], counts[-1])
    for case in TINY_CASES if job.rehearse else CASES:
        _experts(rig, case, counts)
    for scheme, cases in CODED.items():
        for case in TINY_CASES if job.rehearse else cases:
            job.check_time()
            _coded(rig, case, scheme, counts)
    for case in TINY_CASES if job.rehearse else CASES[:2]:
        _fp8(rig, case, counts)
    for heads in HEADS[-1:] if job.rehearse else HEADS:
        _heads(rig, *heads, counts)


def _route(rig: Rig, name: str, routing: Routing, rows: int) -> None:
    """Of logits among which many are equal: they are numbers of the data type. And what each expert has got."""
    kernels, device = rig.kernels, rig.job.device
    logits = rig.draw(rows, routing.num_experts, spread=2.0)
    bias = rig.draw(routing.num_experts, spread=0.1) if routing.scoring == "sigmoid" else None
    on_device = None if bias is None else bias.to(device)
    ids, weights = kernels.route(logits.to(device), routing, on_device)
    wanted_ids, wanted = rig.reference.route(logits, routing, bias)
    rig.same(f"route, {name}: experts", ids, wanted_ids)
    rig.within(f"route, {name}: weights", weights, wanted, WEIGHTS_TOLERANCE)

    def weigh(logits: Tensor) -> Tensor:
        return torch.cat(kernels.route(logits, routing, on_device), dim=1)

    rig.same_rows(f"route, {name}", weigh, [logits.to(device)])
    step = Step([(0, rows - 2), (7, 1)], 16, pad_rows=1, pad_spans=2)
    load, wanted_load = (torch.full((routing.num_experts,), 2**40) for _ in range(2))
    load = load.to(device)
    kernels.count_experts(ids, step.on_device(device), load)
    rig.reference.count_experts(wanted_ids[:-1], step.host(), wanted_load)
    rig.same(f"count_experts, {name}", load, wanted_load)


def _experts(rig: Rig, case: Case, counts: tuple[int, ...]) -> None:
    gate_up, down = _weights(rig, case)
    reference = LoopedExperts(*([Kernels().pack([w]) for w in weights] for weights in (gate_up, down)))
    x, ids, weights = _tokens(rig, case, counts[-1])
    wanted = reference(x, ids, weights)
    experts = rig.kernels.experts(*([rig.kernels.pack([rig.sent(w)]) for w in ws] for ws in (gate_up, down)))
    sent = rig.sent(x), ids.to(rig.job.device), weights.to(rig.job.device)
    for rows in counts:
        found = experts(*(part[:rows] for part in sent))
        rig.near(f"{case}, {rows} rows", found, wanted[:rows], EXPERTS_UNITS)
    rig.same_rows(str(case), experts, sent)


def _coded(rig: Rig, case: Case, how: str, counts: tuple[int, ...]) -> None:
    """Near the reference, and with the bits of the products that serve one expert after the other."""
    quantize = choose_kernels().quantize_groups
    both = [[quantize(each, scheme_of(how, each.shape[1])) for each in weights] for weights in _weights(rig, case)]
    reference = LoopedExperts(*([CodedProduct([weight]) for weight in weights] for weights in both))
    products = [[rig.kernels.pack_coded([weight]) for weight in weights] for weights in both]
    x, ids, weights = _tokens(rig, case, counts[-1])
    sent = rig.sent(x), ids.to(rig.job.device), weights.to(rig.job.device)
    experts = rig.kernels.experts(*products)
    found = experts(*sent)
    rig.within(f"{how}, {case}", found, reference(x, ids, weights), CODED_TOLERANCE)
    with mock.patch.object(looped, "activate", rig.kernels.activate):  # torch's exponential rounds otherwise
        rig.same(f"{how}, {case}: one after the other", found, LoopedExperts(*products)(*sent))
    rig.same_rows(f"{how}, {case}", experts, sent)


def _fp8(rig: Rig, case: Case, counts: tuple[int, ...]) -> None:
    """The bits of dense experts of the same numbers."""
    shapes = (2 * case.inner, case.hidden), (case.hidden, case.inner)
    coded = [[fp8_weight(*shape, seed) for seed in range(case.experts)] for shape in shapes]
    kept = rig.deterministic.experts(*([rig.deterministic.pack_fp8([w], rig.dtype) for w in ws] for ws in coded))
    dense = rig.kernels.experts(*([rig.kernels.pack([rig.sent(w.restored())]) for w in ws] for ws in coded))
    x, ids, weights = _tokens(rig, case, counts[-1])
    for rows in counts:
        sent = rig.sent(x[:rows]), ids[:rows].to(rig.job.device), weights[:rows].to(rig.job.device)
        rig.same(f"fp8, {case}, {rows} rows", kept(*sent), dense(*sent))


def _weights(rig: Rig, case: Case) -> tuple[Tensor, Tensor]:
    """Gate and up, and down, of all experts: such that numbers keep their size."""
    gate_up = rig.draw(case.experts, 2 * case.inner, case.hidden, spread=case.hidden**-0.5)
    return gate_up, rig.draw(case.experts, case.hidden, case.inner, spread=case.inner**-0.5)


def _tokens(rig: Rig, case: Case, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights; half of the rows choose the same experts, so that one expert has many and some few."""
    x, logits = rig.draw(rows, case.hidden), rig.draw(rows, case.experts)
    logits[rows // 2 :] = logits[-1]
    return x, *rig.reference.route(logits, Routing(case.experts, case.top_k), None)


def _heads(rig: Rig, count: int, out_features: int, in_features: int, counts: tuple[int, ...]) -> None:
    """Of inputs that lie beside others, as the still parts of queries do."""
    what = f"{count} heads, {out_features} x {in_features}"
    weights = rig.draw(count, out_features, in_features, spread=in_features**-0.5)
    x = rig.draw(counts[-1], count, in_features + 8)
    wanted = LoopedHeads([Kernels().pack([weight]) for weight in weights])(x[..., :in_features])
    heads, sent = rig.kernels.heads([rig.kernels.pack([rig.sent(weight)]) for weight in weights]), rig.sent(x)
    for rows in counts:
        rig.near(f"{what}, {rows} rows", heads(sent[:rows, :, :in_features]), wanted[:rows], 1.0)
    rig.same_rows(what, heads, [sent[..., :in_features]])
