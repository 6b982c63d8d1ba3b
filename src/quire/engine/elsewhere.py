"""KV beyond the pool, on the engine's side, for an engine that has none: others can still be told what is cached here.

`engine/tiers.py` has host memory and what is below, `engine/plugin.py` a connector that is installed; each is imported
only if it is configured.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from quire.config import EngineConfig
from quire.core.external import External
from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.kv.published import Published
from quire.log import sanitize

if TYPE_CHECKING:  # imported only if there is something elsewhere
    from quire.engine.kv_events import KVEvents
    from quire.kv import wire
    from quire.kv.disk import DiskTier
    from quire.kv.exporter import Exporter
    from quire.kv.host import HostTier
    from quire.kv.mailbox import Mailbox
    from quire.kv.mover import Mover
    from quire.kv.prefill_servers import Importer, Unmet
    from quire.kv.tiers.sources import Sources

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


class PrefillRequest(NamedTuple):
    """A prompt to compute for another engine; call `Elsewhere.prefilled` with its number when it has ended."""

    number: int
    want: wire.Want


def names_key(cluster_key: bytes) -> bytes:
    """The key with which the engines of a cluster name blocks."""
    return blake3(cluster_key, derive_key_context="quire 2026 names of a cluster's KV blocks").digest()


class Elsewhere:
    """What an engine has of KV that is elsewhere: nothing. Others may be told what is cached here.

    Args:
        config: its options.
        hash_key: key of the blocks' hashes; None for a random one.

    Attributes:
        key: the key with which blocks are named and verified.
        host, disk: the tiers, or None. sources: what comes from elsewhere, and where it is; None without a host tier.
        published: what others can read here; None if nobody wants to know.
        events: tells routers of other systems what is cached; None if they are not told.
        mailbox: messages from threads; None if there are none.
        exporter: None if other engines cannot read here. importer: None if no other engine computes prompts.
        to_compute, dropped: prompts to compute for other engines, and those no longer needed; taken by whoever drives
            the engine.
        notes: messages for the user.
        unmet: number of requests that named an engine that was not asked, by the reason.
    """

    def __init__(self, config: EngineConfig, hash_key: bytes | None) -> None:
        self.key = hash_key or secrets.token_bytes(32)
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        self.sources: Sources | None = None
        self.published: Published | None = None
        self.events: KVEvents | None = None
        self.mailbox: Mailbox | None = None
        self.exporter: Exporter | None = None
        self.importer: Importer | None = None
        self.to_compute: list[PrefillRequest] = []
        self.dropped: list[int] = []
        self.notes: list[str] = []
        self.unmet: dict[Unmet, int] = {}
        self._say_again: dict[Unmet, float] = {}  # when the next warning may come
        self._config = config
        self._kvs: Sequence[KVManager] = ()
        self._on_gone: Callable[[Iterable[bytes]], None] = lambda blocks: None

    def open(self, host: HostTier | None, identity: dict[str, str], pair_share: float, read: float) -> None:
        """Connect to what is elsewhere.

        Args:
            identity: everything that a block's bytes depend on.
            pair_share, read: see `kv.tiers.cost.Costs`.

        Raises:
            ConfigError: a transport or a port is not available, or `kv_events_config` is not valid.
        """
        if self._config.kv_events_config is not None:
            from quire.engine.kv_events import publisher  # not above: few want it, and it imports ZeroMQ

            self.events = publisher(self._config.kv_events_config)

    def connector(self) -> External | None:
        """A new pool's connector; None if there is nothing elsewhere."""
        return None

    def mover(self) -> Mover | None:
        """Who moves the blocks; None if that is the host tier, or there is nothing to move."""
        return None

    # -- telling others what is here -----------------------------------------------------------------------------

    def attach(self, kvs: Sequence[KVManager]) -> None:
        """Attach these pools: others are told what they have."""
        self._kvs = kvs
        if self.events is not None:
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

    def tell(self, num_steps: int) -> None:
        """Tell others what has changed.

        Args:
            num_steps: number of steps that the engine has computed.
        """
        if published := self.published:
            touched, caches = published.touched, [kv.cache for kv in self._kvs]
            came, went = published.changes(caches)
            if self.events is not None and touched:
                self.events.tell(touched, published.blocks, caches)
            if gone := [each for each in went if not self._cached(each)]:
                self._on_gone(gone)
            if came or went:
                self._changed(came, went)

    def _changed(self, came: list[bytes], went: list[bytes]) -> None:
        """Blocks have come and gone here."""

    # -- requests for other engines ------------------------------------------------------------------------------

    def check_asked(self, request: Request) -> None:
        """Count and say so if a request's prompt cannot come from the engine that its `kv_transfer_params` name: it is
        computed here then, or by another engine."""
        asked = request.params.kv_transfer_params or {}
        if not asked.get("do_remote_prefill"):
            return
        engine, host = asked.get("remote_engine_id", ""), asked.get("remote_host", "")
        why = self._unmet(engine, host)
        if why is None:
            return
        self.unmet[why] = self.unmet.get(why, 0) + 1
        if (now := time.monotonic()) < self._say_again.get(why, 0.0):
            return
        self._say_again[why] = now + SAY_SECONDS
        named = " at ".join(sanitize(each) for each in (engine, host) if each) or "another engine"
        logger.warning("kv_transfer_params ask for a prompt from %s, and %s", named, _UNMET[why])

    def _unmet(self, engine: str, host: str) -> Unmet | None:
        """Why this engine is not asked; None if it is."""
        return "role"

    def prefilled(self, numbers: Sequence[int]) -> None:
        """Requests that computed prompts for other engines have ended; see `to_compute`."""

    # -- steps ---------------------------------------------------------------------------------------------------

    def exchange(self, wait_seconds: float = 0.0) -> None:
        """Take in messages from threads; waits up to this many seconds for the first one."""

    def waits(self, wait_seconds: float) -> bool:
        """Whether requests wait for what is elsewhere; if so, waits a little for news."""
        return False

    def reset(self) -> None:
        """The scheduler's bookkeeping is rebuilt: nothing may be written that it does not know of."""

    def close(self) -> None:
        """Disconnect."""
        if self.events is not None:
            self.events.close()
            self.events = None

    # -- counters ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, dict[str, int]]:
        """For each tier, the numbers of blocks `stored` there, `loaded` from there, and `bad`."""
        return {}

    def slots(self) -> dict[str, int]:
        """Of the host tier, by their state."""
        return {}

    def sizes(self, block_bytes: int) -> dict[str, dict[str, int]]:
        """Bytes `stored` in each tier and `loaded` from it; see `counts`."""
        return {}
