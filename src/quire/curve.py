"""ZeroMQ sockets between machines, for those alone who share a token: both sides make their CURVE keys from it.

Who has it not can neither read nor say anything, nor learn the keys; what passes is encrypted and cannot be changed.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path
from typing import Literal, NamedTuple

import blake3
import zmq
from zmq.utils import z85

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

SHORTEST_TOKEN, LONGEST_TOKEN = 16, 4096
"""Bytes. Whoever has recorded a handshake may try tokens on it, so it must not be one that can be guessed."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Address(NamedTuple):
    """Where somebody listens."""

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
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"{name} {self.host!r}: {why or error}; name a host, or its address") from error
        return f"tcp://{Address(str(found), self.port)}"


def read_token(file: str, name: str, quiet: bool = False) -> bytes:
    """The token in a file, without white space around it. A file that all may read is a warning.

    Args:
        quiet: another process of the same program reads it too, and warns.

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
    if stat.S_ISREG(mode) and mode & stat.S_IROTH and not quiet:
        logger.warning("%s %s can be read by every user of this machine: chmod 600", name, file)
    return token


class Curve:
    """What makes sockets of one purpose ones for those who have the token.

    Args:
        token: what both sides share.
        purpose: what for, different from all other purposes: keys of one open nothing of another.
    """

    def __init__(self, token: bytes, purpose: str) -> None:
        self._token, self._purpose = token, purpose

    def keys(self, whose: Literal["first", "others"]) -> tuple[bytes, bytes]:
        """Public and secret key of the side that listens ("first"), or of those who connect."""
        derived = blake3.blake3(self._token, derive_key_context=f"{self._purpose}: {whose}").digest()
        secret = z85.encode(derived)
        return zmq.curve_public(secret), secret

    def listening(self, context: Context) -> Socket:
        """A ROUTER, not bound yet. A `Doorkeeper` must answer in the same context, or everybody is let in who knows
        its public key.
        """
        made = context.socket(zmq.ROUTER)
        made.curve_server = True
        made.curve_publickey, made.curve_secretkey = self.keys("first")
        made.zap_domain = b"quire"
        return _ready(made)

    def connecting(self, context: Context) -> Socket:
        """A DEALER, not connected yet; it connects once."""
        made = context.socket(zmq.DEALER)
        made.curve_serverkey = self.keys("first")[0]
        made.curve_publickey, made.curve_secretkey = self.keys("others")
        made.reconnect_ivl = -1
        return _ready(made)


def _ready(made: Socket) -> Socket:
    made.linger = 0
    made.ipv6 = True
    return made


def heartbeats(made: Socket, timeout: float) -> None:
    """Have a socket drop who is silent for `timeout` seconds, and they it."""
    milliseconds = max(100, min(6_000_000, int(timeout * 1000)))
    made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = milliseconds // 4, milliseconds, milliseconds


class Doorkeeper:
    """Lets those in who have the others' keys; ZeroMQ asks it (https://rfc.zeromq.org/spec/27/). One a context."""

    def __init__(self, context: Context, curve: Curve) -> None:
        self._known = z85.decode(curve.keys("others")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """The question that has come."""
        version, request, *_, mechanism, key = [*self.socket.recv_multipart(), b"", b""][:7]
        status = b"200" if mechanism == b"CURVE" and key == self._known else b"400"
        self.socket.send_multipart([version, request, status, b"", b"", b""])
