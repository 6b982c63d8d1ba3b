"""Transports: what is read is what the other process has, or an error; and nobody else gets anything."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.bench import transfer
from quire.bench.transfer import devices, filled, holding, make_region
from quire.cli.main import main
from quire.curve import Curve
from quire.errors import ConfigError
from quire.kv.transport import TRANSPORTS, installed, open_transport
from quire.kv.transport.base import Link, Range, Region, TransferError, Transport
from quire.kv.transport.shared import SharedAddress, SharedMemoryTransport
from quire.kv.transport.socket import (
    LONGEST_QUESTION,
    PIECE,
    WINDOW,
    Answer,
    Question,
    SocketAddress,
    SocketLink,
    SocketTransport,
)

TOKEN = "0123456789abcdef"
SIZE = 4 * PIECE + 12_345
SEED = 7
POISON = 0xEE
FENCED = ["shared_memory", "socket"]
TIMEOUT = 60.0

CONTENT = filled(SIZE, SEED)


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


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(1e-3)


def link_to(transport: SocketTransport, there: SocketAddress, region: Region) -> SocketLink:
    """A link to whoever is there, of which nothing is asked yet."""
    endpoint = f"tcp://{there.host}:{there.port}"
    return SocketLink(transport._curve.connecting(transport._context), endpoint, there, region.memory)


def untouched(region: Region) -> bool:
    return region.memory == bytes([POISON]) * len(region.memory)


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
        pytest.raises(TransferError, match="not all has been copied within 0"),
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


def test_after_a_read_that_failed_nothing_is_written_any_more(region: Region) -> None:
    with paired("socket", region) as pair:
        pair.holder.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match="has not answered in time"):
            pair.link.read([Range(0, 0, SIZE)], 0.3)
        pair.holder.send_signal(signal.SIGCONT)
        again = pair.transport.connect(pair.address)
        for _ in range(50):  # the holder has answered what came before, too
            again.read([Range(0, SIZE - 1, 1)], TIMEOUT)
        region.memory[SIZE - 1] = POISON
        assert untouched(region)
        pair.whole()


def test_an_answer_that_comes_after_the_deadline_is_not_written(region: Region) -> None:
    """The holder here answers the first half in time, and the other when nobody waits for it."""
    context: zmq.Context[Any] = zmq.Context()
    curve = Curve(TOKEN.encode(), "quire 2026 KV blocks")
    server = curve.listening(context)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    transport = SocketTransport(region, TOKEN.encode())
    link = link_to(transport, SocketAddress("127.0.0.1", port, b"r", SIZE), region)
    failed: list[TransferError] = []

    def read() -> None:
        try:
            link.read([Range(0, 0, 2 * PIECE)], 2.0)
        except TransferError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    asked = []
    for _ in range(2):
        assert server.poll(10_000)
        peer, question = server.recv_multipart()
        asked.append(number_of(question))
    body = b"x" * PIECE
    server.send_multipart([peer, msgspec.msgpack.encode(Answer(asked[0])), body])
    reader.join(TIMEOUT)
    assert "has not answered in time" in str(failed[0])
    server.send_multipart([peer, msgspec.msgpack.encode(Answer(asked[1])), body])
    with pytest.raises(TransferError, match="closed"):
        link.read([Range(0, 0, 1)], 0.2)
    assert region.memory[:PIECE] == body
    assert region.memory[PIECE:] == bytes([POISON]) * (SIZE - PIECE)
    transport.close()
    context.destroy(linger=0)


def test_a_holder_that_is_slow_is_not_waited_for_beyond_the_deadline(region: Region) -> None:
    context: zmq.Context[Any] = zmq.Context()
    transport = SocketTransport(region, TOKEN.encode())
    server = transport._curve.listening(context)
    there = SocketAddress("127.0.0.1", server.bind_to_random_port("tcp://127.0.0.1"), b"r", SIZE)
    over = threading.Event()

    def answer() -> None:
        """A hundredth of a second a question, which is 2 seconds for all."""
        while not over.is_set():
            if server.poll(100):
                peer, question = server.recv_multipart()
                over.wait(0.01)
                server.send_multipart([peer, msgspec.msgpack.encode(Answer(number_of(question))), b"x" * 256])

    thread = threading.Thread(target=answer)
    thread.start()
    ranges = [Range(0, place, 1) for place in range(256)] * 200
    began = time.monotonic()
    with pytest.raises(TransferError, match="has not answered in time"):
        link_to(transport, there, region).read(ranges, 0.5)
    assert time.monotonic() - began < 1.5
    over.set()
    thread.join()
    transport.close()
    context.destroy(linger=0)


def number_of(question: bytes) -> int:
    return msgspec.msgpack.decode(question, type=Question).number


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b"\xff", b"x"], "makes no sense"),
        ([msgspec.msgpack.encode(Answer(99)), b"x"], "makes no sense"),
        ([msgspec.msgpack.encode(Answer(0)), b"xy"], "another length"),
        ([msgspec.msgpack.encode(Answer(0))], "makes no sense"),
        ([msgspec.msgpack.encode(Answer(0)), b"x", b"y"], "makes no sense"),
        ([msgspec.msgpack.encode(Answer(0, "no")), b""], "refuses: no"),
    ],
)
def test_a_holder_that_answers_nonsense_is_an_error(answer: list[bytes], error: str, region: Region) -> None:
    context: zmq.Context[Any] = zmq.Context()
    transport = SocketTransport(region, TOKEN.encode())
    server = transport._curve.listening(context)
    there = SocketAddress("127.0.0.1", server.bind_to_random_port("tcp://127.0.0.1"), b"r", SIZE)
    thread = threading.Thread(target=lambda: server.send_multipart([server.recv_multipart()[0], *answer]))
    thread.start()
    with pytest.raises(TransferError, match=error):
        link_to(transport, there, region).read([Range(0, 0, 1)], 10.0)
    thread.join()
    assert untouched(region)
    transport.close()
    context.destroy(linger=0)


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


def test_closing_a_holder_ends_its_readers_and_frees_the_port(region: Region) -> None:
    with served(region) as (holder, address):
        reader = SocketTransport(region, TOKEN.encode())
        link = reader.connect(holder.address)
        holder.close()
        with pytest.raises(TransferError):
            link.read([Range(0, 0, 100)], TIMEOUT)
        with pytest.raises(TransferError, match=f"127.0.0.1:{address.port}: the other engine is not there"):
            reader.connect(holder.address)
        other = SocketTransport(region, TOKEN.encode(), port=address.port)
        with pytest.raises(TransferError, match="the region that is asked for is not here any more"):
            reader.connect(holder.address)
        reader.close()
        other.close()
        other.close()
        with pytest.raises(TransferError, match="the transport was closed"):
            reader.connect(holder.address)


# -- who may read --------------------------------------------------------------------------------------------


def test_another_key_gets_nothing_and_the_holder_serves_on(region: Region) -> None:
    with served(region) as (holder, address):
        stranger = SocketTransport(region, b"another key, as long")
        with pytest.raises(TransferError, match=rf":{address.port}: .*cluster key"):
            stranger.connect(holder.address)
        assert untouched(region)
        stranger.close()
        known = SocketTransport(region, TOKEN.encode())
        known.connect(holder.address).read([Range(0, 0, SIZE)], TIMEOUT)
        assert region.memory == CONTENT
        known.close()


def test_who_knows_the_holders_public_key_alone_gets_nothing(region: Region) -> None:
    context: zmq.Context[Any] = zmq.Context()
    curve = Curve(TOKEN.encode(), "quire 2026 KV blocks")
    with served(region) as (_, address):
        for keys, welcome in ((zmq.curve_keypair(), False), (curve.keys("others"), True)):
            asking = curve.connecting(context)
            asking.curve_publickey, asking.curve_secretkey = keys
            asking.connect(f"tcp://127.0.0.1:{address.port}")
            asking.send(msgspec.msgpack.encode(Question(address.region, 0, [(0, 100)])))
            assert bool(asking.poll(10_000 if welcome else 500)) == welcome
            if welcome:
                assert asking.recv_multipart()[1] == CONTENT[:100]
    context.destroy(linger=0)


def test_a_process_that_speaks_without_keys_gets_nothing(region: Region) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with served(region) as (_, address):
        plain = context.socket(zmq.DEALER)
        plain.connect(f"tcp://127.0.0.1:{address.port}")
        plain.send(msgspec.msgpack.encode(Question(address.region, 0, [(0, 100)])))
        assert not plain.poll(500)
    context.destroy(linger=0)


class Relay:
    """Stands between a reader and a holder: keeps what passes, and may change a byte of what the holder says.

    Args:
        change: which of the bytes that the holder has said; -1: none.
    """

    def __init__(self, port: int, change: int = -1) -> None:
        self.passed, self._change = bytearray(), change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._holder = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        reader = self._listening.accept()[0]
        threading.Thread(target=self._carry, args=(reader, self._holder, -1), daemon=True).start()
        self._carry(self._holder, reader, self._change)

    def _carry(self, source: socket.socket, target: socket.socket, change: int) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if 0 <= change - carried < len(data):
                    data[change - carried] ^= 1
                carried += len(data)
                self.passed += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for made in (self._listening, self._holder):
            made.close()


def test_what_passes_is_encrypted_and_cannot_be_changed(region: Region) -> None:
    with served(region) as (_, address):
        reader = SocketTransport(region, TOKEN.encode())
        relay = Relay(address.port)
        link = reader.connect(
            json.dumps({**json.loads(msgspec.json.encode(address)), "type": "socket", "port": relay.port})
        )
        link.read([Range(0, 0, SIZE)], TIMEOUT)
        assert region.memory == CONTENT
        assert len(relay.passed) > SIZE
        assert not any(CONTENT[place : place + 16] in relay.passed for place in range(0, SIZE - 16, 65_521))
        relay.close()

        region.memory[:] = bytes([POISON]) * SIZE
        relay = Relay(address.port, change=5000)
        changed = msgspec.structs.replace(address, port=relay.port)
        link = reader.connect(msgspec.json.encode(changed).decode())
        with pytest.raises(TransferError):
            link.read([Range(0, 0, 100_000)], 5.0)
        assert untouched(region)
        relay.close()
        reader.close()


# -- readers that do not keep to the rules -------------------------------------------------------------------


def nonsense(chance: random.Random, region: bytes) -> list[bytes]:
    """A message that is none."""
    good = msgspec.msgpack.encode(Question(region, 1, [(0, 100)]))
    ranges = [[(2**63, 1)], [(-1, 1)], [(0, 0)], [(0, PIECE + 1)], [(0, PIECE)] * 2, [(SIZE, 1)], [(0, 1)] * 257]
    return chance.choice(
        [
            [chance.randbytes(chance.randrange(200))],
            [chance.randbytes(20_000)],
            [good[: chance.randrange(len(good))]],
            [good, good],
            [b""] * chance.randrange(1, 50),
            [msgspec.msgpack.encode((region, 1, chance.choice(ranges)))],
            [msgspec.msgpack.encode((chance.randbytes(8), 1, [(0, 1)]))],
            [msgspec.msgpack.encode((region, 2**64 - 1, [(0, 1)]))],
            [msgspec.msgpack.encode([[[[]]]] * 100)],
        ]
    )


def test_no_message_stops_the_holder(region: Region) -> None:
    chance = random.Random(3)
    with served(region) as (holder, address):
        context: zmq.Context[Any] = zmq.Context()
        curve = Curve(TOKEN.encode(), "quire 2026 KV blocks")
        told = 0
        for _ in range(40):
            asking = curve.connecting(context)
            asking.connect(f"tcp://127.0.0.1:{address.port}")
            for _ in range(10):
                asking.send_multipart(nonsense(chance, address.region))
            while asking.poll(20):
                head, body = asking.recv_multipart()
                answer = msgspec.msgpack.decode(head, type=Answer)
                assert bool(answer.refused) == (body == b"")
                assert body in (b"", CONTENT[:1])
                told += 1
            asking.close()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", address.port)) as raw, contextlib.suppress(OSError):
                raw.sendall(chance.choice([b"", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE"]) + chance.randbytes(500))
                raw.settimeout(0.01)
                assert CONTENT[:16] not in raw.recv(1000)
        assert told > 10
        reader = SocketTransport(region, TOKEN.encode())
        reader.connect(holder.address).read([Range(0, 0, SIZE)], TIMEOUT)
        assert region.memory == CONTENT
        reader.close()
        context.destroy(linger=0)


def test_a_message_that_is_too_long_ends_its_connection(region: Region) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with served(region) as (_, address):
        asking = Curve(TOKEN.encode(), "quire 2026 KV blocks").connecting(context)
        ends = asking.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        asking.connect(f"tcp://127.0.0.1:{address.port}")
        asking.send(bytes(LONGEST_QUESTION))
        assert not ends.poll(300)
        asking.send(bytes(LONGEST_QUESTION + 100))
        assert ends.poll(10_000)
    context.destroy(linger=0)


def test_a_reader_that_takes_nothing_costs_bounded_memory_and_holds_nobody_up(region: Region) -> None:
    with paired("socket", region) as pair:
        address = msgspec.json.decode(pair.address, type=SocketAddress)
        context: zmq.Context[Any] = zmq.Context()
        asking = Curve(TOKEN.encode(), "quire 2026 KV blocks").connecting(context)
        asking.rcvhwm = 1
        asking.connect(f"tcp://127.0.0.1:{address.port}")
        question = msgspec.msgpack.encode(Question(address.region, 0, [(0, PIECE // 2), (0, PIECE // 2)]))
        before = peak_memory(pair.holder.pid)
        for _ in range(500):
            with contextlib.suppress(zmq.Again):
                asking.send(question, zmq.NOBLOCK)
        for _ in range(10):
            pair.link.read([Range(0, 0, SIZE)], TIMEOUT)
        assert peak_memory(pair.holder.pid) - before < (2 * WINDOW + 30) * PIECE
        assert region.memory == CONTENT
        context.destroy(linger=0)


def peak_memory(pid: int) -> int:
    """Bytes that a process has had at once."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


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
    with pytest.raises(TransferError, match="no file that other processes can open"):
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


