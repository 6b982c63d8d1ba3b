"""The side that reads what other nodes of a pool hold, into its own host tier."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire.errors import ConfigError, QuireError
from quire.kv import wire
from quire.kv.directory.base import Node
from quire.kv.disk import Ended
from quire.kv.importer import REST_SECONDS, Prefiller, Reading
from quire.kv.mailbox import Mailbox

logger = logging.getLogger(__name__)


class NodeReader(Prefiller):
    """Another node, which is asked for what it has and computes nothing. The connection is made when something is
    wanted from there; where that fails, the node rests for a while.
    """

    what = "KV node"

    def __init__(self, *args: object) -> None:
        self._wake = threading.Event()
        super().__init__(*args)  # type: ignore[arg-type]

    def order(self, want: wire.Want, slots: Sequence[int]) -> bool:
        with self._lock:
            if time.monotonic() < self._resting_until:
                return False
            self._readings[want.number] = Reading(want, slots)
        self._outbox.post(want)
        self._wake.set()
        return True

    def close(self) -> None:
        self._stopping = True
        self._wake.set()
        super().close()

    def _run(self) -> None:
        while self._wake.wait() and not self._stopping:
            self._wake.clear()
            if not self._readings:
                continue
            try:
                self._session()
            except QuireError as error:
                self.state = str(error)
                level = logging.WARNING if self._readings else logging.DEBUG  # it may just have left
                logger.log(level, "KV node %s: %s; its blocks are computed here meanwhile", self.url, error)
            except Exception:
                logger.exception("KV node %s: an error here; its blocks are computed here meanwhile", self.url)
            with self._lock:
                self._resting_until = time.monotonic() + REST_SECONDS
            self._give_up()
            self._outbox.take()


class NodeReaders:
    """All nodes that something was read from.

    Args:
        connect: makes the reader of a node.
        mailbox: told of what cannot be ordered.
    """

    def __init__(self, connect: Callable[[Node], NodeReader], mailbox: Mailbox) -> None:
        self._connect, self._mailbox = connect, mailbox
        self.readers: dict[str, NodeReader] = {}
        self._banned: set[str] = set()
        self._closing: list[threading.Thread] = []

    def pull(self, number: int, blocks: Sequence[tuple[int, bytes]], node: Node | None) -> None:
        """Have blocks read into slots; `node` is None where it is not known any more."""
        if node is not None and node.name not in self._banned:
            want = wire.Want(number, [name for _, name in blocks], [])
            try:
                if node.name not in self.readers:
                    self.readers[node.name] = self._connect(node)
                if self.readers[node.name].order(want, [slot for slot, _ in blocks]):
                    return
            except ConfigError as error:
                logger.warning("KV node %s: %s", node.name, error)
        self._mailbox.post(Ended("read", number, 0, 0.0))

    def ban(self, node: str) -> None:
        """Ask a node for nothing any more."""
        self._banned.add(node)

    def keep(self, nodes: frozenset[str]) -> None:
        """Forget those that have left: these are there."""
        for name in [each for each in self.readers if each not in nodes]:
            thread = threading.Thread(target=self.readers.pop(name).close, name="quire-node-closing", daemon=True)
            self._closing = [*(each for each in self._closing if each.is_alive()), thread]
            thread.start()  # it may take a moment, and a step may not
        self._banned &= nodes

    def drain(self) -> None:
        """Read nothing more of what was ordered."""
        for reader in self.readers.values():
            reader.stop_reading()
        for thread in self._closing:
            thread.join()

    def close(self) -> None:
        """Say no more to any."""
        for reader in self.readers.values():
            reader.close()
        for thread in self._closing:
            thread.join()
