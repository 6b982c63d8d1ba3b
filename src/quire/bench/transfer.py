"""Measures how fast blocks are transferred from one process to another, by each transport."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from quire.child import python, spawn_quietly
from quire.errors import BenchmarkError, ConfigError
from quire.kv.transport import open_transport
from quire.kv.transport.base import Link, Range, Region

REGION = 64 << 20
"""Bytes of each of the two regions."""

BLOCKS = 4 << 10, 16 << 10, 64 << 10, 128 << 10, 512 << 10, 4 << 20
"""Block sizes in bytes. 128 KiB is a block of 64 tokens of a model with a few billion parameters and GQA."""

MOST_BLOCKS = 512
"""Blocks read at once."""

ROUNDS = 3
"""Number of reads of many blocks, of which the best counts."""

SINGLES = 30
"""Number of reads of one block, of which the median counts."""

START_SECONDS, READ_SECONDS = 60.0, 60.0


class Held(msgspec.Struct):
    """The other process's task: offer a region (`filled`), write its address to `fd`, and wait until `fd` is closed."""

    transport: str
    token: str
    host: str
    size: int
    seed: int
    fd: int


class Said(msgspec.Struct):
    """The other process's answer: the address of its region, or the error."""

    address: str = ""
    error: str = ""


class Figures(msgspec.Struct):
    """The figures of one transport and one block size.

    Attributes:
        one_us: time for one block, in microseconds.
        coalesced_gb_s, scattered_gb_s: GB/s (1e9 bytes) for many adjacent blocks, read as one range; and for blocks at
            random places on both sides, one range each.
    """

    transport: str
    block: int
    one_us: float
    coalesced_gb_s: float
    scattered_gb_s: float


def make_region(size: int) -> Region:
    """A region of zeros, whose memfd stays open as long as this process lives."""
    fd = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return Region(memoryview(mmap.mmap(fd, size)), fd)


def filled(size: int, seed: int) -> bytes:
    """The contents of the other process's region."""
    return np.random.default_rng(seed).bytes(size)


@contextlib.contextmanager
def holding(
    transport: str, token: str, host: str, size: int, seed: int
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start another process that offers a region; returns the address and the process.

    Raises:
        ConfigError: the transport does not start there.
    """
    own, others = socket.socketpair()
    with own, others:
        start = Held(transport, token, host, size, seed, others.fileno())
        process = spawn_quietly(python("quire.bench.transfer_holder"), start, fds=(others.fileno(),))
        try:
            others.close()
            own.settimeout(START_SECONDS)
            with own.makefile("rb") as lines:
                line = lines.readline()
            said = msgspec.json.decode(line, type=Said) if line else Said(error="the other process has died")
            if said.error:
                raise ConfigError(said.error)
            yield said.address, process
        except TimeoutError as error:
            raise BenchmarkError(f"the other process has not begun within {START_SECONDS:g} seconds") from error
        finally:
            process.kill()
            process.wait()


def measure(transport: str, host: str) -> Iterator[Figures]:
    """Measure a transport between this process and one that is started for it; yields figures per block size.

    Raises:
        ConfigError: the transport does not start.
        TransferError: it fails.
        BenchmarkError: it delivers wrong bytes.
    """
    token, seed = secrets.token_hex(32), 1
    region, content = make_region(REGION), filled(REGION, seed)
    with holding(transport, token, host, REGION, seed) as (address, _):
        opened = open_transport(transport, region, token.encode(), host)
        try:
            link = opened.connect(address)
            link.read([Range(0, 0, REGION)], READ_SECONDS)  # allocates the memory
            for block in BLOCKS:
                yield _figures(transport, block, link, region, content)
            link.close()
        finally:
            opened.close()
            os.close(region.fd)


def _figures(transport: str, block: int, link: Link, region: Region, content: bytes) -> Figures:
    count = min(MOST_BLOCKS, REGION // block // 2)
    places = random.Random(block).sample(range(REGION // block), 2 * count)
    scattered = [Range(places[i] * block, places[count + i] * block, block) for i in range(count)]
    one = statistics.median(_seconds(link, [moved]) for moved in (scattered * SINGLES)[:SINGLES])
    coalesced = min(_seconds(link, [Range(REGION - count * block, 0, count * block)]) for _ in range(ROUNDS))
    region.memory[:] = bytes(REGION)
    apart = min(_seconds(link, scattered) for _ in range(ROUNDS))
    for source, target, length in scattered:
        if region.memory[target : target + length] != content[source : source + length]:
            raise BenchmarkError(f"{transport} delivered other bytes than the other process has")
    size = count * block / 1e9
    return Figures(transport, block, one * 1e6, size / coalesced, size / apart)


def _seconds(link: Link, ranges: Sequence[Range]) -> float:
    began = time.perf_counter()
    link.read(ranges, READ_SECONDS)
    return time.perf_counter() - began


def devices(system: Path = Path("/sys")) -> list[tuple[str, str]]:
    """Describe this machine's RDMA hardware: a row per device port with its GIDs, and the module that lets devices read
    a GPU's memory.
    """
    rows = [row for port in sorted(system.glob("class/infiniband/*/ports/*")) for row in _port(port)]
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (system / "module" / name).is_dir()]
    return [*(rows or [("RDMA devices", "none")]), ("peer memory module", ", ".join(modules) or "none")]


def _port(port: Path) -> list[tuple[str, str]]:
    def read(name: str) -> str:
        with contextlib.suppress(OSError):  # an unused GID cannot be read
            return (port / name).read_text().strip()
        return ""

    name = f"RDMA device {port.parent.parent.name}, port {port.name}"
    gids = sorted((port / "gids").glob("*"), key=lambda path: (len(path.name), path.name))
    found = [
        (f"  GID {gid.name}", f"{value} {read(f'gid_attrs/types/{gid.name}')}".rstrip())
        for gid in gids
        if (value := read(f"gids/{gid.name}")).strip("0:")
    ]
    state = ", ".join(text for text in (read("state"), read("rate"), read("link_layer")) if text)
    return [(name, state or "unknown"), *(found or [("  GIDs", "none")])]
