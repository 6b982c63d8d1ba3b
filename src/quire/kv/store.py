"""A store of KV blocks that all nodes of a pool share: unlike a directory, it has the blocks themselves.

To the rest of the engine it is one more node, which has everything that was put there: blocks are looked up, read into
slots and verified as another node's are. Putting a new block works like an export to another engine
(`kv/tiers/exports.py`): it is saved to a slot, pinned, copied from there, and released. The store itself decides which
blocks it keeps, in how many copies and for how long. One thread communicates with it, so no step waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from quire.kv import wire
from quire.kv.agent import Agent, Changed
from quire.kv.directory.base import Node
from quire.kv.host import CHECK_BYTES, HostTier
from quire.kv.mailbox import STORE_NUMBERS, Dropped, Ended, Located, Mailbox, Nodes, Released, Wanted
from quire.kv.tiers.orders import Gone, Have, Lacks, Locate, Pull

logger = logging.getLogger(__name__)

BATCH = 64
"""Most blocks that are put or read at once."""

MOST_WAITING = 2**16
"""Most new blocks that wait to be put; beyond that, the oldest are dropped."""

MOST_BAD = 8
"""After this many corrupt blocks, nothing more is read from the store."""


class BlockStore(Protocol):
    """Values by name. Others may be able to write there, so everything that is read is verified.

    Raises (each call):
        DirectoryError: it does not answer now. ConfigError: it never will, as it is configured.
    """

    def connect(self) -> None:
        """Connect; called first, and again after an error."""

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these the store has, or appears to have."""

    def put(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Store these; if a name exists already, its old value may remain."""

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The values; None for those that the store does not have."""

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove these."""

    def close(self) -> None:
        """Close the connection."""


class StoreAgent(Agent):
    """The engine's connection to a store, in the roles of `DirectoryAgent`, `NodeReaders` and `Exporter`.

    Args:
        store: owned by the agent from now on. where: its address, for messages.
        tier: the host tier, from whose slots blocks are put, and into whose slots they are read.
        mailbox: the engine's.
        puts, reads: whether the engine's role allows it to put and to read.

    Attributes:
        ready: the store answers. problem: why it does not; "" if it does.
        nodes: the store, as if it were another node.

    Raises:
        ConfigError: the store can never be used as it is configured.
    """

    def __init__(
        self, store: BlockStore, where: str, tier: HostTier, mailbox: Mailbox, puts: bool, reads: bool
    ) -> None:
        super().__init__(store.close, "KV store", "KV blocks are computed meanwhile", mailbox)
        self._store, self._where, self._tier = store, where, tier
        self._puts, self._reads = puts, reads
        self._bad = 0
        self._waiting: dict[bytes, None] = {}  # to be put
        self._putting: tuple[int, list[bytes]] | None = None  # requested from the engine: number, names
        self._told = 0  # number of these that are in slots
        self._pulls: list[Pull] = []
        self._next = STORE_NUMBERS
        self._inbox = deque[Any]()
        self._start()

    # -- called by the engine -----------------------------------------------------------------------------------

    def changed(self, came: list[bytes], went: list[bytes]) -> None:
        """The engine has gained and lost these blocks."""
        if self._puts:
            self._outbox.post(Changed(came, went))

    def pull(self, order: Pull, node: Node | None) -> None:
        """Order blocks to be read into slots; answered by an `Ended`."""
        self._outbox.post(order if node is not None else order._replace(blocks=()))

    def announce(self, news: Have | Gone) -> None:
        """Blocks that were requested are in slots until they are released; or no more will come."""
        self._outbox.post(news)

    def all_gone(self) -> None:
        """No further blocks of any request will come."""
        self._outbox.post(Gone(-1))

    def ban(self, node: str) -> None:
        """A block was bad. Others may be good, so the store stays in use until there are too many."""
        self._bad += 1
        self._tell_nodes()

    def keep(self, nodes: frozenset[str]) -> None:
        """See `NodeReaders`; the store is the only node."""

    def drain(self) -> None:
        """Stop all reads that were ordered."""
        done = threading.Event()
        self._outbox.post(done)
        done.wait()

    # -- in the thread ----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._store.connect()
        self._found()
        self._tell_nodes()

    def _tell_nodes(self) -> None:
        name = f"the store ({self._bad})"
        there = self.ready and self._reads and self._bad < MOST_BAD
        self.nodes = {name: Node(name, "", self._where)} if there else {}
        self._mailbox.post(Nodes(frozenset(self.nodes)))

    def _advance(self) -> None:
        """Take in the engine's messages, answer them, and put one batch."""
        busy = bool(self._waiting) and self._putting is None
        self._take_in(0.0 if busy or self._lookups or self._pulls else 0.5)
        while self._lookups:
            number, names, _ = self._lookups[0]
            found = self._store.exists(names)
            self._mailbox.post(Located(number, [list(self.nodes) if there else [] for there in found]))
            del self._lookups[0]
        while self._pulls:
            self._read(self._pulls.pop(0))
        if self._putting is None and self._waiting:
            self._begin_putting()

    def _take_in(self, wait_seconds: float) -> None:
        self._inbox += self._outbox.take(0.0 if self._inbox else wait_seconds)
        while self._inbox:
            news = self._inbox.popleft()  # if it fails, only this message is lost
            match news:
                case Changed(came, went):
                    self._waiting |= dict.fromkeys(came)
                    for each in (*went, *islice(list(self._waiting), max(0, len(self._waiting) - MOST_WAITING))):
                        self._waiting.pop(each, None)
                case Locate():
                    self._lookups.append(news)
                case Pull():
                    self._pulls.append(news)
                case Have():
                    self._put(news)
                case Gone(number):
                    self._ended(number)
                case Lacks(_, hashes) if self.ready:
                    self._store.remove(hashes)
                case threading.Event():
                    self._give_up_pulls()
                    news.set()

    # -- putting -----------------------------------------------------------------------------------------------

    def _begin_putting(self) -> None:
        """Have the engine save the next blocks that the store does not have."""
        names = list(islice(self._waiting, BATCH))
        missing = [name for name, there in zip(names, self._store.exists(names), strict=True) if not there]
        for name in names:
            del self._waiting[name]
        if missing:
            self._next += 1
            self._putting, self._told = (self._next, missing), 0
            self._mailbox.post(Wanted(self._next, wire.Want(self._next, missing, [])))

    def _put(self, news: Have) -> None:
        """Put blocks, which are in slots until they are released. A put that fails is not retried."""
        if self._putting is None or self._putting[0] != news.number:
            self._mailbox.post(Dropped(news.number))
            return
        number, names = self._putting
        values = [_packed(self._tier, slot) for slot in news.slots]
        self._told = news.first + len(values)
        done = self._told == len(names)
        self._putting = None if done else self._putting
        self._mailbox.post(Released(number, self._told))
        if self.ready:
            self._store.put(names[news.first : self._told], values)

    def _ended(self, number: int) -> None:
        """The engine has evicted the next block of the request; those after it may still be there."""
        if self._putting is not None and number in (-1, self._putting[0]):
            self._waiting = dict.fromkeys(self._putting[1][self._told + 1 :]) | self._waiting if number >= 0 else {}
            self._putting = None

    # -- reading -----------------------------------------------------------------------------------------------

    def _read(self, pull: Pull) -> None:
        """Read a chain up to the first block that the store does not have."""
        begin, count = time.monotonic(), 0
        try:
            while count < len(pull.blocks):
                some = pull.blocks[count : count + BATCH]
                values = self._store.get([name for _, name in some])
                good = 0
                while good < len(some) and _unpack(values[good], self._tier, some[good][0]):
                    good += 1
                count += good
                if good < len(some):
                    break
        finally:
            seconds = time.monotonic() - begin
            self._mailbox.post(Ended("gone" if self.ready else "read", pull.number, count, seconds, seconds))

    def _give_up(self) -> None:
        self._tell_nodes()

    def _answer_nothing(self) -> None:
        super()._answer_nothing()
        self._give_up_pulls()

    def _give_up_pulls(self) -> None:
        for pull in self._pulls:
            self._mailbox.post(Ended("read", pull.number, 0, 0.0))
        self._pulls.clear()


def _packed(tier: HostTier, slot: int) -> bytes:
    """Encode a block with its check for the store."""
    check = tier.checks[slot]
    return len(check).to_bytes(2, "little") + check + tier.block(slot).numpy().tobytes()


def _unpack(value: bytes | None, tier: HostTier, slot: int) -> bool:
    """Decode a value into a slot; False if it is malformed. The bytes are verified when the block is loaded."""
    if value is None or len(value) < 2:
        return False
    begin = 2 + int.from_bytes(value[:2], "little")
    if len(value) != begin + tier.place(slot)[1] or begin - 2 > CHECK_BYTES:
        return False
    tier.checks[slot] = value[2:begin]
    tier.block(slot).numpy()[:] = memoryview(value)[begin:]
    return True
