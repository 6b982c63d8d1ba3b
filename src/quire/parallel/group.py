"""The ranks of a group, and what they do together.

Every product is split by its outputs, and where the next one needs whole rows, they are gathered: no number is ever
added across ranks, so the bits are those of one rank. Where bits need not be the same for any number of ranks, every
other product is split by its inputs instead, and what ranks have of the result is added: two collectives a layer in
place of four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

PANEL = 32
"""Columns that kernels compute together: a share is made of such, where there are enough of them."""


class Group(Protocol):
    """What the ranks of a model do together. All of them do the same, in the same order.

    Attributes:
        rank, size: which one this is, of how many.
        address: of the group for kernels that gather by themselves; None: there is none.
        shared_bytes: of the memory that all ranks of a machine share.
        counts: gathers so far, and bytes that this rank received in them; None: it is not known.
        reduced: sums of all ranks so far, and bytes of what was summed.
        lost: the rank that was lost, if any.

    Each of the methods below that waits for others raises:
        StepGivenUpError: a rank could not go on with the step.
        RanksDisagreeError: another rank does something else.
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
        """The columns of all ranks, [rows, width], from this rank's own, x [rows, own]; `parts`: those of each."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, [rows, columns], in fp32 and in the order of the ranks, rounded once."""
        ...

    def exchange(self, own: Sequence[torch.Tensor], word: int = 0) -> list[torch.Tensor]:
        """What every rank brings, as bytes; the next collective but one overwrites them.

        Args:
            own: what this one brings, side by side: others need not know how much.
            word: what all must agree on.
        """
        ...

    def check(self, digest: int) -> None:
        """Tell that this rank has computed its step; `digest`: of the tokens, the same on all ranks."""
        ...

    def give_up(self, number: int) -> None:
        """This rank does not compute the plan of this number, so no other can; nor those before it that have not ended.

        All must begin anew afterwards, with a later one.
        """
        ...

    def lose(self, rank: int) -> None:
        """A rank is gone: no other one waits for it. May be called by any thread."""
        ...

    def ended(self, outcome: int) -> None:
        """Raises what the outcome of a kernel's collective says, if it was not done."""
        ...

    def begin_anew(self, number: int) -> None:
        """Go on with the plan of this number, whatever was given up before; returns when all ranks do."""
        ...


class OneRank:
    """A model that one process computes alone; or a rank's place, of which nothing is asked but its share."""

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

    def begin_anew(self, number: int) -> None:
        return


class Split(Enum):
    """How a product is split among ranks.

    NONE: it is not, every rank computes it. OUTPUTS: each has its own outputs, and they stay where they are. INPUTS:
    its inputs lie split, as such outputs do; they are gathered, and so are its outputs. (Or each rank has the weights
    of its own inputs, and the outputs are added.) VOCABULARY: its outputs are gathered.
    """

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    VOCABULARY = "vocabulary"


class Gather:
    """Brings together the columns that the ranks have.

    Args:
        width: all of them. heads: see `share`.

    Attributes:
        parts: which columns each rank has. own: this one's.
    """

    def __init__(self, group: Group, width: int, heads: int | None = None) -> None:
        self.group, self.width = group, width
        self.parts = [share(width, OneRank(rank, group.size), heads) for rank in range(group.size)]
        self.own = self.parts[group.rank]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, own]. Returns [rows, width]."""
        return self.group.all_gather(x, self.parts)


def own_heads(heads: int, group: Group) -> int:
    """How many of so many heads this rank has."""
    return len(share(heads, group, heads))


def share(size: int, group: Group, heads: int | None = None) -> range:
    """This rank's part of `size` columns (or outputs), see `share_of`."""
    return share_of(size, group.rank, group.size, heads)


def share_of(size: int, rank: int, ranks: int, heads: int | None = None) -> range:
    """One rank's part of `size` columns (or outputs).

    Where there are fewer of them than ranks, ranks next to each other have the same one, and no gather puts that right:
    models ask only for heads to be shared so.

    Args:
        heads: of how many the columns are those; no head is cut, and ranks share one where there are fewer heads.
    """
    if heads is None:
        unit = math.gcd(size, PANEL)
        while unit > 1 and size // unit < ranks:
            unit //= 2
        pieces = size // unit
    else:
        unit, pieces = size // heads, heads
    first, last = rank * pieces // ranks, (rank + 1) * pieces // ranks
    return range(first * unit, max(last, first + 1) * unit)
