"""Mooncake's transfer engine (extra `mooncake`): RDMA if there are devices, otherwise TCP.

Its ports, for the handshake and for data, are open on all addresses. Nothing is encrypted, and anyone who can reach
them can read and write the registered memory. That is only the host tier, every block of which is verified. Do not
expose these ports to other networks.

Mooncake's engine writes data whenever it arrives, even after it has reported that the transfer failed, until it is
destroyed. So each link has an engine of its own, with its own ports, and an engine whose read has failed is destroyed.
That ends its threads and connections, and takes a second in which no Python code runs.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.kv.transport.base import CONNECT_SECONDS, Range, Region, TransferError, read_address, write_address
from quire.kv.transport.polled import PolledLink, address_of

DONE, WAITING = 1, 0
"""Return values of `transfer_check_status`; any other means failure."""


class MooncakeAddress(msgspec.Struct, frozen=True, tag="mooncake"):
    """Where the engine listens for handshakes ("host:port"), and the region's address in its process."""

    segment: str
    base: int
    size: int


class MooncakeTransport:
    """See `Transport`.

    Args:
        host: this machine's address for other engines.

    Raises:
        ConfigError: Mooncake is not installed, or does not start.
    """

    name, fenced = "mooncake", True

    def __init__(self, region: Region, host: str = "127.0.0.1") -> None:
        self._host, self._base, self._size = host, address_of(region.memory), len(region.memory)
        self._links: weakref.WeakSet[MooncakeLink] = weakref.WeakSet()
        self._spare: list[Any] = [self._started()]  # engines that no link has
        self._engine: Any = None  # from which others read, once anybody asks where it is

    def _started(self) -> Any:
        """An engine of Mooncake that may write into the region.

        Raises:
            ConfigError: it does not start.
        """
        engine = _library().TransferEngine()
        protocol = "rdma" if Path("/sys/class/infiniband").is_dir() else "tcp"
        if engine.initialize(self._host, "P2PHANDSHAKE", protocol, "") != 0:
            raise ConfigError(f"Mooncake does not start with host {self._host!r} by {protocol}; its log says why")
        if engine.register_memory(self._base, self._size) != 0:
            raise ConfigError(f"Mooncake cannot register {self._size} bytes; its log says why (see 'ulimit -l')")
        return engine

    @property
    def address(self) -> str:
        if self._engine is None:
            self._engine = self._taken()
        return write_address(MooncakeAddress(f"{self._host}:{self._engine.get_rpc_port()}", self._base, self._size))

    def _taken(self) -> Any:
        """A spare engine, or else a new one."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._started()

    def connect(self, address: str) -> MooncakeLink:
        there = read_address(address, MooncakeAddress)
        try:
            engine = self._taken()
        except ConfigError as error:
            raise TransferError(str(error)) from error
        self._reach(engine, there.segment)
        link = MooncakeLink(engine, there, self._base, self._size, self._spare)
        self._links.add(link)
        return link

    def _reach(self, engine: Any, segment: str) -> None:
        """Open another engine's segment.

        That takes a lock that all transfers need, for up to a minute if the other engine does not answer. So it is
        probed first, and both happen in a thread.

        Raises:
            TransferError: the other engine does not answer.
        """
        opened = threading.Event()

        def reach() -> None:
            if engine.send_probe(segment) == 0:
                engine.batch_transfer_async_read(segment, [], [], [])
                opened.set()

        thread = threading.Thread(target=reach, name="quire-kv-mooncake", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if opened.is_set():
            return
        if not thread.is_alive():
            self._spare.append(engine)
        raise TransferError(f"no Mooncake engine answers at {segment}")

    def close(self) -> None:
        for link in list(self._links):
            link.close()
        self._spare.clear()
        self._engine = None


class MooncakeLink(PolledLink):
    """See `Link`.

    Args:
        engine: of this link alone. spare: where it goes at the end, if nothing has failed.
    """

    def __init__(self, engine: Any, there: MooncakeAddress, base: int, size: int, spare: list[Any]) -> None:
        super().__init__(there.size, size)
        self._engine, self._segment, self._bases, self._spare = engine, there.segment, (there.base, base), spare

    def _begin(self, ranges: Sequence[Range]) -> Callable[[], bool]:
        """Start one transfer per range: the status of a batch can only be polled for its first transfer."""
        there, here = self._bases
        begun = {
            self._engine.batch_transfer_async_read(self._segment, [here + target], [there + source], [length])
            for source, target, length in ranges
        }
        if 0 in begun:
            raise TransferError(f"Mooncake cannot read from {self._segment}; its log says why")

        def done() -> bool:
            for transfer in list(begun):
                status = self._engine.transfer_check_status(transfer)
                if status not in (DONE, WAITING):
                    raise TransferError(f"Mooncake did not read everything from {self._segment}; see its log")
                if status == DONE:
                    begun.discard(transfer)
            return not begun

        return done

    def _failed(self) -> None:
        super()._failed()
        self._engine = self._left = None  # the last reference: the engine is destroyed

    def close(self) -> None:
        super().close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._spare.append(engine)


def _library() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # there is no other way to set it
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        missing = "apt-get install libibverbs1" if "libibverbs" in str(error) else "pip install '.[mooncake]'"
        raise ConfigError(f"the transport mooncake needs Mooncake's transfer engine: {error}; {missing}") from error
