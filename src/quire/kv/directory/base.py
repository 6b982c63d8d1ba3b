"""The interface of directories: which nodes there are, and which KV blocks each of them can give to others.

A directory is only a hint: a reader asks the node itself for a block, and verifies the bytes. So a directory that is
wrong, late or lost costs time but never changes a token. Blocks are named by their keyed, chained hashes, which reveal
nothing about their contents without the cluster's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.errors import QuireError


class DirectoryError(QuireError):
    """A directory (or store) cannot be used now; the message says why."""


class Node(NamedTuple):
    """An engine that shares blocks.

    Attributes:
        name: a new one after each start of the engine.
        epoch: a new one each time the directory has lost the node; what was published before does not count.
        address: HOST:PORT where it listens for readers of its blocks.
    """

    name: str
    epoch: str
    address: str


Holders = list[list[Node]]
"""For each block asked about, the nodes that have it."""


class Directory(Protocol):
    """A directory. Each call is atomic, and takes one round trip.

    Raises (each call):
        DirectoryError: it does not answer.
        ConfigError: it never will, as it is configured.
    """

    def check(self) -> None:
        """Check that the directory can be used at all."""

    def join(self, node: Node, lease: float) -> bool:
        """Register the node, or renew its lease, for this many seconds. False if it was not registered in this epoch,
        so that none of its blocks are."""

    def leave(self, node: Node) -> None:
        """Deregister the node."""

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        """Publish that the node has these blocks. False, with no effect, if it is not registered in this epoch."""

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        """Withdraw blocks that the node published in this epoch."""

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        """The nodes that have the blocks of a chain, up to the first needed one that no node has.

        Args:
            needed: for each block, whether later ones are useless without it; None if all are needed.
        """

    def nodes(self) -> list[Node]:
        """All registered nodes."""

    def close(self) -> None:
        """Close the connection."""


def other_cluster(where: str) -> str:
    """The error for an engine with another cluster key."""
    return (
        f"{where} is used by engines with another cluster key; give all of them the same --cluster-key-file, or this "
        "one another directory"
    )


def masked(url: str) -> str:
    """A URL without its password."""
    scheme, found, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{found}{user + ':***' if at else ''}{at}{place}"
