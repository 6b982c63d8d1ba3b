"""Messages between the machines of an engine, over ZeroMQ: a frame that says what it is, and one with its bytes.

The first machine listens on one port, and the others connect to it. Both sides derive their CURVE keys from a shared
token; without it nobody can read or send anything, or learn the keys.
"""

from __future__ import annotations

import msgspec

from quire.curve import Context, Curve, Doorkeeper, Socket, heartbeats
from quire.engine.rank import RankStart


class Hello(msgspec.Struct, tag=True):
    """A machine's first message. Every version of Quire can read this one.

    Attributes:
        host: the machine's name, for messages.
        ranks: how many it contributes; 0: as many as the first machine says.
    """

    version: str
    host: str = ""
    ranks: int = 0


class Refused(msgspec.Struct, tag=True):
    """The machine cannot take part; the message is for users."""

    message: str


class Seats(msgspec.Struct, tag=True):
    """All machines have joined: start these ranks."""

    starts: list[RankStart]


class Carried(msgspec.Struct, tag=True):
    """Bytes of a rank's link, from one end to the other; empty if it was closed."""

    rank: int


class Written(msgspec.Struct, tag=True):
    """What `Mirror.news` returned for a rank of a group."""

    group: int
    rank: int


class Alive(msgspec.Struct, tag=True):
    """The first machine is alive, even if it has nothing to send. (ZeroMQ's own time-to-live ends with each message
    that is no heartbeat and begins with the next heartbeat, which a machine that hangs never sends.)
    """


class Exited(msgspec.Struct, tag=True):
    """A rank has ended: see `how_it_ended`."""

    rank: int
    code: int
    out_of_memory: bool


FromFirst = Refused | Seats | Carried | Written | Alive
ALIVE_SHARE = 0.25
"""Share of `collective_timeout_s` after which the first machine sends its next `Alive`."""

ToFirst = Hello | Carried | Written | Exited


def _curve(token: bytes) -> Curve:
    return Curve(token, "quire 2026 ranks on several machines")


def listening(context: Context, token: bytes, timeout: float) -> Socket:
    """The first machine's socket, not bound yet. Both sides drop a peer that is silent for `timeout` seconds."""
    made = _unbounded(_curve(token).listening(context))
    heartbeats(made, timeout)
    return made


def connecting(context: Context, token: bytes) -> Socket:
    """Another machine's socket, not connected yet; it connects once."""
    return _unbounded(_curve(token).connecting(context))


def doorkeeper(context: Context, token: bytes) -> Doorkeeper:
    """The authenticator, which admits machines that have the token."""
    return Doorkeeper(context, _curve(token))


def _unbounded(made: Socket) -> Socket:
    made.sndhwm = made.rcvhwm = 0  # steps run one after the other, so there is never much
    return made
