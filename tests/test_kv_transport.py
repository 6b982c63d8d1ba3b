"""Transports: what is read is what the other process has, or an error; and nobody else gets anything."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from quire.bench.transfer import make_region
from quire.errors import ConfigError
from quire.kv.transport import TRANSPORTS, open_transport
from quire.kv.transport.base import Link, Range, Region, TransferError
from quire.kv.transport.shared import SharedAddress, SharedMemoryTransport
from quire.kv.transport.socket import (
    PIECE,
)
from tests.kv_holders import CONTENT, POISON, SIZE, TIMEOUT, opened, paired, poisoned, untouched

FENCED = ["shared_memory", "socket", "mooncake"]


@pytest.fixture(autouse=True, scope="module")
def by_tcp() -> Iterator[None]:
    """UCX would copy within the machine, which nobody can stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture
def region() -> Iterator[Region]:
    """One's own, poisoned."""
    made = poisoned()
    yield made
    os.close(made.fd)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(1e-3)


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_is_read_is_what_the_other_has_and_nothing_else_changes(name: str, region: Region) -> None:
    with paired(name, region) as pair:
        chance = random.Random(1)
        expected = bytearray(region.memory)
        for _ in range(30):
            ranges, free = [], 0
            for _ in range(chance.choice([1, 3, 400])):
                length = min(chance.choice([1, 100, 4096, 70_000, 2 * PIECE + 5]), (SIZE - free) // 2)
                target = free + chance.randrange(2)
                if length < 1 or target + length > SIZE:
                    break
                ranges.append(Range(chance.randrange(SIZE - length + 1), target, length))
                free = target + length
            for source, target, length in ranges:
                expected[target : target + length] = CONTENT[source : source + length]
            chance.shuffle(ranges)
            pair.link.read(ranges, TIMEOUT)
            assert region.memory == expected
        pair.whole()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_readers_at_once(name: str, region: Region) -> None:
    with paired(name, region) as pair:
        half = SIZE // 2
        links = [pair.link, pair.transport.connect(pair.address)]
        failed: list[Exception] = []

        def read(link: Link, first: int, end: int) -> None:
            try:
                for _ in range(5):
                    link.read(
                        [Range(place, place, min(30_000, end - place)) for place in range(first, end, 30_000)], 60
                    )
            except Exception as error:
                failed.append(error)

        threads = [
            threading.Thread(target=read, args=(links[0], 0, half)),
            threading.Thread(target=read, args=(links[1], half, SIZE)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert failed == []
        assert region.memory == CONTENT


@pytest.mark.parametrize("name", TRANSPORTS)
def test_ranges_that_are_not_within_both_regions_are_refused_and_nothing_is_read(name: str, region: Region) -> None:
    with paired(name, region) as pair:
        good = Range(0, 0, 100)
        for bad in (
            (SIZE - 9, 0, 10),
            (-1, 0, 10),
            (0, SIZE - 9, 10),
            (0, -1, 10),
            (0, 0, 0),
            (5, 5, -2),
            (2**70, 0, 1),
        ):
            with pytest.raises(TransferError, match="not within regions"):
                pair.link.read([good, Range(*bad)], TIMEOUT)
        assert untouched(region)
        pair.whole()


# -- others that stop, die, or are late ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != "shared_memory"])
def test_a_holder_that_is_stopped_is_waited_for_until_the_deadline(name: str, region: Region) -> None:
    with paired(name, region) as pair:
        pair.holder.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"in time|within"):
            pair.link.read([Range(0, 0, SIZE)], 0.5)
        assert 0.5 <= time.monotonic() - began < 5.0
        with pytest.raises(TransferError):
            pair.link.read([Range(0, 0, SIZE)], 0.5)


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != "shared_memory"])
def test_once_a_link_is_settled_nothing_is_written_of_what_it_failed_to_bring(name: str) -> None:
    size = 32 << 20
    region = poisoned(size)
    with paired(name, region, size) as pair:
        stopped = threading.Timer(0.01, pair.holder.send_signal, [signal.SIGSTOP])
        stopped.start()
        with pytest.raises(TransferError):
            for _ in range(10_000):
                pair.link.read([Range(place, place, 1 << 20) for place in range(0, size, 1 << 20)], 1.0)
        pair.link.close()
        assert pair.link.settled() is (name in FENCED)
        region.memory[:] = bytes([POISON]) * size
        pair.holder.send_signal(signal.SIGCONT)
        until(pair.link.settled, "it goes on")
        region.memory[:] = bytes([POISON]) * size
        time.sleep(0.5)
        assert untouched(region)
        with contextlib.closing(pair.transport.connect(pair.address)) as again:
            again.read([Range(0, 0, SIZE)], TIMEOUT)
        assert region.memory[:SIZE] != bytes([POISON]) * SIZE


