"""How likely a block that leaves the pool is to come back, learnt from those that left before.

Nothing needs to be kept for that but names, as in the ghost lists of 2Q (Johnson and Shasha 1994): a block that was not
saved comes back when it is computed again.
"""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 65_536
"""Blocks that have left the pool. With blocks of 16 tokens, a million tokens, in some 10 MB."""

_BEFORE = -1
"""Stands for a block that came back already."""


class Returns:
    """What has left the pool, and how much of it came back.

    The odds are a mean over the last blocks that left, about as many as the pool has, which begins with 1: a block for
    the first time counts 0, and 1 more once it comes back.

    Args:
        pool: number of blocks in the pool.
        reach: a block that comes back after more blocks than this have left counts as lost: a tier with so many slots
            would no longer have it.

    Attributes:
        odds: of a block that leaves for the first time.
    """

    def __init__(self, pool: int, reach: int) -> None:
        self._pool, self._reach, self._most = pool, reach, max(REMEMBERED, reach)
        self.odds = 1.0
        self._left: OrderedDict[bytes, int] = OrderedDict()  # by name, how many had left then, or `_BEFORE`
        self._count = 0

    def left(self, name: bytes) -> bool:
        """A block leaves the pool. Returns whether it has done so before, as far as that is remembered."""
        self._count += 1
        before = name in self._left
        if not before:
            self._left[name] = self._count
            self.odds -= self.odds / self._pool
            if len(self._left) > self._most:
                self._left.popitem(last=False)
        self._left.move_to_end(name)
        return before

    def came(self, name: bytes) -> None:
        """A block has come into the pool, loaded or computed."""
        count = self._left.get(name, _BEFORE)
        if count == _BEFORE:
            return
        self._left[name] = _BEFORE
        if self._count - count < self._reach:
            self.odds = min(1.0, self.odds + 1 / self._pool)
