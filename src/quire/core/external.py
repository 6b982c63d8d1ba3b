"""The seam for KV that is elsewhere: in host memory, on a disk, at other engines, or wherever a connector keeps it.

The scheduler knows one sentence of it: *so many blocks can be had: wait for this event, or compute*. Where they are,
what that costs and whom to trust are the connector's business. Its words are those of vLLM's KV connector; `kv/` has
the implementations, and `kv/connector.py` what they have in common. An engine without one imports none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from quire.core.prefix import Part, Prefix
from quire.core.prefix_cache import PrefixCache
from quire.core.prefix_leaders import BLOCK
from quire.core.request import Event
from quire.core.step import Move, StepPlan, StepResult


@dataclass(eq=False)
class Found:
    """Blocks that can be had without computing them. To the scheduler it is another request that computes them
    (`prefix_leaders.Leader`), before all others in order: it is waited for, and others that want them wait, too.

    Attributes:
        hashes: of the blocks; or a name of its own, if it is only being found out who has them.
        kind: of its event: `BLOCK`, or `ELSEWHERE` if it may take long.
        num_published: number of its blocks that have come, and are in the prefix cache.
    """

    order: ClassVar[tuple[float, int, int]] = (-math.inf, 0, 0)

    hashes: list[bytes]
    kind: str = field(default=BLOCK, kw_only=True)
    num_published: int = field(default=0, init=False)

    @property
    def ready(self) -> Event:
        """What to wait for: after it, the prefix is looked up again."""
        return Event(self.kind, self.hashes[-1])


@dataclass(eq=False)
class Loadable(Found):
    """Blocks that the next plan can load into the pool.

    Attributes:
        prefix: the blocks are its next ones.
        parts: what is loaded of them, in this order. end: after how many blocks the request could begin, if all were.
        promised: blocks of each group that stay available for the request meanwhile.
        moves: what is loaded, once it is in a plan.
    """

    prefix: Prefix
    parts: Sequence[Part]
    end: int
    promised: list[int] = field(default_factory=list, init=False)
    moves: list[Move] = field(default_factory=list, init=False)


class Pace(Protocol):
    """Limits how long a step's prompts may take, and hence what requests that decode beside them wait for."""

    def take(self, count: int, context: int) -> None:
        """The step computes `count` tokens after `context` others."""

    def room(self, context: int) -> int:
        """How many tokens after `context` others it may still compute."""


class External(Protocol):
    """A connector, as the scheduler and the block tables of one pool see it."""

    def reset(self, cache: PrefixCache) -> None:
        """Forget everything; the pool is empty, and has this cache from now on."""

    def poll(self, now: float) -> list[Found]:
        """A step begins. What has ended since the last one: all of it that comes has come, failed, or came late."""

    def lookup(self, prefix: Prefix, decoding: bool) -> Found | None:
        """What can be had of a prefix and is worth it. If it is not `Loadable`, it is on its way until `poll` says so.

        Args:
            decoding: whether requests decode in this step, which should not wait long.
        """

    def load(self, found: Loadable, allocate: Callable[[int], int]) -> None:
        """Have the next plan load `found.parts`; sets `found.moves`.

        Args:
            allocate: gives a block of a group to load into, for which others may be evicted.
        """

    def published(self, name: bytes, group: int, block: int) -> None:
        """The prefix cache has a block (`block_hash.part_name`) that was computed or loaded, and from which others can
        go on. In a group that keeps only part of a request's positions, this is known when the request ends."""

    def used(self, name: bytes, group: int, block: int) -> None:
        """A request has taken a block from the prefix cache."""

    def evicted(self, name: bytes, group: int, block: int) -> None:
        """A block leaves the prefix cache. It is overwritten by the next plan, after that plan's saves."""

    def pace(self, least: int) -> Pace | None:
        """The limit of the next step's prompts, which decodes are beside; None if there is none. At least `least`
        tokens at a prompt's beginning are allowed."""

    @property
    def has_moves(self) -> bool:
        """Whether the next plan has saves or loads."""

    def planned(self, number: int) -> tuple[list[Move], list[Move]]:
        """Take the saves and loads for plan `number`."""

    def committed(self, plan: StepPlan, result: StepResult) -> list[Loadable]:
        """A plan has committed. Returns what it loaded, each with its first `num_published` blocks."""

    def given_up(self) -> None:
        """No plan in flight will commit. What was evicted, and no plan has saved yet, is still in place."""

    @property
    def waits(self) -> bool:
        """Whether something is on its way from outside of the engine."""

    def wrong(self) -> Iterator[str]:
        """Rules that its bookkeeping breaks, for `invariants`; none, unless there is a bug."""
