"""NVIDIA's NIXL over UCX (extra `nixl`): RDMA, TCP, or whatever UCX finds within a machine.

UCX opens its own ports on the devices in UCX_NET_DEVICES. Nothing is encrypted, and anyone who can reach them and knows
a region's address (`NixlTransport.address`, which includes its keys) can read and write the region. That is only the
host tier, every block of which is verified. Do not expose these ports to other networks. Not fenced: a read that has
timed out may still be written later; NIXL reports when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.kv.transport.base import Range, Region, TransferError, read_address, write_address
from quire.kv.transport.polled import PolledLink, address_of


class NixlAddress(msgspec.Struct, frozen=True, tag="nixl"):
    """The metadata that NIXL's agents exchange, and the region's address in its process."""

    metadata: bytes
    base: int
    size: int


class NixlTransport:
    """See `Transport`.

    Raises:
        ConfigError: NIXL is not installed, or does not start.
    """

    name, fenced = "nixl", False

    def __init__(self, region: Region) -> None:
        self._base, self._size = address_of(region.memory), len(region.memory)
        self._links: weakref.WeakSet[NixlLink] = weakref.WeakSet()
        self._peers: Counter[str] = Counter()  # number of links to each
        self._lock = threading.Lock()
        library = _library()
        try:
            threads = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = library.nixl_agent(
                f"quire-{secrets.token_hex(8)}", library.nixl_agent_config(backends=["UCX"], sync_mode=threads)
            )
            self._registered = self._agent.register_memory([(self._base, self._size, 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # its errors have no class of their own
            raise ConfigError(f"NIXL does not start: {error!r}; see its log") from error
        self._address = NixlAddress(metadata, self._base, self._size)

    @property
    def address(self) -> str:
        return write_address(self._address)

    def connect(self, address: str) -> NixlLink:
        there = read_address(address, NixlAddress)
        with self._lock:
            try:
                peer = self._agent.add_remote_agent(there.metadata).decode()
                self._agent.make_connection(peer)
            except Exception as error:
                raise TransferError(f"NIXL cannot connect to the other engine: {error!r}") from error
            self._peers[peer] += 1
        link = NixlLink(self._agent, peer, there, self._base, self._size, self._forget)
        self._links.add(link)
        return link

    def _forget(self, peer: str) -> None:
        """A link has ended; after an engine's last one, NIXL forgets the engine."""
        with self._lock:
            self._peers[peer] -= 1
            if self._peers[peer] == 0:
                del self._peers[peer]
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        for link in list(self._links):
            link.close()
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None


class NixlLink(PolledLink):
    """See `Link`.

    Args:
        forget: called once with `peer`, at the end.
    """

    def __init__(
        self, agent: Any, peer: str, there: NixlAddress, base: int, size: int, forget: Callable[[str], None]
    ) -> None:
        super().__init__(there.size, size)
        self._agent, self._peer, self._bases = agent, peer, (there.base, base)
        self._forget = weakref.finalize(self, forget, peer)

    def _begin(self, ranges: Sequence[Range]) -> Callable[[], bool]:
        there, here = self._bases
        from_there = np.array([(there + source, length, 0) for source, _, length in ranges], np.uint64)
        to_here = np.array([(here + target, length, 0) for _, target, length in ranges], np.uint64)
        with _told():
            own, others = (self._agent.get_xfer_descs(of, "DRAM") for of in (to_here, from_there))
            transfer = self._agent.initialize_xfer("READ", own, others, self._peer)
            state = self._agent.transfer(transfer)

        def done() -> bool:
            nonlocal state
            with _told():
                if state == "PROC":
                    state = self._agent.check_xfer_state(transfer)
            if state not in ("DONE", "PROC"):
                raise TransferError("NIXL did not read everything from the other engine; see its log")
            return bool(state == "DONE")

        return done

    def settled(self) -> bool:
        settled = super().settled()
        if settled and self._closed:
            self._forget()  # not before: NIXL does not tell of what still comes from an engine that it has let go of
        return settled

    def close(self) -> None:
        super().close()
        self.settled()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn NIXL's errors, which have no class of their own, into TransferErrors."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"NIXL cannot read from the other engine: {error!r}") from error


def _library() -> Any:
    told = logging.raiseExceptions
    try:
        library = importlib.import_module("nixl_cu12")
    except ImportError as error:
        raise ConfigError(f"the transport nixl needs NIXL: {error}; pip install '.[nixl]'") from error
    logging.raiseExceptions = told  # importing nixl switches that off
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
    return library
