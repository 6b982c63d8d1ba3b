"""The socket between machines: late answers, strangers, and peers that do not keep to the rules."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.curve import Curve
from quire.errors import ConfigError
from quire.kv.transport.base import Range, Region, TransferError
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
from tests.kv_holders import CONTENT, POISON, SIZE, TIMEOUT, TOKEN, paired, poisoned, served, untouched


@pytest.fixture
def region() -> Iterator[Region]:
    """One's own, poisoned."""
    made = poisoned()
    yield made
    os.close(made.fd)


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


def link_to(transport: SocketTransport, there: SocketAddress, region: Region) -> SocketLink:
    """A link to whoever is there, of which nothing is asked yet."""
    endpoint = f"tcp://{there.host}:{there.port}"
    return SocketLink(transport._curve.connecting(transport._context), endpoint, there, region.memory)


def number_of(question: bytes) -> int:
    return msgspec.msgpack.decode(question, type=Question).number


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


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b"\xff", b"x"], "is invalid"),
        ([msgspec.msgpack.encode(Answer(99)), b"x"], "is invalid"),
        ([msgspec.msgpack.encode(Answer(0)), b"xy"], "the wrong length"),
        ([msgspec.msgpack.encode(Answer(0))], "is invalid"),
        ([msgspec.msgpack.encode(Answer(0)), b"x", b"y"], "is invalid"),
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


def test_closing_a_holder_ends_its_readers_and_frees_the_port(region: Region) -> None:
    with served(region) as (holder, address):
        reader = SocketTransport(region, TOKEN.encode())
        link = reader.connect(holder.address)
        holder.close()
        with pytest.raises(TransferError):
            link.read([Range(0, 0, 100)], TIMEOUT)
        with pytest.raises(TransferError, match=f"127.0.0.1:{address.port}: the other engine is not running"):
            reader.connect(holder.address)
        other = SocketTransport(region, TOKEN.encode(), port=address.port)
        assert other.address != holder.address
        with pytest.raises(TransferError, match="the requested region is no longer here"):
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


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "port"), [("no such host", 1), ("127.0.0.1", 99_999), ("", 1), ("127.0.0.1", -1)])
def test_an_address_that_leads_nowhere_is_an_error(host: str, port: int, region: Region) -> None:
    transport = SocketTransport(region, TOKEN.encode())
    with pytest.raises(TransferError):
        transport.connect(msgspec.json.encode(SocketAddress(host, port, b"", 1)).decode())
    transport.close()


def test_a_host_or_port_that_cannot_be_listened_at_is_refused(region: Region) -> None:
    with served(region) as (_, address):
        for host, port, match in (
            ("127.0.0.1", address.port, "Address already in use; choose an address of this machine and a free port"),
            ("192.0.2.77", 0, "Cannot assign requested address"),
            ("0.0.0.0", 0, "is not an address at which others can reach this machine; give one of its addresses"),
            ("::", 0, "is not an address at which others can reach this machine"),
            ("no such host", 0, "name a host, or its address"),
        ):
            transport = SocketTransport(region, TOKEN.encode(), host, port)
            with pytest.raises(ConfigError, match=match):
                assert transport.address
            transport.close()


def test_who_only_reads_listens_nowhere(region: Region) -> None:
    def listening() -> int:
        return sum(thread.name == "quire-kv-socket" for thread in threading.enumerate())

    with served(region) as (holder, _):
        before = listening()
        reader = SocketTransport(region, TOKEN.encode())
        reader.connect(holder.address).read([Range(0, 0, 100)], TIMEOUT)
        assert listening() == before
        assert reader.address and listening() == before + 1
        reader.close()
