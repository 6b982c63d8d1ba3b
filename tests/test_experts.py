"""Routing against rules that are written out, over scores with many ties; and what experts make of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quire.errors import ModelConfigError
from quire.layers.experts import ExpertsConfig, ExpertsLayer
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.config import read_routing
from quire.models.fields import Fields
from quire.ops import Kernels, RaggedBatch, choose_kernels
from quire.ops.cpu import library
from quire.ops.experts import LoopedExperts, Routing, route
from quire.ops.ragged import DeviceSpans
from quire.parallel.group import Group, OneRank, Split

HIDDEN, INNER, COUNT = 32, 16, 6

# Routing


def written_out(logits: list[float], routing: Routing, bias: list[float]) -> tuple[list[int], list[float]]:
    """The rules one after the other, in the double precision of Python's numbers, for one token."""
    if routing.scoring == "softmax":
        powers = [math.exp(x - max(logits)) for x in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    rank = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = routing.num_experts // routing.groups

    def group_score(group: int) -> float:
        best = sorted(rank[group * size : (group + 1) * size], reverse=True)
        return best[0] if routing.group_score == "max" else best[0] + best[1]

    groups = sorted(range(routing.groups), key=lambda group: (-group_score(group), group))[: routing.top_groups]
    remaining = [expert for expert in range(routing.num_experts) if expert // size in groups]
    ids = sorted(sorted(remaining, key=lambda expert: (-rank[expert], expert))[: routing.top_k])
    weights = [scores[expert] for expert in ids]
    if routing.normalize:
        weights = [weight / sum(weights) for weight in weights]
    return ids, [weight * routing.scale for weight in weights]


ROUTINGS = {
    "plain": Routing(8, 2, normalize=False),
    "normalized": Routing(8, 3),
    "one": Routing(8, 1, normalize=False),
    "all": Routing(8, 8),
    "sigmoid": Routing(16, 4, "sigmoid", normalize=False, scale=2.5),
    "groups by their best": Routing(16, 3, groups=4, top_groups=2, normalize=False, scale=16.0),
    "groups by their two best": Routing(16, 4, "sigmoid", 4, 2, "top2", scale=2.5),
    "groups of two": Routing(16, 6, "sigmoid", 8, 3, "top2"),
    "as many as remain": Routing(16, 8, "sigmoid", 4, 2, "top2"),
    "every group": Routing(16, 5, groups=4, top_groups=4),
}


@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize("case", ROUTINGS)
def test_routing_follows_the_rules_written_out_over_scores_with_ties(case: str, biased: bool) -> None:
    routing = ROUTINGS[case]
    generator = torch.Generator().manual_seed(5)
    # Few values, so that many tie; but two sums do only where their parts are the same, or rounding would decide.
    logits = torch.tensor([0.0, 0.3, 1.1, 1.9, 2.6])[torch.randint(5, (400, routing.num_experts), generator=generator)]
    of_groups = torch.randint(-2, 3, (routing.groups if routing.groups > 1 else 8,), generator=generator) * 0.25
    bias = of_groups.repeat_interleave(routing.num_experts // len(of_groups)) if biased else None
    ids, weights = route(logits, routing, bias)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    added = [0.0] * routing.num_experts if bias is None else bias.tolist()
    for row, row_ids, row_weights in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected_ids, expected_weights = written_out(row, routing, added)
        assert row_ids == expected_ids
        assert row_weights == pytest.approx(expected_weights, rel=1e-5)


@pytest.mark.parametrize("case", ROUTINGS)
def test_a_tokens_route_has_the_same_bits_beside_any_other_tokens(case: str) -> None:
    routing = ROUTINGS[case]
    logits = torch.randn(37, routing.num_experts, generator=torch.Generator().manual_seed(1)) * 3
    ids, weights = route(logits, routing, None)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(30, 37)):
        some_ids, some_weights = route(logits[rows], routing, None)
        assert torch.equal(some_ids, ids[rows])
        assert torch.equal(some_weights, weights[rows])


def test_a_bias_changes_who_is_chosen_and_no_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    ids, weights = route(logits, Routing(4, 2, "sigmoid", normalize=False), torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits[:, [0, 3]].sigmoid())


def test_scores_that_are_all_nothing_give_finite_weights() -> None:
    ids, weights = route(torch.full((1, 4), -200.0), Routing(4, 2, "sigmoid"), None)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


# What config.json says of it

COUNTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}


def test_routing_is_read_from_config_json() -> None:
    found = read_routing(
        Fields(COUNTS, "config.json"), "n_routed_experts", scoring="sigmoid", group_score="top2", scale=2.5
    )
    assert found == Routing(16, 4, "sigmoid", 4, 2, "top2", True, 2.5)
    assert read_routing(Fields(COUNTS, "config.json"), "n_routed_experts", normalize=False) == Routing(
        16, 4, normalize=False
    )


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"n_group": 3}, "n_group", "a divisor of n_routed_experts (16)"),
        ({"n_group": 16, "topk_group": 8}, "n_group", "at most 8, since a group is scored by its two best"),
        ({"topk_group": 5}, "topk_group", "from 1 to 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "at most the 8 experts of 2 groups"),
        ({"num_experts_per_tok": 17, "topk_group": 4}, "num_experts_per_tok", "at most the 16 experts of 4 groups"),
        ({"num_experts_per_tok": 17, "n_group": 1, "topk_group": 1}, "num_experts_per_tok", "n_routed_experts (16)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok", "from 1 to"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok", "found nothing"),
        ({"n_routed_experts": "16"}, "n_routed_experts", "a whole number"),
    ],
)
def test_counts_that_cannot_be_are_refused_with_field_and_file(
    changes: dict[str, object], field: str, reason: str
) -> None:
    fields = Fields(COUNTS | changes, "/models/m/config.json")
    with pytest.raises(ModelConfigError) as caught:
        read_routing(fields, "n_routed_experts", scoring="sigmoid", group_score="top2")
    for part in ("/models/m/config.json", repr(field), reason):
        assert part in str(caught.value)


