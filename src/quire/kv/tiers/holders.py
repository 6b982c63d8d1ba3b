"""Which blocks other nodes have, according to a directory.

The directory is asked outside the steps, and its answers are hints: they expire after a while, and if a node turns out
not to have a block, another one is asked, or the block is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from quire.core.external import Found
from quire.core.prefix import Part, Prefix
from quire.kv.tiers.tier import Tier

FRESH_SECONDS = 2.0
"""Answers younger than this are not asked for again."""

KEPT_SECONDS = 60.0
"""Answers older than this are not used, even if the directory is down."""

LOOKUP_SECONDS = 0.05
"""How long requests wait for an answer."""

MOST_KNOWN = 2**17
"""Most blocks for which answers are kept; the oldest are dropped first."""

REPLICAS = 2
"""A block that this many other nodes have is not saved in this node's tier, too."""


@dataclass(eq=False)
class Lookup(Found):
    """A question to the directory, for whose answer requests wait as they would for a fetch.

    Attributes:
        names: of the blocks' parts (`block_hash.part_name`). needed: for each, whether later ones are useless without.
        deadline: when requests no longer wait for the answer. late: it has passed.
    """

    number: int
    names: list[bytes]
    needed: list[bool]
    deadline: float
    late: bool = False


class Holders:
    """Which nodes have which blocks.

    Attributes:
        ready: whether the directory answers; set by whoever communicates with it.
        missed: number of blocks asked about that no node had; if some layers see all positions, those of layers with a
            window and of recurrent ones are not counted. stale: blocks that a node did not have although the directory
            said so. bad: blocks that came from a node with the wrong bytes.
    """

    def __init__(self) -> None:
        self.ready = False
        self.missed = self.stale = self.bad = 0
        self._next = 0
        self._known: OrderedDict[bytes, tuple[float, tuple[str, ...]]] = OrderedDict()  # time of the answer, and nodes
        self._banned: set[str] = set()
        self._nodes: frozenset[str] | None = None  # nodes that exist; None if not known yet
        self.reset()

    def reset(self) -> None:
        """Forget all open questions."""
        self.lookups: dict[int, Lookup] = {}

    @property
    def nodes(self) -> frozenset[str] | None:
        """The nodes that blocks can be read from; None if not known yet."""
        return None if self._nodes is None else self._nodes - self._banned

    def ask(self, names: list[bytes], needed: list[bool], now: float) -> Lookup | None:
        """Ask the directory about the blocks of a chain that have no recent answer; None if there is nothing to ask.

        Args:
            names, needed: see `Lookup`.
        """
        if not self.ready or any(each.late for each in self.lookups.values()):
            return None  # nothing more is asked of a directory that is late
        if now - self._known.get(names[0], (-KEPT_SECONDS, ()))[0] < FRESH_SECONDS:
            return None
        self._next += 1
        own = b"lookup %d" % self._next
        lookup = self.lookups[self._next] = Lookup([own], self._next, names, needed, now + LOOKUP_SECONDS)
        return lookup

    def answered(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> Lookup | None:
        """Take in an answer: the nodes that have each of the first blocks; no node has the one after these.

        Args:
            number: of the lookup; an unknown one is ignored.
            holders: None if the directory did not answer, in which case earlier answers still count.
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
        """The lookups whose deadline has just passed."""
        late = [each for each in self.lookups.values() if not each.late and each.deadline < now]
        for each in late:
            each.late = True
        return late

    def of(self, block_hash: bytes, now: float) -> tuple[str, ...]:
        """The nodes that have a block."""
        since, names = self._known.get(block_hash, (-KEPT_SECONDS, ()))
        return self._there(names) if now - since < KEPT_SECONDS else ()

    def count(self, block_hash: bytes) -> int:
        """How many other nodes have a block, by the last answer."""
        return len(self._there(self._known.get(block_hash, (0.0, ()))[1]))

    def best(
        self, prefix: Prefix, wanted: Sequence[Part], tier: Tier, cost: Callable[[str], float | None], now: float
    ) -> tuple[str, int]:
        """The node with whose blocks, and those in the tier, a request could begin farthest along its prompt, and after
        how many blocks; of several, the fastest.

        Args:
            wanted: the parts that are neither in the pool nor in the tier.
            cost: seconds per block from a node; None if not known yet.
        """
        known = {part.name: self.of(part.name, now) for part in wanted}

        def end(node: str) -> int:
            return prefix.reach(lambda name: name in tier or node in known.get(name, ()))

        ends = {node: end(node) for nodes in known.values() for node in nodes}
        if not ends:
            return "", prefix.first
        node = max(ends, key=lambda each: (ends[each], -(cost(each) or 0.0)))
        return node, ends[node]

    def lacks(self, node: str, hashes: Sequence[bytes]) -> None:
        """A node turned out not to have these blocks."""
        for each in hashes:
            if each in self._known:
                since, names = self._known[each]
                self._known[each] = since, tuple(name for name in names if name != node)

    def ban(self, node: str) -> bool:
        """Never read from a node again, as it gives wrong bytes. False if it was banned already."""
        new = node not in self._banned
        self._banned.add(node)
        return new

    def keep(self, nodes: frozenset[str]) -> None:
        """Take note of the nodes that exist; answers about others no longer count."""
        self._nodes = nodes
        self._banned &= nodes

    def _there(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes among these that blocks can be read from."""
        nodes = self._nodes
        return tuple(name for name in names if name not in self._banned and (nodes is None or name in nodes))

    def _learn(self, block_hash: bytes, names: tuple[str, ...], now: float) -> None:
        self._known[block_hash] = now, names
        self._known.move_to_end(block_hash)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
