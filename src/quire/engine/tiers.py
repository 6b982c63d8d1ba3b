"""The tiers below the pool, on the engine's side: carries out the scheduler's orders to the disk and to other engines,
and reports the results to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from quire.config import EngineConfig
from quire.core.kv_manager import KVManager
from quire.core.request import Request
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
from quire.kv.published import Published
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.cost import Costs
from quire.kv.tiers.holders import Holders
from quire.kv.tiers.orders import Ban, Forget, Gone, Lacks, Locate, Prefill, Pull, Read, Write
from quire.kv.tiers.sources import Sources
from quire.kv.tiers.tier import DISK, HOST, PEER, REMOTE, Tier
from quire.log import sanitize
from quire.runner.memory_plan import format_size

if TYPE_CHECKING:  # imported only if there are other engines
    from quire.engine.kv_events import KVEvents
    from quire.kv import wire
    from quire.kv.directory.agent import DirectoryAgent
    from quire.kv.exporter import Exporter
    from quire.kv.nodes import NodeReaders
    from quire.kv.prefill_servers import Importer, Unmet
    from quire.kv.store import StoreAgent
    from quire.kv.transport.base import Transport

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.01
"""How long to wait for the tiers when nothing else can be done."""

SAY_SECONDS = 60.0
"""Least seconds between two warnings about engines that cannot be asked."""

_UNMET: dict[Unmet, str] = {
    "role": "this engine asks no other one and computes it: start it with --role decode and that one's --prefill-url",
    "not allowed": "that is none of --prefill-url and is not contacted, so another one computes it, or this engine: "
    "add its server there, or dns+http://NAME:PORT for all addresses of a name",
    "unreachable": "that cannot be reached now, so another one computes it, or this engine",
}

STORE = "mooncake://"
"""Prefix of a `kv_directory` that is a store's URL."""

CLUSTER_KEY = "quire/cluster-key"
"""Default path of the cluster key in the user's configuration folder."""


class PrefillRequest(NamedTuple):
    """A prompt to compute for another engine; call `KVTiers.prefilled` with its number when it has ended."""

    number: int
    want: wire.Want


