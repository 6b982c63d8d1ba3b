"""Which blocks each server has cached, as far as is known: a hint, which may be wrong and then costs time only.

It comes from two sides: from what was sent to a server, which computes it and so has it, and from the server's own
events. Blocks are named by chained hashes: who has a block has all those before it. What a server has is kept as an
ordered set of hashes, the least recently used first, and no more than it has room for; so also of a server that tells
nothing it is known what it has dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.core.cache_events import CacheEvent

MAX_BLOCKS = 2**18
"""Blocks that are remembered of a server whose size is not known; some 30 MB."""


@dataclass(slots=True)
class _Server:
    room: int
    blocks: dict[bytes, None] = field(default_factory=dict)  # in the order of their last use
    boot: str = ""
    next: int | None = None  # number of the next event; None: a snapshot is needed first

    def use(self, hashes: Sequence[bytes]) -> None:
        """These are there and were used now; the last of a prompt go before its first ones."""
        blocks = self.blocks
        for hash in reversed(hashes):
            blocks.pop(hash, None)
            blocks[hash] = None
        excess = len(blocks) - self.room
        if excess > 0:
            for hash in [hash for hash, _ in zip(blocks, range(excess), strict=False)]:
                del blocks[hash]


class Knowledge:
    """What servers hold. Servers are known by name, from the first call that names one until `forget`.

    Args:
        max_blocks: what is remembered of each server at most.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._servers: dict[str, _Server] = {}

    def held(self, server: str, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, the server has. A few look-ups: chains have no holes."""
        found = self._servers.get(server)
        if found is None or not found.blocks:
            return 0
        blocks = found.blocks
        return bisect_left(range(len(hashes)), True, key=lambda index: hashes[index] not in blocks)

    def sent(self, server: str, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks goes there, so it will have them."""
        self._of(server).use(hashes)

    def dropped(self, server: str, hashes: Iterable[bytes]) -> None:
        """The server has turned out not to have these."""
        blocks = self._of(server).blocks
        for hash in hashes:
            blocks.pop(hash, None)

    def hear(self, server: str, boot: str, events: Iterable[CacheEvent]) -> bool:
        """Take a server's events, in their order. False: some are missing, so a snapshot is needed.

        Args:
            boot: changes whenever the server's cache begins anew, with events from 0 on.
        """
        known = self._of(server)
        if known.boot != boot:
            known.blocks.clear()
            known.boot, known.next = boot, 0
        for event in events:
            if known.next is None or event.number > known.next:
                known.blocks.clear()
                known.next = None
                return False
            if event.number < known.next:
                continue  # it was in the snapshot
            known.next += 1
            if event.kind == "cleared":
                known.blocks.clear()
            elif event.group == 0 and event.kind == "stored":
                known.use((event.hash,))
            elif event.group == 0:
                known.blocks.pop(event.hash, None)
        return known.next is not None

    def expects(self, server: str) -> int:
        """Number of the server's next event; -1: a snapshot is needed."""
        found = self._servers.get(server)
        return -1 if found is None or found.next is None else found.next

    def snapshot(self, server: str, boot: str, next_event: int, hashes: Iterable[bytes]) -> None:
        """All that a server has, before its event of this number; the least recently used first, or in any order."""
        known = self._of(server)
        known.boot, known.next = boot, next_event
        known.blocks, known.room = dict.fromkeys(hashes), self._max_blocks  # it says itself what goes
        known.use(())

    def resize(self, server: str, blocks: int) -> None:
        """The server has room for so many blocks."""
        known = self._of(server)
        known.room = min(blocks, self._max_blocks)
        known.use(())

    def forget(self, server: str) -> None:
        """The server is gone, or has lost what it had."""
        self._servers.pop(server, None)

    def count(self, server: str) -> int:
        """Blocks that it is known to have."""
        found = self._servers.get(server)
        return len(found.blocks) if found else 0

    def _of(self, server: str) -> _Server:
        found = self._servers.get(server)
        if found is None:
            found = self._servers[server] = _Server(self._max_blocks)
        return found
