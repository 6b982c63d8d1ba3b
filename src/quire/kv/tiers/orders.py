"""Orders to the disk, to other engines, and to the directory of other nodes; and announcements to those that read here.

Orders are collected in `Sources.orders`, and answered by methods of `Sources`; `Exports.advance` returns announcements.
Imported from anywhere; imports nothing above it.
"""

from __future__ import annotations

from typing import NamedTuple


class Write(NamedTuple):
    """Write the block in a slot to the disk; the slot is pinned until `Sources.written`."""

    slot: int
    hash: bytes


class Read(NamedTuple):
    """Read blocks from the disk into slots; answered by `Sources.read_ended`."""

    number: int
    blocks: tuple[tuple[int, bytes], ...]


class Prefill(NamedTuple):
    """Have blocks computed by another engine and read from there into slots; answered by `Sources.read_ended`.

    Attributes:
        tokens: the prompt that has the blocks, and the token after them.
        priority, owner, scope: the request's.
        engine, host: the preferred engine, by its name or else by its host, used if it can be reached; "" for any.
    """

    number: int
    blocks: tuple[tuple[int, bytes], ...]
    tokens: list[int]
    priority: int
    owner: str
    scope: str
    engine: str = ""
    host: str = ""


class Locate(NamedTuple):
    """Ask the directory who has these blocks; answered by `Sources.located`.

    Attributes:
        names, needed: see `holders.Lookup`.
    """

    number: int
    names: list[bytes]
    needed: list[bool]


class Pull(NamedTuple):
    """Read blocks from another node's tier into slots; answered by `Sources.read_ended`."""

    number: int
    blocks: tuple[tuple[int, bytes], ...]
    node: str


class Lacks(NamedTuple):
    """Tell the directory that a node does not have these blocks."""

    node: str
    hashes: list[bytes]


class Ban(NamedTuple):
    """A node has given a block with wrong bytes: never read from it again."""

    node: str
    hash: bytes


class Forget(NamedTuple):
    """Remove a bad block from the disk's index."""

    hash: bytes


class Have(NamedTuple):
    """Blocks of an export, from its block `first` on, are in these slots, and stay there until they are released."""

    number: int
    first: int
    slots: tuple[int, ...]


class Gone(NamedTuple):
    """No further blocks of an export will come."""

    number: int


Order = Write | Read | Prefill | Locate | Pull | Lacks | Ban | Forget
