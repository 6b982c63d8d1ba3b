"""What other nodes hold, as a directory has said, and what this one holds for them.

The directory is asked beside the steps, and what it says is a hint: it is forgotten after a while, and where a node has
not what it was said to have, another one is asked, or the block is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from quire.core.chain import Chain, Part
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
        names: of their parts (`block_hash.part_name`). needed: of each, whether those behind it are of no use without.
        late: requests wait for it no longer.
    """

    late = False

    def __init__(self, number: int, names: list[bytes], needed: list[bool], deadline: float) -> None:
        self.number, self.names, self.needed, self.deadline = number, names, needed, deadline

    @property
    def event(self) -> Event:
        """What requests wait for: something of blocks, as if they were on their way."""
        return Event(BLOCK, self.number)


class Holders:
    """Which nodes hold which blocks.

    Attributes:
        ready: the directory answers; whoever speaks with it says so.
        missed: blocks that were asked about, and that nobody held; those of layers with a window, or recurrent ones, do
            not count where others see all positions. stale: those that a node had not that was said to
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

    def ask(self, names: list[bytes], needed: list[bool], now: float) -> Lookup | None:
        """What has to be asked about blocks of a chain before their holders are known as well as they can be; None:
        nothing.

        Args:
            names, needed: see `Lookup`.
        """
        if not self.ready or any(each.late for each in self.lookups.values()):
            return None  # one that is late is asked for nothing before it has answered
        if now - self._known.get(names[0], (-KEPT_SECONDS, ()))[0] < FRESH_SECONDS:
            return None
        self._next += 1
        lookup = self.lookups[self._next] = Lookup(self._next, names, needed, now + LOOKUP_SECONDS)
        return lookup

    def answered(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> Lookup | None:
        """The directory has answered: the nodes that hold each of the first blocks; nobody holds the one after these.

        Args:
            number: of the lookup; one that is not known is ignored.
            holders: None: it did not answer, and what it said before counts.
        """
        lookup = self.lookups.pop(number, None)
        if lookup is None:
            return None
        if holders is None:
            self._learn(lookup.names[0], self.of(lookup.names[0], now), now)
            return lookup
        rows = [*holders, *([()] if len(holders) < len(lookup.names) else [])]
        for name, nodes in zip(lookup.names, rows, strict=False):
            self._learn(name, tuple(nodes), now)
        counted = [index for index, needed in enumerate(lookup.needed) if needed or not any(lookup.needed)]
        self.missed += sum(index >= len(rows) or not rows[index] for index in counted)
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
        self, chain: Chain, wanted: Sequence[Part], tier: Tier, cost: Callable[[str], float | None], now: float
    ) -> tuple[str, int]:
        """With whose blocks, beside what is in the tier, a request could begin farthest along its chain, and after how
        many blocks; of several, with those of the fastest.

        Args:
            wanted: what is neither in the pool nor in the tier.
            cost: seconds for a block of a node; None: not known yet.
        """
        known = {part.name: self.of(part.name, now) for part in wanted}

        def end(node: str) -> int:
            return chain.reach(lambda name: name in tier or node in known.get(name, ()))

        ends = {node: end(node) for nodes in known.values() for node in nodes}
        if not ends:
            return "", chain.first
        node = max(ends, key=lambda each: (ends[each], -(cost(each) or 0.0)))
        return node, ends[node]

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
    """The blocks that others may have from this node, by the names of their parts: those in its prefix caches, and
    those in its host tier.

    Which of them have come and gone is found out when somebody asks, of those that were touched meanwhile.
    """

    def __init__(self, tier: Tier) -> None:
        self.blocks: set[bytes] = set()
        self._tier, self._touched = tier, set[bytes]()
        tier.changed = self.touch

    @classmethod
    def of(cls, kvs: Sequence[KVManager]) -> Published:
        """Of an engine whose pools share a tier, as those of replicas of attention do: what one has is the engine's."""
        sources = kvs[0].sources
        sources.published = sources.published or cls(sources.tier)
        return sources.published

    def touch(self, name: bytes) -> None:
        """A block may have come or gone."""
        self._touched.add(name)

    def reset(self) -> None:
        """Any block may have."""
        self._touched |= self.blocks

    def changes(self, caches: Sequence[PrefixCache]) -> tuple[list[bytes], list[bytes]]:
        """Those that have come since the last call, and those that are not there any more, known or not.

        Args:
            caches: the node's; replicas of attention have one each.
        """
        if not self._touched:
            return [], []
        touched, self._touched = self._touched, set()
        there = {each for each in touched if each in self._tier or any(cache.part(each) for cache in caches)}
        came, went = there - self.blocks, touched - there
        self.blocks -= went
        self.blocks |= came
        return list(came), list(went)
