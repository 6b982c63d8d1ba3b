"""The protocol between an engine that computes prompts (the *exporter*) and one that reads the blocks (the *importer*).

It runs over ZeroMQ, encrypted and authenticated by the cluster's key (`curve.py`). The importer connects and sends
`Hello`; the exporter answers with `Welcome` or `Refused`. Then the importer says what it wants, the exporter what it
has, in order and as it becomes available, and the importer what it has read. The blocks themselves go over a transport
(`kv/transport`). Both send a heartbeat every second; a peer that has been silent for `SILENCE_SECONDS` is gone, and so
is everything in progress with it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.curve import Curve

PROTOCOL = 2
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0

Name = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""Of a block, see `core/block_hash.py`."""


class Hello(msgspec.Struct, tag="hello"):
    """An importer's first message. Every version of Quire can read this one.

    Attributes:
        identity: everything that the bytes of a block depend on, by name.
        name: the importer's name, for logs.
    """

    protocol: int
    identity: dict[str, str] = {}
    name: str = ""


class Refused(msgspec.Struct, tag="refused"):
    """The exporter's blocks are of no use to the importer; the message, for users, says why."""

    message: str


class Welcome(msgspec.Struct, tag="welcome"):
    """The importer may ask for blocks.

    Attributes:
        name: the exporter's name, a new one after each start.
        block_bytes: size of a block, for each KV group.
        transports: the address of the exporter's host tier, by transport.
    """

    name: str
    block_bytes: list[int]
    transports: dict[str, str]


class Want(msgspec.Struct, tag="want"):
    """The importer wants these blocks.

    Attributes:
        number: chosen by the importer.
        hashes: the blocks' names, in order.
        tokens: the prompt that has them, of which the exporter computes what it does not have; if empty, nothing.
        priority, owner, scope: the request's.
    """

    number: int
    hashes: list[Name]
    tokens: list[int]
    priority: int = 0
    owner: str = ""
    scope: str = ""


class Have(msgspec.Struct, tag="have"):
    """Blocks of a `Want`, from its block `first` on, can be read.

    Attributes:
        offsets: their positions in the exporter's host tier, in bytes. checks: see `HostTier`.
    """

    number: int
    first: int
    offsets: list[int]
    checks: list[bytes]


class Gone(msgspec.Struct, tag="gone"):
    """No further blocks of a `Want` will come."""

    number: int


class Got(msgspec.Struct, tag="got"):
    """The importer has read the first `count` blocks of a `Want`."""

    number: int
    count: int


class Cancel(msgspec.Struct, tag="cancel"):
    """The importer no longer needs a `Want`."""

    number: int


class Beat(msgspec.Struct, tag="beat"):
    """A heartbeat.

    Attributes:
        steps: number of steps that the sender's engine has computed.
    """

    steps: int = 0


class Bye(msgspec.Struct, tag="bye"):
    """The importer disconnects."""


FromImporter = Hello | Want | Got | Cancel | Beat | Bye
FromExporter = Refused | Welcome | Have | Gone | Beat

encode = msgspec.msgpack.Encoder().encode
decode_from_importer = msgspec.msgpack.Decoder(FromImporter).decode
decode_from_exporter = msgspec.msgpack.Decoder(FromExporter).decode


def curve(cluster_key: bytes) -> Curve:
    """The encryption of this protocol's sockets."""
    return Curve(cluster_key, "quire 2026 KV blocks between engines")


LAYOUT = "layout of the KV"
"""What else differs explains why this does."""

ADVICE = {
    "checkpoint": "give both the same model",
    "precision": "give both the same --dtype and --quantization",
    "kv_cache_dtype": "give both the same --kv-cache-dtype",
    "kernels": "give both the same --cpu-kernels",
    "block_size": "give both the same --block-size",
    "drafting model": "give both the same --speculative-config",
}


def difference(exporter: dict[str, str], importer: dict[str, str]) -> str | None:
    """Why one engine cannot use the other's blocks, and what to do, as part of a sentence; None if it can."""
    names = [name for name in {**exporter, **importer} if exporter.get(name) != importer.get(name)]
    for name in sorted(names, key=lambda name: name == LAYOUT):
        there, here = exporter.get(name, "unknown"), importer.get(name, "unknown")
        advice = f" ({ADVICE[name]})" if name in ADVICE else ""
        return f"{name} is {there} where prompts are computed, and {here} where they are decoded{advice}"
    return None
