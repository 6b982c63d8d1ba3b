"""What engines say to each other: one computes prompts (the *exporter*), and one reads their blocks (the *importer*).

Over ZeroMQ, for those alone who have the cluster's key (`curve.py`). The importer connects, and says `Hello`; the
exporter answers with `Welcome` or `Refused`. Then an importer says what it wants, the exporter what it has, in order
and as it comes, and the importer what it has read. The blocks themselves go over a transport (`kv/transport`). Both
say every second that they are there; whoever is silent for `SILENCE_SECONDS` is gone, and with it all that was under
way.
"""

from __future__ import annotations

import msgspec

from quire.curve import Curve

PROTOCOL = 2
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0


class Hello(msgspec.Struct, tag="hello"):
    """An importer's first message. Every version of Quire can read this one.

    Attributes:
        identity: what the bytes of a block depend on, by what it is called.
        name: of the importer, for people.
    """

    protocol: int
    identity: dict[str, str] = {}
    name: str = ""


class Refused(msgspec.Struct, tag="refused"):
    """The exporter has no blocks that the importer could use; the message is for users."""

    message: str


class Welcome(msgspec.Struct, tag="welcome"):
    """The importer may ask.

    Attributes:
        name: of the exporter, another one after each start.
        block_bytes: of each KV group.
        transports: by name, where the exporter's host tier is found.
    """

    name: str
    block_bytes: list[int]
    transports: dict[str, str]


class Want(msgspec.Struct, tag="want"):
    """The importer waits for these blocks.

    Attributes:
        number: the importer's.
        hashes: the blocks' names, in the order in which they are wanted.
        tokens: a prompt that has them: the exporter computes what it has not. None: it computes nothing.
        priority, owner, scope: of the request.
    """

    number: int
    hashes: list[bytes]
    tokens: list[int]
    priority: int = 0
    owner: str = ""
    scope: str = ""


class Have(msgspec.Struct, tag="have"):
    """Blocks of a `Want`, from its block `first` on, can be read.

    Attributes:
        offsets: where in the exporter's host tier, in bytes. checks: of the blocks, see `HostTier`.
    """

    number: int
    first: int
    offsets: list[int]
    checks: list[bytes]


class Gone(msgspec.Struct, tag="gone"):
    """Nothing more of a `Want` comes."""

    number: int


class Got(msgspec.Struct, tag="got"):
    """The importer has read the first `count` blocks of a `Want`."""

    number: int
    count: int


class Cancel(msgspec.Struct, tag="cancel"):
    """The importer reads nothing more of a `Want`."""

    number: int


class Beat(msgspec.Struct, tag="beat"):
    """Who says so is there.

    Attributes:
        steps: that its engine has computed.
    """

    steps: int = 0


class Bye(msgspec.Struct, tag="bye"):
    """The importer leaves."""


FromImporter = Hello | Want | Got | Cancel | Beat | Bye
FromExporter = Refused | Welcome | Have | Gone | Beat

encode = msgspec.msgpack.Encoder().encode
decode_from_importer = msgspec.msgpack.Decoder(FromImporter).decode
decode_from_exporter = msgspec.msgpack.Decoder(FromExporter).decode


def curve(cluster_key: bytes) -> Curve:
    """What makes this channel's sockets."""
    return Curve(cluster_key, "quire 2026 KV blocks between engines")


def difference(exporter: dict[str, str], importer: dict[str, str]) -> str | None:
    """Why blocks of one engine mean nothing to the other, as part of a sentence; None: they do."""
    for name in {**exporter, **importer}:
        if exporter.get(name) != importer.get(name):
            return (
                f"{name} is {exporter.get(name, 'unknown')} where prompts are computed, and "
                f"{importer.get(name, 'unknown')} where they are decoded"
            )
    return None
