"""Regions, and other processes that hold some, for the tests of transports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from quire.bench.transfer import filled, holding, make_region
from quire.kv.transport import installed, open_transport
from quire.kv.transport.base import Range, Region, Transport
from quire.kv.transport.socket import (
    PIECE,
    SocketAddress,
    SocketTransport,
)

TOKEN = "0123456789abcdef"
SIZE = 4 * PIECE + 12_345
SEED = 7
POISON = 0xEE
TIMEOUT = 60.0

CONTENT = filled(SIZE, SEED)
"""What holders have."""


def poisoned(size: int = SIZE) -> Region:
    made = make_region(size)
    made.memory[:] = bytes([POISON]) * size
    return made


def opened(name: str, region: Region, token: str = TOKEN) -> Transport:
    if name not in installed():
        pytest.skip(f"{name} is not installed")
    return open_transport(name, region, token.encode())


class Pair:
    """A transport of this process and a link of it to a holder, which is another process."""

    def __init__(self, name: str, region: Region, address: str, holder: subprocess.Popen[bytes]) -> None:
        self.region, self.address, self.holder = region, address, holder
        self.transport = opened(name, region)
        self.link = self.transport.connect(address)

    def whole(self, length: int = SIZE) -> None:
        """All that the holder has, read by a new link."""
        link = self.transport.connect(self.address)
        link.read([Range(0, 0, length)], TIMEOUT)
        link.close()
        assert self.region.memory == CONTENT


@contextlib.contextmanager
def paired(name: str, region: Region, size: int = SIZE) -> Iterator[Pair]:
    if name not in installed():
        pytest.skip(f"{name} is not installed")
    with holding(name, TOKEN, "127.0.0.1", size, SEED) as (address, holder):
        pair = Pair(name, region, address, holder)
        try:
            yield pair
        finally:
            with contextlib.suppress(ProcessLookupError):
                holder.send_signal(signal.SIGCONT)
            pair.transport.close()


@contextlib.contextmanager
def served(region: Region) -> Iterator[tuple[SocketTransport, SocketAddress]]:
    """A holder in this process."""
    theirs = make_region(SIZE)
    theirs.memory[:] = CONTENT
    holder = SocketTransport(theirs, TOKEN.encode())
    try:
        yield holder, msgspec.json.decode(holder.address, type=SocketAddress)
    finally:
        holder.close()
        os.close(theirs.fd)


def untouched(region: Region) -> bool:
    return region.memory == bytes([POISON]) * len(region.memory)