def test_shared_memory_is_read_whatever_its_holder_does(region: Region) -> None:
    with paired("shared_memory", region) as pair:
        pair.holder.send_signal(signal.SIGSTOP)
        pair.whole()
        pair.holder.kill()
        pair.holder.wait()
        region.memory[:] = bytes(SIZE)
        pair.link.read([Range(0, 0, SIZE)], TIMEOUT)
        assert region.memory == CONTENT
        with pytest.raises(TransferError, match=r"not to be seen from here .* it has ended"):
            pair.transport.connect(pair.address)


def test_a_deadline_that_has_passed_ends_a_copy(region: Region) -> None:
    with (
        paired("shared_memory", region) as pair,
        pytest.raises(TransferError, match="the copy took longer than 0"),
    ):
        pair.link.read([Range(0, 0, SIZE)], 0.0)


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if name != "shared_memory"])
def test_a_holder_that_is_killed_in_the_middle_is_an_error_at_once(name: str) -> None:
    size = 128 << 20
    region = poisoned(size)
    with paired(name, region, size) as pair:
        failed: list[TransferError] = []

        def read() -> None:
            with contextlib.suppress(TransferError):
                for _ in range(1000):
                    try:
                        pair.link.read([Range(0, 0, size)], 600.0)
                    except TransferError as error:
                        failed.append(error)
                        raise

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: region.memory[0] != POISON or region.memory[size // 2] != POISON, "nothing came")
        pair.holder.kill()
        reader.join(TIMEOUT)
        assert not reader.is_alive() and failed


@pytest.mark.parametrize("name", TRANSPORTS)
def test_closing_ends_a_read_under_way(name: str, region: Region) -> None:
    with paired(name, region) as pair:
        if name != "shared_memory":
            pair.holder.send_signal(signal.SIGSTOP)
        failed: list[TransferError] = []
        began = threading.Event()

        def read() -> None:
            began.set()
            try:
                for _ in range(100_000):
                    pair.link.read([Range(0, 0, SIZE)], 600.0)
            except TransferError as error:
                failed.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        began.wait()
        pair.link.close()
        reader.join(TIMEOUT)
        assert "closed" in str(failed[0])
        if name in FENCED:
            region.memory[:] = bytes([POISON]) * SIZE
            assert untouched(region)
        pair.link.close()


# -- shared memory that is not there -------------------------------------------------------------------------


def test_memory_that_is_not_what_its_address_says_is_refused(region: Region, tmp_path: Path) -> None:
    transport = SharedMemoryTransport(region)
    theirs = msgspec.json.decode(transport.address, type=SharedAddress)

    def refused(match: str, **fields: object) -> None:
        with pytest.raises(TransferError, match=match):
            transport.connect(msgspec.json.encode(msgspec.structs.replace(theirs, **fields)).decode())

    transport.connect(transport.address).close()
    refused("on another machine", boot="another")
    refused("No such file or directory", pid=2**22 + 1)
    refused("No such file or directory", fd=4_000)
    refused("is not the other engine's memory", inode=theirs.inode + 1)
    refused("is not the other engine's memory", size=SIZE + 1)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(CONTENT)
    for name in ("fifo", "file"):
        fd = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
        found = os.fstat(fd)
        refused("is not the other engine's memory", fd=fd, device=found.st_dev, inode=found.st_ino, size=0)
        os.close(fd)


def test_memory_that_becomes_shorter_is_an_error_and_ends_nobody(region: Region) -> None:
    theirs = make_region(SIZE)
    holder, reader = SharedMemoryTransport(theirs), SharedMemoryTransport(region)
    link = reader.connect(holder.address)
    os.ftruncate(theirs.fd, 1000)
    with pytest.raises(TransferError, match="shorter than it was"):
        link.read([Range(0, 0, SIZE)], TIMEOUT)
    link.close()
    os.close(theirs.fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_gets_nothing(region: Region) -> None:
    address = SharedMemoryTransport(region).address
    there = msgspec.json.decode(address, type=SharedAddress)
    script = f"import os; os.open('/proc/{there.pid}/fd/{there.fd}', os.O_RDONLY)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    nobody = "import os; os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3); "
    done = subprocess.run([sys.executable, "-c", nobody + script], capture_output=True, text=True)
    assert "Permission denied" in done.stderr


@pytest.mark.skipif(
    subprocess.run("unshare --pid --fork --mount-proc true", shell=True, capture_output=True).returncode != 0,
    reason="this user may not make containers",
)
def test_another_container_gets_nothing(region: Region) -> None:
    address = SharedMemoryTransport(region).address
    script = (
        "from quire.bench.transfer import make_region; from quire.kv.transport.shared import SharedMemoryTransport; "
        f"SharedMemoryTransport(make_region(10)).connect({address!r})"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    contained = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    done = subprocess.run(contained, capture_output=True, text=True)
    assert "not to be seen from here" in done.stderr and "in another container" in done.stderr


def test_a_region_that_others_cannot_open_has_no_address() -> None:
    memory = memoryview(bytearray(100))
    with pytest.raises(TransferError, match="not a file that other processes can open"):
        SharedMemoryTransport(Region(memory, -1))
    with (
        open(__file__, "rb") as file,
        pytest.raises(TransferError, match=r"the region of 100 bytes is no memfd but .*test_kv_transport"),
    ):
        SharedMemoryTransport(Region(memory, file.fileno()))


# -- names and addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSPORTS)
def test_text_that_is_no_address_is_refused(name: str, region: Region) -> None:
    transport = opened(name, region)
    assert transport.name == name
    assert transport.fenced == (name in FENCED)
    others = ['{"type":"none"}', "", "\0", "[]", '{"type":"socket","host":"x"}', '{"type":"shared_memory","pid":1}']
    for text in [text for text in others if name not in text] + [transport.address[:-2], "\udcff"]:
        with pytest.raises(TransferError, match=f"is not the address of a region by {name}"):
            transport.connect(text)
    transport.close()


def test_a_transport_that_is_not_there_is_refused_with_what_to_do(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: shared_memory, socket, mooncake, nixl"):
        open_transport("rdma", region, b"")
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    for name in ("nixl", "mooncake"):
        with pytest.raises(ConfigError, match=rf"the transport {name} needs .*pip install '\.\[{name}\]'"):
            open_transport(name, region, b"")

    def without_verbs(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(importlib, "import_module", without_verbs)
    with pytest.raises(ConfigError, match=r"libibverbs.so.1: .*; apt-get install libibverbs1"):
        open_transport("mooncake", region, b"")


def test_libraries_are_imported_only_for_transports_that_are_named() -> None:
    script = (
        "import sys; from quire.kv.transport import installed; installed(); import quire.kv.transport.shared; "
        "assert not {'zmq', 'mooncake', 'nixl_cu12'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
