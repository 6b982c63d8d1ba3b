"""A KV group: layers that keep the same positions of a request, and the blocks in which they keep them.

Most models have one. If some layers have a sliding window and others see all positions, each kind is a group, with its
own pool and its own block table per request; blocks that the window has passed are freed for its group only.

Recurrent layers are a third kind. Their blocks hold a row for each token, and the state after the last one, from which
all later tokens are computed; so a token sees its own block and the one before it, as if it had a window of one block
and one token. A state takes as much memory as thousands of keys. So, of the blocks that a step fills, memory is given
only to those from which a later step may continue, and those at marks, which are kept for other requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from quire.core.block_pool import BlockPool
from quire.core.prefix_node import Node


@dataclass(frozen=True, slots=True)
class States:
    """Which blocks of a recurrent group are kept.

    Attributes:
        interval: in blocks; at every multiple of it in a prompt, the state is kept for other requests.
        uncertain: most rows of a step that may yield no token, which are those of drafts.
    """

    interval: int
    uncertain: int = 0

    def tail(self, block_size: int) -> int:
        """Most blocks that a request needs to continue after a step: the current one, one before, those of drafts."""
        return 2 + -(-self.uncertain // block_size)

    def first_needed(self, end: int, block_size: int) -> int:
        """The first block, of those filled by a step up to position `end`, from which the next step may continue."""
        return max(0, (end - self.uncertain) // block_size - 1)

    def marks(self, num_tokens: int, found: int, block_size: int) -> frozenset[int]:
        """Blocks of a request at whose end the state is kept for others, in addition to every `interval`.

        These are the last block from which an equal prompt could continue, and the block where the request diverges
        from what others computed.

        Args:
            num_tokens: number of its tokens.
            found: number of its blocks that are cached, whether or not it can continue from there.
        """
        return frozenset([(num_tokens - 1) // block_size - 1, found - 1])


@dataclass(frozen=True, slots=True)
class Retention:
    """What a group keeps of a request.

    Attributes:
        window: how many of the latest tokens each token sees, including itself; None for all.
        states: which states are kept; None if the layers are not recurrent.
    """

    window: int | None = None
    states: States | None = None

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position`, or any later one, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def first_needed(self, end: int, block_size: int) -> int:
        """The first block, of those filled by a step up to position `end`, that needs memory in any case."""
        return 0 if self.states is None else self.states.first_needed(end, block_size)

    def peak_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks that a request of `num_tokens` needs at once, in chunks of at most `max_chunk` tokens.

        Drafts use only blocks that are free in addition.
        """
        blocks = -(-num_tokens // block_size)
        if self.states is not None:
            begun_from = 2 if max_chunk > 1 else 0
            return min(blocks, self.states.tail(block_size) + begun_from)
        return blocks if self.window is None else min(blocks, -(-(self.window + max_chunk) // block_size) + 1)


class KVGroup:
    """The blocks of one group: who holds them, and which of them the prefix cache has.

    Args:
        num_blocks: size of the pool, including the null block.
        retention: what it keeps of a request; by default, all positions.

    Attributes:
        cached: by block, the node of the prefix tree that has it.
        idle: cached blocks without a holder, least recently used first; all of them can be evicted. Holders release a
            request's last block first, so tails are evicted before the heads that they need.
    """

    def __init__(self, num_blocks: int, retention: Retention = Retention()) -> None:
        self.retention = retention
        self.pool = BlockPool(num_blocks)
        self.reset()

    def reset(self) -> None:
        """Make every block free, and none cached."""
        self.pool.reset()
        self.cached: dict[int, Node] = {}
        self.idle: OrderedDict[int, Node] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Number of blocks in the pool, without the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: free ones, and cached ones without a holder."""
        return self.pool.num_free + len(self.idle)

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps all positions of a request."""
        return self.retention.window is None

    def retain(self, *blocks: int) -> None:
        """Add a holder to each of these blocks."""
        for block in self.pool.retain(*blocks):
            self.idle.pop(block, None)

    def release(self, *blocks: int) -> None:
        """Remove a holder from each of these blocks; without holders, cached ones stay and others are recycled."""
        for block in self.pool.release(*blocks):
            node = self.cached.get(block)
            if node is None:
                self.pool.recycle(block)
            else:
                self.idle[block] = node

    def uncache(self, block: int) -> None:
        """Remove a block from the prefix cache; it is recycled unless it has a holder."""
        del self.cached[block]
        if self.idle.pop(block, None) is not None:
            self.pool.recycle(block)
