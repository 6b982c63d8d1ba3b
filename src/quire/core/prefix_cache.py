"""Prefix caches: KV blocks that finished or running requests leave for others with the same prefix.

Both caches keep a tree with one node a block. A radix tree would usually merge a chain of such nodes into one
edge; keeping them apart makes every lock and every eviction exact to the block, and there is nothing to split
or to merge. A node is locked as often as its block has holders in the pool, so the tree keeps no counts of
its own: who holds a block also holds all blocks before it.

Full blocks are found by their chained hash. A cached block's parent is cached too, so how many blocks of a prompt
are there is found by bisection, at a cost that hardly grows with the prompt.

* "hash" (`PrefixCache`) stops there: whole blocks only.
* "radix" (`RadixCache`) also finds, after the last full block, the child with the longest common prefix, so a match
  is to the token.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.core.block_pool import NULL_BLOCK, BlockPool
from quire.core.cache_events import CacheEvents

KEY_BYTES = 8
"""A key id is a 64-bit integer: a token id, or a content hash where something other than a token stands."""


class Node:
    """One cached block, or the root of a scope (which has the null block).

    Attributes:
        key: the block's key ids as bytes; shorter than a block for a partly filled leaf.
        children: by key. `order` has the same keys sorted, so that a key's neighbours are found by bisection.
        last_used: the cache's tick when the block last lost its last holder.
        attached: False once the node was evicted.
    """

    __slots__ = ("attached", "block", "children", "hash", "key", "last_used", "order", "parent", "scope")

    def __init__(self, parent: Node | None, key: bytes, block: int, hash: bytes, scope: str) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.hash = hash
        self.scope = scope
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.last_used = 0
        self.attached = True


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a prompt.

    Attributes:
        tip: the node of its last full block; None where there is none.
        num_blocks: full blocks, those of the tip and of all nodes above it.
        partial: a node whose block begins with the next `partial_tokens` tokens, to be copied.
    """

    tip: Node | None = None
    num_blocks: int = 0
    partial: Node | None = None
    partial_tokens: int = 0

    def nodes(self) -> Iterator[Node]:
        """One a full block, the tip first."""
        node = self.tip
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The tree, locks, matching by whole blocks, and eviction of the least recently used leaf.

    With `caching` False nothing is ever kept or found (`prefix_cache="off"`); `keeps_partial` says whether a
    partly filled block may be a leaf.

    Args:
        events: told of the full blocks that come and go.
    """

    caching = True
    keeps_partial = False

    def __init__(self, pool: BlockPool, block_size: int, events: CacheEvents | None = None) -> None:
        self.pool = pool
        self._events = events
        self.block_size = block_size
        self.block_bytes = block_size * KEY_BYTES
        self.nodes: dict[int, Node] = {}  # by block
        self._by_hash: dict[bytes, Node] = {}  # those of full blocks
        self.roots: dict[str, Node] = {}  # by scope
        self.num_idle = 0  # cached blocks without holders: all of them can be evicted
        self._tick = 0
        # A heap of (last_used, serial, node); an entry that no longer holds is skipped when it comes up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._serial = 0

    # -- finding -------------------------------------------------------------------------------------------

    def match(self, hashes: list[bytes], limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens, in whole blocks.

        Args:
            hashes: chained hashes of the prompt's full blocks.
            limit: most tokens to match; at least one token is always left to compute.
        """
        count = longest_run(hashes, limit // self.block_size, self._by_hash.__contains__)
        return Match(self._by_hash[hashes[count - 1]], count) if count else Match()

    def match_partial(self, match: Match, scope: str, rest: bytes) -> None:
        """Lengthen a match by the first tokens of a block, where the cache `keeps_partial`.

        Args:
            rest: key ids of the tokens after the match, at most a block.
        """

    def lock(self, match: Match) -> None:
        """Hold all blocks of a match, so that nothing evicts them."""
        for node in match.nodes():
            self._hold(node)
        if match.partial:
            self._hold(match.partial)

    def unlock(self, match: Match) -> None:
        """Undo `lock`."""
        if match.partial:
            self.release(match.partial.block)
        for node in match.nodes():
            self.release(node.block)

    def retain(self, block: int) -> None:
        """Add a holder to a block."""
        if self.pool.retain(block) and block in self.nodes:
            self.num_idle -= 1

    def release(self, block: int) -> None:
        """Take a holder from a block: without holders it stays if it is cached, and is recycled if not."""
        if not self.pool.release(block):
            return
        node = self.nodes.get(block)
        if node is None:
            self.pool.recycle(block)
            return
        self.num_idle += 1
        self._tick += 1
        node.last_used = self._tick
        if not node.children:
            self._push_leaf(node)

    # -- keeping -------------------------------------------------------------------------------------------

    def root(self, scope: str, root_hash: bytes) -> Node:
        """The root of a scope, made when it is missing."""
        node = self.roots.get(scope)
        if node is None:
            node = self.roots[scope] = Node(None, b"", NULL_BLOCK, root_hash, scope)
        return node

    def insert(self, parent: Node, key: bytes, block: int, hash: bytes) -> Node:
        """Publish a full block that somebody holds; returns the node that stands for it.

        Where equal content is there already, that node is returned and `block` stays private: the caller
        takes over the node's block.
        """
        existing = parent.children.get(key)
        if existing is not None:
            return existing
        node = Node(parent, key, block, hash, parent.scope)
        self._attach(node)
        return node

    def insert_partial(self, parent: Node, key: bytes, block: int) -> None:
        """Keep a finished request's last, partly filled block as a leaf, where the cache `keeps_partial`."""
        raise NotImplementedError

    # -- giving up -----------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Recycle up to `count` blocks without holders, least recently used first, leaves first."""
        evicted = 0
        while evicted < count:
            node = self._pop_leaf() or self._oldest_idle()
            if node is None:
                break
            evicted += self._detach(node)
        return evicted

    def clear(self) -> int:
        """Evict everything without a holder."""
        return self.evict(self.num_idle)

    def _attach(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        parent.children[node.key] = node
        insort(parent.order, node.key)
        self.nodes[node.block] = node
        if len(node.key) == self.block_bytes:
            self._by_hash[node.hash] = node
            if self._events is not None:
                self._events.add("stored", node.hash, parent.hash)

    def _detach(self, node: Node) -> int:
        """Take a node and all below it out of the tree; recycles blocks without a holder and says how many."""
        recycled, subtree = 0, [node]
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
            del parent.order[bisect_left(parent.order, node.key)]
            if not parent.children:
                self._became_leaf(parent)
        while subtree:
            lost = subtree.pop()
            lost.attached = False
            subtree.extend(lost.children.values())
            del self.nodes[lost.block]
            if self._by_hash.pop(lost.hash, None) is not None and self._events is not None:
                self._events.add("removed", lost.hash)
            if self.pool.ref_counts[lost.block] == 0:
                self.num_idle -= 1
                self.pool.recycle(lost.block)
                recycled += 1
        return recycled

    def _became_leaf(self, node: Node) -> None:
        if node.parent is None:
            node.attached = False
            del self.roots[node.scope]
        elif self.pool.ref_counts[node.block] == 0:
            self._push_leaf(node)

    def _hold(self, node: Node) -> None:
        if self.pool.retain(node.block):
            self.num_idle -= 1

    def _evictable(self, node: Node) -> bool:
        return node.attached and not node.children and self.pool.ref_counts[node.block] == 0

    def _push_leaf(self, node: Node) -> None:
        self._serial += 1
        heapq.heappush(self._leaves, (node.last_used, self._serial, node))
        if len(self._leaves) > 2 * len(self.nodes) + 64:  # mostly stale: a hot leaf is pushed at every use
            self._leaves = [e for e in self._leaves if self._evictable(e[2]) and e[0] == e[2].last_used]
            heapq.heapify(self._leaves)

    def _pop_leaf(self) -> Node | None:
        while self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if self._evictable(node) and last_used == node.last_used:
                return node
        return None

    def _oldest_idle(self) -> Node | None:
        """An idle node with held blocks below it: left by a sliding window, which gives up first blocks first."""
        idle = [node for node in self.nodes.values() if self.pool.ref_counts[node.block] == 0]
        return min(idle, key=lambda node: node.last_used, default=None)


class NoCache(PrefixCache):
    """`prefix_cache="off"`: keeps nothing, finds nothing."""

    caching = False


class RadixCache(PrefixCache):
    """The last, partly equal block is found too."""

    keeps_partial = True

    def match_partial(self, match: Match, scope: str, rest: bytes) -> None:
        node = match.tip or self.roots.get(scope)
        if node is None:
            return
        place = bisect_left(node.order, rest)  # among sorted keys, the longest common prefix is a neighbour's
        for key in node.order[max(place - 1, 0) : place + 1]:
            tokens = common_tokens(key, rest)
            if tokens > match.partial_tokens:
                match.partial, match.partial_tokens = node.children[key], tokens

    def insert(self, parent: Node, key: bytes, block: int, hash: bytes) -> Node:
        node = super().insert(parent, key, block, hash)
        self._drop_prefixes(parent, key)
        return node

    def insert_partial(self, parent: Node, key: bytes, block: int) -> None:
        place = bisect_left(parent.order, key)
        covered = place < len(parent.order) and parent.order[place].startswith(key)
        if not covered:
            self._attach(Node(parent, key, block, b"", parent.scope))
            self._drop_prefixes(parent, key)

    def _drop_prefixes(self, parent: Node, key: bytes) -> None:
        """Evict partly filled siblings that say nothing that `key` does not: its prefixes, which sort before it."""
        place = bisect_left(parent.order, key) - 1
        while place >= 0 and key.startswith(parent.order[place]):
            prefix = parent.children[parent.order[place]]
            if self._evictable(prefix):
                self._detach(prefix)
            place -= 1


CACHES: dict[str, type[PrefixCache]] = {"radix": RadixCache, "hash": PrefixCache, "off": NoCache}


def longest_run(hashes: list[bytes], count: int, found: Callable[[bytes], bool]) -> int:
    """How many of the first `count` hashes of a chain are found, where each that is found has those before it found."""
    count = min(count, len(hashes))
    if count and found(hashes[count - 1]):
        return count
    return bisect_left(range(count), True, key=lambda index: not found(hashes[index]))


def common_tokens(a: bytes, b: bytes) -> int:
    """How many key ids two keys begin with in common."""
    length = min(len(a), len(b))
    for start in range(0, length, KEY_BYTES):
        if a[start : start + KEY_BYTES] != b[start : start + KEY_BYTES]:
            return start // KEY_BYTES
    return length // KEY_BYTES
