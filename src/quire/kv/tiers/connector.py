"""Transfers of blocks between one pool and the host tier.

Blocks leave the pool when they are evicted, and come back in a *fetch*: consecutive blocks that belong to no request.
Requests that want them wait until the step that loaded them has committed, and then find them in the prefix cache. So
no request owns a transfer: ending a request affects no fetch, and a block that cannot be loaded is simply computed.

Below the host tier there may be a disk and other engines: see `sources.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from quire.core.external import Found, Loadable
from quire.core.prefix import Part, Prefix
from quire.core.prefix_cache import PrefixCache
from quire.core.step import Move, StepPlan, StepResult
from quire.kv.connector import Connector
from quire.kv.tiers.cost import Spare
from quire.kv.tiers.fetch import Fetch, SlotFetch, begun_for, ended_for
from quire.kv.tiers.holders import REPLICAS
from quire.kv.tiers.returns import Returns
from quire.kv.tiers.sources import LEAST_FETCH, Sources
from quire.kv.tiers.tier import HOST

LIKELY = 0.5
"""Where more blocks come back than this share, as those of requests that gave way, all are saved whatever it costs, and
so they are at first: what steps took is not known well yet."""

WORTH = 2
"""How often a block must have been computed or used before it is worth being written to the disk."""

FIRST_LOADS = 4
"""Blocks that the first such step with decoding requests may load; each further one may load twice as many as the last,
up to what the measured times allow, since memory that was not used lately is slower than the measurements say."""

MOST_FETCHES = 8
"""After this many incomplete fetches before its admission, a request's missing blocks are computed."""


