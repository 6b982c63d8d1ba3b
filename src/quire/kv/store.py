"""A store of KV blocks that all nodes of a pool share: it has the bytes, and not only who has them.

To the rest of the engine it is one more node, which has whatever was put there: blocks are looked up, read into slots
and checked as another node's are. To be put, a new block goes the way on which other engines have blocks read here
(`core/exports.py`): it is saved, pinned in its slot, copied from there, and let go. Which blocks the store keeps, how
often and for how long, is its own business. One thread speaks with it, so no step waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from quire.kv import wire
from quire.kv.agent import Agent, Changed, Locate
from quire.kv.directory.base import Node
from quire.kv.disk import Ended
from quire.kv.host import CHECK_BYTES, HostTier
from quire.kv.mailbox import STORE_NUMBERS, Dropped, Located, Mailbox, Nodes, Released, Wanted

logger = logging.getLogger(__name__)

BATCH = 64
"""Blocks that are put, or read, at once."""

MOST_WAITING = 2**16
"""New blocks that wait to be put; the oldest are not, where there are more."""

MOST_BAD = 8
"""After so many blocks with other bytes than their names say, nothing more is read from the store."""


class BlockStore(Protocol):
    """Values by name. Whoever may reach it may write there: what is read is checked.

    Raises (each call):
        DirectoryError: it does not answer now. ConfigError: it never will, to what was configured.
    """

    def connect(self) -> None:
        """Find it; called before all else, and again after an error."""

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these it has, or seems to have."""

    def put(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Keep these; of a name that is there already, the old value may stay."""

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The values; None: it has none."""

    def remove(self, names: Sequence[bytes]) -> None:
        """Keep these no longer."""

    def close(self) -> None:
        """Ask no more."""


class _Pull(NamedTuple):
    number: int
    blocks: Sequence[tuple[int, bytes]]


class _Have(NamedTuple):
    number: int
    first: int
    slots: list[int]


class _Gone(NamedTuple):
    number: int


class _Remove(NamedTuple):
    hashes: list[bytes]


class StoreAgent(Agent):
    """What speaks with a store for an engine; it takes the places of `DirectoryAgent`, `NodeReaders` and `Exporter`.

    Args:
        store: the agent's own from now on. where: it is, for people.
        tier: from whose slots blocks are put, and into whose slots they are read.
        mailbox: the engine's.
        puts, reads: what the engine's role lets it do.

    Attributes:
        ready: the store answers. problem: why it does not; "": it does.
        nodes: the store, as if it were another node.

    Raises:
        ConfigError: the store can never be used as it was configured.
    """

    steps = 0

    def __init__(
        self, store: BlockStore, where: str, tier: HostTier, mailbox: Mailbox, puts: bool = True, reads: bool = True
    ) -> None:
        super().__init__(store, "KV store", "KV blocks are computed meanwhile", mailbox)
        self._store, self._where, self._tier = store, where, tier
        self._puts, self._reads = puts, reads
        self._bad = 0
        self._waiting: dict[bytes, None] = {}  # to be put
        self._putting: tuple[int, list[bytes]] | None = None  # what the engine was asked for: the number, and names
        self._told = 0  # of these
        self._pulls: list[_Pull] = []
        self._next = STORE_NUMBERS
        self._inbox = deque[Any]()
        self._start()

    # -- the engine's side -----------------------------------------------------------------------------------

    def changed(self, came: list[bytes], went: list[bytes]) -> None:
        """Blocks that the engine has from now on, and those that it has not any more."""
        if self._puts:
            self._outbox.post(Changed(came, went))

    def pull(self, number: int, blocks: Sequence[tuple[int, bytes]], node: Node | None) -> None:
        """Have blocks read into slots; `Ended` tells."""
        self._outbox.post(_Pull(number, blocks if node is not None else ()))

    def have(self, number: int, first: int, slots: Sequence[int]) -> None:
        """Blocks that were asked for lie in these slots until they are released."""
        self._outbox.post(_Have(number, first, list(slots)))

    def gone(self, number: int) -> None:
        """Nothing more comes of what was asked for."""
        self._outbox.post(_Gone(number))

    def all_gone(self) -> None:
        """Nothing more comes of anything."""
        self._outbox.post(_Gone(-1))

    def withdraw(self, node: str, hashes: Sequence[bytes]) -> None:
        """The store has not what it seemed to have, or has it wrong."""
        self._outbox.post(_Remove(list(hashes)))

    def ban(self, node: str) -> None:
        """A block was bad: the others may be good, so the store goes on as another node, but not for ever."""
        self._bad += 1
        self._tell_nodes()

    def keep(self, nodes: frozenset[str]) -> None:
        """These are there: the store alone is."""

    def told(self) -> dict[str, Any]:
        """Other engines read nothing here."""
        return {}

    def drain(self) -> None:
        """Read nothing more of what was ordered."""
        done = threading.Event()
        self._outbox.post(done)
        done.wait()

    # -- the thread's ----------------------------------------------------------------------------------------

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
        """Take in what the engine says, answer it, and put one batch."""
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
            news = self._inbox.popleft()  # one that meets an error is the only one that is lost
            match news:
                case Changed(came, went):
                    self._waiting |= dict.fromkeys(came)
                    for each in (*went, *islice(list(self._waiting), max(0, len(self._waiting) - MOST_WAITING))):
                        self._waiting.pop(each, None)
                case Locate():
                    self._lookups.append(news)
                case _Pull():
                    self._pulls.append(news)
                case _Have():
                    self._put(news)
                case _Gone(number):
                    self._ended(number)
                case _Remove(hashes) if self.ready:
                    self._store.remove(hashes)
                case threading.Event():
                    self._give_up_pulls()
                    news.set()

    # -- putting -----------------------------------------------------------------------------------------------

    def _begin_putting(self) -> None:
        """Have the engine save the next blocks that are not there."""
        names = list(islice(self._waiting, BATCH))
        missing = [name for name, there in zip(names, self._store.exists(names), strict=True) if not there]
        for name in names:
            del self._waiting[name]
        if missing:
            self._next += 1
            self._putting, self._told = (self._next, missing), 0
            self._mailbox.post(Wanted(self._next, wire.Want(self._next, missing, [])))

    def _put(self, news: _Have) -> None:
        """Blocks lie in slots, where they stay until they are released; what cannot be put is not tried again."""
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
        """The engine has no more of what it was asked for: the next block went; those behind it may be there."""
        if self._putting is not None and number in (-1, self._putting[0]):
            self._waiting = dict.fromkeys(self._putting[1][self._told + 1 :]) | self._waiting if number >= 0 else {}
            self._putting = None

    # -- reading -----------------------------------------------------------------------------------------------

    def _read(self, pull: _Pull) -> None:
        """Read a chain as far as it is there."""
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
    """A block with its check, as it lies in the store."""
    check = tier.checks[slot]
    return len(check).to_bytes(2, "little") + check + tier.block(slot).numpy().tobytes()


def _unpack(value: bytes | None, tier: HostTier, slot: int) -> bool:
    """Lay a block into a slot; False: the value is none. Whether the bytes are right is found when it is loaded."""
    if value is None or len(value) < 2:
        return False
    begin = 2 + int.from_bytes(value[:2], "little")
    if len(value) != begin + tier.place(slot)[1] or begin - 2 > CHECK_BYTES:
        return False
    tier.checks[slot] = value[2:begin]
    tier.block(slot).numpy()[:] = memoryview(value)[begin:]
    return True