# What experts make of a token


class MadeUp:
    """Random weights by name, each always the same."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.kernels: Kernels = Kernels()
        self.group: Group = OneRank()
        self.expert_group: Group = OneRank()
        self.expert_slots = 0
        self.dtype = dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        shapes = CONFIG.tensor_shapes(HIDDEN)
        generator = torch.Generator().manual_seed(list(shapes).index(name))
        return torch.randn(shapes[name], generator=generator).mul(0.3).to(self.dtype).to(dtype or self.dtype)

    def linear(
        self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: Sequence[int] | None = None
    ) -> Linear:
        assert not bias
        return Linear(self.kernels.pack([self.tensor(f"{name}.weight") for name in names]))

    def elsewhere(self, prefix: str) -> None:
        raise NotImplementedError

    def norm(self, name: str, eps: float) -> RMSNorm:
        raise NotImplementedError


CONFIG = ExpertsConfig(Routing(COUNT, 2, "sigmoid", scale=1.5), INNER, shared_intermediate_size=24, selection_bias=True)


def batch(spans: DeviceSpans | None = None) -> RaggedBatch:
    none = torch.empty(0, dtype=torch.int64)
    return RaggedBatch(none, none, none, [], [], none.view(0, 0), 16, spans)


def test_the_layer_is_the_weighted_sum_of_the_chosen_experts_and_the_shared_one() -> None:
    weights, x = MadeUp(), torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))

    def mlp(prefix: str) -> torch.Tensor:
        gate, up, down = (weights.tensor(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
        inner: torch.Tensor = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        return inner @ down.T

    logits = x @ weights.tensor("mlp.gate.weight").T
    ids, factors = route(logits, CONFIG.routing, weights.tensor("mlp.gate.e_score_correction_bias"))
    assert len(ids.unique()) > 3  # type: ignore[no-untyped-call]
    dense = torch.zeros(9, COUNT).scatter(1, ids, factors)
    expected = mlp("mlp.shared_experts")
    for expert in range(COUNT):
        expected = expected + mlp(f"mlp.experts.{expert}") * dense[:, expert, None]
    layer = ExpertsLayer(CONFIG, weights)
    torch.testing.assert_close(layer(x, batch()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["torch", *library.usable()])
def test_routing_is_by_logits_and_biases_in_fp32_whatever_the_models_data_type(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = MadeUp(torch.bfloat16)
    weights.kernels = choose_kernels(name)
    seen = []
    route = weights.kernels.route

    def watching(
        logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, batch: RaggedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((logits, bias))
        return route(logits, routing, bias)

    monkeypatch.setattr(weights.kernels, "route", watching)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert ExpertsLayer(CONFIG, weights)(x, batch()).dtype == torch.bfloat16
    [(logits, bias)] = seen
    assert bias is not None
    assert (logits.dtype, bias.dtype) == (torch.float32, torch.float32)
    exact = x.double() @ weights.tensor("mlp.gate.weight").double().T
    error = 2.0**-8 if name == "torch" else 1e-5  # torch's product of bf16 is rounded to it
    torch.testing.assert_close(logits.double(), exact, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_tokens_result_has_the_same_bits_beside_any_other_tokens(dtype: torch.dtype) -> None:
    layer = ExpertsLayer(CONFIG, MadeUp(dtype))
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = layer(x, batch())
    for rows in (slice(0, 1), slice(7, 8), slice(2, 19), slice(31, 33)):
        assert torch.equal(layer(x[rows], batch()), whole[rows])


class Counted:
    """A product that counts its calls and rows."""

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features, self.rows = out_features, in_features, list[int]()

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        self.rows.append(len(x))
        return torch.ones(len(x), self.out_features, dtype=out_dtype or x.dtype)


def test_an_expert_that_no_token_chose_is_not_computed() -> None:
    gate_up = [Counted(2 * INNER, HIDDEN) for _ in range(COUNT)]
    down = [Counted(HIDDEN, INNER) for _ in range(COUNT)]
    ids = torch.tensor([[0, 2], [2, 5], [2, 5]])
    LoopedExperts(gate_up, down)(torch.randn(3, HIDDEN), ids, torch.ones(3, 2))
    for products in (gate_up, down):
        assert [product.rows for product in products] == [[1], [], [3], [], [], [2]]


# Load


def test_the_load_counts_the_tokens_of_each_expert() -> None:
    layer = ExpertsLayer(replace(CONFIG, routing=Routing(COUNT, 2)), MadeUp())
    x = torch.randn(20, HIDDEN)
    ids, _ = route(x @ MadeUp().tensor("mlp.gate.weight").T, layer.routing, layer._bias)
    expected = [int((ids == expert).sum()) for expert in range(COUNT)]
    for steps in (1, 2):
        layer(x, batch())
        assert layer.load.tolist() == [steps * count for count in expected]


def test_rows_of_padding_do_not_count() -> None:
    def load_of(rows: int, padding: int) -> list[int]:
        layer = ExpertsLayer(CONFIG, MadeUp())
        starts = torch.tensor([0, rows], dtype=torch.int32)
        layer(x[: rows + padding], batch(DeviceSpans(starts, *[starts[:1]] * 3, starts.view(1, 2))))
        return layer.load.tolist()

    x = torch.randn(12, HIDDEN)
    assert load_of(7, padding=5) == load_of(7, padding=0)
    assert sum(load_of(7, padding=5)) == 2 * 7
