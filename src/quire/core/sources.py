"""What is behind the host tier: a disk, engines that compute prompts, and other nodes that have blocks.

What is stored on the disk is written, and what comes from anywhere is read into slots of the tier, beside the steps, by
whoever carries out the `orders`. Requests wait for that as they do for a fetch, until a deadline; a slot that is late
stays in quarantine until it is said that nothing is written there any more.

There is one of it for a tier: replicas of attention (`core/lockstep.py`), which have pools of their own, share both.
What one of them has begun to read, others wait for, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Protocol

from quire.core.chain import Chain, Part
from quire.core.cost import Costs
from quire.core.exports import Exports
from quire.core.holders import Holders, Lookup, Published
from quire.core.orders import Ban, Forget, Lacks, Locate, Order, Prefill, Pull, Read, Write
from quire.core.prefix_leaders import Leader
from quire.core.request import Event, Request
from quire.core.step import Move
from quire.core.tier import Tier

LEAST_FETCH = 2
"""Fewer blocks are computed."""

HOST, DISK, PEER, REMOTE = "host", "disk", "peer", "remote"
"""Where blocks come from: the host tier; and into that from the disk, another engine that computes them, or another
node that has them.
"""

PATIENCE = {DISK: 20.0, PEER: 120.0, REMOTE: 5.0}
"""Seconds without progress after which requests wait no longer. For blocks that another node has, no longer than
`COMPUTED_TIMES` what computing them takes, and at least `LEAST_PATIENCE`: whoever was chosen for being fast and is not
may cost so much, and no more.
"""

COMPUTED_TIMES, LEAST_PATIENCE = 2.0, 0.05


class SlotFetch:
    """Blocks of one chain that are to be in the host tier; see `Fetch`.

    Attributes:
        source: `DISK`, `PEER` or `REMOTE`.
        hashes: of the chain, those that are in the tier already among them.
        filling: slots that are read into. wanted: names of the blocks that are to be there. sizes: of these, in blocks
            of the first group. pinned: slots of those that are there.
        brings: of so many blocks something is read.
        patience: seconds without progress that requests wait. deadline: from then on they do not.
        late: it has passed.
        request: that it was begun for.
        node: that has them. Only of `REMOTE`.
    """

    order, num_published = (-math.inf, 0, 0), 0
    request: Request | None = None
    node = ""

    def __init__(
        self,
        source: str,
        hashes: list[bytes],
        filling: list[int],
        wanted: list[bytes],
        sizes: list[float],
        pinned: list[int],
        brings: int,
        now: float,
    ) -> None:
        self.source, self.hashes, self.filling, self.wanted = source, hashes, filling, wanted
        self.sizes, self.pinned = sizes, pinned
        self.brings, self.num_filled = brings, 0
        self.begin, self.patience = now, PATIENCE[source]
        self.deadline = now + self.patience
        self.late = False

    @property
    def complete(self) -> bool:
        """All came."""
        return self.num_filled == len(self.filling)

    def came(self) -> int:
        """So many blocks came."""
        return self.brings * self.num_filled // len(self.filling)

    def wait_for(self, seconds: float) -> None:
        """Requests wait no longer for it than so."""
        self.patience = min(self.patience, seconds)
        self.deadline = self.begin + self.patience


class Follower(Protocol):
    """Whose requests may wait for what is read."""

    def arrived(self, event: Event) -> None:
        """Nobody need wait for this any more."""

    def read_over(self, fetch: SlotFetch, seconds: float, moving: float) -> None:
        """A read has ended, in so many seconds, of which it moved bytes in so many."""

    def abandon(self, leader: Leader) -> None:
        """It brings no further blocks."""


class Sources:
    """What is read into a host tier, and written to the disk from there.

    Args:
        tier: its index.
        disk: names of the blocks that the disk has; None: there is none.
        sizes: of each group's blocks, that of the first group's being 1.

    Attributes:
        orders: for the disk and other engines, in their order; whoever carries them out takes them from here.
        stored: blocks that came to the disk. read: blocks that came into the tier, by where from.
        volume: of all that was "stored" somewhere and "loaded" from there, (tier, event), in blocks of the first group.
        prefill_tokens: so many that are to be computed are computed by another engine; None: none is there.
        costs: of computing, and of loading from anywhere.
        exports: what other engines read from the tier; None: there is none.
        holders: what other nodes hold; None: nothing is read from others.
        published: what others may read here; None: nothing.
        followers: told of what has come.
    """

    def __init__(self, tier: Tier, disk: Container[bytes] | None = None, sizes: Sequence[float] = (1.0,)) -> None:
        self.tier, self.disk, self.sizes, self.costs = tier, disk, sizes, Costs()
        self.stored = 0
        self.read = {DISK: 0, PEER: 0, REMOTE: 0}
        self.volume: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.exports = Exports(self) if tier.num_slots else None
        self.holders: Holders | None = None
        self.published: Published | None = None
        self.prefill_tokens: int | None = None
        self.followers: list[Follower] = []
        self._next_read = 0
        self.reset()

    def reset(self) -> None:
        """Nothing is in the tier, or on its way. The disk does nothing any more of what it was asked for."""
        self.tier.reset()
        self.orders: list[Order] = []
        self.reads: dict[int, SlotFetch] = {}
        self.writes: set[int] = set()  # slots
        # By slot, until it was loaded once: the node whose block it was, or "" where another engine computed it.
        self._origins: dict[int, str] = {}
        for each in (self.exports, self.holders, self.published):
            if each is not None:
                each.reset()

    def touched(self, name: bytes) -> None:
        """A block has come into a prefix cache, or goes out of it."""
        if self.published is not None:
            self.published.touch(name)

    @property
    def waits(self) -> bool:
        """Others are to bring blocks, or to say who has them."""
        return bool(self.reads) or (self.holders is not None and bool(self.holders.lookups))

    def size(self, parts: Iterable[Part | Move]) -> float:
        """Of blocks of any groups, in such of the first."""
        return sum(self.sizes[part.group] for part in parts)

    def worth(self, source: str, parts: Sequence[Part], chain: Chain, end: int, first: int | None = None) -> bool:
        """Whether parts that a request needs to begin after `end` blocks are better loaded than computed.

        Args:
            first: it could begin there without them; None: where the chain says.
        """
        size, first = chain.cache.block_size, chain.first if first is None else first
        if not parts or end - chain.first < LEAST_FETCH:
            return False
        return self.costs.prefers_load(source, self.size(parts), (end - first) * size, first * size)

    def exported(self, slots: Sequence[int]) -> None:
        """Another engine was told of blocks."""
        self._count(PEER, "stored", sum(self.sizes[self.tier.group(slot)] for slot in slots))

    def _count(self, tier: str, event: str, size: float) -> None:
        self.volume[tier, event] += size

    # -- the host tier ---------------------------------------------------------------------------------------

    def replaced(self, slot: int) -> None:
        """Another block comes into a slot."""
        self._origins.pop(slot, None)

    def write(self, slot: int, name: bytes) -> None:
        """Have a block in its slot written to the disk, unless that has it, or is so far behind that it would take half
        the slots."""
        if self.disk is None or name in self.disk or slot in self.writes:
            return
        if len(self.writes) < self.tier.num_slots // 2:
            self.tier.pin(slot)
            self.writes.add(slot)
            self.orders.append(Write(slot, name))

    def bad(self, move: Move) -> None:
        """A block has other bytes than were saved: if it came from another node, nothing more is wanted from there."""
        self.tier.withdraw(move.slot)
        self.orders += [] if self.disk is None else [Forget(move.hash)]
        node = self._origins.pop(move.slot, None)
        if node and self.holders is not None:
            self.holders.bad += 1
            if self.holders.ban(node):
                self.orders.append(Ban(node, move.hash))

    def is_new(self, move: Move) -> bool:
        """Whether a block that was loaded came from another engine, so that it is not known what it is worth. If a node
        has it, that is no slot here before it is used again."""
        node = self._origins.pop(move.slot, None)
        if node:
            self.tier.cool(move.slot)
        return node is not None

    # -- disk, and other engines ---------------------------------------------------------------------------

    def written(self, slot: int, stored: bool) -> None:
        """A `Write` has ended."""
        self.writes.remove(slot)
        self.tier.unpin(slot)
        self.stored += stored
        self._count(DISK, "stored", stored * self.sizes[self.tier.group(slot)])

    def begin_read(self, chain: Chain, now: float) -> SlotFetch | None:
        """Have a chain's next blocks read, as far as disk and tier have them; None where none need be."""
        disk, tier = self.disk, self.tier
        if disk is None or any(fetch.late and fetch.source == DISK for fetch in self.reads.values()):
            return None  # a disk that is late is asked for nothing before it has answered
        end = chain.reach(lambda name: name in tier or name in disk)
        parts = chain.missing(end)
        missing = [part for part in parts if part.name not in tier]
        if not missing or not self.worth(DISK, missing, chain, end, chain.reach(tier.__contains__)):
            return None
        fetch, blocks = self._begin_read(DISK, chain, parts, now)
        if blocks:
            self.orders.append(Read(self._next_read, blocks))
        return fetch

    def begin_prefill(self, request: Request, chain: Chain, now: float) -> SlotFetch | None:
        """Have a request's blocks computed by another engine; None where it is not worth it."""
        size, asked = chain.cache.block_size, request.params.kv_transfer_params or {}
        if self.prefill_tokens is None or asked.get("do_remote_decode"):
            return None
        num_tokens = size * (chain.last - chain.reach(self.tier.__contains__))
        if num_tokens < (1 if asked.get("do_remote_prefill") else self.prefill_tokens):
            return None
        end = min(chain.last, chain.first + self.tier.room(0))
        fetch, blocks = self._begin_read(PEER, chain, chain.missing(end), now)
        if fetch is not None and blocks:
            tokens = request.tokens[: (chain.first + len(fetch.hashes)) * size + 1]
            priority, owner = request.params.priority, request.owner
            engine = asked.get("remote_engine_id", "")
            self.orders.append(Prefill(self._next_read, blocks, tokens, priority, owner, request.scope, engine))
        return fetch

    # -- other nodes -----------------------------------------------------------------------------------------

    def begin_pull(self, chain: Chain, now: float) -> SlotFetch | Lookup | None:
        """Have a chain's next blocks read from the node with which it reaches farthest, or ask who has them; None:
        neither."""
        tier, holders = self.tier, self.holders
        if holders is None or chain.last - chain.first < LEAST_FETCH:
            return None
        first = chain.reach(tier.__contains__)
        missing = [part for part in chain.missing(chain.last) if part.name not in tier]
        if not missing:
            return None
        if holders.nodes is not None and not any(
            self.worth(each, missing, chain, chain.last, first) for each in holders.nodes
        ):
            return None  # nobody is there, or even all of it would be computed sooner: it need not be known who has it
        wanted = [part for part in chain.parts(first) if part.name not in tier]
        if lookup := holders.ask([part.name for part in wanted], [chain.needs(part) for part in wanted], now):
            self.orders.append(Locate(lookup.number, lookup.names, lookup.needed))
            return lookup
        node, end = holders.best(chain, wanted, tier, lambda each: self.costs.load_seconds(each, 1), now)
        missing = [part for part in chain.missing(end) if part.name not in tier]
        if end <= first or not self.worth(node, missing, chain, end, first):
            return None
        fetch, blocks = self._begin_read(REMOTE, chain, chain.missing(end), now)
        if fetch is not None and blocks:
            size = chain.cache.block_size
            if compute := self.costs.compute_seconds((end - first) * size, first * size):
                fetch.wait_for(max(LEAST_PATIENCE, COMPUTED_TIMES * compute))
            fetch.node = node
            self.orders.append(Pull(self._next_read, blocks, node))
        return fetch

    def located(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> None:
        """The directory has said who holds blocks, or that it does not answer; see `Holders.answered`."""
        if self.holders is not None and (lookup := self.holders.answered(number, holders, now)) is not None:
            self._arrived(lookup.event)

    def _arrived(self, event: Event) -> None:
        for each in self.followers:
            each.arrived(event)

    def keep_nodes(self, nodes: frozenset[str]) -> None:
        """These other nodes are there, and no others."""
        self.costs.keep({HOST, DISK, PEER, *nodes})
        if self.holders is not None:
            self.holders.keep(nodes)

    def _pulled(self, fetch: SlotFetch, count: int, seconds: float, gone: bool) -> None:
        """A node has given so many of the blocks that it was asked for."""
        lacking = fetch.wanted[count:]
        if count:
            self.costs.moved(fetch.node, sum(fetch.sizes[:count]), seconds)
        if lacking and self.holders is not None:
            self.holders.lacks(fetch.node, lacking)
            self.holders.stale += len(lacking) if gone else 0
            self.orders += [Lacks(fetch.node, lacking)] if gone else []

    # -- reads -------------------------------------------------------------------------------------------------

    def _begin_read(
        self, source: str, chain: Chain, parts: Sequence[Part], now: float
    ) -> tuple[SlotFetch | None, tuple[tuple[int, bytes], ...]]:
        """Pin what is there, so that it does not give way, and take slots for what is not, as far as there are any.

        What another replica has begun to read is waited for: that fetch, and nothing to order.
        """
        blocks: list[tuple[int, bytes]] = []
        taken: list[Part] = []
        pinned = [slot for part in parts if (slot := self.tier.slot(part.name)) is not None]
        for slot in pinned:
            self.tier.pin(slot)
        reached, others = chain.first, None
        for part in parts:
            if self.tier.slot(part.name) is None:
                if (slot := self.tier.take(part.name, part.group)) is None:
                    others = self._reading(part.name)
                    break
                self.replaced(slot)
                blocks.append((slot, part.name))
                taken.append(part)
            reached = max(reached, part.place + 1)
        hashes, sizes = chain.all_hashes[chain.first : reached], [self.sizes[part.group] for part in taken]
        brings = len({part.place for part in taken})
        slots, names = [slot for slot, _ in blocks], [name for _, name in blocks]
        fetch = SlotFetch(source, hashes, slots, names, sizes, pinned, brings, now)
        if not blocks:
            self._release(fetch)
            return others, ()
        self._next_read += 1
        self.reads[self._next_read] = fetch
        return fetch, tuple(blocks)

    def _reading(self, name: bytes) -> SlotFetch | None:
        """What reads a block, if something does."""
        return next((each for each in self.reads.values() if not each.late and name in each.wanted), None)

    def progressed(self, number: int, now: float) -> None:
        """A read goes on: it is waited for as long again. One that is not known is ignored."""
        fetch = self.reads.get(number)
        if fetch is not None and not fetch.late:
            fetch.deadline = now + fetch.patience

    def read_ended(self, number: int, count: int, seconds: float, gone: bool = False, moving: float = 0.0) -> None:
        """A read has filled its first slots, so many; nothing is written into the others any more.

        One that is not known is ignored.

        Args:
            seconds: that it took. moving: in which bytes were moved.
            gone: whoever was to have the others says that it has them not.
        """
        fetch = self.reads.pop(number, None)
        if fetch is None:
            return
        if fetch.late:
            for slot in fetch.filling:
                self.tier.released(slot)
            return
        fetch.num_filled = count
        for index, slot in enumerate(fetch.filling):
            (self.tier.filled if index < count else self.tier.dropped)(slot)
        self.read[fetch.source] += count
        self._count(fetch.source, "loaded", sum(fetch.sizes[:count]))
        if fetch.source != DISK:
            self._origins |= dict.fromkeys(fetch.filling[:count], fetch.node)
        if fetch.source == REMOTE:
            self._pulled(fetch, count, seconds, gone)
        else:
            self.costs.moved(fetch.source, sum(fetch.sizes[: max(count, 1)]), seconds)
        self._release(fetch)
        for each in self.followers:
            each.read_over(fetch, seconds, moving)

    def expire(self, now: float) -> None:
        """Requests wait no longer for what is late. Slots that are still read into are in quarantine until that
        ends."""
        for fetch in [each for each in self.reads.values() if not each.late and each.deadline < now]:
            fetch.late = True
            for slot in fetch.filling:
                self.tier.quarantine(slot)
            if self.holders is not None and fetch.source == REMOTE:
                self.holders.lacks(fetch.node, fetch.wanted)
                self.costs.moved(fetch.node, sum(fetch.sizes), now - fetch.begin)  # at the least
            self._release(fetch)
            for each in self.followers:
                each.abandon(fetch)
        for lookup in [] if self.holders is None else self.holders.expired(now):
            self._arrived(lookup.event)

    def _release(self, fetch: SlotFetch) -> None:
        for slot in reversed(fetch.pinned):
            self.tier.unpin(slot)
