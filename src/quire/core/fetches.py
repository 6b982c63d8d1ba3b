"""What moves between the pool, the host tier and a disk.

Blocks leave the pool when they are evicted, and come back as a *fetch*: a chain of blocks, not a request's. To the
requests that want them, a fetch is what a request that computes them is (`prefix_leaders`): they wait until the step
that loaded the blocks has committed, and then find them in the prefix cache. So no request owns a transfer: ending a
request touches no fetch, and a block that cannot be loaded is only one more to be computed.

Bytes move in the order of the plans (`StepPlan.saves`, `StepPlan.loads`), so no block and no slot is touched beside
the steps, and a slot is free again as soon as the step that was to fill it is given up.

Behind the host tier there may be a disk, and other engines, which compute prompts. What is stored on the disk is
written, and what comes from there or from another engine is read into slots, beside the steps, by whoever carries out
the `orders`. Requests wait for that as they do for a fetch, until a deadline; a slot that is late stays in quarantine
until it is said that nothing is written there any more.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from quire.core.block_hash import part_name
from quire.core.chain import Chain, Part
from quire.core.cost import Costs
from quire.core.holders import REPLICAS, Holders, Lookup, Published
from quire.core.orders import Ban, Forget, Lacks, Locate, Order, Prefill, Pull, Read, Write
from quire.core.prefix_cache import Node
from quire.core.request import Request
from quire.core.step import Move, StepPlan, StepResult
from quire.core.tier import Tier

WORTH = 2
"""Uses of a block by other requests after which it is worth a place in a tier."""

LEAST_FETCH = 2
"""Fewer blocks are computed."""

FIRST_LOADS = 4
"""Blocks that a step loads in which requests decode, where none before it has; the next ones may load twice as many as
the last one, up to what their times allow: memory that was not used lately is slower than what is known."""

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
        from_nodes: those that another node has: they need no place in a tier of this one.
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
        self.from_nodes: set[bytes] = set()

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


class SlotFetch:
    """Blocks of one chain that are to be in the host tier; see `Fetch`.

    Attributes:
        source: `DISK`, `PEER` or `REMOTE`.
        hashes: of the chain, those that are in the tier already among them.
        filling: slots that are read into. sizes: of these, in blocks of the first group. pinned: of those that are
            there.
        brings: of so many blocks something is read.
        patience: seconds without progress that requests wait. deadline: from then on they do not.
        late: it has passed.
        request: that it was begun for.
        node: of the node that has them; wanted: the blocks, one for each slot. Only of `REMOTE`.
    """

    order, num_published = (-math.inf, 0, 0), 0
    request: Request | None = None
    node = ""
    wanted: Sequence[bytes] = ()

    def __init__(
        self,
        source: str,
        hashes: list[bytes],
        filling: list[int],
        sizes: list[float],
        pinned: list[int],
        brings: int,
        now: float,
    ) -> None:
        self.source, self.hashes, self.filling, self.sizes, self.pinned = source, hashes, filling, sizes, pinned
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


class Fetches:
    """Saves and loads: those for the next plan, and those of plans in flight; and what is asked of the disk.

    Args:
        tier: the host tier's index.
        disk: names of the blocks that the disk has; None: there is none.
        sizes: of each group's blocks, that of the first group's being 1.

    Attributes:
        orders: for the disk and other engines, in their order; whoever carries them out takes them from here.
        saved, loaded: blocks that came to the tier, and from there, since the start.
        bad_loads: blocks whose bytes were found to be others than those that had been saved.
        stored: blocks that came to the disk.
        read: blocks that came into the tier, by where from.
        volume: of all that was "stored" in a tier and "loaded" from it, (tier, event), in blocks of the first group.
        prefill_tokens: so many that are to be computed are computed by another engine; None: none is there.
        holders: what other nodes hold; None: nothing is read from others.
        published: what others may read here; None: nothing.
    """

    def __init__(self, tier: Tier, disk: Container[bytes] | None = None, sizes: Sequence[float] = (1.0,)) -> None:
        self.tier, self.disk, self.sizes, self.costs = tier, disk, sizes, Costs()
        self.saved = self.loaded = self.bad_loads = self.stored = 0
        self.read = {DISK: 0, PEER: 0, REMOTE: 0}
        self.volume: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.holders: Holders | None = None
        self.published: Published | None = None
        self.prefill_tokens: int | None = None
        self._recent_loads = 0.0  # of the last plans
        self._next_read = 0
        self.reset()

    def reset(self) -> None:
        """Nothing is in the tier, or on its way. The disk does nothing any more of what it was asked for."""
        self.tier.reset()
        self.orders: list[Order] = []
        self.reads: dict[int, SlotFetch] = {}
        self._origins: dict[int, str] = {}  # by slot, the node whose block it was, until it was loaded once
        if self.holders is not None:
            self.holders.reset()
        if self.published is not None:
            self.published.reset()
        self.writes: set[int] = set()  # slots
        self._saves: list[Move] = []
        self._begun: list[Fetch] = []
        self._in_flight: deque[tuple[int, list[Move], list[Fetch]]] = deque()

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By tier, blocks that were stored there and loaded from there, and those that were bad."""
        if not self.tier.num_slots:
            return {}
        counts = {HOST: {"stored": self.saved, "loaded": self.loaded, "bad": self.bad_loads}}
        return counts if self.disk is None else counts | {DISK: {"stored": self.stored, "loaded": self.read[DISK]}}

    @property
    def slots(self) -> dict[str, int]:
        """Of the host tier, by their state."""
        return self.tier.counts if self.tier.num_slots else {}

    @property
    def has_moves(self) -> bool:
        """The next plan is to save or load something."""
        return bool(self._begun or self._saves)

    @property
    def waits(self) -> bool:
        """Others are to bring blocks, or to say who has them."""
        return bool(self.reads) or (self.holders is not None and bool(self.holders.lookups))

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
        if (allowed := self.costs.blocks_beside_decodes(HOST)) is not None:
            most = min(most, allowed)
        most -= sum(fetch.size for fetch in self._begun)
        if spare < math.inf and (each := self.costs.tokens_per_load(HOST)):
            most = min(most, int(spare / each))
        return max(LEAST_FETCH, most)

    def used(self, node: Node, group: int) -> None:
        """A request has taken a block from the prefix cache. What is worth it is on the disk before it is evicted, so
        that it is there after a restart."""
        node.uses[group] += 1
        if node.uses[group] == WORTH and self.disk is not None:
            self.evicted(node, group, node.blocks[group])

    def evicted(self, node: Node, group: int, block: int) -> None:
        """A block goes from the pool: it is saved if it is worth it."""
        replicas = 0 if self.holders is None else self.holders.count(node.hash)
        if node.uses[group] >= WORTH and node.hash and replicas < REPLICAS:
            self.save(node, group, block)
        self.touched(node.hash)

    def touched(self, block_hash: bytes) -> None:
        """A block has come into the prefix cache, or goes out of it."""
        if self.published is not None and block_hash:
            self.published.touch(block_hash)

    def save(self, node: Node, group: int, block: int) -> bool:
        """The next plan saves a block, before anything is written into it. False: it is in the tier already, or on its
        way there, or there is no slot for it."""
        name = part_name(node.hash, group)
        slot = self.tier.take(name, group)
        if slot is not None:
            self._origins.pop(slot, None)
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
        if self.tier.num_slots:
            self.costs.observe(plan, result, loaded := self.size(plan.loads))
            self._recent_loads = max(loaded, self._recent_loads * 3 // 4)  # steps that overlap take turns
        if not self._in_flight or self._in_flight[0][0] != plan.number:
            return []
        _, saves, fetches = self._in_flight.popleft()
        bad_loads = set(result.bad_loads)
        for move in saves:
            self.tier.filled(move.slot)
            self._write(move)
        self.saved += len(saves)
        self._count(HOST, "stored", self.size(saves))
        self.bad_loads += len(bad_loads)
        for move in plan.loads:
            if move.slot in bad_loads:
                self.tier.withdraw(move.slot)
                self.orders += [] if self.disk is None else [Forget(move.hash)]
                self._blame(move)
        for fetch in fetches:
            good = [move.slot not in bad_loads for move in fetch.moves]
            lost = (place for place, fine in zip(fetch.places, good, strict=True) if not fine)
            fetch.num_published = min(lost, default=len(fetch.hashes))
            came = [move for place, move in zip(fetch.places, fetch.moves, strict=True) if place < fetch.num_published]
            self.loaded += len(came)
            self._count(HOST, "loaded", self.size(came))
            self._unpin(fetch)
            self._cool(fetch)
        return fetches

    def given_up(self) -> None:
        """No plan in flight will commit. Evicted blocks that no plan has saved yet still lie where they did."""
        for _, saves, fetches in self._in_flight:
            for move in saves:
                self.tier.dropped(move.slot)
            for fetch in fetches:
                self._unpin(fetch)
        self._in_flight.clear()

    def exported(self, slots: Sequence[int]) -> None:
        """Another engine was told of blocks."""
        self._count(PEER, "stored", sum(self.sizes[self.tier.group(slot)] for slot in slots))

    def _count(self, tier: str, event: str, size: float) -> None:
        self.volume[tier, event] += size

    # -- disk, and other engines ---------------------------------------------------------------------------

    def _write(self, move: Move) -> None:
        """Have a saved block written, unless the disk has it, or is so far behind that it would take half the slots."""
        if self.disk is not None and move.hash not in self.disk and len(self.writes) < self.tier.num_slots // 2:
            self.tier.pin(move.slot)
            self.writes.add(move.slot)
            self.orders.append(Write(move.slot, move.hash))

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
        if fetch is not None:
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
        if fetch is not None:
            tokens = request.tokens[: (chain.first + len(fetch.hashes)) * size + 1]
            priority, owner = request.params.priority, request.owner
            engine = asked.get("remote_engine_id", "")
            self.orders.append(Prefill(self._next_read, blocks, tokens, priority, owner, request.scope, engine))
        return fetch

    # -- other nodes -----------------------------------------------------------------------------------------

    def begin_pull(self, chain: Chain, now: float) -> SlotFetch | Lookup | None:
        """Have a chain's next blocks read from the node that has most of them, or ask who has them; None: neither. Only
        for models with one group."""
        hashes, first, size = chain.hashes, chain.first, chain.cache.block_size
        if self.holders is None or len(hashes) < LEAST_FETCH:
            return None
        start = next((i for i, each in enumerate(hashes) if each not in self.tier), len(hashes))
        if start == len(hashes):
            return None
        rest, first = hashes[start:], first + start
        nodes, tokens = self.holders.nodes, (len(rest) * size, first * size)
        if nodes is not None and not any(self.costs.prefers_load(each, len(rest), *tokens) for each in nodes):
            return None  # nobody is there, or even all of it would be computed sooner: it need not be known who has it
        if lookup := self.holders.ask(rest, self.tier, now):
            self.orders.append(Locate(lookup.number, lookup.hashes))
            return lookup
        node, count = self.holders.best(rest, self.tier, lambda each: self.costs.load_seconds(each, 1), now)
        missing = sum(each not in self.tier for each in rest[:count])
        if not missing or start + count < LEAST_FETCH:
            return None
        if not self.costs.prefers_load(node, missing, missing * size, first * size):
            return None
        fetch, blocks = self._begin_read(REMOTE, chain, chain.missing(first + count), now)
        if fetch is not None:
            if compute := self.costs.compute_seconds(missing * size, first * size):
                fetch.wait_for(max(LEAST_PATIENCE, COMPUTED_TIMES * compute))
            fetch.node, fetch.wanted = node, [name for _, name in blocks]
            self.orders.append(Pull(self._next_read, blocks, node))
        return fetch

    def located(self, number: int, holders: Sequence[Collection[str]] | None, now: float) -> Lookup | None:
        """See `Holders.answered`."""
        return None if self.holders is None else self.holders.answered(number, holders, now)

    def unanswered(self, now: float) -> list[Lookup]:
        """See `Holders.expired`."""
        return [] if self.holders is None else self.holders.expired(now)

    def keep_nodes(self, nodes: frozenset[str]) -> None:
        """These other nodes are there, and no others."""
        self.costs.keep({HOST, DISK, PEER, *nodes})
        if self.holders is not None:
            self.holders.keep(nodes)

    def _pulled(self, fetch: SlotFetch, count: int, seconds: float, gone: bool) -> None:
        """A node has given so many of the blocks that it was asked for."""
        self._origins |= dict.fromkeys(fetch.filling[:count], fetch.node)
        lacking = list(fetch.wanted[count:])
        if count:
            self.costs.moved(fetch.node, count, seconds)
        if lacking and self.holders is not None:
            self.holders.lacks(fetch.node, lacking)
            self.holders.stale += len(lacking) if gone else 0
            self.orders += [Lacks(fetch.node, lacking)] if gone else []

    def _blame(self, move: Move) -> None:
        """A block is bad: if it came from another node, nothing more is wanted from there."""
        node = self._origins.pop(move.slot, None)
        if node is not None and self.holders is not None:
            self.holders.bad += 1
            if self.holders.ban(node):
                self.orders.append(Ban(node, move.hash))

    def _cool(self, fetch: Fetch) -> None:
        """What another node has, and was loaded from a slot once, is worth no slot here before it is used again."""
        for move in fetch.moves[: fetch.num_published]:
            if self._origins.pop(move.slot, None) is not None:
                fetch.from_nodes.add(move.hash)
                self.tier.cool(move.slot)

    def _begin_read(
        self, source: str, chain: Chain, parts: Sequence[Part], now: float
    ) -> tuple[SlotFetch | None, tuple[tuple[int, bytes], ...]]:
        """Pin what is there, so that it does not give way, and take slots for what is not, as far as there are any."""
        blocks: list[tuple[int, bytes]] = []
        taken: list[Part] = []
        pinned = [slot for part in parts if (slot := self.tier.slot(part.name)) is not None]
        for slot in pinned:
            self.tier.pin(slot)
        reached = chain.first
        for part in parts:
            if self.tier.slot(part.name) is None:
                if (slot := self.tier.take(part.name, part.group)) is None:
                    break
                self._origins.pop(slot, None)
                blocks.append((slot, part.name))
                taken.append(part)
            reached = max(reached, part.place + 1)
        hashes, sizes = chain.all_hashes[chain.first : reached], [self.sizes[part.group] for part in taken]
        brings = len({part.place for part in taken})
        fetch = SlotFetch(source, hashes, [slot for slot, _ in blocks], sizes, pinned, brings, now)
        if not blocks:
            self._release(fetch)
            return None, ()
        self._next_read += 1
        self.reads[self._next_read] = fetch
        return fetch, tuple(blocks)

    def progressed(self, number: int, now: float) -> None:
        """A read goes on: it is waited for as long again. One that is not known is ignored."""
        fetch = self.reads.get(number)
        if fetch is not None and not fetch.late:
            fetch.deadline = now + fetch.patience

    def read_ended(self, number: int, count: int, seconds: float, gone: bool = False) -> SlotFetch | None:
        """A read has filled its first slots, so many; nothing is written into the others any more.

        One that is not known is ignored.

        Args:
            gone: whoever was to have the others says that it has them not.
        """
        fetch = self.reads.pop(number, None)
        if fetch is None:
            return None
        if fetch.late:
            for slot in fetch.filling:
                self.tier.released(slot)
            return None
        fetch.num_filled = count
        for index, slot in enumerate(fetch.filling):
            (self.tier.filled if index < count else self.tier.dropped)(slot)
        self.read[fetch.source] += count
        self._count(fetch.source, "loaded", sum(fetch.sizes[:count]))
        if fetch.source == REMOTE:
            self._pulled(fetch, count, seconds, gone)
        else:
            self.costs.moved(fetch.source, sum(fetch.sizes[: max(count, 1)]), seconds)
        self._release(fetch)
        return fetch

    def expired(self, now: float) -> list[SlotFetch]:
        """Reads whose deadline has passed: their slots are in quarantine until they end."""
        late = [fetch for fetch in self.reads.values() if not fetch.late and fetch.deadline < now]
        for fetch in late:
            fetch.late = True
            for slot in fetch.filling:
                self.tier.quarantine(slot)
            if self.holders is not None and fetch.source == REMOTE:
                self.holders.lacks(fetch.node, fetch.wanted)
                self.costs.moved(fetch.node, len(fetch.filling), now - fetch.begin)  # at the least
            self._release(fetch)
        return late

    def _release(self, fetch: SlotFetch) -> None:
        for slot in reversed(fetch.pinned):
            self.tier.unpin(slot)

    def _unpin(self, fetch: Fetch) -> None:
        for move in reversed(fetch.moves):  # the head was used last: tails give way first
            self.tier.unpin(move.slot)
