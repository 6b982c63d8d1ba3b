"""Prefix caches: KV blocks of finished and running requests that others with the same prefix can use.

Both caches are a tree with one node per block of tokens. A radix tree would usually merge a chain of such nodes into
one edge; keeping them apart makes every lock and every eviction exact to the block, and nothing has to be split or
merged. A node has one block per KV group, its parts, which are added and evicted independently. A part is locked while
its block has holders in the pool, so the tree keeps no counts of its own.

A match may *end* at a node if the next token finds all that it sees: in a group that keeps all positions, every part up
to there; in a group with a window, the parts that cover it. In the first kind of group, the node's own part implies all
parts before it: without them it would be useless, so it is evicted with them.

Full blocks are found by their chained hash. Since a node's parent is always in the tree, too, the number of cached
blocks of a prompt is found by bisection, at a cost that hardly grows with the prompt.

* "hash" (`PrefixCache`) stops there, and matches whole blocks only.
* "radix" (`RadixCache`) also finds, after the last full block, the child with the longest common prefix, so that
  matches are exact to the token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.core.block_hash import part_name
from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_group import KVGroup
from quire.core.prefix_node import Node

KEY_BYTES = 8
"""A key id is a 64-bit integer: a token id, or a content hash in place of something other than a token."""


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a prompt.

    Attributes:
        tip: the node of its last full block; the root or None if there is none.
        num_blocks: number of full blocks: the tip's and those of all nodes above it.
        num_found: number of full blocks that are cached, even if no match may end there.
        partial: a node whose blocks begin with the next `partial_tokens` tokens, to be copied.
    """

    tip: Node | None = None
    num_blocks: int = 0
    num_found: int = 0
    partial: Node | None = None
    partial_tokens: int = 0

    def nodes(self) -> Iterator[Node]:
        """The nodes of the full blocks, the tip first."""
        node = self.tip
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The tree, with matching of whole blocks and LRU eviction.

    With `caching` False nothing is ever kept or found (`prefix_cache="off"`); `keeps_partial` says whether a
    partly filled block can be a leaf.

    Args:
        groups: the KV groups.
        evicted: called with the name (`part_name`), group and id of each full block that is evicted.

    Attributes:
        changed: called with the names of full blocks that have come, and of those that have gone.
    """

    caching = True
    keeps_partial = False

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        evicted: Callable[[bytes, int, int], None] | None = None,
    ) -> None:
        self.groups = groups
        self._evicted = evicted
        self.changed: Callable[[bytes], None] | None = None
        self.block_size = block_size
        self.block_bytes = block_size * KEY_BYTES
        self._by_hash: dict[bytes, Node] = {}  # nodes of full blocks
        self.roots: dict[str, Node] = {}  # by scope

    # -- finding -------------------------------------------------------------------------------------------

    def match(self, hashes: list[bytes], limit: int, back: int = 0) -> Match:
        """The longest cached prefix of at most `limit` tokens, in whole blocks.

        Args:
            hashes: chained hashes of the prompt's full blocks.
            limit: most tokens to match; at least one token is always left to compute.
            back: how many of the last matched tokens will be computed again.
        """
        count = longest_run(hashes, limit // self.block_size, self._by_hash.__contains__)
        return self._shortened(Match(self._by_hash[hashes[count - 1]], count, count), back) if count else Match()

    def find(self, block_hash: bytes) -> Node | None:
        """The node of a full block."""
        return self._by_hash.get(block_hash)

    def part(self, name: bytes) -> tuple[Node, int] | None:
        """The node and group of the full block with this name (`part_name`)."""
        for number in range(len(self.groups)):
            node = self._by_hash.get(part_name(name, number))
            if node is not None and node.blocks[number] != NULL_BLOCK:
                return node, number
        return None

    def has(self, block_hash: bytes, number: int) -> bool:
        """Whether a group's part of a full block is cached."""
        node = self._by_hash.get(block_hash)
        return node is not None and node.blocks[number] != NULL_BLOCK

    def _shortened(self, match: Match, back: int) -> Match:
        """Shorten a number of blocks to where a match may end."""
        needed = self._needed(match.num_blocks, back)
        for count, node in zip(range(match.num_blocks, 0, -1), match.nodes(), strict=True):
            if count <= min(needed):
                break
            if any(block == NULL_BLOCK and count > first for block, first in zip(node.blocks, needed, strict=True)):
                match = Match(node.parent, count - 1, match.num_found)
                needed = self._needed(count - 1, back)
        return match

    def _needed(self, count: int, back: int) -> list[int]:
        """By group, the first block whose part a match of `count` blocks needs; if all are needed, the last one, which
        implies the others."""
        end = count * self.block_size - back
        return [
            count - 1 if group.keeps_all else group.retention.first_seen(end) // self.block_size
            for group in self.groups
        ]

    def match_partial(self, match: Match, scope: str, rest: bytes) -> None:
        """Extend a match by the first tokens of a block, if the cache `keeps_partial`.

        Args:
            rest: key ids of the tokens after the match, at most a block.
        """

    # -- keeping -------------------------------------------------------------------------------------------

    def root(self, scope: str, root_hash: bytes) -> Node:
        """The root of a scope, created if it does not exist."""
        node = self.roots.get(scope)
        if node is None:
            node = self.roots[scope] = Node(None, b"", 0, root_hash, scope)
        return node

    def insert(self, parent: Node, key: bytes, blocks: Sequence[int], hash: bytes) -> Node:
        """Publish full blocks that have holders, one per group; returns their node.

        If equal content is cached already, it stays, and `blocks` remain private: the caller should use the node's.
        """
        node = parent.children.get(key)
        if node is None:
            node = self._attach(parent, key, hash)
            self._by_hash[hash] = node
        if NULL_BLOCK in node.blocks:
            self.fill(node, blocks)
        return node

    def insert_partial(self, parent: Node, key: bytes, blocks: Sequence[int]) -> None:
        """Keep a finished request's last, partly filled blocks as a leaf, if the cache `keeps_partial`."""
        raise NotImplementedError

    def _attach(self, parent: Node, key: bytes, hash: bytes) -> Node:
        node = parent.children[key] = Node(parent, key, len(self.groups), hash, parent.scope)
        insort(parent.order, key)
        return node

    def fill(self, node: Node, blocks: Sequence[int]) -> None:
        """Add parts that a node lacks, which have holders; null blocks are skipped."""
        for number, (group, block) in enumerate(zip(self.groups, blocks, strict=True)):
            if node.blocks[number] == NULL_BLOCK != block:
                node.blocks[number] = block
                group.cached[block] = node
                if node.hash and self.changed is not None:
                    self.changed(part_name(node.hash, number))

    # -- evicting -----------------------------------------------------------------------------------------

    def evict(self, number: int, count: int) -> int:
        """Evict up to `count` blocks of a group that have no holder, least recently used first.

        Parts that are useless without them are evicted, too.
        """
        group = self.groups[number]
        free = group.pool.num_free
        while group.idle and group.pool.num_free - free < count:
            block = next(iter(group.idle))
            node = group.idle[block]
            if not group.keeps_all and len(node.key) == self.block_bytes:
                self._empty(node, number)
                if not node.children and not any(node.blocks):
                    self._detach(node)
            else:
                self._detach(node)
        return group.pool.num_free - free

    def clear(self) -> int:
        """Evict everything without a holder; returns the number of blocks."""
        return sum(self.evict(number, len(group.idle)) for number, group in enumerate(self.groups))

    def _detach(self, node: Node) -> None:
        """Remove a node from the tree, with all nodes below it, and ancestors left without parts or children."""
        child, parent = node, node.parent
        while parent is not None:
            del parent.children[child.key]
            del parent.order[bisect_left(parent.order, child.key)]
            if parent.children or any(parent.blocks):
                break
            self._forget(parent)
            child, parent = parent, parent.parent
        subtree = [node]
        while subtree:
            lost = subtree.pop()
            subtree.extend(lost.children.values())
            self._forget(lost)

    def _forget(self, node: Node) -> None:
        node.attached = False
        if node.parent is None:
            del self.roots[node.scope]
        for number in range(len(node.blocks)):
            self._empty(node, number)
        if self._by_hash.pop(node.hash, None) is not None and self.changed is not None:
            self.changed(node.hash)

    def _empty(self, node: Node, number: int) -> None:
        """Remove one part of a node, if it has it."""
        block, node.blocks[number] = node.blocks[number], NULL_BLOCK
        if block != NULL_BLOCK:
            if node.hash and self._evicted is not None:
                self._evicted(part_name(node.hash, number), number, block)
            self.groups[number].uncache(block)
            if node.hash and self.changed is not None:
                self.changed(part_name(node.hash, number))