class TierConnector(Connector):
    """Saves and loads of one pool.

    Args:
        sources: the host tier, and what is below it; other pools may share it.
        keeps_pace: whether decodes are not to wait long for prompts, while other engines compute the long ones.

    Attributes:
        tier: the host tier's index. sizes: see `Sources`.
        over: what has ended since the last step began.
    """

    def __init__(self, sources: Sources, keeps_pace: bool = True) -> None:
        self.sources, self.tier, self.sizes, self._keeps_pace = sources, sources.tier, sources.sizes, keeps_pace
        self._recent_loads = 0.0  # a decaying maximum over the last plans
        self._now = 0.0
        sources.pools.append(self)

    def reset(self, cache: PrefixCache) -> None:
        """See `External`."""
        super().reset(cache)
        self.sources.reset()
        self.over: list[Found] = []
        self._spare: Spare | None = None
        self._uses: dict[bytes, int] = {}  # of the blocks in the pool: how often each was computed or used
        self._new: set[bytes] = set()  # just loaded, from other engines: not known to be worth a slot here
        self._for_disk: set[bytes] = set()  # of what is being saved
        self._returns = Returns(sum(group.num_usable for group in cache.groups), self.tier.num_slots)

    # -- looking up --------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Found]:
        """See `External`."""
        self._now, self._spare = now, None
        self.sources.expire(now)
        over, self.over = self.over, []
        return over

    @property
    def waits(self) -> bool:
        """See `External`."""
        return bool(self.over) or self.sources.waits

    def lookup(self, prefix: Prefix, decoding: bool) -> Found | None:
        """See `External`: into the host tier, or from there into the pool. If it is not known who has the blocks, the
        directory is asked first."""
        sources, request, now = self.sources, prefix.request, self._now
        if request.num_fetches >= MOST_FETCHES:
            return None
        found = sources.begin_read(prefix, now) or sources.begin_pull(prefix, now) or sources.begin_prefill(prefix, now)
        if isinstance(found, SlotFetch):
            begun_for(found, request, now)
        return found or self._loadable(prefix, self.most_loads(decoding))

    def pace(self, least: int) -> Spare | None:
        """See `External`."""
        if self.sources.prefill_tokens is not None and self._keeps_pace:
            costs = self.sources.costs
            self._spare = Spare(costs, max(least, costs.tokens_beside_decodes()))
        return self._spare

    def _loadable(self, prefix: Prefix, most: float | None) -> Fetch | None:
        """What one fetch may load of a prefix, as far as the tier has it; None if that is not worth it.

        At most a quarter of the pool, and at most `most` blocks, are loaded at once; the rest is left to another fetch.
        """
        end, first, groups = prefix.reach(self.tier.__contains__), prefix.first, prefix.cache.groups
        wanted = prefix.missing(end)
        parts = self._at_once(wanted)
        if not self.sources.worth(HOST, parts, prefix, end if len(parts) == len(wanted) else _after(parts)):
            return None
        if most is not None and self.sources.size(parts) - most >= LEAST_FETCH:  # a smaller rest would be computed
            sizes = accumulate(self.sizes[part.group] for part in parts)
            parts = parts[: max(1, sum(size <= most for size in sizes))]
        reached, brings = end, end - first
        if len(parts) < len(wanted):
            reached = _after(parts)  # a request can begin there only if no other group's parts are needed
            brings = reached - first if len(groups) == 1 and groups[0].keeps_all else 0
        return Fetch(prefix.hashes[first:reached], prefix, parts, end, self.sources.size(parts), brings)

    def _at_once(self, parts: list[Part]) -> list[Part]:
        """The parts that one fetch may load: of a group that keeps all positions, at most a quarter of its pool."""
        taken: Counter[int] = Counter()
        for index, part in enumerate(parts):
            group = self.cache.groups[part.group]
            if group.keeps_all and taken[part.group] == group.num_usable // 4:
                return parts[:index]
            taken[part.group] += 1
        return parts

    def most_loads(self, decoding: bool) -> float | None:
        """How much the next plan may load for one more request, in blocks of the first group; None if unlimited.

        Args:
            decoding: whether requests decode in it, which should not wait long.
        """
        if not decoding:
            return None
        most: float = max(FIRST_LOADS, 2 * self._recent_loads)
        if (allowed := self.sources.costs.blocks_beside_decodes(HOST)) is not None:
            most = min(most, allowed)
        most -= sum(found.size for found in self._begun if isinstance(found, Fetch))
        if self._spare is not None:
            most = min(most, self._spare.blocks(HOST))
        return max(LEAST_FETCH, most)

    def load(self, found: Loadable, allocate: Callable[[int], int]) -> None:
        """See `External`."""
        super().load(found, allocate)
        if isinstance(found, Fetch):
            begun_for(found, found.prefix.request, self._now)
            if self._spare is not None:
                self._spare.load(found.size, HOST)

    def slot(self, part: Part) -> int:
        """See `Connector`."""
        slot = self.tier.kept[part.name]
        self.tier.pin(slot)
        return slot

    # -- what is kept ------------------------------------------------------------------------------------------

    def used(self, name: bytes, group: int, block: int) -> None:
        """See `External`. A block that is worth it is written to the disk even before it is evicted, so that it is
        there after a restart."""
        uses = self._uses[name] = self._uses.get(name, 0) + 1
        if uses == WORTH and self.sources.disk is not None:
            self._keep(name, group, block, uses)

    def published(self, name: bytes, group: int, block: int) -> None:
        """See `External`: the block's first use."""
        if name in self._new:
            self._new.remove(name)
        elif name not in self._uses:
            self._uses[name] = 1
            self._returns.came(name)

    def evicted(self, name: bytes, group: int, block: int) -> None:
        """See `External`."""
        if uses := self._uses.pop(name, 0):
            self._keep(name, group, block, uses)

    def _keep(self, name: bytes, group: int, block: int, uses: int) -> None:
        """Save a block in the host tier, unless it was passed by or others keep it. It goes on to the disk if it is
        worth that.

        One that leaves for the first time is saved only if it is likely enough to come back, see `Costs.worth_saving`:
        copying prompts that come once would be in vain.
        """
        holders = self.sources.holders
        if holders is not None and holders.count(name) >= (REPLICAS if uses >= WORTH else 1):
            return
        again = self._returns.left(name) or uses >= WORTH
        if not again and not self._worth_saving():
            return
        if self.keep(name, group, block):
            if again and self.sources.disk is not None:
                self._for_disk.add(name)
        elif again and (slot := self.tier.slot(name)) is not None:
            self.sources.write(slot, name)

    def _worth_saving(self) -> bool:
        """Whether blocks that leave the pool for the first time are saved; where others can read them, always."""
        odds = self._returns.odds
        return self.sources.shared or odds > LIKELY or self.sources.costs.worth_saving(odds, self.cache.block_size)

    def keep(self, name: bytes, group: int, block: int) -> bool:
        """Have the next plan save a block. False if it is in the tier or on its way there already, or if there is no
        slot for it."""
        slot = self.tier.take(name, group)
        if slot is not None:
            self.sources.replaced(slot)
            self.save(block, name, group, slot)
        return slot is not None

    def export(self, name: bytes) -> bool:
        """See `exports.Pool`."""
        found = self.cache.part(name)
        return found is not None and self.keep(name, found[1], found[0].blocks[found[1]])

    # -- what came of it ---------------------------------------------------------------------------------------

    def committed(self, plan: StepPlan, result: StepResult) -> list[Loadable]:
        """See `External`."""
        self.tier.committed()
        loaded = self.sources.size(plan.loads)
        self.sources.costs.observe(plan, result, loaded, self.sources.size(plan.saves))
        self._recent_loads = max(loaded, self._recent_loads * 3 // 4)  # overlapping steps load alternately
        self._new.clear()
        return super().committed(plan, result)

    def saved(self, move: Move) -> None:
        """See `Connector`."""
        self.tier.filled(move.slot)
        if move.hash in self._for_disk:
            self.sources.write(move.slot, move.hash)
            self._for_disk.remove(move.hash)
        self.sources.count(HOST, "stored", [move.slot])

    def loaded(self, found: Loadable, bad: Sequence[Move], seconds: float) -> None:
        """See `Connector`."""
        end = found.prefix.first + found.num_published
        came = [move for part, move in zip(found.parts, found.moves, strict=True) if part.place < end]
        for move in bad:
            self.sources.bad(move)
        self.sources.count(HOST, "loaded", (move.slot for move in came))
        self._unpin(found)
        self._new.update(move.hash for move in came if self.sources.is_new(move))
        if isinstance(found, Fetch):
            ended_for(found, seconds)

    def dropped(self, saves: Sequence[Move], found: Sequence[Loadable]) -> None:
        """See `Connector`."""
        for move in saves:
            self.tier.give_up(move.slot)
        for each in found:
            self._unpin(each)
        self._for_disk.clear()

    def _unpin(self, found: Loadable) -> None:
        for move in reversed(found.moves):  # the head is released last, so tails are evicted first
            self.tier.unpin(move.slot)

    def wrong(self) -> Iterator[str]:
        """See `External`. Pools that share a tier are checked together."""
        sources, tier = self.sources, self.tier
        pools = [pool for pool in sources.pools if isinstance(pool, TierConnector)]
        counts, reads = tier.counts, sources.reads.values()
        if sum(counts.values()) != tier.num_slots:
            yield f"{counts} are not {tier.num_slots} slots"
        waiting = [read for read in reads if not read.late]
        filling = [move.slot for each in pools for move in each.saves_under_way]
        filling += [slot for read in waiting for slot in read.filling]
        if not len(set(filling)) == len(filling) == counts["filling"]:
            yield f"slots {filling} are saved into, {counts}"
        read = Counter(move.slot for each in pools for found in each.under_way for move in found.moves)
        read.update([*sources.writes, *(sources.exports.pinned if sources.exports else ())])
        read.update(slot for each in waiting for slot in each.pinned)
        late = {slot for each in reads if each.late for slot in each.filling}
        if counts["quarantined"] < len(late):
            yield f"slots {late} may still be written, {counts}"
        if read != Counter(tier.pins):
            yield f"slots {dict(read)} are read, and pinned are {tier.pins}"
        kept = set(tier.kept.values())
        if set(tier.idle_slots) != kept - set(read):
            yield f"slots {tier.idle_slots} may give way of {kept}, read are {read}"


def _after(parts: Sequence[Part]) -> int:
    """The block after the last one of these parts."""
    return 1 + max((part.place for part in parts), default=-1)
