"""What speaks with a directory for an engine: a thread, so that no step waits for it.

While the directory cannot be reached, what it said before counts, nothing is waited for, and once it is back, all that
this node holds is published again if it was lost.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from quire.errors import ConfigError, QuireError
from quire.kv.directory.base import Directory, DirectoryError, Node
from quire.kv.mailbox import Located, Mailbox, Nodes

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""A node that is not heard of for so long is gone."""

REFRESH_SECONDS = 900.0
"""So often everything is published again: a directory may forget what is old, and others may take back by mistake."""

BATCH = 512
"""Blocks of one call, which delays lookups by about 2 ms."""

RETRY_SECONDS, MOST_RETRY_SECONDS = 0.2, 2.0
"""Between attempts to reach a directory: at first, and after many that failed."""


class _Changed(NamedTuple):
    came: list[bytes]
    went: list[bytes]


class _Locate(NamedTuple):
    number: int
    hashes: list[bytes]


class _Withdraw(NamedTuple):
    node: str
    hashes: list[bytes]


class DirectoryAgent:
    """Keeps this node's entries, and asks about others'.

    Args:
        directory: the agent's own from now on.
        name: of this node, another one after each start of the engine.
        address: where it listens for those who read its blocks; "": it holds nothing for others.
        mailbox: told `Located`, and `Nodes` where they are others than before.
        lease: seconds after which a node that says nothing is gone.

    Attributes:
        ready: the directory answers.
        nodes: the others, by name, as they were known last.
        problem: why the directory cannot be used; "": it can.

    Raises:
        ConfigError: the directory can never be used as it was configured.
    """

    def __init__(
        self, directory: Directory, name: str, address: str, mailbox: Mailbox, lease: float = LEASE_SECONDS
    ) -> None:
        self._directory, self._mailbox, self._lease = directory, mailbox, lease
        self._node = Node(name, secrets.token_hex(8), address)
        self.ready, self.problem = False, ""
        self.nodes: dict[str, Node] = {}
        self._held: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # what is not told yet, and whether it is held
        self._lookups: list[_Locate] = []
        self._stale: list[_Withdraw] = []
        self._renew = self._refresh = 0.0
        self._outbox = Mailbox()
        self._stopping = False
        try:
            directory.check()
            self._join()
        except DirectoryError as error:
            self._lost(error)
        self._thread = threading.Thread(target=self._run, name="quire-directory", daemon=True)
        self._thread.start()

    # -- the engine's side -----------------------------------------------------------------------------------

    def changed(self, came: list[bytes], went: list[bytes]) -> None:
        """Blocks that this node holds from now on, and those that it does not any more."""
        self._outbox.post(_Changed(came, went))

    def locate(self, number: int, hashes: list[bytes]) -> None:
        """Ask who holds a chain of blocks; `Located` tells, soon or late."""
        self._outbox.post(_Locate(number, hashes))

    def withdraw(self, node: str, hashes: Sequence[bytes]) -> None:
        """A node does not hold what it published."""
        self._outbox.post(_Withdraw(node, list(hashes)))

    def close(self) -> None:
        """Say no more; the others see at once that this node is gone."""
        self._stopping = True
        self._outbox.post(None)
        self._thread.join()
        self._outbox.close()
        self._directory.close()

    # -- the thread's ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_SECONDS
        while not self._stopping:
            try:
                self._advance()
                pause = RETRY_SECONDS
            except (DirectoryError, ConfigError) as error:
                self._lost(error)
                self._rest(pause)
                pause = min(2 * pause, MOST_RETRY_SECONDS)
            except Exception:
                logger.exception("what speaks with the KV directory has met an error, and goes on")
                self._lost(DirectoryError("an error here"))
                self._rest(pause)
        if self.ready and self._node.address:
            try:
                self._directory.leave(self._node)
            except QuireError as error:
                logger.debug("the KV directory was not told of this node's end: %s", error)

    def _advance(self) -> None:
        """Be there, answer, and tell one batch of what has changed."""
        now = time.monotonic()
        if not self.ready or now >= self._renew:
            self._join()
        if now >= self._refresh:
            self._tell_all()
        busy = bool(self._changed or self._stale)
        self._take_in(0.0 if busy else max(0.001, self._renew - time.monotonic()))
        while self._lookups:
            number, hashes = self._lookups[0]
            rows = [[node for node in row if node.name != self._node.name] for row in self._directory.query(hashes)]
            self._know(self.nodes | {node.name: node for row in rows for node in row})
            self._mailbox.post(Located(number, [[node.name for node in row] for row in rows]))
            del self._lookups[0]
        self._tell()

    def _join(self) -> None:
        """Renew the lease; where the directory has lost this node, all is told again."""
        if self._node.address and not self._directory.join(self._node, self._lease):
            self._node = self._node._replace(epoch=secrets.token_hex(8))
            self._directory.join(self._node, self._lease)
            self._tell_all()
        self._know({node.name: node for node in self._directory.nodes() if node.name != self._node.name})
        self._renew = time.monotonic() + self._lease / 3
        if self.problem:
            logger.info("the KV directory answers again")
        self.ready, self.problem = True, ""

    def _know(self, nodes: dict[str, Node]) -> None:
        """These others are there."""
        before, self.nodes = self.nodes, nodes
        if nodes.keys() != before.keys():
            self._mailbox.post(Nodes(frozenset(nodes)))

    def _tell_all(self) -> None:
        self._changed = dict.fromkeys(self._held, True) | {
            block: held for block, held in self._changed.items() if not held
        }
        self._refresh = time.monotonic() + REFRESH_SECONDS

    def _tell(self) -> None:
        """One batch of what has changed."""
        batch = dict(islice(self._changed.items(), BATCH))
        came = [block for block, held in batch.items() if held]
        went = [block for block, held in batch.items() if not held]
        if went:
            self._directory.withdraw(self._node, went)
        if came and not self._directory.publish(self._node, came):
            self._join()  # its lease has ended: all is told again
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
                case _Changed(came, went):
                    self._mark(came, True)
                    self._mark(went, False)
                case _Locate():
                    self._lookups.append(news)
                case _Withdraw():
                    self._stale.append(news)

    def _mark(self, blocks: Iterable[bytes], held: bool) -> None:
        if self._node.address:
            self._changed |= dict.fromkeys(blocks, held)
            (self._held.update if held else self._held.difference_update)(blocks)

    def _lost(self, error: QuireError) -> None:
        """The directory does not answer: nobody waits for it."""
        if not self.problem:
            logger.warning("%s; KV blocks of nodes that are known are read on, and others are computed", error)
        self.ready, self.problem = False, str(error)
        self._stale.clear()
        self._answer_nothing()

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            self._take_in(left)
            self._answer_nothing()

    def _answer_nothing(self) -> None:
        for number, _ in self._lookups:
            self._mailbox.post(Located(number, None))
        self._lookups.clear()