class KVTiers:
    """The tiers below the pool. If a folder cannot be used, that is logged and the engine serves without a disk tier.

    Args:
        config: has the folder, the budget, and the other engines.
        hash_key: key of the blocks' hashes; None for the cluster's, the folder's, or a random one.

    Attributes:
        key: the key with which blocks are named and verified.
        host, disk: the tiers, or None. sources: the index of both, and what comes from elsewhere; None without a host
            tier.
        published: what others can read here; None if nobody wants to know.
        mailbox: messages from the threads; None if there are none.
        exporter: None if other engines cannot read here. importer: None if no other engine computes prompts.
        agent: None without a directory. nodes: None if no blocks are read from other nodes.
        store: agent and nodes in one, if a store has the blocks themselves; otherwise None.
        events: tells routers of other systems what is cached; None if they are not told.
        to_compute, dropped: prompts to compute for other engines, and those no longer needed; taken by whoever drives
            the engine.
        notes: messages for the user.
        unmet: number of requests that named an engine that was not asked, by the reason.
    """

    def __init__(self, config: EngineConfig, hash_key: bytes | None) -> None:
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        self.sources: Sources | None = None
        self.published: Published | None = None
        self.exporter: Exporter | None = None
        self.importer: Importer | None = None
        self.agent: DirectoryAgent | StoreAgent | None = None
        self.nodes: NodeReaders | StoreAgent | None = None
        self.store: StoreAgent | None = None
        self.events: KVEvents | None = None
        elsewhere = config.disk_kv_path is not None or config.kv_role is not None
        self.mailbox = Mailbox() if elsewhere else None
        self.to_compute: list[PrefillRequest] = []
        self.dropped: list[int] = []
        self.notes: list[str] = []
        self.unmet: dict[Unmet, int] = {}
        self._say_again: dict[Unmet, float] = {}  # when the next warning may come
        self._config = config
        self._cluster_key = _cluster_key(config)
        self._transports = contextlib.ExitStack()
        self._folder: tuple[Path, bytes, int] | None = None
        self._kvs: Sequence[KVManager] = ()
        self._on_gone: Callable[[Iterable[bytes]], None] = lambda blocks: None
        if config.disk_kv_path is not None:
            try:
                self._folder = open_folder(config.disk_kv_path)
            except DiskTierError as error:
                self._off(error)
        own = None if self._folder is None else self._folder[1]
        if self._cluster_key is not None:
            own = blake3(self._cluster_key, derive_key_context="quire 2026 names of a cluster's KV blocks").digest()
        self.key = hash_key or own or secrets.token_bytes(32)

    def open(self, host: HostTier | None, identity: dict[str, str], costs: Costs) -> None:
        """Read the folder's index, and connect to the other engines.

        Args:
            identity: everything that a block's bytes depend on.
            costs: estimates whether loading blocks pays.

        Raises:
            ConfigError: a transport or a port is not available, or `kv_events_config` is not valid.
        """
        self.host = host
        if self._config.kv_events_config is not None:
            from quire.engine.kv_events import publisher  # not above: few want it, and it imports ZeroMQ

            self.events = publisher(self._config.kv_events_config)
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
        self.sources.costs = costs
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
        if url.startswith(STORE):
            self._open_store(url, host, cluster_name(key), mailbox)
            return
        from quire.kv import wire
        from quire.kv.directory import masked, open_directory
        from quire.kv.directory.agent import DirectoryAgent
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

    def _open_store(self, url: str, host: HostTier, cluster: str, mailbox: Mailbox) -> None:
        from quire.kv.mooncake_store import MooncakeStore
        from quire.kv.store import StoreAgent

        config = self._config
        store = MooncakeStore(url, cluster, config.kv_host)
        self.store = StoreAgent(store, url, host, mailbox, config.prefills, config.decodes)
        self.agent, self.nodes = self.store, self.store if config.decodes else None
        self.notes.append(f"KV blocks are shared by {url}" + (f": {self.store.problem}" if self.store.problem else ""))

    def connector(self) -> TierConnector | None:
        """A new pool's connector to the tiers; None if there are none."""
        return None if self.sources is None else TierConnector(self.sources, keeps_pace=not self._config.prefills)

    def attach(self, kvs: Sequence[KVManager]) -> None:
        """Attach these pools: others are told what they have."""
        self._kvs = kvs
        if self.events is not None or (self.sources is not None and self.sources.shared):
            self._listen()

    def _listen(self) -> None:
        if self.published is None:
            self.published = Published(None if self.sources is None else self.sources.tier)
            for kv in self._kvs:
                kv.listen(self.published)

    def follow(self, gone: Callable[[Iterable[bytes]], None]) -> None:
        """Call `gone` with blocks of which no part is in a pool or in a tier any more."""
        self._listen()
        self._on_gone = gone

    def holds(self, block_hash: bytes) -> bool:
        """Whether something of a block is in the pool or in the host tier, as far as `follow` knows."""
        return (self.published is not None and block_hash in self.published.blocks) or self._cached(block_hash)

    def _cached(self, block_hash: bytes) -> bool:
        """Whether a block has a place in a prefix cache: windows may have passed it, but not all after it."""
        return any(kv.cache.find(block_hash) is not None for kv in self._kvs)

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
        """Take in messages from the threads; waits up to this many seconds for the first one."""
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
        """Pass on the connectors' orders, and what they have for other engines.

        Args:
            num_steps: number of steps that the engine has computed.
        """
        sources = self.sources
        if published := self.published:
            touched, caches = published.touched, [kv.cache for kv in self._kvs]
            came, went = published.changes(caches)
            if self.events is not None and touched:
                self.events.tell(touched, published.blocks, caches)
            if gone := [each for each in went if not self._cached(each)]:
                self._on_gone(gone)
            if self.agent is not None and self.exporter is not None and (came or went):
                self.agent.changed(came, went)
        if self.mailbox is None or sources is None:
            return
        if sources.orders:
            self._order(sources)
        if self.exporter is not None and (exports := sources.exports):
            self.exporter.steps = num_steps
            for told in exports.advance(sources.pools):
                to = self.store if self.store is not None and told.number >= STORE_NUMBERS else self.exporter
                to.announce(told)

    def check_asked(self, request: Request) -> None:
        """Count and say so if a request's prompt cannot come from the engine that its `kv_transfer_params` name: it is
        computed here then, or by another engine."""
        asked = request.params.kv_transfer_params or {}
        if not asked.get("do_remote_prefill"):
            return
        engine, host = asked.get("remote_engine_id", ""), asked.get("remote_host", "")
        why: Unmet | None = self.importer.unmet(engine, host) if self.importer else "role"
        if why is None:
            return
        self.unmet[why] = self.unmet.get(why, 0) + 1
        if (now := time.monotonic()) < self._say_again.get(why, 0.0):
            return
        self._say_again[why] = now + SAY_SECONDS
        named = " at ".join(sanitize(each) for each in (engine, host) if each) or "another engine"
        logger.warning("kv_transfer_params ask for a prompt from %s, and %s", named, _UNMET[why])

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
        """Of the host tier, by their state."""
        return {} if self.sources is None else self.sources.tier.counts

    def sizes(self, block_bytes: int) -> dict[str, dict[str, int]]:
        """Bytes `stored` in each tier and `loaded` from it; see `counts`."""
        if self.sources is None:
            return {}
        size = self.sources.size_moved
        return {
            tier: {event: round(size(tier, event) * block_bytes) for event in ("stored", "loaded") if event in counts}
            for tier, counts in self.counts().items()
        }

    def waits(self, wait_seconds: float) -> bool:
        """Whether requests wait for the tiers; if so, waits a little for news."""
        if self.sources is None or not self.sources.waits:
            return False
        if wait_seconds:
            self.exchange(wait_seconds)
        return True

    def prefilled(self, numbers: Sequence[int]) -> None:
        """Requests that computed prompts for other engines have ended; see `to_compute`."""
        if self.sources is not None and (exports := self.sources.exports) is not None:
            for number in numbers:
                exports.computed(number)

    def reset(self) -> None:
        """The scheduler's bookkeeping is rebuilt: nothing may be written into slots that it does not know of."""
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
        for each in (self.agent, self.importer, self.nodes, self.exporter, self.disk, self.events):
            if each is not None:
                each.close()
        self._transports.close()
        if self._folder is not None:
            os.close(self._folder[2])
        if self.mailbox is not None:
            self.mailbox.close()
        self.host = self.disk = self._folder = self.importer = self.exporter = self.agent = self.nodes = None
        self.store = self.events = None


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
