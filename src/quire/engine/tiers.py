"""The tiers below the pool, on the engine's side: carries out the connectors' orders to the disk and to other engines,
and reports the results to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from quire.config import EngineConfig
from quire.core.kv_manager import KVManager
from quire.engine.elsewhere import Elsewhere, PrefillRequest, names_key
from quire.engine.installed import find, names
from quire.errors import ConfigError
from quire.kv.disk import DiskTier, DiskTierError, open_folder
from quire.kv.host import HostTier
from quire.kv.mailbox import (
    STORE_NUMBERS,
    Dropped,
    Ended,
    Late,
    Located,
    Mailbox,
    Nodes,
    Progressed,
    Released,
    Servers,
    Wanted,
)
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.cost import Costs
from quire.kv.tiers.holders import Holders
from quire.kv.tiers.orders import Ban, Forget, Gone, Lacks, Locate, Prefill, Pull, Read, Write
from quire.kv.tiers.sources import Sources
from quire.kv.tiers.tier import DISK, HOST, PEER, REMOTE, Tier
from quire.runner.memory_plan import format_size

if TYPE_CHECKING:  # imported only if there are other engines
    from quire.kv.directory.agent import DirectoryAgent
    from quire.kv.nodes import NodeReaders
    from quire.kv.prefill_servers import Unmet
    from quire.kv.store import BlockStore, StoreAgent
    from quire.kv.transport.base import Transport

logger = logging.getLogger(__name__)

STORES = {"mooncake": "quire.kv.mooncake_store:MooncakeStore"}
"""What makes a `kv.store.BlockStore`, by the scheme of its URL in `kv_directory`; others may be installed."""

STORE_GROUP = "quire.kv_stores"
"""The group of their entry points."""

CLUSTER_KEY = "quire/cluster-key"
"""Default path of the cluster key in the user's configuration folder."""


