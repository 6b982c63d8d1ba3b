"""Reads blocks that other nodes have into this node's host tier."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from quire.errors import ConfigError, QuireError
from quire.kv import wire
from quire.kv.directory.base import Node
from quire.kv.importer import LOOK_SECONDS, REST_SECONDS, Prefiller, Reading
from quire.kv.mailbox import Ended, Mailbox
from quire.kv.readers import Readers
from quire.kv.tiers.orders import Pull

logger = logging.getLogger(__name__)


class NodeReader(Prefiller):
    """A connection to another node, which is asked for blocks that it has and computes nothing. It is made when blocks
    are wanted from there; if that fails, the node is left alone for a while.
    """

    what = "KV node"
    steps_aside = False  # its blocks are weighed against computing them

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
        while not self._stopping:
            self._wake.wait(LOOK_SECONDS if self._late else None)
            self._wake.clear()
            self._settle()
            if self._stopping or not self._readings:
                continue
            try:
                self._session()
            except QuireError as error:
                self.state = str(error)
                level = logging.WARNING if self._readings else logging.DEBUG  # it may have shut down normally
                logger.log(level, "KV node %s: %s; its blocks are computed here meanwhile", self.url, error)
            except Exception:
                logger.exception("KV node %s: an error here; its blocks are computed here meanwhile", self.url)
            with self._lock:
                self._resting_until = time.monotonic() + REST_SECONDS
            self._give_up()
            self._outbox.take()
        self._give_up()  # what was ordered just before the end


class NodeReaders(Readers[NodeReader]):
    """The readers of all nodes from which blocks were read.

    Args:
        connect: makes the reader of a node.
        mailbox: gets an `Ended` for reads that cannot be ordered.
    """

    def __init__(self, connect: Callable[[Node], NodeReader], mailbox: Mailbox) -> None:
        super().__init__()
        self._connect, self._mailbox = connect, mailbox
        self._banned: set[str] = set()

    def pull(self, order: Pull, node: Node | None) -> None:
        """Order the reading of blocks into slots; `node` is None if it is no longer known."""
        if node is not None and node.name not in self._banned:
            want = wire.Want(order.number, [name for _, name in order.blocks], [])
            try:
                if node.name not in self.readers:
                    self.readers[node.name] = self._connect(node)
                if self.readers[node.name].order(want, [slot for slot, _ in order.blocks]):
                    return
            except ConfigError as error:
                logger.warning("KV node %s: %s", node.name, error)
        self._mailbox.post(Ended("read", order.number, 0, 0.0))

    def ban(self, node: str) -> None:
        """Never ask this node for anything again."""
        self._banned.add(node)

    def keep(self, names: Collection[str]) -> None:
        super().keep(names)
        self._banned.intersection_update(names)