class NoCache(PrefixCache):
    """`prefix_cache="off"`: keeps and finds nothing."""

    caching = False


class RadixCache(PrefixCache):
    """Also matches the beginning of the last block."""

    keeps_partial = True

    def match_partial(self, match: Match, scope: str, rest: bytes) -> None:
        node = match.tip or self.roots.get(scope)
        if node is None:
            return
        place = bisect_left(node.order, rest)  # among sorted keys, a neighbour has the longest common prefix
        for key in node.order[max(place - 1, 0) : place + 1]:
            tokens, child = common_tokens(key, rest), node.children[key]
            if tokens > match.partial_tokens and NULL_BLOCK not in child.blocks:
                match.partial, match.partial_tokens = child, tokens

    def insert(self, parent: Node, key: bytes, blocks: Sequence[int], hash: bytes) -> Node:
        node = super().insert(parent, key, blocks, hash)
        self._drop_prefixes(parent, key)
        return node

    def insert_partial(self, parent: Node, key: bytes, blocks: Sequence[int]) -> None:
        place = bisect_left(parent.order, key)
        covered = place < len(parent.order) and parent.order[place].startswith(key)
        if not covered:
            self.fill(self._attach(parent, key, b""), blocks)
            self._drop_prefixes(parent, key)

    def _drop_prefixes(self, parent: Node, key: bytes) -> None:
        """Evict partly filled siblings that are prefixes of `key`, which sort before it."""
        place = bisect_left(parent.order, key) - 1
        while place >= 0 and key.startswith(parent.order[place]):
            prefix = parent.children[parent.order[place]]
            if all(block in group.idle for group, block in zip(self.groups, prefix.blocks, strict=True)):
                self._detach(prefix)
            place -= 1


CACHES: dict[str, type[PrefixCache]] = {"radix": RadixCache, "hash": PrefixCache, "off": NoCache}


def longest_run(hashes: list[bytes], count: int, found: Callable[[bytes], bool]) -> int:
    """How many of the first `count` hashes of a chain are found; a hash is found only if all before it are."""
    count = min(count, len(hashes))
    if count and found(hashes[count - 1]):
        return count
    return bisect_left(range(count), True, key=lambda index: not found(hashes[index]))


def common_tokens(a: bytes, b: bytes) -> int:
    """The length of two keys' common prefix, in key ids."""
    length = min(len(a), len(b))
    for start in range(0, length, KEY_BYTES):
        if a[start : start + KEY_BYTES] != b[start : start + KEY_BYTES]:
            return start // KEY_BYTES
    return length // KEY_BYTES
