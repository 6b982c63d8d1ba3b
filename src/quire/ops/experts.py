"""Mixture of experts: which experts a token goes to, and what they make of it. Plain torch; the definition."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from quire.ops.elementwise import Activation, activate
from quire.ops.linear import Product
from quire.ops.ragged import RaggedBatch
from quire.parallel.group import Gather, Group

TINY = 1e-20
"""Added to the sum by which weights are divided, as DeepSeek-V3 does: scores of a sigmoid may all be 0."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's scores choose experts, in the terms of the checkpoints' configurations.

    Attributes:
        num_experts: to choose from.
        top_k: experts a token goes to (`num_experts_per_tok`).
        scoring: how logits become scores (`scoring_func`).
        groups, top_groups: experts lie in so many groups, of which the best so many stay (`n_group`, `topk_group`).
        group_score: a group's score is its best expert's (V2's `group_limited_greedy`) or the sum of its two best
            (V3's `noaux_tc`).
        normalize: weights are divided by their sum (`norm_topk_prob`).
        scale: and then multiplied by this (`routed_scaling_factor`).
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalize: bool = True
    scale: float = 1.0


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and their weights, of each token.

    Args:
        logits: [tokens, experts] fp32.
        bias: [experts] fp32, added to scores for the selection alone; None: none.

    Returns:
        (ids [tokens, top_k] int64, ascending in each row; weights [tokens, top_k] fp32, of the unbiased scores).
        Of equal scores the lowest id is chosen.
    """
    scores = _scores(logits.float(), routing.scoring)
    chosen_by = scores if bias is None else scores + bias
    if routing.top_groups < routing.groups:
        chosen_by = chosen_by.masked_fill(~_in_best_groups(chosen_by, routing), -math.inf)
    ids = _largest(chosen_by, routing.top_k).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if routing.normalize:
        total = weights[:, 0]
        for place in range(1, routing.top_k):  # in a fixed order, which faster kernels share
            total = total + weights[:, place]
        weights = weights / (total + TINY).unsqueeze(1)
    return ids, weights * routing.scale


def _scores(logits: torch.Tensor, scoring: Literal["softmax", "sigmoid"]) -> torch.Tensor:
    """[tokens, experts] fp32; `sigmoid` is spelled out since torch's takes another path at a call's last elements."""
    return logits.softmax(dim=-1) if scoring == "softmax" else 1.0 / (1.0 + logits.neg().exp())


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of each row's largest, [rows, count]; of equal ones the first. `topk` does not say which it takes."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Whether each expert's group stays: [tokens, experts] bool."""
    grouped = scores.view(-1, routing.groups, routing.num_experts // routing.groups)
    if routing.group_score == "max":
        of_groups = grouped.amax(-1)
    else:
        best = grouped.topk(2, dim=-1).values
        of_groups = best[..., 0] + best[..., 1]
    kept = torch.zeros_like(of_groups, dtype=torch.bool)
    kept.scatter_(1, _largest(of_groups, routing.top_groups), True)
    return kept.unsqueeze(2).expand_as(grouped).flatten(1)


def count_experts(ids: torch.Tensor, batch: RaggedBatch, load: torch.Tensor) -> None:
    """Add to the load how many of a step's rows each expert has got, without waiting for the device.

    Args:
        ids: [rows, top_k] int64, as `route` gives them. Rows of padding do not count.
        load: [experts] int64.
    """
    real = batch.once(("real pairs", ids.shape[1]), lambda: _real_pairs(ids, batch))
    load.index_add_(0, ids.flatten(), real)


def _real_pairs(ids: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """1 for each of a step's ids, 0 in rows of padding: [rows * top_k] int64; the same in all layers."""
    real = torch.ones_like(ids)
    if batch.spans is not None:
        rows = torch.arange(len(ids), device=ids.device)
        real *= (rows < batch.spans.row_starts[-1]).unsqueeze(1)
    return real.flatten()


@dataclass(frozen=True)
class ExpertSlots:
    """Expert parallelism: which ranks have which experts. An expert that has several slots deals its tokens out.

    Attributes:
        group: the ranks.
        experts: the expert in each slot; every rank has as many slots, one rank's after another's.
    """

    group: Group
    experts: tuple[int, ...]

    @property
    def own(self) -> range:
        """This rank's slots."""
        each = len(self.experts) // self.group.size
        return range(self.group.rank * each, (self.group.rank + 1) * each)

    @property
    def own_experts(self) -> list[int]:
        """The expert in each of them."""
        return [self.experts[slot] for slot in self.own]

    @functools.cached_property
    def replicas(self) -> list[list[int]]:
        """Slots of each expert."""
        found: list[list[int]] = [[] for _ in range(max(self.experts) + 1)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return found

    def turns(self, device: torch.device | str = "cpu") -> Turns:
        """Which slots tokens go to."""
        most = max(map(len, self.replicas))
        table = [(slots * most)[:most] for slots in self.replicas]
        return Turns(torch.tensor(table, device=device), torch.tensor([*map(len, self.replicas)], device=device))


@dataclass(frozen=True, slots=True)
class Turns:
    """An expert's slots take turns by the numbers of the tokens.

    Attributes:
        slots: [experts, most], of each again and again. counts: [experts], how many there are.
    """

    slots: torch.Tensor
    counts: torch.Tensor

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots [tokens, top_k] of experts `ids` [tokens, top_k]."""
        tokens = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        return self.slots[ids, tokens % self.counts[ids]]


class Experts(Protocol):
    """All experts of a layer: `down(activation(gate) * up)` each."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [tokens, hidden]. ids, weights: [tokens, top_k], as `route` gives them.

        Returns [tokens, hidden] in x's data type (where ranks share the experts, this rank's columns of it): products
        of experts in fp32, times the weights, summed in fp32 in ascending order of ids, rounded once. A row's bits do
        not depend on the other rows.
        """
        ...


@runtime_checkable
class CountedExperts(Experts, Protocol):
    """Experts that can tell what memory they need: a CPU's. On a GPU a step is run, and measured."""

    def workspace(self, tokens: int, top_k: int, dtype: torch.dtype) -> int:
        """Most bytes of intermediate results for so many tokens in `dtype`, beside what is given and returned."""
        ...


class LoopedExperts:
    """One expert after the other; one that no token chose costs nothing.

    Args:
        gate_up: per expert, the product [2 * intermediate, hidden]: gate and up side by side.
        down: per expert, the product [hidden, intermediate].
        shared, activation: see `Kernels.experts`.
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._inner = shared if isinstance(shared, Gather) else None
        self._slots = shared if isinstance(shared, ExpertSlots) else None
        self._turns = None if self._slots is None else self._slots.turns()

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        slots = ids if self._turns is None else self._turns.of(ids)
        own = range(len(self._down)) if self._slots is None else self._slots.own
        hidden = self._down[0].out_features
        parts = x.new_zeros(*ids.shape, hidden, dtype=torch.float32)  # [tokens, top_k, hidden]
        for slot in sorted({*slots.flatten().tolist()} & {*own}):
            token, place = (slots == slot).nonzero(as_tuple=True)
            gate_up = self._gate_up[slot - own.start].matmul(x[token])
            inner = activate(gate_up, self._activation)
            inner = inner if self._inner is None else self._inner(inner)
            parts[token, place] = (
                self._down[slot - own.start].matmul(inner, torch.float32) * weights[token, place, None]
            )
        if self._slots is not None:
            parts = of_all_ranks(parts.flatten(0, 1), slots, self._slots).view(parts.shape)
        total = parts[:, 0]
        for place in range(1, ids.shape[1]):
            total = total + parts[:, place]
        return total.to(x.dtype)

    def workspace(self, tokens: int, top_k: int, dtype: torch.dtype) -> int:
        """See `CountedExperts`: all turns' results and their sums, and one expert that all tokens chose."""
        hidden, inner = self._down[0].out_features, self._down[0].in_features
        return tokens * (hidden * (4 * (top_k + 4) + 2 * dtype.itemsize) + inner * (5 * dtype.itemsize + 3 * 4))


def of_all_ranks(parts: torch.Tensor, slots: torch.Tensor, shared: ExpertSlots) -> torch.Tensor:
    """Each pair's result [pairs, hidden] from the rank that has its slot; `slots`: [tokens, top_k]."""
    group, hidden = shared.group, parts.shape[1]
    gathered = group.all_gather(parts, [range(rank * hidden, (rank + 1) * hidden) for rank in range(group.size)])
    ranks = slots.flatten() // len(shared.own)
    return gathered.view(-1, group.size, hidden)[torch.arange(len(ranks), device=ranks.device), ranks]


class HeadProducts(Protocol):
    """A product of its own for each head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, in], any strides. Returns [tokens, heads, out], contiguous, in x's data type."""
        ...


class LoopedHeads:
    """One head after the other: see `HeadProducts`."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadProducts`."""
        parts = [product.matmul(x[:, head].contiguous()) for head, product in enumerate(self._products)]
        return torch.stack(parts, dim=1)
