"""Between machines, over TCP: ZeroMQ with CURVE, so that everything is encrypted, and only engines with the cluster key
can connect.

The reader asks for pieces, a few at a time, and the holder's thread answers each with the bytes. Buffered answers are
bounded: ZeroMQ drops those beyond a limit, which no reader reaches that keeps to `WINDOW`. Only the reader's own thread
writes into its region.

An engine with the key is trusted: ZeroMQ does not limit the number of frames in a message.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.curve import Address, Curve, Doorkeeper, Socket, heartbeats
from quire.errors import ConfigError
from quire.kv.transport.base import (
    CONNECT_SECONDS,
    Range,
    Region,
    TransferError,
    check_ranges,
    read_address,
    write_address,
)

logger = logging.getLogger(__name__)

PIECE = 1 << 20
"""Most bytes in an answer."""

MOST_RANGES = 256
"""Most ranges in a question."""

WINDOW = 8
"""Most questions that a reader has open at once."""

LONGEST_QUESTION = 8192
"""Most bytes in a question; enough for 256 ranges."""

SILENCE_SECONDS = 30.0
"""A holder drops a reader, and the memory of its buffered answers, after this much silence."""

ENCRYPTION = 64
"""Most bytes that encryption adds to a frame."""

WAKE = b"\1" + bytes(7)
REFUSING = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH
ENDS = zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED

Position = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=1, le=PIECE)]


class SocketAddress(msgspec.Struct, frozen=True, tag="socket"):
    """Where the holder listens.

    Attributes:
        region: a random id, so that a later process at the same port is not mistaken for this one.
    """

    host: str
    port: int
    region: bytes
    size: int


class Question(msgspec.Struct, array_like=True):
    """A reader's message, in one frame. It may ask for no ranges, to see whether the region is there."""

    region: bytes
    number: int
    ranges: Annotated[list[tuple[Position, Length]], msgspec.Meta(max_length=MOST_RANGES)]


class Answer(msgspec.Struct, array_like=True):
    """The first frame of an answer; the second one has the ranges' bytes, concatenated.

    Attributes:
        refused: why there are none, as a message for users.
    """

    number: int
    refused: str = ""


class SocketTransport:
    """See `Transport`. It starts to listen when `address` is first read.

    Args:
        region: need not be a file.
        token: the cluster key.
        host: this machine's address for other engines. port: 0 is any free one.

    Raises:
        ConfigError: (from `address`) the host is not an address of this machine, or stands for all of its addresses, or
            the port is taken.
    """

    name, fenced = "socket", True

    def __init__(self, region: Region, token: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._memory = region.memory
        self._curve = Curve(token, "quire 2026 KV blocks")
        self._context: zmq.Context[Socket] = zmq.Context()
        self._links: weakref.WeakSet[SocketLink] = weakref.WeakSet()
        self._connecting = threading.Lock()
        self._closed = False
        self._host, self._port = host, port
        self._name = secrets.token_bytes(8)  # of the region
        self._address: SocketAddress | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        if self._address is None:  # an engine that only reads never listens
            self._address = self._listen()
        return write_address(self._address)

    def _listen(self) -> SocketAddress:
        server = self._curve.listening(self._context)
        door = Doorkeeper(self._context, self._curve)
        server.maxmsgsize = LONGEST_QUESTION + ENCRYPTION
        server.rcvhwm = server.sndhwm = 2 * WINDOW
        heartbeats(server, SILENCE_SECONDS)
        try:
            port = _bound(server, self._host, self._port)
        except BaseException:
            server.close()
            door.socket.close()
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, args=(server, door), name="quire-kv-socket", daemon=True)
        self._thread.start()
        return SocketAddress(self._host, port, self._name, len(self._memory))

    def connect(self, address: str) -> SocketLink:
        there = read_address(address, SocketAddress)
        try:
            endpoint = Address(there.host, there.port).resolved("the other engine's host")
            with self._connecting:
                if self._closed:
                    raise TransferError("the transport was closed")
                link = SocketLink(self._curve.connecting(self._context), endpoint, there, self._memory)
                self._links.add(link)
            link.read([], CONNECT_SECONDS)
        except (ConfigError, TransferError, zmq.ZMQError, OverflowError) as error:
            raise TransferError(f"{Address(there.host, there.port)}: {error}") from error
        return link

    def close(self) -> None:
        with self._connecting:
            closed, self._closed = self._closed, True
        if closed:
            return
        for link in list(self._links):
            link.close()
        if self._thread is not None:
            os.write(self._wake, WAKE)
            self._thread.join()
            os.close(self._wake)
        self._context.destroy(linger=0)

    # -- the holder's thread -------------------------------------------------------------------------------------

    def _serve(self, server: Socket, door: Doorkeeper) -> None:
        poller = zmq.Poller()
        for source in (server, door.socket, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poller.poll())):
                if door.socket in ready:
                    door.answer()
                if server in ready:
                    self._answer(server)
        except Exception:
            logger.exception("KV blocks are not offered any more: a bug")
        finally:
            server.close()
            door.socket.close()

    def _answer(self, server: Socket) -> None:
        """Answer the question that has come; an invalid one gets no answer."""
        peer, *frames = server.recv_multipart()
        try:
            question = msgspec.msgpack.decode(b"".join(frames), type=Question)
            body, refused = self._bytes(question), ""
        except (msgspec.MsgspecError, UnicodeError) as error:
            logger.debug("a request for KV blocks is invalid: %s", error)
            return
        except TransferError as error:
            body, refused = memoryview(b""), str(error)
        answer = msgspec.msgpack.encode(Answer(question.number, refused))
        with contextlib.suppress(zmq.Again):
            server.send_multipart([peer, answer, body], zmq.NOBLOCK, copy=False)

    def _bytes(self, question: Question) -> memoryview:
        if question.region != self._name:
            raise TransferError("the requested region is no longer here")
        check_ranges([Range(source, 0, length) for source, length in question.ranges], len(self._memory), PIECE)
        if sum(length for _, length in question.ranges) > PIECE:
            raise TransferError(f"more than {PIECE} bytes were requested at once")
        pieces = [self._memory[source : source + length] for source, length in question.ranges]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