@pytest.mark.parametrize(("host", "port"), [("no such host", 1), ("127.0.0.1", 99_999), ("", 1), ("127.0.0.1", -1)])
def test_an_address_that_leads_nowhere_is_an_error(host: str, port: int, region: Region) -> None:
    transport = SocketTransport(region, TOKEN.encode())
    with pytest.raises(TransferError):
        transport.connect(msgspec.json.encode(SocketAddress(host, port, b"", 1)).decode())
    transport.close()


def test_a_host_or_port_that_cannot_be_listened_at_is_refused(region: Region) -> None:
    with served(region) as (_, address):
        for host, port, match in (
            ("127.0.0.1", address.port, "Address already in use; choose an address of this machine, and a port that"),
            ("192.0.2.77", 0, "Cannot assign requested address"),
            ("0.0.0.0", 0, "is not where others reach this machine; name one of its addresses"),
            ("::", 0, "is not where others reach this machine"),
            ("no such host", 0, "name a host, or its address"),
        ):
            with pytest.raises(ConfigError, match=match):
                SocketTransport(region, TOKEN.encode(), host, port)


def test_a_transport_that_is_not_there_is_refused_with_what_to_do(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="unknown transport 'rdma'; known: shared_memory, socket, mooncake, nixl"):
        open_transport("rdma", region, b"")
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    for name in ("nixl", "mooncake"):
        with pytest.raises(ConfigError, match=rf"the transport {name} needs .*pip install 'quire\[{name}\]'"):
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


