"""Blocks that other engines read from this one's host tier.

An export is a chain of blocks that another engine wants. Blocks in the tier are announced, in order, and pinned until
the other engine has read them; blocks in the pool are saved to the tier first; for the rest, the export waits while a
request computes them. So a chain can be read while its prompt is still being computed, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.prefix_cache import PrefixCache
from quire.kv.tiers.orders import Gone, Have
from quire.kv.tiers.tier import PEER, Tier


class Pool(Protocol):
    """The connector of a pool that shares the tier."""

    cache: PrefixCache

    def export(self, name: bytes) -> bool:
        """Have a block saved, by its name; False: it is not here, or in the tier, or there is no slot for it."""


@dataclass(slots=True)
class Export:
    """A chain of blocks that another engine wants.

    Attributes:
        hashes: the blocks' names.
        computing: whether a request computes the missing ones.
        slots: of the blocks announced to the other engine.
        released: number of those that it has read.
    """

    hashes: Sequence[bytes]
    computing: bool
    slots: list[int] = field(default_factory=list)
    released: int = 0

    @property
    def told(self) -> int:
        """Number of blocks announced to the other engine."""
        return len(self.slots)


class Exports:
    """All exports in progress. Their blocks may be in the pools of several replicas, which share the tier.

    Args:
        tier: shared by all pools.
        count: called with the slots of blocks "stored" for a `PEER`.
    """

    def __init__(self, tier: Tier, count: Callable[[str, str, Sequence[int]], None]) -> None:
        self._tier, self._count = tier, count
        self.reset()

    def reset(self) -> None:
        """The tier was reset: nothing is pinned, and all exports are forgotten."""
        self.under_way: dict[int, Export] = {}

    @property
    def pinned(self) -> list[int]:
        """Slots that others may be reading, once per export; for invariant checks."""
        return [slot for export in self.under_way.values() for slot in export.slots[export.released :]]

    def missing(self, hashes: Sequence[bytes], pools: Sequence[Pool]) -> bool:
        """Whether some of a chain's blocks would have to be computed."""
        return any(each not in self._tier and all(pool.cache.part(each) is None for pool in pools) for each in hashes)

    def begin(self, number: int, hashes: Sequence[bytes], computing: bool) -> None:
        """Begin an export: another engine wants these blocks."""
        self.under_way[number] = Export(hashes, computing)

    def computed(self, number: int) -> None:
        """The request that computed an export's blocks has ended, with or without success."""
        if export := self.under_way.get(number):
            export.computing = False

    def release(self, number: int, count: int) -> None:
        """The other engine has read the first `count` blocks; an impossible count is ignored."""
        if export := self.under_way.get(number):
            self._unpin(export, max(0, min(count, export.told)))
            self._end_if_read(number, export)

    def end(self, number: int) -> None:
        """The other engine no longer needs an export; an unknown number is ignored."""
        if export := self.under_way.pop(number, None):
            self._unpin(export, export.told)

    def advance(self, pools: Sequence[Pool]) -> list[Have | Gone]:
        """Announce what has become available since the last call; the next plan saves blocks that only a pool has."""
        news: list[Have | Gone] = []
        for number, export in list(self.under_way.items()):
            first = export.told
            for block_hash in export.hashes[first:]:
                slot = self._tier.slot(block_hash)
                if slot is None:
                    break
                self._tier.pin(slot)
                export.slots.append(slot)
            if export.told > first:
                self._count(PEER, "stored", export.slots[first:])
                news.append(Have(number, first, tuple(export.slots[first:])))
            if export.told < len(export.hashes) and not self._coming(export, pools):
                news.append(Gone(number))
                export.hashes = export.hashes[: export.told]
                self._end_if_read(number, export)
        return news

    def _coming(self, export: Export, pools: Sequence[Pool]) -> bool:
        """Whether the next block is still to come; saves blocks that are in a pool."""
        for block_hash in export.hashes[export.told :]:
            if not self._tier.is_filling(block_hash) and not any(pool.export(block_hash) for pool in pools):
                break
        return export.computing or self._tier.is_filling(export.hashes[export.told])

    def _end_if_read(self, number: int, export: Export) -> None:
        if export.released == len(export.hashes):
            del self.under_way[number]

    def _unpin(self, export: Export, count: int) -> None:
        for slot in export.slots[export.released : count]:
            self._tier.unpin(slot)
        export.released = max(export.released, count)
