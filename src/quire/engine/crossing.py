"""What passes between the machines of an engine: messages of two frames, what it is and its bytes, over ZeroMQ.

The first machine listens at one port, and the others connect to it. Both sides make their CURVE keys from a token that
they share, so who has it not can neither read nor say anything, nor learn the keys.
"""

from __future__ import annotations

import msgspec

from quire.curve import Context, Curve, Doorkeeper, Socket, heartbeats
from quire.engine.rank import RankStart


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


def _curve(token: bytes) -> Curve:
    return Curve(token, "quire 2026 ranks on several machines")


def listening(context: Context, token: bytes, timeout: float) -> Socket:
    """The first machine's socket, not bound yet; it drops who is silent for `timeout` seconds, and they it."""
    made = _unbounded(_curve(token).listening(context))
    heartbeats(made, timeout)
    return made


def connecting(context: Context, token: bytes) -> Socket:
    """Another machine's socket, not connected yet; it connects once."""
    return _unbounded(_curve(token).connecting(context))


def doorkeeper(context: Context, token: bytes) -> Doorkeeper:
    """Who lets machines in that have the token."""
    return Doorkeeper(context, _curve(token))


def _unbounded(made: Socket) -> Socket:
    made.sndhwm = made.rcvhwm = 0  # steps follow one another, so there is never much
    return made
