"""Which blocks others can read from this node, for a directory of nodes, routers, and whoever follows KV events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from quire.kv.tiers.tier import Tier


class Published:
    """The blocks that others can read from this node, by the names of their parts: those in its prefix caches and in
    its host tier.

    Changes are determined on request, by looking at the blocks that were touched since the last time. It listens to the
    block tables of all pools (`KVManager.listen`), and to the tier that they share.

    Args:
        tier: None if there is none.

    Attributes:
        blocks: those that there were the last time. touched: those that may have come or gone since.
    """

    def __init__(self, tier: Tier | None = None) -> None:
        self.blocks: set[bytes] = set()
        self._tier, self.touched = tier, set[bytes]()
        if tier is not None:
            tier.changed = self.touch

    def touch(self, name: bytes) -> None:
        """A block may have been added or removed."""
        self.touched.add(name)

    def reset(self) -> None:
        """Any block may have been added or removed."""
        self.touched |= self.blocks

    def changes(self, caches: Sequence[PrefixCache]) -> tuple[list[bytes], list[bytes]]:
        """The blocks added since the last call, and those that are not there any more, published or not.

        Args:
            caches: the node's prefix caches, one for each data-parallel replica.
        """
        if not self.touched:
            return [], []
        touched, self.touched = self.touched, set()
        tier = self._tier or ()
        there = {each for each in touched if each in tier or any(cache.part(each) for cache in caches)}
        came, went = there - self.blocks, touched - there
        self.blocks -= went
        self.blocks |= came
        return list(came), list(went)