class SocketLink:
    """See `Link`. Only the first `read`, which may be empty, shows whether anyone answers.

    Args:
        made: a socket that is not connected yet; owned by this link. endpoint: `there`, in ZeroMQ's notation.
        memory: this engine's region.

    Raises:
        zmq.ZMQError: the endpoint is not valid.
    """

    def __init__(self, made: Socket, endpoint: str, there: SocketAddress, memory: memoryview) -> None:
        self._there, self._memory = there, memory
        self._closed = False
        self._reading = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # not before: another thread may be about to write to it
        self._socket = made
        self._socket.rcvhwm, self._socket.maxmsgsize = 2 * WINDOW, PIECE + ENCRYPTION
        self._monitor: Socket = self._socket.get_monitor_socket(sum({*REFUSING, *ENDS}))
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def read(self, ranges: Sequence[Range], seconds: float) -> None:
        check_ranges(ranges, self._there.size, len(self._memory))
        with self._reading:
            try:
                self._read(ranges, time.monotonic() + seconds)
            except BaseException:  # answers may still arrive
                self._end()
                raise

    def _read(self, ranges: Sequence[Range], end: float) -> None:
        questions = enumerate(_questions(ranges)) if ranges else iter([(0, [])])
        awaited: dict[int, list[Range]] = {}
        for number, pieces in questions:
            self._ask(number, pieces)
            awaited[number] = pieces
            if len(awaited) == WINDOW:
                self._take_in(awaited, end)
        while awaited:
            self._take_in(awaited, end)

    def _ask(self, number: int, pieces: Sequence[Range]) -> None:
        if self._closed:
            raise TransferError("the link was closed")
        asked = [(source, length) for source, _, length in pieces]
        with contextlib.suppress(zmq.Again):  # not connected any more, as the monitor says
            self._socket.send(msgspec.msgpack.encode(Question(self._there.region, number, asked)), zmq.NOBLOCK)

    def _take_in(self, awaited: dict[int, list[Range]], end: float) -> None:
        """Receive the next answer, and copy its bytes."""
        frames = self._received(end)
        try:
            head, body = (frame.buffer for frame in frames)
            answer = msgspec.msgpack.decode(head, type=Answer)
            pieces = awaited.pop(answer.number)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise TransferError("the other engine's answer is invalid") from error
        if answer.refused:
            raise TransferError(f"the other engine refuses: {answer.refused[:200]}")
        if len(body) != sum(length for _, _, length in pieces):
            raise TransferError("the other engine's answer has the wrong length")
        for _, target, length in pieces:
            self._memory[target : target + length] = body[:length]
            body = body[length:]

    def _received(self, end: float) -> list[zmq.Frame]:
        """The frames of the next message."""
        while not self._closed:
            if (left := end - time.monotonic()) <= 0:
                raise TransferError("the other engine has not answered in time")
            ready = dict(self._poller.poll(math.ceil(left * 1000)))
            if self._closed:
                break
            if self._socket in ready:
                return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._monitor in ready:
                event = recv_monitor_message(self._monitor)["event"]
                if event in REFUSING:
                    raise TransferError("the other engine does not accept this cluster key")
                raise TransferError("the other engine is not running, or has another cluster key")
        raise TransferError("the link was closed")

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        os.write(self._wake, WAKE)
        with self._reading:
            self._end()

    def _end(self) -> None:
        self._closed = True
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()


def _bound(server: Socket, host: str, port: int) -> int:
    """Bind the server; returns the port."""
    resolved = Address(host, port).resolved("host")
    if resolved.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
        raise ConfigError(
            f"host {host!r} is not an address at which others can reach this machine; give one of its addresses"
        )
    try:
        server.bind(resolved)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"KV blocks cannot be offered at {Address(host, port)}: {zmq.strerror(error.errno or 0)}; choose an "
            "address of this machine and a free port"
        ) from error
    return int(bytes(server.getsockopt(zmq.LAST_ENDPOINT)).strip(b"\0").rpartition(b":")[2])


def _questions(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Split ranges into pieces, and group these into questions."""
    pieces: list[Range] = []
    room = PIECE
    for source, target, length in ranges:
        while length:
            part = min(length, room)
            pieces.append(Range(source, target, part))
            source, target, length, room = source + part, target + part, length - part, room - part
            if room == 0 or len(pieces) == MOST_RANGES:
                yield pieces
                pieces, room = [], PIECE
    if pieces:
        yield pieces
