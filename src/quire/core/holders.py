"""What other nodes hold, as a directory has said, and what this one holds for them.

The directory is asked beside the steps, and what it says is a hint: it is forgotten after a while, and where a node has
not what it was said to have, another one is asked, or the block is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from quire.core.prefix_cache import PrefixCache
from quire.core.prefix_leaders import BLOCK
from quire.core.request import Event
from quire.core.tier import Tier

if TYPE_CHECKING:
    from quire.core.kv_manager import KVManager

FRESH_SECONDS = 2.0
"""Of what was said no longer ago, nothing is asked again."""

KEPT_SECONDS = 60.0
"""What was said longer ago is not believed, though the directory may be gone."""

LOOKUP_SECONDS = 0.05
"""Requests wait no longer for an answer."""

MOST_KNOWN = 2**17
"""Blocks of which something is known; the oldest go first."""

REPLICAS = 2
"""A block that so many other nodes hold is not saved in one more tier."""


class Lookup:
    """Blocks that the directory was asked about.

    Attributes:
        late: requests wait for it no longer.
    """

    late = False

    def __init__(self, number: int, hashes: list[bytes], deadline: float) -> None:
        self.number, self.hashes, self.deadline = number, hashes, deadline

    @property
    def event(self) -> Event:
        """What requests wait for: something of blocks, as if they were on their way."""
        return Event(BLOCK, self.number)


class Holders:
    """Which nodes hold which blocks.

    Attributes:
        ready: the directory answers; whoever speaks with it says so.
        missed: blocks that were asked about, and that nobody held. stale: those that a node had not that was said to
            hold them. bad: those that came from a node with other bytes than their name says.
    """

    def __init__(self) -> None:
        self.ready = False
        self.missed = self.stale = self.bad = 0
        self._next = 0
        self._known: OrderedDict[bytes, tuple[float, tuple[str, ...]]] = OrderedDict()  # since when, and who
        self._banned: set[str] = set()
        self._nodes: frozenset[str] | None = None  # those that are there; None: that was not told yet
        self.reset()

    def reset(self) -> None:
        """Nobody waits for an answer."""
        self.lookups: dict[int, Lookup] = {}

    @property
    def nodes(self) -> frozenset[str] | None:
        """Those that blocks can be had from; None: it was not told yet who is there."""
        return None if self._nodes is None else self._nodes - self._banned

    def ask(self, hashes: Sequence[bytes], tier: Tier, now: float) -> Lookup | None:
        """What has to be asked about a chain before its holders are known as well as they can be; None: nothing.

        Args:
            hashes: the first one is not in the tier.
        """
        if not self.ready or any(each.late for each in self.lookups.values()):
            return None  # one that is late is asked for nothing before it has answered
        if now - self._known.get(hashes[0], (-KEPT_SECONDS, ()))[0] < FRESH_SECONDS:
            return None
        self._next += 1
        missing = [each for each in hashes if each not in tier]
        lookup = self.lookups[self._next] = Lookup(self._next, missing, now + LOOKUP_SECONDS)
        return lookup

    def answered(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> Lookup | None:
        """The directory has answered: the nodes that hold the first blocks; nobody holds the one after these.

        Args:
            number: of the lookup; one that is not known is ignored.
            holders: None: it did not answer, and what it said before counts.
        """
        lookup = self.lookups.pop(number, None)
        if lookup is None:
            return None
        if holders is None:
            self._learn(lookup.hashes[0], self.of(lookup.hashes[0], now), now)
            return lookup
        rows = [*holders, *([()] if len(holders) < len(lookup.hashes) else [])]
        for block_hash, names in zip(lookup.hashes, rows, strict=False):
            self._learn(block_hash, tuple(names), now)
        self.missed += len(lookup.hashes) - len(holders)
        return lookup

    def expired(self, now: float) -> list[Lookup]:
        """Those whose deadline has passed."""
        late = [each for each in self.lookups.values() if not each.late and each.deadline < now]
        for each in late:
            each.late = True
        return late

    def of(self, block_hash: bytes, now: float) -> tuple[str, ...]:
        """Who holds a block."""
        since, names = self._known.get(block_hash, (-KEPT_SECONDS, ()))
        return self._there(names) if now - since < KEPT_SECONDS else ()

    def count(self, block_hash: bytes) -> int:
        """How many others hold a block, as was said last."""
        return len(self._there(self._known.get(block_hash, (0.0, ()))[1]))

    def best(
        self, hashes: Sequence[bytes], tier: Tier, cost: Callable[[str], float | None], now: float
    ) -> tuple[str, int]:
        """Who has most of a chain beside what is in the tier, and how many blocks; of several, who is fastest.

        Args:
            cost: seconds for a block of a node; None: not known yet.
        """
        runs = dict.fromkeys(self.of(hashes[0], now), 0)
        for node in runs:
            runs[node] = next(
                (i for i, each in enumerate(hashes) if each not in tier and node not in self.of(each, now)),
                len(hashes),
            )
        if not runs:
            return "", 0
        node = max(runs, key=lambda each: (runs[each], -(cost(each) or 0.0)))
        return node, runs[node]

    def lacks(self, node: str, hashes: Sequence[bytes]) -> None:
        """A node does not give these."""
        for each in hashes:
            if each in self._known:
                since, names = self._known[each]
                self._known[each] = since, tuple(name for name in names if name != node)

    def ban(self, node: str) -> bool:
        """What a node gives cannot be believed: it is asked for nothing any more. False: it was not before, either."""
        new = node not in self._banned
        self._banned.add(node)
        return new

    def keep(self, nodes: frozenset[str]) -> None:
        """These are there; what is known of others counts no more."""
        self._nodes = nodes
        self._banned &= nodes

    def _there(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these nodes that blocks can be had from."""
        nodes = self._nodes
        return tuple(name for name in names if name not in self._banned and (nodes is None or name in nodes))

    def _learn(self, block_hash: bytes, names: tuple[str, ...], now: float) -> None:
        self._known[block_hash] = now, names
        self._known.move_to_end(block_hash)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


class Published:
    """The blocks that others may have from this node: those in its prefix caches, and those in its host tier.

    Which of them have come and gone is found out when somebody asks, of those that were touched meanwhile.
    """

    def __init__(self, tier: Tier) -> None:
        self.blocks: set[bytes] = set()
        self._tier, self._touched = tier, set[bytes]()
        tier.changed = self.touch

    @classmethod
    def of(cls, kvs: Sequence[KVManager]) -> Published:
        """Of an engine whose pools share a tier, as those of replicas of attention do: what one has is the engine's."""
        published = kvs[0].fetches.published or cls(kvs[0].fetches.tier)
        for kv in kvs:
            kv.fetches.published = published
        return published

    def touch(self, block_hash: bytes) -> None:
        """A block may have come or gone."""
        self._touched.add(block_hash)

    def reset(self) -> None:
        """Any block may have."""
        self._touched |= self.blocks

    def changes(self, caches: Sequence[PrefixCache]) -> tuple[list[bytes], list[bytes]]:
        """Those that have come since the last call, and those that have gone.

        Args:
            caches: the node's; replicas of attention have one each.
        """
        if not self._touched:
            return [], []
        touched, self._touched = self._touched, set()
        there = {each for each in touched if each in self._tier or any(cache.find(each) for cache in caches)}
        came, went = there - self.blocks, (touched - there) & self.blocks
        self.blocks -= went
        self.blocks |= came
        return list(came), list(went)
