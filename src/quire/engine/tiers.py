"""The engine's side of the tiers: it carries out what the scheduler asks of the disk."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from quire.config import EngineConfig
from quire.core.fetches import Forget, Read
from quire.core.lockstep import Lockstep
from quire.core.scheduler import Scheduler
from quire.kv.disk import DiskTier, DiskTierError, open_folder
from quire.kv.host import HostTier
from quire.runner.memory_plan import format_size

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.01
"""How long a step waits for the disk where nothing else can be done."""


class KVTiers:
    """The tiers below the pool. A folder that cannot be used is one line, and the engine serves without it.

    Args:
        config: names the folder, and the budget.
        hash_key: names of blocks; None: the folder's, or a random one.

    Attributes:
        key: with which blocks are named and checked.
        disk: None: there is none.
        notes: for people.
    """

    def __init__(self, config: EngineConfig, hash_key: bytes | None) -> None:
        self.disk: DiskTier | None = None
        self.notes: list[str] = []
        self._budget = config.disk_kv_bytes
        self._folder: tuple[Path, bytes, int] | None = None
        if config.disk_kv_path is not None:
            try:
                self._folder = open_folder(config.disk_kv_path)
            except DiskTierError as error:
                self._off(error)
        own = None if self._folder is None else self._folder[1]
        self.key = hash_key or own or secrets.token_bytes(32)

    def open(self, host: HostTier | None) -> None:
        """Find out what the folder has."""
        if self._folder is None or host is None:
            return
        folder, key, _ = self._folder
        try:
            self.disk = DiskTier(folder, key, self._budget, host)
        except OSError as error:
            self._off(error)
            return
        found = len(self.disk.index) * host.block_bytes
        self.notes.append(f"disk tier: {format_size(self._budget)} in {folder}, which has {format_size(found)} of KV")

    def _off(self, error: Exception) -> None:
        self.notes.append(f"disk_kv_path: {error}; there is no disk tier")
        logger.warning("%s", self.notes[-1])

    def exchange(self, scheduler: Scheduler | Lockstep, wait_seconds: float = 0.0) -> None:
        """Tell the scheduler what the disk has done, and the disk what is wanted."""
        disk = self.disk
        if disk is None or isinstance(scheduler, Lockstep):  # replicas have no tiers yet
            return
        fetches = scheduler.kv.fetches
        for order in fetches.orders:
            if isinstance(order, Forget):
                disk.forget(order.hash)
            elif isinstance(order, Read):
                disk.read(order.number, order.blocks)
            else:
                disk.write(order.slot, order.hash)
        fetches.orders.clear()
        for kind, number, count, seconds in disk.ended(wait_seconds):
            if kind == "read":
                scheduler.read_ended(number, count, seconds)
            else:
                fetches.written(number, bool(count))

    def waits(self, scheduler: Scheduler | Lockstep) -> bool:
        """Whether requests wait for the disk; waits a little for it then."""
        if self.disk is None or not scheduler.kvs[0].fetches.reads:
            return False
        self.exchange(scheduler, WAIT_SECONDS)
        return True

    def reset(self) -> None:
        """The scheduler's books are made anew: nothing may be written into slots that they do not know of."""
        if self.disk is not None:
            self.disk.drain()

    def close(self) -> None:
        """Let go of the folder, once all is written."""
        if self.disk is not None:
            self.disk.close()
        if self._folder is not None:
            os.close(self._folder[2])
        self.disk = self._folder = None
