"""Block tables: which blocks hold a request's KV, how they are shared, and when they are given back."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from quire.core.block_hash import BlockHasher
from quire.core.block_pool import NULL_BLOCK, BlockPool
from quire.core.cache_events import CacheEvents
from quire.core.prefix_cache import CACHES, Match
from quire.core.request import Request


class Handle(NamedTuple):
    """Who holds blocks beside the requests, until it is released: a step in flight, or somebody outside.

    Attributes:
        kind: `STEP`, or whatever others name theirs.
        key: which one of the kind.
    """

    kind: str
    key: Hashable


STEP = "step"


class KVManager:
    """Block tables of the requests, over one pool and one prefix cache.

    Blocks that a step in flight may still write are kept until that step has committed.

    Args:
        num_blocks: size of the pool, the null block included.
        block_size: tokens a block.
        prefix_cache: "radix", "hash" or "off".
        window: how many of the latest tokens each token attends to; None for all of them.
        hasher: gives blocks their identity.
        needs_next_token: what is stored of a token depends on the next one too (a drafting head's KV), so the last
            token of a cached prefix is computed again.
        events: told of what comes into the prefix cache and leaves it.

    Attributes:
        num_held: blocks that are held beside the requests, by the kind of their handles.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: str,
        hasher: BlockHasher,
        window: int | None = None,
        needs_next_token: bool = False,
        events: CacheEvents | None = None,
    ) -> None:
        self.needs_next_token = needs_next_token
        self.block_size = block_size
        self.window = window
        self.hasher = hasher
        self.events = events
        self._prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks)
        self.reset()

    def reset(self) -> None:
        """Every block is free, and nothing is cached, whatever was written in the books before."""
        self.pool.reset()
        self.cache = CACHES[self._prefix_cache](self.pool, self.block_size, self.events)
        if self.events is not None:
            self.events.add("cleared")
        self.num_held: Counter[str] = Counter()
        self._held: dict[Handle, list[tuple[int, int]]] = {}  # blocks and their generations
        self._latest: tuple[str, array[int], list[bytes]] = ("", array("q"), [])  # hashed last: scope, keys, hashes

    @property
    def num_usable(self) -> int:
        """Blocks of the pool without the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones without a holder."""
        return self.pool.num_free + self.cache.num_idle

    @property
    def num_deferred(self) -> int:
        """Blocks that come back when the steps in flight commit."""
        return self.num_held[STEP]

    @property
    def held(self) -> Iterable[int]:
        """Blocks that are held beside the requests, once a holder, for checks."""
        return (block for held in self._held.values() for block, _ in held)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, in chunks of at most `max_chunk` tokens."""
        blocks = self.blocks_for(num_tokens)
        return blocks if self.window is None else min(blocks, self.blocks_for(self.window + max_chunk) + 1)

    # -- prefix cache --------------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """The longest cached prefix of a waiting request; its hashes up to its last full block are made here.

        A request that asks for prompt log-probabilities reads nothing, since cached rows have no logits.
        """
        if not self.cache.caching:
            return Match()
        self._hash_prompt(request)
        if request.params.prompt_logprobs is not None:
            return Match()
        limit = len(request.tokens) - 1
        match = self.cache.match(request.hashes, limit)
        start = match.num_blocks * self.block_size
        self.cache.match_partial(match, request.scope, request.key_bytes(start, min(start + self.block_size, limit)))
        if self.needs_next_token:
            self._drop_last_token(match)
        return match

    def _drop_last_token(self, match: Match) -> None:
        if match.partial is None and match.tip is not None:
            match.partial, match.partial_tokens = match.tip, self.block_size
            match.tip, match.num_blocks = match.tip.parent, match.num_blocks - 1
        match.partial_tokens -= 1
        if match.partial_tokens <= 0:
            match.partial, match.partial_tokens = None, 0

    def admit(self, request: Request, match: Match) -> None:
        """Start a request's table with a match that was locked for it."""
        request.table = [node.block for node in match.nodes()][::-1]
        request.tip = match.tip if match.num_blocks else None
        request.num_published = match.num_blocks
        request.num_computed = match.num_blocks * self.block_size
        if match.partial:
            target = self._take()
            request.copies = [(match.partial.block, target, match.partial_tokens)]
            request.table.append(target)
            request.num_computed += match.partial_tokens
        request.num_committed = request.num_computed
        request.num_sent = 0

    def copied(self, request: Request, step: int) -> None:
        """The request's copies are in step `step`; their sources stay locked until it has committed."""
        for source, _, _ in request.copies:
            self._hand_over(source, Handle(STEP, step))
        request.copies = []

    def publish(self, request: Request) -> list[bytes]:
        """Offer the blocks that committed steps have filled to the prefix cache; returns their hashes."""
        full = request.num_committed // self.block_size
        if not self.cache.caching or full <= request.num_published:
            return []
        first = request.num_published
        self._extend_hashes(request, full)
        request.num_published = full
        tip = request.tip if first else self.cache.root(request.scope, self.hasher.root(request.scope))
        for index, key in enumerate(request.block_keys(first, full, self.block_size), start=first):
            if tip is None or not tip.attached:
                request.tip = None  # its prefix was evicted (a window passed it): the rest stays private
                break
            block = request.table[index]
            tip = request.tip = self.cache.insert(tip, key, block, request.hashes[index])
            if tip.block != block:
                self._adopt(request, index, tip.block)
        return request.hashes[first:full]

    def _adopt(self, request: Request, index: int, block: int) -> None:
        """Share the block that holds the same already, in place of the request's own."""
        self.cache.retain(block)
        self._give_back(request, [request.table[index]])
        request.table[index] = block
        request.num_sent = min(request.num_sent, index)

    def _hash_prompt(self, request: Request) -> None:
        """Hash a request's full blocks; choices and repetitions of one prompt, which come in a row, share the work."""
        count = len(request.tokens) // self.block_size
        if len(request.hashes) < count:
            scope, keys, hashes = self._latest
            if scope == request.scope and keys == request.keys:
                request.hashes = hashes[:]
            else:
                self._extend_hashes(request, count)
                self._latest = (request.scope, request.keys[:], request.hashes[:])

    def _extend_hashes(self, request: Request, count: int) -> None:
        have = len(request.hashes)
        if have < count:
            parent = request.hashes[-1] if have else self.hasher.root(request.scope)
            request.hashes += self.hasher.chain(parent, request.block_keys(have, count, self.block_size))

    # -- tables --------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions; False, and nothing done, where blocks do not suffice."""
        self._pass_window(request)
        missing = self.blocks_for(num_tokens) - len(request.table)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            request.table.append(self._take())
        return True

    def trim(self, request: Request) -> None:
        """Give back the blocks after the last computed token: drafts were rejected that would have filled them."""
        keep = self.blocks_for(request.num_computed)
        surplus = request.table[keep:]
        if surplus:
            del request.table[keep:]
            request.num_sent = min(request.num_sent, keep)
            self._give_back(request, surplus[::-1])

    def free(self, request: Request, *, keep_partial: bool = False) -> None:
        """Give back a request's blocks, the last one first, so that prefixes outlive what follows them in the cache.

        Args:
            keep_partial: offer the last, partly filled block to the prefix cache.
        """
        if keep_partial and self.cache.keeps_partial:
            self._publish_partial(request)
        for source, _, _ in request.copies:  # never ran: its lock ends here
            self.cache.release(source)
        blocks, request.table, request.copies = request.table, [], []
        request.tip, request.num_published = None, 0
        self._give_back(request, [block for block in reversed(blocks) if block != NULL_BLOCK])

    def blocks_of_these_alone(self, requests: Iterable[Request]) -> int:
        """Blocks that only these requests hold: so many come free when all of them are preempted."""
        holders = Counter(block for request in requests for block in request.table if block != NULL_BLOCK)
        return sum(count == self.pool.ref_counts[block] for block, count in holders.items())

    def hold(self, handle: Handle, blocks: Iterable[int]) -> None:
        """Keep blocks until the handle is released: they are neither freed nor written.

        Args:
            blocks: with a cached one all that lie before it, as whoever holds a block does.
        """
        for block in blocks:
            self.cache.retain(block)
            self._hand_over(block, handle)

    def release(self, handle: Handle) -> None:
        """Give back what a handle holds, in whatever order they end; one that holds nothing is ignored."""
        for block, generation in self._held.pop(handle, ()):
            self.num_held[handle.kind] -= 1
            self.pool.check(block, generation)
            self.cache.release(block)

    def step_committed(self, step: int) -> None:
        """What waited for this step is given back."""
        self.release(Handle(STEP, step))

    def _publish_partial(self, request: Request) -> None:
        full, rest = divmod(request.num_committed, self.block_size)
        if not rest or full != request.num_published:
            return
        tip = request.tip if full else self.cache.root(request.scope, self.hasher.root(request.scope))
        if tip is not None and tip.attached:
            key = request.key_bytes(full * self.block_size, full * self.block_size + rest)
            self.cache.insert_partial(tip, key, request.table[full])

    def _take(self) -> int:
        if not self.pool.num_free:
            self.cache.evict(1)
        return self.pool.allocate()

    def _give_back(self, request: Request, blocks: list[int]) -> None:
        if request.num_in_flight:
            for block in blocks:
                self._hand_over(block, Handle(STEP, request.last_step))
            return
        for block in blocks:
            self.cache.release(block)

    def _hand_over(self, block: int, handle: Handle) -> None:
        """A holder that the block counts already is the handle from now on."""
        self._held.setdefault(handle, []).append((block, self.pool.generations[block]))
        self.num_held[handle.kind] += 1

    def _pass_window(self, request: Request) -> None:
        """Give up the blocks that no later token of the request attends to."""
        if self.window is None:
            return
        certain = request.num_computed - request.num_unverified_tokens
        passed = max(0, certain - self.window + 1) // self.block_size
        gone: list[int] = []
        for index in range(min(passed, len(request.table)) - 1, -1, -1):
            if request.table[index] == NULL_BLOCK:
                break
            if index >= request.num_published and self.cache.caching:
                continue  # not committed yet: it is published first
            gone.append(request.table[index])
            request.table[index] = NULL_BLOCK
        self._give_back(request, gone)
