"""Transfers of blocks between the pool and the host tier.

Blocks leave the pool when they are evicted, and come back in a *fetch*: a chain of blocks that belongs to no request.
Requests that want these blocks treat a fetch like another request that computes them (`prefix_leaders`): they wait
until the step that loaded the blocks has committed, and then find them in the prefix cache. So no request owns a
transfer: ending a request affects no fetch, and a block that cannot be loaded is simply computed.

Bytes are copied in the order of the plans (`StepPlan.saves`, `StepPlan.loads`), so no block or slot is touched outside
the steps, and a slot whose step is given up is free again when a later one has committed.

Below the host tier there may be a disk and other engines: see `core/sources.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.core.block_hash import part_name
from quire.core.holders import REPLICAS
from quire.core.prefix_cache import Node
from quire.core.prefix_leaders import BLOCK
from quire.core.request import Request
from quire.core.returns import Returns
from quire.core.sources import LEAST_FETCH, Sources
from quire.core.step import Move, StepPlan, StepResult
from quire.core.tier import HOST

WORTH = 2
"""How often a block must have been computed or used before it is worth being written to the disk."""

FIRST_LOADS = 4
"""Blocks that the first such step with decoding requests may load; each further one may load twice as many as the last,
up to what the measured times allow, since memory that was not used lately is slower than the measurements say."""

MOST_FETCHES = 8
"""After this many incomplete fetches before its admission, a request's missing blocks are computed."""


@dataclass(eq=False)
class Fetch:
    """Blocks of one chain being loaded into the pool.

    Attributes:
        order: its place in the order of service, before all requests, so that any request may wait for it.
        parent: node of the block before them; None if they begin the chain.
        scope: the chain's scope.
        hashes, keys: of the blocks, one each.
        moves: one for each part of the blocks that is not in the pool yet. places: the block that each move is for.
        size: of all moves, in blocks of the first group.
        brings: how many blocks further requests can begin once they are loaded.
        promised: additional blocks of each group that must stay available for the request that asked for them.
        num_published: number of blocks that were loaded and published.
        new: blocks that came from other engines, so that it is not known yet whether they are worth a slot here.
        request: the request that it was begun for.
    """

    order, source, engine, kind = (-math.inf, 0, 0), HOST, "", BLOCK

    parent: Node | None
    scope: str
    hashes: list[bytes]
    keys: list[bytes]
    moves: list[Move]
    places: list[int]
    size: float
    brings: int
    promised: list[int]
    num_published: int = 0
    new: set[bytes] = field(default_factory=set)
    request: Request | None = None

    @property
    def complete(self) -> bool:
        """All came."""
        return self.num_published == len(self.hashes)

    def came(self) -> int:
        """How many blocks further requests can begin now."""
        return min(self.brings, self.num_published)

    def parts(self) -> Iterator[tuple[bytes, bytes, list[Move]]]:
        """Hash, key and moves of each block that was loaded, up to the last one with a move."""
        moves: list[list[Move]] = [[] for _ in range(self.num_published)]
        for place, move in zip(self.places, self.moves, strict=True):
            if place < self.num_published:
                moves[place].append(move)
        while moves and not moves[-1]:
            moves.pop()
        return zip(self.hashes, self.keys, moves, strict=False)


