"""The engine's connection to a directory: a thread, so that no step waits for it.

While the directory cannot be reached, its last answers still count and nothing waits for it. Once it is back, this
node's blocks are published again if they were lost.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from itertools import islice

from quire.errors import QuireError
from quire.kv.agent import Agent, Changed
from quire.kv.directory.base import Directory, Node
from quire.kv.mailbox import Located, Mailbox, Nodes
from quire.kv.tiers.orders import Lacks, Locate

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""A node that has been silent for this long is gone."""

REFRESH_SECONDS = 900.0
"""How often everything is published again: a directory may expire entries, and others may withdraw them by mistake."""

TELL_SECONDS = 0.1
"""How long changes are collected: each call costs both sides more than the blocks in it, and takes processor time from
the engine."""

BATCH = 512
"""Most blocks per call, which then delays lookups by about 2 ms."""


class DirectoryAgent(Agent):
    """Maintains this node's entries, and looks up others'.

    Args:
        directory: owned by the agent from now on.
        name: this node's name, a new one after each start of the engine.
        address: where it listens for readers of its blocks; "" if it has nothing for others.
        mailbox: gets `Located`, and `Nodes` when they have changed.

    Attributes:
        ready: the directory answers.
        nodes: the other nodes by name, as last known.
        problem: why the directory cannot be used; "" if it can.

    Raises:
        ConfigError: the directory can never be used as it is configured.
    """

    def __init__(self, directory: Directory, name: str, address: str, mailbox: Mailbox) -> None:
        meanwhile = "KV blocks of nodes that are known are read on, and others are computed"
        super().__init__(directory.close, "KV directory", meanwhile, mailbox)
        self._directory = directory
        self._node = Node(name, secrets.token_hex(8), address)
        self._held: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # not published yet: whether this node has the block
        self._stale: list[Lacks] = []
        self._renew = self._refresh = self._tell_at = 0.0
        self._looks = False  # it will check for changes soon, and need not be woken
        self._looking = threading.Lock()
        self._start()

    # -- called by the engine -----------------------------------------------------------------------------------

    def changed(self, came: list[bytes], went: list[bytes]) -> None:
        """This node has gained and lost these blocks."""
        with self._looking:
            tell = self._outbox.leave if self._looks else self._outbox.post
            self._looks = True
            tell(Changed(came, went))

    # -- in the thread ----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Deregister, so that the others see at once that this node is gone."""
        if self.ready and self._node.address:
            try:
                self._directory.leave(self._node)
            except QuireError as error:
                logger.debug("the KV directory was not told of this node's end: %s", error)

    def _advance(self) -> None:
        """Renew the lease, answer lookups, and when it is time publish one batch of changes."""
        now = time.monotonic()
        if now >= self._renew:
            self._join()
        if now >= self._refresh:
            self._tell_all()
        gathering = bool(self._changed or self._stale)
        if not gathering or now >= self._tell_at:
            with self._looking:
                self._looks = False  # set first, so that later changes wake it
        self._take_in(max(0.0, (min(self._tell_at, self._renew) if gathering else self._renew) - time.monotonic()))
        while self._lookups:
            number, names, needed = self._lookups[0]
            found = self._directory.query(names, needed)
            rows = [[node for node in row if node.name != self._node.name] for row in found]
            self._know(self.nodes | {node.name: node for row in rows for node in row})
            self._mailbox.post(Located(number, [[node.name for node in row] for row in rows]))
            del self._lookups[0]
        now = time.monotonic()
        if not gathering:
            self._tell_at = now + TELL_SECONDS
        elif now >= self._tell_at:
            self._tell()

    def _connect(self) -> None:
        self._directory.check()
        self._join()

    def _join(self) -> None:
        """Renew the lease; if the directory has lost this node, publish everything again."""
        if self._node.address and not self._directory.join(self._node, LEASE_SECONDS):
            self._node = self._node._replace(epoch=secrets.token_hex(8))
            self._directory.join(self._node, LEASE_SECONDS)
            self._tell_all()
        self._know({node.name: node for node in self._directory.nodes() if node.name != self._node.name})
        self._renew = time.monotonic() + LEASE_SECONDS / 3
        self._found()

    def _know(self, nodes: dict[str, Node]) -> None:
        """Take note of the other nodes."""
        before, self.nodes = self.nodes, nodes
        if nodes.keys() != before.keys():
            self._mailbox.post(Nodes(frozenset(nodes)))

    def _tell_all(self) -> None:
        self._changed = dict.fromkeys(self._held, True) | {
            block: held for block, held in self._changed.items() if not held
        }
        self._refresh = time.monotonic() + REFRESH_SECONDS

    def _tell(self) -> None:
        """Publish one batch of changes."""
        batch = dict(islice(self._changed.items(), BATCH))
        came = [block for block, held in batch.items() if held]
        went = [block for block, held in batch.items() if not held]
        if went:
            self._directory.withdraw(self._node, went)
        if came and not self._directory.publish(self._node, came):
            self._join()  # the lease has expired: publish everything again
            return
        for block in batch:
            del self._changed[block]
        for name, hashes in self._stale:
            if (node := self.nodes.get(name)) is not None:
                self._directory.withdraw(node, hashes)
        self._stale.clear()

    def _take_in(self, wait_seconds: float) -> None:
        for news in self._outbox.take(wait_seconds):
            match news:
                case Changed(came, went):
                    self._mark(came, True)
                    self._mark(went, False)
                case Locate():
                    self._lookups.append(news)
                case Lacks():
                    self._stale.append(news)

    def _mark(self, blocks: Iterable[bytes], held: bool) -> None:
        if self._node.address:
            blocks = [each for each in blocks if held or each in self._held]
            self._changed |= dict.fromkeys(blocks, held)
            (self._held.update if held else self._held.difference_update)(blocks)

    def _give_up(self) -> None:
        self._stale.clear()
