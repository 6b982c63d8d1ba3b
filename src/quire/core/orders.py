"""What is asked of whoever has blocks beside the engine: the disk, other engines, and the directory of other nodes.

`Fetches.orders` has what is to be asked next; `Fetches` says what the answers are.
"""

from __future__ import annotations

from typing import NamedTuple


class Write(NamedTuple):
    """To be written to the disk: the block in a slot, which is pinned until `Fetches.written`."""

    slot: int
    hash: bytes


class Read(NamedTuple):
    """To be read from the disk into slots, until `Fetches.read_ended`."""

    number: int
    blocks: tuple[tuple[int, bytes], ...]


class Prefill(NamedTuple):
    """To be computed by another engine and read from there into slots, until `Fetches.read_ended`.

    Attributes:
        tokens: the prompt that has the blocks, and the token after them.
        priority, owner, scope: the request's.
        engine: the one that it is to be, if that can be reached; "": any.
    """

    number: int
    blocks: tuple[tuple[int, bytes], ...]
    tokens: list[int]
    priority: int
    owner: str
    scope: str
    engine: str = ""


class Locate(NamedTuple):
    """The directory is to say who holds these blocks, by `Holders.answered`.

    Attributes:
        names, needed: see `holders.Lookup`.
    """

    number: int
    names: list[bytes]
    needed: list[bool]


class Pull(NamedTuple):
    """To be read from another node's tier into slots, until `Fetches.read_ended`."""

    number: int
    blocks: tuple[tuple[int, bytes], ...]
    node: str


class Lacks(NamedTuple):
    """A node has not these blocks, which the directory says it holds."""

    node: str
    hashes: list[bytes]


class Ban(NamedTuple):
    """A node has given a block with other bytes."""

    node: str
    hash: bytes


class Forget(NamedTuple):
    """The disk has the block no longer: it was bad."""

    hash: bytes


Order = Write | Read | Prefill | Locate | Pull | Lacks | Ban | Forget