class Fetches:
    """Saves and loads of one pool, for the next plan and in plans in flight.

    Args:
        sources: the host tier, and what is below it; other pools may share it.
        num_blocks: number of blocks in the pools of all groups. block_size: tokens in each.

    Attributes:
        tier: the host tier's index. sizes: see `Sources`.
    """

    def __init__(self, sources: Sources, num_blocks: int, block_size: int) -> None:
        self.sources, self.tier, self.sizes = sources, sources.tier, sources.sizes
        self._num_blocks, self._block_size = num_blocks, block_size
        self._recent_loads = 0.0  # a decaying maximum over the last plans
        self.reset()

    def reset(self) -> None:
        """Forget all saves and loads."""
        self.sources.reset()
        self._saves: list[Move] = []
        self._begun: list[Fetch] = []
        self._for_disk: set[bytes] = set()  # of what is being saved
        self._returns = Returns(self._num_blocks, self.tier.num_slots)
        self._in_flight: deque[tuple[int, list[Move], list[Fetch]]] = deque()

    @property
    def has_moves(self) -> bool:
        """Whether the next plan has saves or loads."""
        return bool(self._begun or self._saves)

    @property
    def promised(self) -> list[int]:
        """Blocks of each group that must stay available for requests whose blocks are being fetched."""
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
        """How much the next plan may load for one more request, in blocks of the first group; None if unlimited.

        Args:
            decoding: whether requests decode in it, which should not wait long.
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
        """A request has taken a block from the prefix cache. A block that is worth it is written to the disk even
        before it is evicted, so that it is there after a restart."""
        node.uses[group] += 1
        if node.uses[group] == WORTH and self.sources.disk is not None:
            self.evicted(node, group, node.blocks[group])

    def computed(self, node: Node, group: int) -> None:
        """A request has computed a block from which others can go on, or it was loaded again: its first use. In a group
        that keeps only part of a request's positions, this is known when the request ends or gives way."""
        if not node.uses[group]:
            node.uses[group] = 1
            self._returns.came(part_name(node.hash, group))

    def evicted(self, node: Node, group: int, block: int) -> None:
        """A block is evicted from the pool: save it in the host tier, unless it was passed by or others keep it. It
        goes on to the disk if it is worth that.

        One that leaves for the first time is saved only if it is likely enough to come back, see `Costs.worth_saving`:
        copying prompts that come once would be in vain.
        """
        uses = node.uses[group]
        if not node.hash or not uses:
            return
        name, holders = part_name(node.hash, group), self.sources.holders
        if holders is not None and holders.count(name) >= (REPLICAS if uses >= WORTH else 1):
            return
        again = self._returns.left(name) or uses >= WORTH
        if not again and not self._worth_saving():
            return
        if self.save(node, group, block):
            if again and self.sources.disk is not None:
                self._for_disk.add(name)
        elif again and (slot := self.tier.slot(name)) is not None:
            self.sources.write(slot, name)

    def _worth_saving(self) -> bool:
        """Whether blocks that leave the pool for the first time are saved; where others can read them, always."""
        sources = self.sources
        return sources.published is not None or sources.costs.worth_saving(self._returns.odds, self._block_size)

    def save(self, node: Node, group: int, block: int) -> bool:
        """Have the next plan save a block, before anything is written into it. False if it is in the tier or on its way
        there already, or if there is no slot for it."""
        name = part_name(node.hash, group)
        slot = self.tier.take(name, group)
        if slot is not None:
            self.sources.replaced(slot)
            self._saves.append(Move(block, slot, name, group))
        return slot is not None

    def begin(self, fetch: Fetch) -> None:
        """Have the next plan load a fetch's blocks, whose slots are pinned already."""
        self._begun.append(fetch)

    def planned(self, number: int) -> tuple[list[Move], list[Move]]:
        """Take the saves and loads for plan `number`."""
        saves, begun, self._saves, self._begun = self._saves, self._begun, [], []
        if saves or begun:
            self._in_flight.append((number, saves, begun))
        return saves, [move for fetch in begun for move in fetch.moves]

    def committed(self, plan: StepPlan, result: StepResult) -> list[Fetch]:
        """A plan has committed. Returns its fetches; each has loaded its first `num_published` blocks."""
        sources = self.sources
        if self.tier.num_slots:
            self.tier.committed()
            loaded = sources.size(plan.loads)
            sources.costs.observe(plan, result, loaded, sources.size(plan.saves))
            self._recent_loads = max(loaded, self._recent_loads * 3 // 4)  # overlapping steps load alternately
        if not self._in_flight or self._in_flight[0][0] != plan.number:
            return []
        _, saves, fetches = self._in_flight.popleft()
        bad_loads = set(result.bad_loads)
        for move in saves:
            self.tier.filled(move.slot)
            if move.hash in self._for_disk:
                sources.write(move.slot, move.hash)
                self._for_disk.remove(move.hash)
        sources.count(HOST, "stored", (move.slot for move in saves))
        for move in plan.loads:
            if move.slot in bad_loads:
                sources.bad(move)
        for fetch in fetches:
            good = [move.slot not in bad_loads for move in fetch.moves]
            lost = (place for place, fine in zip(fetch.places, good, strict=True) if not fine)
            fetch.num_published = min(lost, default=len(fetch.hashes))
            came = [move for place, move in zip(fetch.places, fetch.moves, strict=True) if place < fetch.num_published]
            sources.count(HOST, "loaded", (move.slot for move in came))
            self._unpin(fetch)
            fetch.new.update(move.hash for move in came if sources.is_new(move))
        return fetches

    def given_up(self) -> None:
        """No plan in flight will commit. Evicted blocks that no plan has saved yet are still in place."""
        for _, saves, fetches in self._in_flight:
            for move in saves:
                self.tier.give_up(move.slot)
            for fetch in fetches:
                self._unpin(fetch)
        self._in_flight.clear()
        self._for_disk.clear()

    def _unpin(self, fetch: Fetch) -> None:
        for move in reversed(fetch.moves):  # the head is released last, so tails are evicted first
            self.tier.unpin(move.slot)
