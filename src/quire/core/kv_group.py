"""A KV group: layers that keep the same positions of a request, and the blocks in which they keep them.

Most models have one. Where some layers see a sliding window and others all positions, each kind is a group with a pool
and a table a request of its own: what a window has passed comes back for its group alone.

Recurrent layers are a third kind. A block of theirs holds a row for each of its tokens, and the state after the last
one, which all that follows is computed from; so a token sees its own block and the one before it, as if it had a window
of one block and one token. A state takes as much memory as thousands of keys. So of the blocks that a step fills, only
those get memory from which a later step may go on, and those at marks, which are kept for other requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.block_pool import BlockPool

if TYPE_CHECKING:
    from quire.core.prefix_cache import Node


@dataclass(frozen=True, slots=True)
class States:
    """Of a group whose layers are recurrent, which of its blocks are there.

    Attributes:
        interval: every so many blocks of a prompt the state is kept for others.
        uncertain: most rows of a step that may yield no token: those of drafts.
    """

    interval: int
    uncertain: int = 0

    def tail(self, block_size: int) -> int:
        """Most blocks that a request needs to go on after a step: where it is, one before it, what drafts may fill."""
        return 2 + -(-self.uncertain // block_size)

    def first_needed(self, end: int, block_size: int) -> int:
        """The first of the blocks that a step to position `end` fills from which the next one may go on."""
        return max(0, (end - self.uncertain) // block_size - 1)

    def marks(self, num_tokens: int, found: int, matched: int, block_size: int) -> frozenset[int]:
        """Blocks of a request at whose end the state is kept for others, beside those of every `interval`.

        The last that an equal prompt could go on from; and where the request leaves what others computed, if their
        state was not kept there.

        Args:
            num_tokens: that it has.
            found: blocks of it that are cached, whether or not it can go on from there.
            matched: those of them that it goes on from.
        """
        ends = {(num_tokens - 1) // block_size - 1, *({found - 1} if found > matched else ())}
        return frozenset(ends)


class KVGroup:
    """The blocks of one group: who holds them, and which of them the prefix cache has.

    Args:
        num_blocks: size of the pool, the null block included.
        window: how many of the latest tokens each token sees, itself included; None: all of them.
        states: see `States`; None: its layers are not recurrent.

    Attributes:
        cached: by block, the node of the prefix tree that has it.
        idle: those of them without a holder, the least recently used first: all of them can be evicted. Holders let go
            of a request's last block first, so tails go before the heads that they need.
    """

    def __init__(self, num_blocks: int, window: int | None = None, states: States | None = None) -> None:
        self.window, self.states = window, states
        self.pool = BlockPool(num_blocks)
        self.reset()

    def reset(self) -> None:
        """Every block is free, and none cached."""
        self.pool.reset()
        self.cached: dict[int, Node] = {}
        self.idle: OrderedDict[int, Node] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Blocks of the pool without the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones without a holder."""
        return self.pool.num_free + len(self.idle)

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` sees, and so all after it."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def peak_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """See `peak_blocks`."""
        return peak_blocks(self.window, num_tokens, max_chunk, block_size, self.states)

    def retain(self, block: int) -> None:
        """Add a holder to a block."""
        if self.pool.retain(block):
            self.idle.pop(block, None)

    def release(self, block: int) -> None:
        """Take a holder from a block: without holders it stays if it is cached, and is recycled if not."""
        if not self.pool.release(block):
            return
        node = self.cached.get(block)
        if node is None:
            self.pool.recycle(block)
        else:
            self.idle[block] = node

    def uncache(self, block: int) -> None:
        """The prefix cache has it no longer: it is recycled, unless somebody holds it."""
        del self.cached[block]
        if self.idle.pop(block, None) is not None:
            self.pool.recycle(block)


def peak_blocks(
    window: int | None, num_tokens: int, max_chunk: int, block_size: int, states: States | None = None
) -> int:
    """Most blocks of a group that a request of `num_tokens` needs at once, in chunks of at most `max_chunk` tokens.

    Drafts take no more than what is free beside that.
    """
    blocks = -(-num_tokens // block_size)
    if states is not None:
        return min(blocks, states.tail(block_size) + (2 if max_chunk > 1 else 0))  # and those that it comes from
    return blocks if window is None else min(blocks, -(-(window + max_chunk) // block_size) + 1)
