"""Block tables: which blocks hold a request's KV, how they are shared, and when they are freed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.core.block_hash import BlockHasher, common_blocks, part_name
from quire.core.block_pool import NULL_BLOCK
from quire.core.external import External, Found, Loadable
from quire.core.kv_group import KVGroup
from quire.core.prefix import Prefix
from quire.core.prefix_cache import CACHES, Match
from quire.core.prefix_node import Node
from quire.core.request import Request
from quire.core.step import Move, StepPlan, StepResult
from quire.errors import RequestTooLargeError


class Handle(NamedTuple):
    """A holder of blocks other than a request, until it is released: a step in flight, or a reader outside the engine.

    Attributes:
        kind: `STEP`, or a name chosen by the user of the handle.
        key: identifies the handle among those of its kind.
    """

    kind: str
    key: Hashable


STEP = "step"


class Listener(Protocol):
    """Follows which full blocks are in the prefix cache, by their names (`block_hash.part_name`)."""

    def touch(self, name: bytes) -> None:
        """A block has come or gone."""

    def reset(self) -> None:
        """All that there were may have gone."""


class KVManager:
    """Block tables of the requests, over the pools of all KV groups and one prefix cache.

    Blocks that a step in flight may still write are kept until that step has committed. A group is named by its number.

    Args:
        groups: layers that keep the same positions, at least one group.
        block_size: tokens a block, in all groups.
        prefix_cache: "radix", "hash" or "off".
        hasher: gives blocks their identity.
        needs_next_token: a token's KV depends on the next token too (as in a drafting head), so the last token of a
            cached prefix is computed again.
        external: the connector to KV that is elsewhere; None if there is none.

    Attributes:
        external: see above.
        num_held: number of blocks held by handles, by the kind of handle.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        prefix_cache: str,
        hasher: BlockHasher,
        needs_next_token: bool = False,
        external: External | None = None,
    ) -> None:
        self.needs_next_token = needs_next_token
        self.block_size = block_size
        self.hasher = hasher
        self._prefix_cache = prefix_cache
        self.groups = groups
        self.external = external
        self._listener: Listener | None = None
        self._windowed = [number for number, group in enumerate(groups) if not group.keeps_all]
        self._whole = [number for number, group in enumerate(groups) if group.keeps_all]
        self._recurrent = [number for number, group in enumerate(groups) if group.retention.states is not None]
        self.reset()

    def reset(self) -> None:
        """Make every block free and the cache empty, whatever the bookkeeping said before."""
        for group in self.groups:
            group.reset()
        evicted = None if self.external is None else self.external.evicted
        self.cache = CACHES[self._prefix_cache](self.groups, self.block_size, evicted)
        if self.external is not None:
            self.external.reset(self.cache)
        if self._listener is not None:
            self._listener.reset()
            self.cache.changed = self._listener.touch
        self._loads: list[Loadable] = []  # in the next plan or in plans in flight
        self.num_held: Counter[str] = Counter()
        self._held: dict[Handle, list[tuple[int, int, int]]] = {}  # (group, block, generation)
        self._latest: tuple[str, array[int], list[bytes]] = ("", array("q"), [])  # last hashed: scope, keys, hashes

    def listen(self, listener: Listener) -> None:
        """Have a listener told from now on what comes into the prefix cache and what goes."""
        self._listener, self.cache.changed = listener, listener.touch

    @property
    def num_usable(self) -> int:
        """Number of blocks in all pools, without the null blocks."""
        return sum(group.num_usable for group in self.groups)

    @property
    def num_available(self) -> int:
        """Number of blocks in all pools that can be allocated now: free ones, and cached ones without a holder."""
        return sum(group.num_available for group in self.groups)

    @property
    def use(self) -> float:
        """The share of blocks that have a holder, in the group where it is largest; at 1, requests are preempted."""
        return max(1 - group.num_available / group.num_usable for group in self.groups)

    def lacks(self, needed: Sequence[int], more: Sequence[int] = ()) -> bool:
        """Whether any group has fewer blocks available than needed, and whether than needed with `more` per group."""
        more = more or [0] * len(self.groups)
        counts = zip(needed, self.groups, more, strict=True)
        return any(blocks > group.num_available + extra for blocks, group, extra in counts)

    @property
    def num_deferred(self) -> int:
        """Number of blocks that will be freed when the steps in flight commit."""
        return self.num_held[STEP]

    @property
    def held(self) -> Iterable[tuple[int, int]]:
        """(group, block) held by handles, once per handle; for invariant checks."""
        return ((number, block) for held in self._held.values() for number, block, _ in held)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> list[int]:
        """Most blocks of each group that a request holds at once: see `Retention.peak_blocks`."""
        return [group.retention.peak_blocks(num_tokens, max_chunk, self.block_size) for group in self.groups]

    def check_fits(self, request: Request, max_chunk: int, max_model_len: int) -> None:
        """Check that a request could run alone. (Another engine may ask for a longer context than this one has.)

        Raises:
            RequestTooLargeError: it is longer than `max_model_len`, or needs more blocks than there are.
        """
        what = f"the prompt's {request.num_prompt} tokens and max_tokens={request.max_tokens}"
        if request.num_positions > max_model_len:
            raise RequestTooLargeError(f"{what} do not fit into a context of {max_model_len} tokens (max_model_len)")
        for blocks, group in zip(self.peak_blocks(request.num_positions, max_chunk), self.groups, strict=True):
            if blocks > group.num_usable:
                raise RequestTooLargeError(
                    f"{what} need {blocks} KV blocks of {self.block_size} tokens, but the pool has {group.num_usable}; "
                    "lower max_tokens, or give the engine more with kv_cache_memory or num_kv_blocks"
                )

    # -- prefix cache --------------------------------------------------------------------------------------

    def match(self, request: Request, whole: bool = False) -> Match:
        """Find the longest cached prefix of a waiting request; hashes its prompt if that has not been done yet.

        A request that needs every row of its prompt never matches, since cached rows have no hidden states.

        Args:
            whole: match whole blocks only, so that none has to be copied.
        """
        if not self.cache.caching:
            return Match()
        self._hash_prompt(request)
        if request.computes_all:
            return Match()
        limit = len(request.tokens) - 1
        back = 0 if not self.needs_next_token else self.block_size if whole else 1
        match = self.cache.match(request.hashes, limit, back)
        if not whole:
            start = match.num_blocks * self.block_size
            rest = request.key_bytes(start, min(start + self.block_size, limit))
            self.cache.match_partial(match, request.scope, rest)
        if self.needs_next_token:
            self._drop_last_token(match, whole)
        return match

    def cached_tokens(self, request: Request) -> int:
        """Number of cached tokens of a waiting request's prompt."""
        match = self.match(request)
        return match.num_blocks * self.block_size + match.partial_tokens

    def _drop_last_token(self, match: Match, whole: bool) -> None:
        if match.partial is None and match.num_blocks and match.tip is not None:
            match.partial, match.partial_tokens = match.tip, self.block_size
            match.tip, match.num_blocks = match.tip.parent, match.num_blocks - 1
        match.partial_tokens -= 1
        if whole or match.partial_tokens <= 0:
            match.partial, match.partial_tokens = None, 0

    def _tables(self, match: Match) -> list[list[int]]:
        """A match's blocks by group, from position 0 on; the null block where the next token sees nothing."""
        nodes = list(match.nodes())[::-1]
        seen = self.first_seen(match)
        return [
            [NULL_BLOCK] * first + [node.blocks[number] for node in nodes[first:]] for number, first in enumerate(seen)
        ]

    def first_seen(self, match: Match) -> list[int]:
        """By group, how many of a match's blocks the token after it does not see."""
        end = match.num_blocks * self.block_size + match.partial_tokens
        return [min(group.retention.first_seen(end) // self.block_size, match.num_blocks) for group in self.groups]

    def blocks_to_start(
        self, request: Request, match: Match, num_tokens: int, max_chunk: int, num_running: int
    ) -> list[int]:
        """Blocks of each group, besides the match, that must be available before a request starts with `num_tokens`.

        A preempted request is readmitted only when all its tokens fit and one free block remains for each running
        request; otherwise it would soon be preempted again.
        """
        promised, peaks = self.promised, self.peak_blocks(len(request.tokens), max_chunk)
        missing = self.blocks_for(num_tokens) - match.num_blocks
        partial = match.partial is not None  # it is copied to a new block, in which the step may not end
        kept = [group.retention.states for group in self.groups]
        most = [
            states.tail(self.block_size) + partial if states else peak for states, peak in zip(kept, peaks, strict=True)
        ]
        counts = [min(missing, own) + others for own, others in zip(most, promised, strict=True)]
        if not request.stats.preemptions:
            return counts
        return [
            max(needed, peak - match.num_blocks + first + others) + num_running
            for needed, peak, first, others in zip(counts, peaks, self.first_seen(match), promised, strict=True)
        ]

    def lock(self, match: Match) -> None:
        """Hold all blocks of a match, so that nothing evicts them."""
        for group, blocks in zip(self.groups, self._blocks(match), strict=True):
            group.retain(*blocks)

    def unlock(self, match: Match) -> None:
        """Undo `lock`."""
        for group, blocks in zip(self.groups, self._blocks(match), strict=True):
            group.release(*blocks)

    def _blocks(self, match: Match) -> list[list[int]]:
        """A match's blocks by group, last ones first, in the order in which they are released."""
        partial = [[]] * len(self.groups) if match.partial is None else [[block] for block in match.partial.blocks]
        tables = zip(partial, self._tables(match), strict=True)
        return [last + [block for block in reversed(table) if block != NULL_BLOCK] for last, table in tables]

    def admit(self, request: Request, match: Match) -> None:
        """Start a request's tables with a match that has been locked for it."""
        request.tables, request.num_passed = self._tables(match), self.first_seen(match)
        for number in self._recurrent:
            states, size = self.groups[number].retention.states, self.block_size
            if states is not None:
                request.marks = states.marks(len(request.tokens), match.num_found, size)
        request.tip = match.tip if match.num_blocks else None
        request.num_published = match.num_blocks
        request.num_computed = match.num_blocks * self.block_size
        if match.partial is not None:
            for number, (table, source) in enumerate(zip(request.tables, match.partial.blocks, strict=True)):
                table.append(self._take(number))
                request.copies.append((number, source, table[-1], match.partial_tokens))
            request.num_computed += match.partial_tokens
        request.num_committed = request.num_computed
        request.num_sent = request.num_fetches = request.num_waits = 0
        if self.external is not None:
            for place, node in zip(range(match.num_blocks - 1, -1, -1), match.nodes(), strict=True):
                for number, passed in enumerate(request.num_passed):
                    if place >= passed:
                        self.external.used(part_name(node.hash, number), number, node.blocks[number])

    def copied(self, request: Request, step: int) -> None:
        """The request's copies are part of step `step`; their sources stay locked until it has committed."""
        for number, source, _, _ in request.copies:
            self._hand_over(number, source, Handle(STEP, step))
        request.copies = []

    def publish(self, request: Request) -> list[bytes]:
        """Publish the blocks that committed steps have filled in the prefix cache; returns their hashes."""
        full = request.num_committed // self.block_size
        if not self.cache.caching or full <= request.num_published:
            return []
        first = request.num_published
        self._extend_hashes(request, full)
        request.num_published = full
        tip = request.tip if first else self.cache.root(request.scope, self.hasher.root(request.scope))
        for index, key in enumerate(request.block_keys(first, full, self.block_size), start=first):
            if tip is None or not tip.attached:
                request.tip = None  # its parent was evicted after a window had passed it: the rest stays private
                break
            blocks = [table[index] for table in request.tables]
            kept = [block if self._keeps(request, number, index) else NULL_BLOCK for number, block in enumerate(blocks)]
            tip = request.tip = self.cache.insert(tip, key, kept, request.hashes[index])
            if tip.blocks != blocks:
                self._adopt(request, index, tip.blocks)
            if self.external is not None:
                self._tell_published(self.external, tip, self._whole)
        return request.hashes[first:full]

    def _adopt(self, request: Request, index: int, blocks: Sequence[int]) -> None:
        """Replace the request's blocks, one per group, by cached ones with the same contents."""
        for number, (table, block) in enumerate(zip(request.tables, blocks, strict=True)):
            if NULL_BLOCK not in (table[index], block) and table[index] != block:
                self.groups[number].retain(block)
                self._give_back(request, number, [table[index]])
                table[index] = block
                request.num_sent = min(request.num_sent, index)

    def _keeps(self, request: Request, number: int, index: int) -> bool:
        """Whether a group's block of a request is kept for others; a state only at a mark."""
        states = self.groups[number].retention.states
        if states is None or index in request.marks:
            return True
        return index * self.block_size < request.num_prompt and (index + 1) % states.interval == 0

    def _hash_prompt(self, request: Request) -> None:
        """Hash a request's full blocks, except those with which the last hashed prompt begins, too."""
        count = len(request.tokens) // self.block_size
        if len(request.hashes) < count:
            scope, keys, hashes = self._latest
            if scope == request.scope and not request.hashes:
                most = min(count, len(hashes))
                request.hashes = hashes[: common_blocks(keys, request.keys, self.block_size, most)]
            self._extend_hashes(request, count)
            self._latest = (request.scope, request.keys[:], request.hashes[:])

    def _extend_hashes(self, request: Request, count: int) -> None:
        have = len(request.hashes)
        if have < count:
            parent = request.hashes[-1] if have else self.hasher.root(request.scope)
            request.hashes += self.hasher.chain(parent, request.block_keys(have, count, self.block_size))

    # -- elsewhere -----------------------------------------------------------------------------------------

    def find(self, request: Request, first: int, last: int, decoding: bool) -> Found | None:
        """What a connector has of a waiting request's blocks `first` to `last - 1`, if that is worth it."""
        if self.external is None or first >= min(last, len(request.hashes)):
            return None
        return self.external.lookup(Prefix(self.cache, request, first, last, int(self.needs_next_token)), decoding)

    def load(self, found: Loadable, needed: Sequence[int], step: int) -> bool:
        """Have step `step` load what was found; False if the pool has no room for all that its request needs to begin,
        since the loaded blocks would soon be evicted.

        Args:
            needed: blocks of each group that it needs to begin, including those that are loaded, and those promised to
                others.
        """
        prefix, handle, here = found.prefix, Handle(STEP, step), list(found.prefix.found(found.end))
        for _, number, block in here:
            self.groups[number].retain(block)
        there = Counter(number for place, number, _ in here if place >= prefix.first)
        lacking = [own - there[number] for number, own in enumerate(needed)]
        if self.external is None or self.lacks(lacking):
            for _, number, block in here:
                self.groups[number].release(block)
            return False
        self.external.load(found, self._take)
        for number, block in [*((m.group, m.block) for m in reversed(found.moves)), *(each[1:] for each in here)]:
            self._hand_over(number, block, handle)
        moved, others = Counter(part.group for part in found.parts), self.promised
        found.promised = [max(0, own - moved[number] - others[number]) for number, own in enumerate(lacking)]
        self._loads.append(found)
        return True

    @property
    def promised(self) -> list[int]:
        """Blocks of each group that must stay available for requests whose blocks are being loaded."""
        return [sum(counts) for counts in zip([0] * len(self.groups), *(f.promised for f in self._loads), strict=True)]

    @property
    def has_moves(self) -> bool:
        """Whether the next plan has saves or loads."""
        return self.external is not None and self.external.has_moves

    def planned(self, number: int) -> tuple[list[Move], list[Move]]:
        """Take the saves and loads for plan `number`."""
        return ([], []) if self.external is None else self.external.planned(number)

    def loaded(self, plan: StepPlan, result: StepResult) -> list[Loadable]:
        """A plan has committed: publish what it loaded in the prefix cache. Returns what was loaded."""
        if self.external is None:
            return []
        loads = self.external.committed(plan, result)
        for found in loads:
            self._loads.remove(found)
            self._insert(found, self.external)
        return loads

    def _insert(self, found: Loadable, external: External) -> None:
        """Publish blocks that were loaded, up to the last one with a part that was."""
        prefix, first = found.prefix, found.prefix.first
        moves: dict[int, list[Move]] = {}
        for part, move in zip(found.parts, found.moves, strict=True):
            if part.place < first + found.num_published:
                moves.setdefault(part.place, []).append(move)
        end, scope = max(moves, default=first - 1) + 1, prefix.request.scope
        tip = self.cache.find(prefix.hashes[first - 1]) if first else None
        keys = prefix.request.block_keys(first, end, self.block_size)
        for place, key in enumerate(keys, start=first):
            tip = tip or self.cache.root(scope, self.hasher.root(scope))
            blocks = {move.group: move.block for move in moves.get(place, ())}
            row = [blocks.get(number, NULL_BLOCK) for number in range(len(self.groups))]
            tip = self.cache.insert(tip, key, row, prefix.hashes[place])
            for move in moves.get(place, ()):
                external.published(move.hash, move.group, move.block)

    def given_up(self) -> None:
        """No plan in flight will commit; what they were to load is not loaded."""
        if self.external is not None:
            self.external.given_up()
            self._loads.clear()

    # -- tables --------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables to cover `num_tokens` positions; False, with no effect, if there are not enough blocks."""
        for number in self._windowed:
            self._pass_window(request, number)
        first, last = len(request.tables[0]), self.blocks_for(num_tokens)
        if last <= first:
            return True
        needed = [max(first, group.retention.first_needed(num_tokens, self.block_size)) for group in self.groups]
        if any(last - begin > group.num_available for begin, group in zip(needed, self.groups, strict=True)):
            return False
        for number, (table, begin) in enumerate(zip(request.tables, needed, strict=True)):
            spare = self.groups[number].num_available - (last - begin)  # for states that no step continues from
            for index in range(first, last):
                kept = index < begin and spare > 0 and self._keeps(request, number, index)
                spare -= kept
                table.append(self._take(number) if kept or index >= begin else NULL_BLOCK)
        return True

    def trim(self, request: Request) -> None:
        """Free the blocks after the last computed token, which rejected drafts would have filled."""
        keep = self.blocks_for(request.num_computed)
        request.num_sent = min(request.num_sent, keep)
        for number, table in enumerate(request.tables):
            surplus = table[keep:]
            del table[keep:]
            self._give_back(request, number, [block for block in surplus[::-1] if block != NULL_BLOCK])

    def free(self, request: Request, *, keep_partial: bool = False) -> None:
        """Free a request's blocks, last one first, so that prefixes stay in the cache longer than what follows them.

        Args:
            keep_partial: publish the last, partly filled block in the prefix cache.
        """
        self._publish_state(request)
        if keep_partial and self.cache.keeps_partial:
            self._publish_partial(request)
        for number, source, _, _ in request.copies:  # the copy never ran, so its source is unlocked here
            self.groups[number].release(source)
        self._mark_end(request)
        tables, request.tables, request.copies = request.tables, [], []
        request.tip, request.num_published = None, 0
        for number, table in enumerate(tables):
            self._give_back(request, number, [block for block in reversed(table) if block != NULL_BLOCK])

    def _mark_end(self, request: Request) -> None:
        """Tell the connector what a request sees behind its last cached block in groups that keep only part of it."""
        if request.tip is None or not self._windowed or self.external is None:
            return
        match = Match(request.tip, request.num_published)
        first_seen = self.first_seen(match)
        first = min(first_seen[number] for number in self._windowed)
        for place, node in zip(range(match.num_blocks - 1, first - 1, -1), match.nodes(), strict=False):
            self._tell_published(self.external, node, [n for n in self._windowed if place >= first_seen[n]])

    def _tell_published(self, external: External, node: Node, groups: Iterable[int]) -> None:
        for number in groups:
            if node.blocks[number] != NULL_BLOCK:
                external.published(part_name(node.hash, number), number, node.blocks[number])

    def blocks_of_these_alone(self, requests: Sequence[Request]) -> list[int]:
        """Number of blocks of each group that only these requests hold: those freed by preempting all of them."""
        alone = []
        for number, group in enumerate(self.groups):
            holders = Counter(block for request in requests for block in request.tables[number] if block != NULL_BLOCK)
            alone.append(sum(count == group.pool.ref_counts[block] for block, count in holders.items()))
        return alone

    def hold(self, handle: Handle, blocks: Iterable[tuple[int, int]]) -> None:
        """Hold blocks until the handle is released: they are neither freed nor written.

        Args:
            blocks: (group, block) pairs, later ones first. In a group that keeps all positions, a cached block must
                come with all blocks before it, as for every holder.
        """
        for number, block in blocks:
            self.groups[number].retain(block)
            self._hand_over(number, block, handle)

    def release(self, handle: Handle) -> None:
        """Release what a handle holds. Handles may end in any order; one that holds nothing is ignored."""
        for number, block, generation in self._held.pop(handle, ()):
            self.num_held[handle.kind] -= 1
            self.groups[number].pool.check(block, generation)
            self.groups[number].release(block)

    def step_committed(self, step: int) -> None:
        """Free the blocks that were kept for this step."""
        self.release(Handle(STEP, step))

    def _publish_state(self, request: Request) -> None:
        """Keep the state after a request's last published block, so that its text can be continued from there."""
        tip, index = request.tip, request.num_published - 1
        if self._recurrent and tip is not None and tip.attached and index >= 0:
            self.cache.fill(
                tip,
                [
                    table[index] if number in self._recurrent else NULL_BLOCK
                    for number, table in enumerate(request.tables)
                ],
            )

    def _publish_partial(self, request: Request) -> None:
        full, rest = divmod(request.num_committed, self.block_size)
        if not rest or full != request.num_published:
            return
        tip = request.tip if full else self.cache.root(request.scope, self.hasher.root(request.scope))
        if tip is not None and tip.attached:
            key = request.key_bytes(full * self.block_size, full * self.block_size + rest)
            self.cache.insert_partial(tip, key, [table[full] for table in request.tables])

    def _take(self, number: int) -> int:
        pool = self.groups[number].pool
        if not pool.num_free:
            self.cache.evict(number, 1)
        return pool.allocate()

    def _give_back(self, request: Request, number: int, blocks: Sequence[int]) -> None:
        if not request.num_in_flight:
            self.groups[number].release(*blocks)
            return
        for block in blocks:
            self._hand_over(number, block, Handle(STEP, request.last_step))

    def _hand_over(self, number: int, block: int, handle: Handle) -> None:
        """Turn an existing reference to the block into the handle's."""
        generation = self.groups[number].pool.generations[block]
        self._held.setdefault(handle, []).append((number, block, generation))
        self.num_held[handle.kind] += 1

    def _pass_window(self, request: Request, number: int) -> None:
        """Free the blocks of a group that no later token of the request sees."""
        table = request.tables[number]
        certain = request.num_computed - request.num_unverified_tokens
        passed = min(self.groups[number].retention.first_seen(certain) // self.block_size, len(table))
        if self.cache.caching:
            passed = min(passed, request.num_published)  # blocks are published before they are freed
        gone = [index for index in range(request.num_passed[number], passed) if table[index] != NULL_BLOCK]
        blocks = [table[index] for index in reversed(gone)]
        for index in gone:
            table[index] = NULL_BLOCK
        request.num_passed[number] = max(passed, request.num_passed[number])
        self._give_back(request, number, blocks)