class KVTiers(Elsewhere):
    """The tiers below the pool. If a folder cannot be used, that is logged and the engine serves without a disk tier.

    Args:
        config: has the folder, the budget, and the other engines.
        hash_key: key of the blocks' hashes; None for the cluster's, the folder's, or a random one.

    Attributes:
        agent: None without a directory. nodes: None if no blocks are read from other nodes.
        store: agent and nodes in one, if a store has the blocks themselves; otherwise None.
    """

    def __init__(self, config: EngineConfig, hash_key: bytes | None) -> None:
        super().__init__(config, hash_key)
        self.agent: DirectoryAgent | StoreAgent | None = None
        self.nodes: NodeReaders | StoreAgent | None = None
        self.store: StoreAgent | None = None
        elsewhere = config.disk_kv_path is not None or config.kv_role is not None
        self.mailbox = Mailbox() if elsewhere else None
        self._cluster_key = _cluster_key(config)
        self._transports = contextlib.ExitStack()
        self._folder: tuple[Path, bytes, int] | None = None
        if config.disk_kv_path is not None:
            try:
                self._folder = open_folder(config.disk_kv_path)
            except DiskTierError as error:
                self._off(error)
        own = None if self._folder is None else self._folder[1]
        if self._cluster_key is not None:
            own = names_key(self._cluster_key)
        self.key = hash_key or own or self.key

    def open(self, host: HostTier | None, identity: dict[str, str], pair_share: float, read: float) -> None:
        """Read the folder's index, and connect to the other engines; see `Elsewhere`."""
        super().open(host, identity, pair_share, read)
        self.host = host
        if host is None:
            return
        if self._folder is not None:
            self._open_disk(host, *self._folder[:2])
        if self._cluster_key is not None and self._config.kv_role is not None and self.mailbox is not None:
            self._open_roles(host, self._cluster_key, self.mailbox, identity)
        first = host.groups[0].block_bytes
        self.sources = Sources(
            Tier(*(each.count for each in host.groups)),
            self.disk.index if self.disk else None,
            [each.block_bytes / first for each in host.groups],
        )
        self.sources.costs = Costs(pair_share, read)
        self.sources.holders = Holders() if self.agent is not None and self.nodes else None
        self.sources.shared = self.agent is not None and self.exporter is not None

    def _open_roles(self, host: HostTier, key: bytes, mailbox: Mailbox, identity: dict[str, str]) -> None:
        from quire.kv import wire
        from quire.kv.exporter import Exporter
        from quire.kv.importer import Prefiller, check_url
        from quire.kv.prefill_servers import Importer

        config, curve = self._config, wire.curve(key)
        transports = self._opened(host, key)
        names = ", ".join(each.name for each in transports)
        if config.prefills:
            where = config.kv_host, config.kv_port
            self.exporter = Exporter(*where, curve, identity, host, transports, mailbox)
            self.notes.append(f"other engines may have prompts computed here: {self.exporter.address} ({names})")
        if config.prefill_urls and config.decodes:
            links = curve, identity, host, transports, mailbox, self.exporter.name if self.exporter else ""
            for url in config.prefill_urls:
                check_url(url)
            self.importer = Importer(config.prefill_urls, lambda url: Prefiller(url, *links), mailbox)
            self.notes.append(
                f"prompts of {config.prefill_min_tokens:,} tokens and more are computed by "
                f"{', '.join(config.prefill_urls)} ({names}), or here while it cannot be reached"
            )
        if config.kv_directory is not None:
            self._open_directory(config.kv_directory, host, key, mailbox, identity, transports)

    def _open_directory(
        self,
        url: str,
        host: HostTier,
        key: bytes,
        mailbox: Mailbox,
        identity: dict[str, str],
        transports: list[Transport],
    ) -> None:
        scheme = url.partition("://")[0]
        if scheme in STORES or scheme in names(STORE_GROUP):
            make = find("kv_directory", STORES.get(scheme, scheme), STORE_GROUP)
            self._open_store(make(url, cluster_name(key), self._config.kv_host), url, host, mailbox)
            return
        from quire.kv import wire
        from quire.kv.directory import open_directory
        from quire.kv.directory.agent import DirectoryAgent
        from quire.kv.directory.base import masked
        from quire.kv.nodes import NodeReader, NodeReaders

        curve, exporter = wire.curve(key), self.exporter
        name, address = (exporter.name, str(exporter.address)) if exporter else ("", "")
        self.agent = DirectoryAgent(open_directory(url, cluster_name(key)), name, address, mailbox)
        if self._config.decodes:
            links = curve, identity, host, transports, mailbox
            self.nodes = NodeReaders(lambda node: NodeReader(node.address, *links), mailbox)
        self.notes.append(
            f"KV blocks are shared with the nodes of {masked(url)}"
            + (f": {self.agent.problem}" if self.agent.problem else f", {len(self.agent.nodes)} others so far")
        )

    def _open_store(self, store: BlockStore, url: str, host: HostTier, mailbox: Mailbox) -> None:
        from quire.kv.store import StoreAgent

        config = self._config
        self.store = StoreAgent(store, url, host, mailbox, config.prefills, config.decodes)
        self.agent, self.nodes = self.store, self.store if config.decodes else None
        self.notes.append(f"KV blocks are shared by {url}" + (f": {self.store.problem}" if self.store.problem else ""))

    def connector(self) -> TierConnector | None:
        """A new pool's connector to the tiers; None if there are none."""
        return None if self.sources is None else TierConnector(self.sources, keeps_pace=not self._config.prefills)

    def attach(self, kvs: Sequence[KVManager]) -> None:
        """See `Elsewhere`."""
        super().attach(kvs)
        if self.sources is not None and self.sources.shared:
            self._listen()

    def _opened(self, host: HostTier, key: bytes) -> list[Transport]:
        """Open the transports to other engines, fastest first."""
        from quire.kv.transport import open_transport
        from quire.kv.transport.base import TransferError

        given, opened = self._config.kv_transport, []
        for name in [given] if given else ["shared_memory", "socket"]:
            try:
                opened.append(open_transport(name, host.region, key, self._config.kv_host))
            except TransferError as error:
                if given:
                    raise ConfigError(f"kv_transport={name}: {error}") from error
                self.notes.append(f"transport {name} cannot be used: {error}")
                continue
            self._transports.callback(opened[-1].close)
        return opened

    def _open_disk(self, host: HostTier, folder: Path, key: bytes) -> None:
        budget = self._config.disk_kv_bytes
        try:
            self.disk = DiskTier(folder, key, budget, host, self.mailbox)
        except OSError as error:
            self._off(error)
            return
        found, free = self.disk.num_bytes, shutil.disk_usage(folder).free
        note = f"disk tier: {format_size(budget)} in {folder}, which has {format_size(found)} of KV"
        if found + free < budget:
            note += (
                f"; only {format_size(free)} are free there, so lower disk_kv_memory: a full disk takes no new blocks"
            )
        self.notes.append(note)

    def _off(self, error: Exception) -> None:
        self.notes.append(f"disk_kv_path: {error}; there is no disk tier")
        logger.warning("%s", self.notes[-1])

    def exchange(self, wait_seconds: float = 0.0) -> None:
        """See `Elsewhere`."""
        sources = self.sources
        if self.mailbox is None or sources is None:
            return
        if self.importer is not None:
            sources.prefill_tokens = self._config.prefill_min_tokens if self.importer.ready else None
        if sources.holders is not None and self.agent is not None:
            sources.holders.ready = self.agent.ready
        for news in self.mailbox.take(wait_seconds):
            self._take_in(sources, news)

    def tell(self, num_steps: int) -> None:
        """Tell others what has changed, and pass on the connectors' orders, and what they have for other engines."""
        super().tell(num_steps)
        sources = self.sources
        if self.mailbox is None or sources is None:
            return
        if sources.orders:
            self._order(sources)
        if self.exporter is not None and (exports := sources.exports):
            self.exporter.steps = num_steps
            for told in exports.advance(sources.pools):
                to = self.store if self.store is not None and told.number >= STORE_NUMBERS else self.exporter
                to.announce(told)

    def _changed(self, came: list[bytes], went: list[bytes]) -> None:
        if self.agent is not None and self.exporter is not None:
            self.agent.changed(came, went)

    def _unmet(self, engine: str, host: str) -> Unmet | None:
        return self.importer.unmet(engine, host) if self.importer else "role"

    def _order(self, sources: Sources) -> None:
        disk, importer, agent, nodes = self.disk, self.importer, self.agent, self.nodes
        for order in sources.orders:
            match order:
                case Forget(block_hash) if disk:
                    disk.forget(block_hash)
                case Read(number, blocks) if disk:
                    disk.read(number, blocks)
                case Write(slot, block_hash) if disk:
                    disk.write(slot, block_hash)
                case Prefill() if importer:
                    importer.order(order)
                case Locate() | Lacks() if agent:
                    agent.order(order)
                case Pull() if agent and nodes:
                    nodes.pull(order, agent.nodes.get(order.node))
                case Ban(node, block_hash) if agent and nodes:
                    logger.error("KV node %s gave a block with other bytes: nothing more is read from it", node)
                    nodes.ban(node)
                    agent.order(Lacks(node, [block_hash]))
        sources.orders.clear()

    def _take_in(self, sources: Sources, news: object) -> None:
        exports = sources.exports
        match news:
            case Ended("read" | "gone" as kind, number, count, seconds, moving, engine):
                sources.read_ended(number, count, seconds, kind == "gone", moving, engine)
            case Located(number, holders):
                sources.located(number, holders, time.monotonic())
            case Servers() if self.importer:
                self.importer.listed(news)
            case Nodes(names):
                sources.keep_nodes(names)
                if self.nodes is not None:
                    self.nodes.keep(names)
            case Ended("write", slot, count):
                sources.written(slot, bool(count))
            case Progressed(number):
                sources.progressed(number, time.monotonic())
            case Late(number):
                sources.stalled(number)
            case Wanted(number, want) if self.exporter and want.tokens and sources.asked_for(want.hashes):
                self.exporter.announce(Gone(number))  # else each might wait for the other
            case Wanted(number, want) if exports:
                computing = bool(want.tokens) and exports.missing(want.hashes, sources.pools)
                exports.begin(number, want.hashes, computing)
                if computing:
                    self.to_compute.append(PrefillRequest(number, want))
            case Released(number, blocks) if exports:
                exports.release(number, blocks)
            case Dropped(number) if exports:
                exports.end(number)
                self.dropped.append(number)

    def counts(self) -> dict[str, dict[str, int]]:
        """For each tier, the numbers of blocks `stored` there, `loaded` from there, and `bad`; for other engines, of
        blocks read by them, read from them, and announced by them when no longer wanted; for other nodes, of blocks
        read from them, that no node had, that a node did not have although the directory said so, and bad ones.
        """
        sources = self.sources
        if sources is None:
            return {}
        events: dict[str, tuple[str, ...]] = {HOST: ("stored", "loaded", "bad")}
        if sources.disk is not None:
            events[DISK] = "stored", "loaded"
        if self.exporter or self.importer:
            events[PEER] = "stored", "loaded"
        if sources.holders is not None:
            events[REMOTE] = ("loaded",)
        counts = {tier: {event: sources.num_moved(tier, event) for event in own} for tier, own in events.items()}
        if self.importer:
            counts[PEER]["unwanted"] = self.importer.unwanted
        if (found := sources.holders) is not None:
            counts[REMOTE] |= {"missed": found.missed, "stale": found.stale, "bad": found.bad}
        return counts

    def slots(self) -> dict[str, int]:
        """See `Elsewhere`."""
        return {} if self.sources is None else self.sources.tier.counts

    def sizes(self, block_bytes: int) -> dict[str, dict[str, int]]:
        """See `Elsewhere`."""
        if self.sources is None:
            return {}
        size = self.sources.size_moved
        return {
            tier: {event: round(size(tier, event) * block_bytes) for event in ("stored", "loaded") if event in counts}
            for tier, counts in self.counts().items()
        }

    def waits(self, wait_seconds: float) -> bool:
        """See `Elsewhere`."""
        if self.sources is None or not self.sources.waits:
            return False
        if wait_seconds:
            self.exchange(wait_seconds)
        return True

    def prefilled(self, numbers: Sequence[int]) -> None:
        """See `Elsewhere`."""
        if self.sources is not None and (exports := self.sources.exports) is not None:
            for number in numbers:
                exports.computed(number)

    def reset(self) -> None:
        """See `Elsewhere`."""
        if self.disk is not None:
            self.disk.drain()
        for readers in (self.importer, self.nodes):
            if readers is not None:
                readers.drain()
        for news in self.mailbox.take() if self.mailbox is not None else ():
            if isinstance(news, Nodes | Servers) and self.sources is not None:
                self._take_in(self.sources, news)  # sent only when they change, so they must not be lost
        if self.exporter is not None:
            self.exporter.all_gone()
        if self.store is not None:
            self.store.all_gone()

    def close(self) -> None:
        """Finish all writes, release the folder, and disconnect from other engines."""
        super().close()
        for each in (self.agent, self.importer, self.nodes, self.exporter, self.disk):
            if each is not None:
                each.close()
        self._transports.close()
        if self._folder is not None:
            os.close(self._folder[2])
        if self.mailbox is not None:
            self.mailbox.close()
        self.host = self.disk = self._folder = self.importer = self.exporter = self.agent = self.nodes = None
        self.store = None


def cluster_name(key: bytes) -> str:
    """An id of a cluster's key that does not reveal it."""
    return blake3(key, derive_key_context="quire 2026 name of a cluster").hexdigest(16)


def _cluster_key(config: EngineConfig) -> bytes | None:
    """The key of all engines that share KV; None if this one shares none.

    Raises:
        ConfigError: it cannot be read or created.
    """
    if config.cluster_key_file is None and config.kv_role is None:
        return None
    from quire.curve import read_token

    if config.cluster_key_file is not None:
        return read_token(config.cluster_key_file, "--cluster-key-file")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    file = folder / CLUSTER_KEY
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.touch(0o600)
        new.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(new, file)  # if two do this at once, one wins
        new.unlink()
    except OSError as error:
        raise ConfigError(
            f"kv_role={config.kv_role}: {file} cannot be created ({error.strerror or error}); give another file with "
            "--cluster-key-file"
        ) from error
    return read_token(str(file), "cluster key")
