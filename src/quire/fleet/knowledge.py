"""An estimate of the blocks that each server has cached. If it is wrong, that only costs time.

There are two sources: the prompts sent to a server, which it will compute and cache, and the server's own events.
Blocks are named by chained hashes, so a server that has a block has all blocks before it. For each server there is an
LRU set of hashes, limited to the size of its cache, so that evictions are also approximated for servers that report no
events. All together are limited, too: whichever server has most blocks then gives up its least recently used ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from quire.fleet.cache_events import CacheEvent

MAX_BLOCKS = 2**18
"""Most blocks that are remembered of a server, about 30 MB; fewer if the size of its cache is known."""

MAX_BLOCKS_OF_ALL = 2**23
"""Most blocks that are remembered of all servers, about 800 MB."""

LOOKS = 64
"""How often blocks of all servers are counted, which takes a while if these are thousands, per `max_blocks_of_all` that
have come: that share of it may be beyond it."""


@dataclass(slots=True)
class _Server:
    room: int
    blocks: dict[bytes, None] = field(default_factory=dict)  # least recently used first
    boot: str = ""
    next: int | None = None  # number of the next event; None if a snapshot is needed first

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark a prompt's blocks as cached and just used; its last blocks will be evicted before its first ones."""
        blocks = self.blocks
        for hash in reversed(hashes):
            blocks.pop(hash, None)
            blocks[hash] = None
        self.shrink(self.room)

    def shrink(self, most: int) -> None:
        """Forget the least recently used blocks beyond so many."""
        for hash in list(islice(self.blocks, max(0, len(self.blocks) - most))):
            del self.blocks[hash]


class Knowledge:
    """The blocks of all servers. A server is known by name, from the first call that names it until `forget`.

    Args:
        max_blocks: most blocks that are remembered of each server. max_blocks_of_all: of all servers together.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_blocks_of_all: int = MAX_BLOCKS_OF_ALL) -> None:
        self._max_blocks, self._max_blocks_of_all = max_blocks, max_blocks_of_all
        self._servers: dict[str, _Server] = {}
        self._came = 0  # blocks since all were counted

    def held(self, server: str, hashes: Sequence[bytes]) -> int:
        """Number of a prompt's first blocks that the server has. Found by bisection, since chains have no gaps."""
        found = self._servers.get(server)
        if found is None or not found.blocks:
            return 0
        blocks = found.blocks
        return bisect_left(range(len(hashes)), True, key=lambda index: hashes[index] not in blocks)

    def sent(self, server: str, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent there, so the server will have them."""
        self._of(server).use(hashes)
        self._bound(len(hashes))

    def dropped(self, server: str, hashes: Iterable[bytes]) -> None:
        """The server turned out not to have these blocks."""
        blocks = self._of(server).blocks
        for hash in hashes:
            blocks.pop(hash, None)

    def hear(self, server: str, boot: str, events: Iterable[CacheEvent]) -> bool:
        """Apply a server's events, in order. False if some are missing, so that a snapshot is needed.

        Args:
            boot: changes whenever the server restarts with an empty cache, and with events from 0 on.
        """
        known = self._of(server)
        if known.boot != boot:
            known.blocks.clear()
            known.boot, known.next = boot, 0
        count = len(known.blocks)
        for event in events:
            if known.next is None or event.number > known.next:
                known.blocks.clear()
                known.next = None
                return False
            if event.number < known.next:
                continue  # it was in the snapshot
            known.next += 1
            if event.stored:
                known.use((event.name,))
            else:
                known.blocks.pop(event.name, None)
        self._bound(len(known.blocks) - count)
        return known.next is not None

    def expects(self, server: str) -> int:
        """Number of the server's next event; -1 if a snapshot is needed."""
        found = self._servers.get(server)
        return -1 if found is None or found.next is None else found.next

    def snapshot(self, server: str, boot: str, next_event: int, hashes: Iterable[bytes]) -> None:
        """Set all blocks that a server has, before its event with this number, least recently used first if known."""
        known = self._of(server)
        known.boot, known.next = boot, next_event
        known.blocks, known.room = dict.fromkeys(hashes), self._max_blocks  # it reports evictions itself
        known.use(())
        self._bound(len(known.blocks))

    def resize(self, server: str, blocks: int) -> None:
        """Set the number of blocks that fit into the server's cache."""
        known = self._of(server)
        known.room = min(blocks, self._max_blocks)
        known.use(())

    def forget(self, server: str) -> None:
        """The server is gone, or has lost its cache."""
        self._servers.pop(server, None)

    def count(self, server: str) -> int:
        """Number of blocks that the server is known to have."""
        found = self._servers.get(server)
        return len(found.blocks) if found else 0

    def _bound(self, came: int) -> None:
        """So many blocks have come: now and then, take what all servers have too many from those that have most."""
        self._came += max(0, came)
        if self._came <= self._max_blocks_of_all // LOOKS:
            return
        self._came = 0
        excess = self.total - self._max_blocks_of_all
        while excess > 0:
            largest = max(self._servers.values(), key=lambda each: len(each.blocks))
            given_up = min(excess, len(largest.blocks) // 8 + 1)
            largest.shrink(len(largest.blocks) - given_up)
            excess -= given_up

    @property
    def total(self) -> int:
        """Number of blocks of all servers."""
        return sum(len(each.blocks) for each in self._servers.values())

    def _of(self, server: str) -> _Server:
        found = self._servers.get(server)
        if found is None:
            found = self._servers[server] = _Server(self._max_blocks)
        return found
