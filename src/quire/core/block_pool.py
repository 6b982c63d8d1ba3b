"""The KV blocks of one device: who holds each, and which are free."""

from __future__ import annotations

NULL_BLOCK = 0
"""The null block, never allocated: padding writes here, and tables have it for blocks that a window has passed."""


class BlockPool:
    """Reference counts and a free list over block ids 1 to `num_blocks - 1`.

    A block's count is the number of block tables, locks and steps in flight that hold it. A count of zero
    does not free the block by itself, since a prefix cache may keep it: the caller recycles it.

    Attributes:
        ref_counts: number of holders of each block.
        generations: how often each block was allocated, so that stale handles are detected.
        double_releases: releases of blocks without a holder; a bug, counted and otherwise ignored.
        stale_handles: uses of a handle whose block has since been allocated to another holder; a bug, counted.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.generations = [0] * num_blocks
        self.double_releases = self.stale_handles = 0
        self.reset()

    def reset(self) -> None:
        """Make every block free, whoever held it."""
        self.ref_counts = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """The free list, for checks."""
        return self._free

    def allocate(self) -> int:
        """Allocate a free block, with one holder. The caller has made sure that there is one."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        self.generations[block] += 1
        return block

    def check(self, block: int, generation: int) -> None:
        """Check that a held block has not been allocated again since."""
        self.stale_handles += self.generations[block] != generation

    def retain(self, *blocks: int) -> list[int]:
        """Add a holder to each of these blocks; returns those that had none."""
        counts, unheld = self.ref_counts, []
        for block in blocks:
            if not counts[block]:
                unheld.append(block)
            counts[block] += 1
        return unheld

    def release(self, *blocks: int) -> list[int]:
        """Remove a holder from each of these blocks; returns those that have none left."""
        counts, unheld = self.ref_counts, []
        for block in blocks:
            if not counts[block]:
                self.double_releases += 1
                continue
            counts[block] -= 1
            if not counts[block]:
                unheld.append(block)
        return unheld

    def recycle(self, block: int) -> None:
        """Put a block without holders back on the free list."""
        self._free.append(block)
