"""What is below the host tier: a disk, engines that compute prompts, and other nodes that have blocks.

Writing to the disk, and reading from any of these into slots of the tier, happens outside the steps, by whoever carries
out the `orders`. Requests wait for a read as they do for a fetch, until a deadline; a slot that is late stays in
quarantine until it is known that nothing is written there any more.

There is one `Sources` per tier: data-parallel replicas (`core/lockstep.py`), each of which has its own pool and
connector, share both. If one of them has begun to read a block, others wait for that read, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Protocol

from quire.core.external import Found
from quire.core.prefix import Part, Prefix
from quire.core.step import Move
from quire.kv.tiers.cost import Costs
from quire.kv.tiers.exports import Exports
from quire.kv.tiers.exports import Pool as ExportingPool
from quire.kv.tiers.fetch import SlotFetch, ended_for
from quire.kv.tiers.holders import Holders, Lookup
from quire.kv.tiers.orders import Ban, Forget, Lacks, Locate, Order, Prefill, Pull, Read, Write
from quire.kv.tiers.tier import DISK, HOST, PEER, REMOTE, Tier

LEAST_FETCH = 2
"""Least number of blocks worth fetching; fewer are computed."""

COMPUTED_TIMES, LEAST_PATIENCE = 2.0, 0.05
"""How long requests wait for blocks from another node: this many times the seconds to compute them, but at least so
long. That bounds the cost of choosing a node that turns out to be slow."""


class Pool(ExportingPool, Protocol):
    """The connector of a pool that shares the tier."""

    over: list[Found]


class Sources:
    """Reads into a host tier, and writes from there to the disk.

    Args:
        tier: the host tier's index.
        disk: names of the blocks on the disk; None if there is no disk tier.
        sizes: of each group's blocks, relative to the first group's.

    Attributes:
        orders: for the disk and other engines, in order; whoever carries them out takes them from here.
        moved: blocks "stored" in each tier and "loaded" from it since the start, and "bad" ones, whose bytes were not
            those stored; by (tier, event, group). For `PEER`, "stored" are those announced to other engines.
        prefill_tokens: with at least this many tokens to compute, a prompt is computed by another engine; None if there
            is none.
        costs: estimates of the time to compute, and to load from each source.
        exports: what other engines read from the tier; None if there is no tier.
        holders: what other nodes have; None if nothing is read from them.
        shared: other nodes know which blocks are here, and can read them.
        pools: the connectors that share them.
    """

    def __init__(self, tier: Tier, disk: Container[bytes] | None = None, sizes: Sequence[float] = (1.0,)) -> None:
        self.tier, self.disk, self.sizes, self.costs = tier, disk, sizes, Costs()
        self.moved: Counter[tuple[str, str, int]] = Counter()
        self.exports = Exports(tier, self.count) if tier.num_slots else None
        self.holders: Holders | None = None
        self.prefill_tokens: int | None = None
        self.shared = False
        self.pools: list[Pool] = []
        self._next_read = 0
        self.reset()

    def reset(self) -> None:
        """Forget the tier's contents and all transfers. The disk no longer carries out earlier orders."""
        self.tier.reset()
        self.orders: list[Order] = []
        self.reads: dict[int, SlotFetch] = {}
        self.writes: set[int] = set()  # slots
        # By slot, until its first load: the node that the block came from, or "" if a prefill engine computed it.
        self._origins: dict[int, str] = {}
        for each in (self.exports, self.holders):
            if each is not None:
                each.reset()

    @property
    def waits(self) -> bool:
        """Whether blocks, or answers about who has them, are expected from elsewhere."""
        return bool(self.reads) or (self.holders is not None and bool(self.holders.lookups))

    def size(self, parts: Iterable[Part | Move]) -> float:
        """The size of blocks of any groups, in blocks of the first one."""
        return sum(self.sizes[part.group] for part in parts)

    def worth(self, source: str, parts: Sequence[Part], prefix: Prefix, end: int, first: int | None = None) -> bool:
        """Whether it is better to load the parts that a request needs to begin after `end` blocks than to compute them.

        Args:
            first: where it could begin without them; None for the prefix's `first`.
        """
        size, first = prefix.cache.block_size, prefix.first if first is None else first
        if not parts or end - prefix.first < LEAST_FETCH:
            return False
        return self.costs.prefers_load(source, self.size(parts), (end - first) * size, first * size)

    def count(self, tier: str, event: str, slots: Iterable[int]) -> None:
        """Count the blocks in these slots of the host tier as `moved`."""
        self.moved.update((tier, event, self.tier.group(slot)) for slot in slots)

    def num_moved(self, tier: str, event: str) -> int:
        """Number of blocks `moved`, of all groups."""
        return sum(self.moved[tier, event, group] for group in range(len(self.sizes)))

    def size_moved(self, tier: str, event: str) -> float:
        """Their size, in blocks of the first group."""
        return sum(self.moved[tier, event, group] * size for group, size in enumerate(self.sizes))

    # -- the host tier ---------------------------------------------------------------------------------------

    def replaced(self, slot: int) -> None:
        """A slot gets another block."""
        self._origins.pop(slot, None)

    def write(self, slot: int, name: bytes) -> None:
        """Order a block to be written from its slot to the disk, unless the disk has it, or pending writes would pin
        half the slots."""
        if self.disk is None or name in self.disk or slot in self.writes:
            return
        if len(self.writes) < self.tier.num_slots // 2:
            self.tier.pin(slot)
            self.writes.add(slot)
            self.orders.append(Write(slot, name))

    def bad(self, move: Move) -> None:
        """A block's bytes differ from what was saved: if it came from another node, never read from there again."""
        self.tier.withdraw(move.slot)
        self.count(HOST, "bad", [move.slot])
        self.orders += [] if self.disk is None else [Forget(move.hash)]
        node = self._origins.pop(move.slot, None)
        if node and self.holders is not None:
            self.holders.bad += 1
            if self.holders.ban(node):
                self.orders.append(Ban(node, move.hash))

    def is_new(self, move: Move) -> bool:
        """Whether a loaded block came from another engine, so that it is not known whether it is worth a slot. If a
        node has it, it may be evicted first until it is used again."""
        node = self._origins.pop(move.slot, None)
        if node:
            self.tier.cool(move.slot)
        return node is not None

    # -- disk, and other engines ---------------------------------------------------------------------------

    def written(self, slot: int, stored: bool) -> None:
        """A `Write` has ended."""
        self.writes.remove(slot)
        self.tier.unpin(slot)
        self.count(DISK, "stored", [slot] if stored else ())

    def begin_read(self, prefix: Prefix, now: float) -> SlotFetch | None:
        """Order a prefix's next blocks to be read, as far as disk and tier have them; None if there are none."""
        disk, tier = self.disk, self.tier
        if disk is None or any(fetch.late and fetch.source == DISK for fetch in self.reads.values()):
            return None  # nothing more is asked of a disk that is late
        end = prefix.reach(lambda name: name in tier or name in disk)
        parts = prefix.missing(end)
        missing = [part for part in parts if part.name not in tier]
        if not missing or not self.worth(DISK, missing, prefix, end, prefix.reach(tier.__contains__)):
            return None
        fetch, blocks = self._begin_read(DISK, prefix, parts, now)
        if blocks:
            self.orders.append(Read(self._next_read, blocks))
        return fetch

    def begin_prefill(self, prefix: Prefix, now: float) -> SlotFetch | None:
        """Order a request's blocks to be computed by another engine; None if that is not worth it."""
        request = prefix.request
        size, asked = prefix.cache.block_size, request.params.kv_transfer_params or {}
        if self.prefill_tokens is None or asked.get("do_remote_decode"):
            return None
        num_tokens = size * (prefix.last - prefix.reach(self.tier.__contains__))
        if num_tokens < (1 if asked.get("do_remote_prefill") else self.prefill_tokens):
            return None
        end = min(prefix.last, prefix.first + self.tier.room(0))
        fetch, blocks = self._begin_read(PEER, prefix, prefix.missing(end), now)
        if fetch is not None and blocks:
            tokens = request.tokens[: (prefix.first + len(fetch.hashes)) * size + 1]
            priority, owner = request.params.priority, request.owner
            named = asked.get("remote_engine_id", ""), asked.get("remote_host", "")
            self.orders.append(Prefill(self._next_read, blocks, tokens, priority, owner, request.scope, *named))
        return fetch

    def asked_for(self, names: Collection[bytes]) -> bool:
        """Whether another engine is computing some of these blocks for this one."""
        asked = (fetch for fetch in self.reads.values() if fetch.source == PEER and not fetch.late)
        return any(not set(names).isdisjoint(fetch.wanted) for fetch in asked)

    # -- other nodes -----------------------------------------------------------------------------------------

    def begin_pull(self, prefix: Prefix, now: float) -> SlotFetch | Lookup | None:
        """Order a prefix's next blocks to be read from the node that has most of them, or ask who has them; None if
        neither is worth it."""
        tier, holders = self.tier, self.holders
        if holders is None or prefix.last - prefix.first < LEAST_FETCH:
            return None
        first = prefix.reach(tier.__contains__)
        missing = [part for part in prefix.missing(prefix.last) if part.name not in tier]
        if not missing:
            return None
        if holders.nodes is not None and not any(
            self.worth(each, missing, prefix, prefix.last, first) for each in holders.nodes
        ):
            return None  # no nodes, or computing all of it is faster than reading it
        wanted = [part for part in prefix.parts(first) if part.name not in tier]
        if lookup := holders.ask([part.name for part in wanted], [prefix.needs(part) for part in wanted], now):
            self.orders.append(Locate(lookup.number, lookup.names, lookup.needed))
            return lookup
        node, end = holders.best(prefix, wanted, tier, lambda each: self.costs.load_seconds(each, 1), now)
        missing = [part for part in prefix.missing(end) if part.name not in tier]
        if end <= first or not self.worth(node, missing, prefix, end, first):
            return None
        fetch, blocks = self._begin_read(REMOTE, prefix, prefix.missing(end), now)
        if fetch is not None and blocks:
            size = prefix.cache.block_size
            if compute := self.costs.compute_seconds((end - first) * size, first * size):
                fetch.wait_for(max(LEAST_PATIENCE, COMPUTED_TIMES * compute))
            fetch.node = node
            self.orders.append(Pull(self._next_read, blocks, node))
        return fetch

    def located(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> None:
        """The directory has answered who has some blocks, or does not answer; see `Holders.answered`."""
        if self.holders is not None and (lookup := self.holders.answered(number, holders, now)) is not None:
            self._over(lookup)

    def _over(self, found: Found) -> None:
        """What requests may wait for has ended."""
        for each in self.pools:
            each.over.append(found)

    def keep_nodes(self, nodes: frozenset[str]) -> None:
        """Take note of the other nodes that exist now."""
        self.costs.keep({HOST, DISK, PEER, *nodes})
        if self.holders is not None:
            self.holders.keep(nodes)

    def _pulled(self, fetch: SlotFetch, count: int, seconds: float, gone: bool) -> None:
        """A read from a node has ended with the first `count` of the blocks."""
        lacking = fetch.wanted[count:]
        if count:
            self.costs.moved(fetch.node, sum(fetch.sizes[:count]), seconds)
        if lacking and self.holders is not None:
            self.holders.lacks(fetch.node, lacking)
            self.holders.stale += len(lacking) if gone else 0
            self.orders += [Lacks(fetch.node, lacking)] if gone else []

    # -- reads -------------------------------------------------------------------------------------------------

    def _begin_read(
        self, source: str, prefix: Prefix, parts: Sequence[Part], now: float
    ) -> tuple[SlotFetch | None, tuple[tuple[int, bytes], ...]]:
        """Pin blocks that are in the tier, so that they are not evicted, and take slots for the others if possible.

        If another replica has begun to read one of them, returns that read, with nothing to order.
        """
        blocks: list[tuple[int, bytes]] = []
        taken: list[Part] = []
        pinned = [slot for part in parts if (slot := self.tier.slot(part.name)) is not None]
        for slot in pinned:
            self.tier.pin(slot)
        reached, others = prefix.first, None
        for part in parts:
            if self.tier.slot(part.name) is None:
                if (slot := self.tier.take(part.name, part.group)) is None:
                    others = self._reading(part.name)
                    break
                self.replaced(slot)
                blocks.append((slot, part.name))
                taken.append(part)
            reached = max(reached, part.place + 1)
        hashes, sizes = prefix.hashes[prefix.first : reached], [self.sizes[part.group] for part in taken]
        brings = len({part.place for part in taken})
        slots, names = [slot for slot, _ in blocks], [name for _, name in blocks]
        fetch = SlotFetch(hashes, source, slots, names, sizes, pinned, brings, prefix.cache.block_size, now)
        if not blocks:
            self._release(fetch)
            return others, ()
        self._next_read += 1
        self.reads[self._next_read] = fetch
        return fetch, tuple(blocks)

    def _reading(self, name: bytes) -> SlotFetch | None:
        """The read in progress of a block, if any."""
        return next((each for each in self.reads.values() if not each.late and name in each.wanted), None)

    def progressed(self, number: int, now: float) -> None:
        """A read has made progress: its deadline is extended. An unknown number is ignored."""
        fetch = self.reads.get(number)
        if fetch is not None and not fetch.late:
            fetch.deadline = now + fetch.patience

    def stalled(self, number: int) -> None:
        """A read has failed, but something may still be written into its slots: requests wait no longer. An unknown
        number is ignored.
        """
        fetch = self.reads.get(number)
        if fetch is not None:
            fetch.deadline = -math.inf

    def read_ended(
        self, number: int, count: int, seconds: float, gone: bool = False, moving: float = 0.0, engine: str = ""
    ) -> None:
        """A read has ended with its first `count` slots filled; nothing is written into the others any more.

        An unknown number is ignored.

        Args:
            seconds: its duration. moving: the part in which bytes were transferred.
            gone: the source has reported that it does not have the other blocks.
            engine: the engine that provided the blocks, for display.
        """
        fetch = self.reads.pop(number, None)
        if fetch is None:
            return
        if fetch.late:
            for slot in fetch.filling:
                self.tier.released(slot)
            return
        fetch.num_filled, fetch.engine = count, engine
        for index, slot in enumerate(fetch.filling):
            (self.tier.filled if index < count else self.tier.dropped)(slot)
        self.count(fetch.source, "loaded", fetch.filling[:count])
        if fetch.source != DISK:
            self._origins |= dict.fromkeys(fetch.filling[:count], fetch.node)
        if fetch.source == REMOTE:
            self._pulled(fetch, count, seconds, gone)
        else:
            self.costs.moved(fetch.source, sum(fetch.sizes[: max(count, 1)]), seconds)
        self._release(fetch)
        ended_for(fetch, seconds, moving)
        self._over(fetch)

    def expire(self, now: float) -> None:
        """End the wait for reads whose deadline has passed; their slots are in quarantine until they end."""
        for fetch in [each for each in self.reads.values() if not each.late and each.deadline < now]:
            fetch.late = True
            for slot in fetch.filling:
                self.tier.quarantine(slot)
            if self.holders is not None and fetch.source == REMOTE:
                self.holders.lacks(fetch.node, fetch.wanted)
                self.costs.moved(fetch.node, sum(fetch.sizes), now - fetch.begin)  # a lower bound
            self._release(fetch)
            self._over(fetch)
        for lookup in [] if self.holders is None else self.holders.expired(now):
            self._over(lookup)

    def _release(self, fetch: SlotFetch) -> None:
        for slot in reversed(fetch.pinned):
            self.tier.unpin(slot)
