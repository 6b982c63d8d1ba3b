"""A node of the prefix tree: what both the tree and the groups' blocks are found by (see `prefix_cache.py`)."""

from __future__ import annotations

from quire.core.block_pool import NULL_BLOCK


class Node:
    """The cached parts of one block of tokens, or the root of a scope (which has no parts).

    Attributes:
        key: the tokens' key ids as bytes; shorter than a block for a partly filled leaf, which is removed as soon as it
            lacks a part.
        blocks: its parts, one block per group; the null block for missing ones. A node without parts stays as long as
            it has children.
        children: by key. `order` has the same keys sorted, so that a key's neighbours are found by bisection.
        attached: False once the node is no longer in the tree.
    """

    __slots__ = ("attached", "blocks", "children", "hash", "key", "order", "parent", "scope")

    def __init__(self, parent: Node | None, key: bytes, num_parts: int, hash: bytes, scope: str) -> None:
        self.parent = parent
        self.key = key
        self.blocks = [NULL_BLOCK] * num_parts
        self.hash = hash
        self.scope = scope
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.attached = True
