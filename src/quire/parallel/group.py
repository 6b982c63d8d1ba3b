"""Groups of ranks, their collectives, and how weights are sharded.

Every product is column-parallel (split by its outputs), and where the next one needs whole rows, they are gathered: no
sum ever crosses ranks, so the bits are those of one rank. If bits may depend on the number of ranks
(`deterministic=False`), every other product is row-parallel (split by its inputs) instead, and its partial results are
summed: two collectives a layer instead of four (Megatron-LM, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

PANEL = 32
"""Columns that kernels compute together: shares are multiples of this, if there are enough columns."""


class Group(Protocol):
    """A rank's membership in a group. All ranks call the same collectives in the same order.

    Attributes:
        rank, size: this rank, and the number of ranks.
        address: the group's address for kernels that gather themselves; None if they cannot.
        shared_bytes: size of the memory that the ranks of a machine share.
        counts: number of gathers so far, and bytes that this rank received in them; None if unknown.
        reduced: number of all-reduces so far, and bytes that were summed.
        lost: the rank that was lost, if any.

    Each method that waits for other ranks raises:
        StepGivenUpError: a rank could not continue the step.
        RanksDisagreeError: another rank called something else.
        RankLostError: a rank died, or did not answer in time; nothing can be computed any more.
    """

    rank: int
    size: int
    address: int | None
    shared_bytes: int

    @property
    def counts(self) -> tuple[int, int] | None: ...

    @property
    def reduced(self) -> tuple[int, int]: ...

    @property
    def lost(self) -> int | None: ...

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        """Gather the columns of all ranks, [rows, width], given this rank's, x [rows, own]; `parts`: each rank's."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' x, [rows, columns], in fp32 and in the order of the ranks, rounded once."""
        ...

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        """All-gather bytes of any size; returns each rank's, until the next collective but one overwrites them.

        Args:
            own: this rank's tensors, which are concatenated; other ranks need not know their size.
            word: a number that must be the same on all ranks.
        """
        ...

    def check(self, digest: int) -> None:
        """Complete a step: check that all ranks have sampled the same tokens, given this rank's digest of them."""
        ...

    def give_up(self, number: int) -> None:
        """Give up the plan with this number, and unfinished ones before it, on all ranks. They `resume` with a later
        one.
        """
        ...

    def lose(self, rank: int) -> None:
        """Record that a rank is gone, so that no other waits for it. May be called by any thread."""
        ...

    def ended(self, outcome: int) -> None:
        """Raise the error of a kernel's collective, unless its outcome is success."""
        ...

    def resume(self, number: int) -> None:
        """Continue with the plan with this number after others were given up; returns when all ranks do."""
        ...


class OneRank:
    """The group of a model that one process computes; or just a rank number, to compute its share."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.address: int | None = None
        self.shared_bytes = 0
        self.counts = self.reduced = 0, 0
        self.lost: int | None = None

    def all_gather(self, x: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        return [torch.cat([part.contiguous().view(torch.uint8).flatten() for part in own])]

    def check(self, digest: int) -> None:
        return

    def give_up(self, number: int) -> None:
        return

    def lose(self, rank: int) -> None:
        return

    def ended(self, outcome: int) -> None:
        return

    def resume(self, number: int) -> None:
        return


class Split(Enum):
    """How a product is split among ranks.

    Attributes:
        NONE: it is replicated: every rank computes all of it.
        OUTPUTS: column-parallel; each rank keeps its own outputs.
        INPUTS: takes inputs that are split like such outputs; they are gathered, and so are its outputs. (With
            `deterministic=False` it is row-parallel: each rank has the weights of its inputs, and outputs are summed.)
        VOCABULARY: column-parallel; the outputs are gathered.
    """

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    VOCABULARY = "vocabulary"


class Gather:
    """Gathers the columns of a matrix from all ranks.

    Args:
        width: number of all columns. heads: see `share`.

    Attributes:
        parts: the columns of each rank. own: this rank's.
    """

    def __init__(self, group: Group, width: int, heads: int | None = None) -> None:
        self.group, self.width = group, width
        self.parts = [share(width, OneRank(rank, group.size), heads) for rank in range(group.size)]
        self.own = self.parts[group.rank]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, own]. Returns [rows, width]."""
        return self.group.all_gather(x, self.parts)


def own_heads(heads: int, group: Group) -> int:
    """Number of this rank's heads, given the number of all."""
    return len(share(heads, group, heads))


def share(size: int, group: Group, heads: int | None = None) -> range:
    """This rank's share of `size` columns (or outputs), see `share_of`."""
    return share_of(size, group.rank, group.size, heads)


def share_of(size: int, rank: int, ranks: int, heads: int | None = None) -> range:
    """One rank's share of `size` columns (or outputs).

    With fewer columns than ranks, neighbouring ranks have the same one, which a gather does not undo: models only
    replicate (key and value) heads like this.

    Args:
        heads: number of heads that the columns consist of; heads are not split, and are replicated if there are fewer
            heads than ranks.
    """
    if heads is None:
        unit = math.gcd(size, PANEL)
        while unit > 1 and size // unit < ranks:
            unit //= 2
        pieces = size // unit
    else:
        unit, pieces = size // heads, heads
    if pieces < ranks:
        first = rank * pieces // ranks
        return range(first * unit, (first + 1) * unit)
    # The first rank never has fewer than others, so that what it plans is enough for all.
    first, last = (-(-pieces * place // ranks) for place in (rank, rank + 1))
    return range(first * unit, last * unit)


def query_pieces(heads: int, kv_heads: int, ranks: int) -> int:
    """How many pieces the query heads consist of, see `share_of`: those of a KV head stay together, unless ranks share
    it."""
    return kv_heads if kv_heads >= ranks else heads


def can_share(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether ranks can share a layer's heads: each has some, and the KV heads that they need."""
    return ranks <= kv_heads or (ranks <= heads and ranks % kv_heads == 0)
