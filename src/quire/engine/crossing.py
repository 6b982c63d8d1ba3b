"""What passes between the machines of an engine: messages of two frames, what it is and its bytes, over ZeroMQ.

The first machine listens at one port, and the others connect to it. Both sides make their CURVE keys from a token that
they share, so who has it not can neither read nor say anything, nor learn the keys.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import blake3
import msgspec
import zmq
from zmq.utils import z85

from quire.engine.rank import RankStart
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

SHORTEST_TOKEN, LONGEST_TOKEN = 16, 4096
"""Bytes. Whoever has recorded a handshake may try tokens on it, so it must not be one that can be guessed."""

Socket = zmq.Socket[bytes]


class Hello(msgspec.Struct, tag=True):
    """A machine's first message. Every version of Quire can read this one.

    Attributes:
        host: the machine's name, for people.
        ranks: how many it brings; 0: as many as the first machine says.
    """

    version: str
    host: str = ""
    ranks: int = 0


class Refused(msgspec.Struct, tag=True):
    """The machine cannot take part; the message is for users."""

    message: str


class Seats(msgspec.Struct, tag=True):
    """All machines are there: start these ranks."""

    starts: list[RankStart]


class Carried(msgspec.Struct, tag=True):
    """Bytes of a rank's link, from one of its ends to the other; none: it was closed."""

    rank: int


class Written(msgspec.Struct, tag=True):
    """What `Mirror.news` has told of a rank of a group."""

    group: int
    rank: int


class Alive(msgspec.Struct, tag=True):
    """The first machine is there, though it may have nothing to say. (A time-to-live of ZeroMQ's own ends with each
    message that is no heartbeat, and begins with the next that is one; which a machine that hangs never sends.)
    """


class Exited(msgspec.Struct, tag=True):
    """A rank has ended: see `how_it_ended`."""

    rank: int
    code: int
    out_of_memory: bool


FromFirst = Refused | Seats | Carried | Written | Alive
ALIVE_SHARE = 0.25
"""Of `collective_timeout_s`: so often the first machine says that it is there."""

ToFirst = Hello | Carried | Written | Exited


class Address(NamedTuple):
    """Where the first machine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def read(cls, text: str, name: str) -> Address:
        """HOST:PORT, or [HOST]:PORT.

        Raises:
            ConfigError: it is not one; the message calls it `name`.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"{name} {text!r} is not HOST:PORT, with a port from 1 to 65535, such as 10.0.0.1:29501")
        return cls(host, int(port))

    def resolved(self, name: str) -> str:
        """As ZeroMQ takes it.

        Raises:
            ConfigError: there is no such host.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise ConfigError(
                f"{name} {self.host!r}: {error.strerror or error}; name a host, or its address"
            ) from error
        return f"tcp://{Address(str(found), self.port)}"


def read_token(file: str, name: str) -> bytes:
    """The token in a file, without white space around it.

    Raises:
        ConfigError: it cannot be read, or is no token; the message calls the file's option `name`.
    """
    try:
        with Path(file).expanduser().open("rb") as opened:
            token, mode = opened.read(LONGEST_TOKEN + 1).strip(), os.fstat(opened.fileno()).st_mode
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name} {file}: {why}; make one with 'openssl rand -hex 32 > {file}'") from error
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
        raise ConfigError(
            f"{name} {file}: a token of {len(token)} bytes; allowed: {SHORTEST_TOKEN} to {LONGEST_TOKEN}; make one "
            f"with 'openssl rand -hex 32 > {file}'"
        )
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning("%s %s can be read by every user of this machine: chmod 600", name, file)
    return token


def _keys(token: bytes, whose: str) -> tuple[bytes, bytes]:
    """Public and secret key of the first machine, or of the others."""
    context = f"quire 2026 ranks on several machines: {whose}"
    secret = z85.encode(blake3.blake3(token, derive_key_context=context).digest())
    return zmq.curve_public(secret), secret


def listening(context: zmq.Context[Socket], token: bytes, timeout: float) -> Socket:
    """The first machine's socket, not bound yet; it drops who is silent for `timeout` seconds, and they it."""
    made = context.socket(zmq.ROUTER)
    made.curve_server = True
    made.curve_publickey, made.curve_secretkey = _keys(token, "first")
    made.zap_domain = b"ranks"
    milliseconds = max(100, min(6_000_000, int(timeout * 1000)))
    made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = milliseconds // 4, milliseconds, milliseconds
    return _unbounded(made)


def connecting(context: zmq.Context[Socket], token: bytes) -> Socket:
    """Another machine's socket, not connected yet; it connects once."""
    made = context.socket(zmq.DEALER)
    made.curve_serverkey = _keys(token, "first")[0]
    made.curve_publickey, made.curve_secretkey = _keys(token, "others")
    made.reconnect_ivl = -1
    return _unbounded(made)


def _unbounded(made: Socket) -> Socket:
    made.sndhwm = made.rcvhwm = 0  # steps follow one another, so there is never much
    made.linger = 0
    made.ipv6 = True
    return made


class Doorkeeper:
    """Lets those in who have the others' keys; ZeroMQ asks it (https://rfc.zeromq.org/spec/27/)."""

    def __init__(self, context: zmq.Context[Socket], token: bytes) -> None:
        self._known = z85.decode(_keys(token, "others")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """The question that has come."""
        version, request, *_, mechanism, key = [*self.socket.recv_multipart(), b"", b""][:7]
        status = b"200" if mechanism == b"CURVE" and key == self._known else b"400"
        self.socket.send_multipart([version, request, status, b"", b"", b""])
