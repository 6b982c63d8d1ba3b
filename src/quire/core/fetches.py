"""What moves between the pool, the host tier and what is behind that.

Blocks leave the pool when they are evicted, and come back as a *fetch*: a chain of blocks, not a request's. To the
requests that want them, a fetch is what a request that computes them is (`prefix_leaders`): they wait until the step
that loaded the blocks has committed, and then find them in the prefix cache. So no request owns a transfer: ending a
request touches no fetch, and a block that cannot be loaded is only one more to be computed.

Bytes move in the order of the plans (`StepPlan.saves`, `StepPlan.loads`), so no block and no slot is touched beside
the steps, and a slot is free again as soon as the step that was to fill it is given up.

Behind the host tier there may be a disk, and other engines: see `core/sources.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from quire.core.block_hash import part_name
from quire.core.holders import REPLICAS
from quire.core.prefix_cache import Node
from quire.core.request import Request
from quire.core.sources import HOST, LEAST_FETCH, Sources
from quire.core.step import Move, StepPlan, StepResult

WORTH = 2
"""Uses of a block by other requests after which it is worth a place in a tier."""

FIRST_LOADS = 4
"""Blocks that a step loads in which requests decode, where none before it has; the next ones may load twice as many as
the last one, up to what their times allow: memory that was not used lately is slower than what is known."""

MOST_FETCHES = 8
"""Fetches that one request may begin before it is admitted and that do not bring all they were to: what it lacks after
these is computed."""


class Fetch:
    """Blocks of one chain on their way into the pool.

    Attributes:
        order: before every request's: all may wait for it.
        parent: node of the block before them; None: they begin the chain.
        scope: whose chain it is.
        hashes, keys: of the blocks, one each.
        moves: of those parts of the blocks that are not in the pool yet. places: of each, which block it belongs to.
        size: of all moves, in blocks of the first group.
        brings: so many blocks further requests may begin once they are there.
        promised: blocks of each group beside these that must stay available for the request that asked for them.
        num_published: blocks that came.
        new: those that came from other engines: what they are worth here is not known yet.
        request: that it was begun for.
    """

    order, source = (-math.inf, 0, 0), HOST
    request: Request | None = None

    def __init__(
        self,
        parent: Node | None,
        scope: str,
        hashes: list[bytes],
        keys: list[bytes],
        moves: list[Move],
        places: list[int],
        size: float,
        brings: int,
        promised: list[int],
    ) -> None:
        self.parent, self.scope, self.hashes, self.keys = parent, scope, hashes, keys
        self.moves, self.places, self.size, self.brings, self.promised = moves, places, size, brings, promised
        self.num_published = 0
        self.new: set[bytes] = set()

    @property
    def complete(self) -> bool:
        """All came."""
        return self.num_published == len(self.hashes)

    def came(self) -> int:
        """So many blocks further requests may begin."""
        return min(self.brings, self.num_published)

    def parts(self) -> Iterator[tuple[bytes, bytes, list[Move]]]:
        """Hash and key of each block that came, up to the last one of which something moved, and its moves."""
        moves: list[list[Move]] = [[] for _ in range(self.num_published)]
        for place, move in zip(self.places, self.moves, strict=True):
            if place < self.num_published:
                moves[place].append(move)
        while moves and not moves[-1]:
            moves.pop()
        return zip(self.hashes, self.keys, moves, strict=False)


class Fetches:
    """Saves and loads of one pool: those for the next plan, and those of plans in flight.

    Args:
        sources: the host tier, and what is behind it; other pools may have the same.

    Attributes:
        tier: the host tier's index. sizes: see `Sources`.
        saved, loaded: blocks that came to the tier, and from there, since the start.
        bad_loads: blocks whose bytes were found to be others than those that had been saved.
        volume: of all that was "stored" in the tier and "loaded" from it, in blocks of the first group.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources, self.tier, self.sizes = sources, sources.tier, sources.sizes
        self.saved = self.loaded = self.bad_loads = 0
        self.volume = {"stored": 0.0, "loaded": 0.0}
        self._recent_loads = 0.0  # of the last plans
        self.reset()

    def reset(self) -> None:
        """Nothing is in the tier, or on its way."""
        self.sources.reset()
        self._saves: list[Move] = []
        self._begun: list[Fetch] = []
        self._in_flight: deque[tuple[int, list[Move], list[Fetch]]] = deque()

    @property
    def counts(self) -> dict[str, int]:
        """Blocks that were stored in the tier and loaded from there, and those that were bad."""
        return {"stored": self.saved, "loaded": self.loaded, "bad": self.bad_loads}

    @property
    def has_moves(self) -> bool:
        """The next plan is to save or load something."""
        return bool(self._begun or self._saves)

    @property
    def promised(self) -> list[int]:
        """Blocks of each group that must stay available for requests whose blocks are on their way."""
        return [
            sum(counts) for counts in zip([0] * len(self.sizes), *(f.promised for f in self.under_way), strict=True)
        ]

    @property
    def under_way(self) -> list[Fetch]:
        """All that have not ended, for checks."""
        return [*self._begun, *(fetch for _, _, fetches in self._in_flight for fetch in fetches)]

    @property
    def saves_under_way(self) -> list[Move]:
        """All that have not ended, for checks."""
        return [*self._saves, *(move for _, saves, _ in self._in_flight for move in saves)]

    def most_loads(self, decoding: bool, spare: float = math.inf) -> float | None:
        """How many blocks of the first group, or as much of others, the next plan may load for one more request; None:
        any number.

        Args:
            decoding: requests decode in it, and are not to wait for long.
            spare: see `PendingStep`.
        """
        if not decoding:
            return None
        most: float = max(FIRST_LOADS, 2 * self._recent_loads)
        if (allowed := self.sources.costs.blocks_beside_decodes(HOST)) is not None:
            most = min(most, allowed)
        most -= sum(fetch.size for fetch in self._begun)
        if spare < math.inf and (each := self.sources.costs.tokens_per_load(HOST)):
            most = min(most, int(spare / each))
        return max(LEAST_FETCH, most)

    def used(self, node: Node, group: int) -> None:
        """A request has taken a block from the prefix cache. What is worth it is on the disk before it is evicted, so
        that it is there after a restart."""
        node.uses[group] += 1
        if node.uses[group] == WORTH and self.sources.disk is not None:
            self.evicted(node, group, node.blocks[group])

    def evicted(self, node: Node, group: int, block: int) -> None:
        """A block goes from the pool: it is saved if it is worth it. One that came to the tier from another engine is
        written to the disk now."""
        if not node.hash or node.uses[group] < WORTH:
            return
        name, holders = part_name(node.hash, group), self.sources.holders
        if holders is not None and holders.count(name) >= REPLICAS:
            return
        if not self.save(node, group, block) and (slot := self.tier.slot(name)) is not None:
            self.sources.write(slot, name)

    def save(self, node: Node, group: int, block: int) -> bool:
        """The next plan saves a block, before anything is written into it. False: it is in the tier already, or on its
        way there, or there is no slot for it."""
        name = part_name(node.hash, group)
        slot = self.tier.take(name, group)
        if slot is not None:
            self.sources.replaced(slot)
            self._saves.append(Move(block, slot, name, group))
        return slot is not None

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
        sources = self.sources
        if self.tier.num_slots:
            sources.costs.observe(plan, result, loaded := sources.size(plan.loads))
            self._recent_loads = max(loaded, self._recent_loads * 3 // 4)  # steps that overlap take turns
        if not self._in_flight or self._in_flight[0][0] != plan.number:
            return []
        _, saves, fetches = self._in_flight.popleft()
        bad_loads = set(result.bad_loads)
        for move in saves:
            self.tier.filled(move.slot)
            sources.write(move.slot, move.hash)
        self.saved += len(saves)
        self.volume["stored"] += sources.size(saves)
        self.bad_loads += len(bad_loads)
        for move in plan.loads:
            if move.slot in bad_loads:
                sources.bad(move)
        for fetch in fetches:
            good = [move.slot not in bad_loads for move in fetch.moves]
            lost = (place for place, fine in zip(fetch.places, good, strict=True) if not fine)
            fetch.num_published = min(lost, default=len(fetch.hashes))
            came = [move for place, move in zip(fetch.places, fetch.moves, strict=True) if place < fetch.num_published]
            self.loaded += len(came)
            self.volume["loaded"] += sources.size(came)
            self._unpin(fetch)
            fetch.new.update(move.hash for move in came if sources.is_new(move))
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