# -- quire bench transfer ------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "REGION", 1 << 20)
    monkeypatch.setattr(transfer, "BLOCKS", (4096, 131072))


@pytest.mark.usefixtures("small")
def test_the_command_prints_a_table_that_lines_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transport", "shared_memory,socket"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("transport"))
    rows = [line for line in lines if line.startswith(("shared_memory ", "socket "))]
    assert [row[:23].split() for row in rows] == [
        [name, size, "KiB"] for name in ("shared_memory", "socket") for size in ("4", "128")
    ]
    ends = [heading.index(word) + len(word) for word in ("one, us", "coalesced, GB/s", "scattered, GB/s")]
    for row in rows:
        assert [match.end() for match in re.finditer(r"[\d.,]+(?= |$)", row[24:])] == [end - 24 for end in ends]
        assert all(float(figure.replace(",", "")) > 0 for figure in row.split()[3:])


@pytest.mark.usefixtures("small")
def test_json_lines_go_to_standard_output_and_the_table_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transport", "shared_memory", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["transport"], row["block"]) for row in rows] == [("shared_memory", 4096), ("shared_memory", 131072)]
    assert all(row["one_us"] > 0 and row["coalesced_gb_s"] > 0 and row["scattered_gb_s"] > 0 for row in rows)
    assert "coalesced, GB/s" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--transport", "rdma"],
            "--transport 'rdma': unknown transport; known: shared_memory, socket, mooncake, nixl",
        ),
        (["--transport", ""], "--transport '': unknown transport"),
        (["--transports", "socket"], "unknown option --transports; did you mean --transport?"),
        (["--host", "no such host"], "--host 'no such host': "),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file cannot be written"),
        (["socket"], "unrecognized arguments: socket"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_transport_that_fails_is_said_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.kv.transport.installed", lambda: ["socket", "shared_memory"])
    assert main(["bench", "transfer", "--host", "192.0.2.77"]) == 0
    out = capsys.readouterr().out
    assert "socket: KV blocks cannot be offered at 192.0.2.77:0: Cannot assign requested address" in out
    assert "shared_memory   128 KiB" in out
    assert main(["bench", "transfer", "--host", "192.0.2.77", "--transport", "socket"]) == 1


def test_rdma_devices_are_named(tmp_path: Path) -> None:
    assert devices(tmp_path) == [("RDMA devices", "none"), ("peer memory module", "none")]
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for name, text in (
        ("state", "4: ACTIVE\n"),
        ("rate", "400 Gb/sec (4X NDR)\n"),
        ("link_layer", "Ethernet\n"),
        ("gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
        ("gid_attrs/types/3", "RoCE v2\n"),
    ):
        (port / name).write_text(text)
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert devices(tmp_path) == [
        ("RDMA device mlx5_0, port 1", "4: ACTIVE, 400 Gb/sec (4X NDR), Ethernet"),
        ("  GID 3", "0000:0000:0000:0000:0000:ffff:0a00:0001 RoCE v2"),
        ("peer memory module", "nvidia_peermem"),
    ]
