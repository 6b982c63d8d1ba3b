"""What moves between the pool and the host tier.

Blocks leave the pool when they are evicted, and come back as a *fetch*: a chain of blocks, not a request's. To the
requests that want them, a fetch is what a request that computes them is (`prefix_leaders`): they wait until the step
that loaded the blocks has committed, and then find them in the prefix cache. So nobody waits for bytes alone: ending a
request touches no fetch, and a block that cannot be loaded is only one more to be computed.

Bytes move in the order of the plans (`StepPlan.saves`, `StepPlan.loads`), so no block and no slot is touched beside
the steps, and a slot is free again as soon as the step that was to fill it is given up.
"""

from __future__ import annotations

import math
from collections import deque

from quire.core.cost import Costs
from quire.core.prefix_cache import Node
from quire.core.step import Move, StepPlan, StepResult
from quire.core.tier import Tier

WORTH = 2
"""Uses of a block by other requests after which it is worth a place in a tier."""

LEAST_FETCH = 2
"""Fewer blocks are computed."""

MOST_FETCHES = 8
"""Fetches that one request may begin before it is admitted: what it lacks after these is computed."""


class Fetch:
    """Blocks of one chain on their way into the pool.

    Attributes:
        order: before every request's: all may wait for it.
        parent: node of the block before them; None: they begin the chain.
        scope: whose chain it is.
        hashes, keys: of the blocks, one each.
        moves: one a block.
        promised: blocks beside these that must stay available for the request that asked for them.
        num_published: blocks that came.
    """

    order = (-math.inf, 0, 0)

    def __init__(
        self, parent: Node | None, scope: str, keys: list[bytes], moves: list[Move], promised: int = 0
    ) -> None:
        self.parent, self.scope, self.keys, self.moves, self.promised = parent, scope, keys, moves, promised
        self.hashes = [move.hash for move in moves]
        self.num_published = 0


class Fetches:
    """Saves and loads: those for the next plan, and those of plans in flight.

    Args:
        tier: the host tier's index.

    Attributes:
        saved, loaded: blocks that came to the tier, and from there, since the start.
        bad_loads: blocks whose bytes were found to be others than those that had been saved.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier, self.costs = tier, Costs()
        self.saved = self.loaded = self.bad_loads = 0
        self.reset()

    def reset(self) -> None:
        """Nothing is in the tier, or on its way."""
        self.tier.reset()
        self._saves: list[Move] = []
        self._begun: list[Fetch] = []
        self._in_flight: deque[tuple[int, list[Move], list[Fetch]]] = deque()

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By tier, blocks that were stored there and loaded from there, and those that were bad."""
        if not self.tier.num_slots:
            return {}
        return {"host": {"stored": self.saved, "loaded": self.loaded, "bad": self.bad_loads}}

    @property
    def has_loads(self) -> bool:
        """The next plan is to load something."""
        return bool(self._begun)

    @property
    def promised(self) -> int:
        """Blocks that must stay available for requests whose blocks are on their way."""
        return sum(fetch.promised for fetch in self.under_way)

    @property
    def under_way(self) -> list[Fetch]:
        """All that have not ended, for checks."""
        return [*self._begun, *(fetch for _, _, fetches in self._in_flight for fetch in fetches)]

    @property
    def saves_under_way(self) -> list[Move]:
        """All that have not ended, for checks."""
        return [*self._saves, *(move for _, saves, _ in self._in_flight for move in saves)]

    def worth(self, num_blocks: int, block_size: int, first: int) -> bool:
        """Whether so many blocks of a chain, from its block `first` on, are better loaded than computed."""
        return num_blocks >= LEAST_FETCH and self.costs.prefers_load(num_blocks, block_size, first)

    def evicted(self, node: Node, block: int) -> None:
        """A block goes from the pool: the next plan saves it, before anything is written into it, if it is worth it."""
        if node.uses >= WORTH and node.hash:
            slot = self.tier.take(node.hash)
            if slot is not None:
                self._saves.append(Move(block, slot, node.hash))

    def begin(self, fetch: Fetch) -> None:
        """The next plan loads its blocks. Their slots were pinned."""
        self._begun.append(fetch)

    def planned(self, number: int) -> tuple[list[Move], list[Move]]:
        """What plan `number` saves and loads."""
        saves, begun, self._saves, self._begun = self._saves, self._begun, [], []
        if saves or begun:
            self._in_flight.append((number, saves, begun))
        return saves, [move for fetch in begun for move in fetch.moves]

    def committed(self, plan: StepPlan, result: StepResult) -> list[Fetch]:
        """A plan has committed. Returns its fetches; each has come up to its `num_published`."""
        if self.tier.num_slots:
            self.costs.observe(plan, result)
        if not self._in_flight or self._in_flight[0][0] != plan.number:
            return []
        _, saves, fetches = self._in_flight.popleft()
        bad_loads = set(result.bad_loads)
        for move in saves:
            self.tier.filled(move.slot)
        self.saved += len(saves)
        self.bad_loads += len(bad_loads)
        for slot in bad_loads:
            self.tier.withdraw(slot)
        for fetch in fetches:
            bad = (index for index, move in enumerate(fetch.moves) if move.slot in bad_loads)
            fetch.num_published = next(bad, len(fetch.moves))
            self.loaded += fetch.num_published
            self._unpin(fetch)
        return fetches

    def given_up(self) -> None:
        """No plan in flight will commit. Evicted blocks that no plan has saved yet still lie where they did."""
        for _, saves, fetches in self._in_flight:
            for move in saves:
                self.tier.dropped(move.slot)
            for fetch in fetches:
                self._unpin(fetch)
        self._in_flight.clear()

    def _unpin(self, fetch: Fetch) -> None:
        for move in reversed(fetch.moves):  # the head was used last: tails give way first
            self.tier.unpin(move.slot)
