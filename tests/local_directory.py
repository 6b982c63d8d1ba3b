"""A directory within the process: the reference that the real ones are compared with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from quire.errors import ConfigError
from quire.kv.directory.base import Holders, Node, other_cluster


class LocalStore:
    """The data that the directories of one process share.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.lock = clock, threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Lose everything."""
        self.owner: tuple[str, float] = "", 0.0  # the cluster, and until when
        self.leases: dict[str, tuple[Node, float]] = {}
        self.blocks: dict[bytes, dict[str, str]] = {}  # by block, the epochs of nodes

    def find(self, name: str) -> Node | None:
        """The node, if its lease has not expired."""
        node, end = self.leases.get(name, (None, 0.0))
        return node if end > self.clock() else None


class LocalDirectory:
    """See `base.Directory`."""

    def __init__(self, store: LocalStore, cluster: str = "") -> None:
        self._store, self._cluster = store, cluster

    def check(self) -> None:
        """See `Directory`; always succeeds."""

    def join(self, node: Node, lease: float) -> bool:
        with self._store.lock:
            owner, end = self._store.owner
            now = self._store.clock()
            if end > now and owner != self._cluster:
                raise ConfigError(other_cluster("the directory"))
            known = self._store.find(node.name) == node
            self._store.owner = self._cluster, now + lease
            self._store.leases[node.name] = node, now + lease
            return known

    def leave(self, node: Node) -> None:
        with self._store.lock:
            if self._store.find(node.name) == node:
                del self._store.leases[node.name]

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        with self._store.lock:
            there = self._store.find(node.name)
            if there is None or there.epoch != node.epoch:
                return False
            for block in blocks:
                self._store.blocks.setdefault(block, {})[node.name] = node.epoch
            return True

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        with self._store.lock:
            for block in blocks:
                held = self._store.blocks.get(block, {})
                if held.get(node.name) == node.epoch:
                    del held[node.name]

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        with self._store.lock:
            found: Holders = []
            for block, ends in zip(blocks, needed or [True] * len(blocks), strict=True):
                published = self._store.blocks.get(block, {}).items()
                nodes = [(self._store.find(name), epoch) for name, epoch in published]
                holders = [node for node, epoch in nodes if node is not None and node.epoch == epoch]
                if not holders and ends:
                    break
                found.append(holders)
            return found

    def nodes(self) -> list[Node]:
        with self._store.lock:
            return [node for name in self._store.leases if (node := self._store.find(name)) is not None]

    def close(self) -> None:
        """See `Directory`; there is nothing to close."""
