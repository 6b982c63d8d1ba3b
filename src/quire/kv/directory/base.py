"""What a directory is: which nodes there are, and which KV blocks each of them can give to others.

It is a hint, and nothing else: who reads a block asks the node for it, and checks the bytes. So a directory that is
wrong, late or lost costs time and no token. Blocks are named by their keyed, chained hashes, which tell nothing of what
is in them to who has not the cluster's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.errors import QuireError


class DirectoryError(QuireError):
    """The directory cannot be used now; the message says why."""


class Node(NamedTuple):
    """An engine that shares blocks.

    Attributes:
        name: another one after each start of the engine.
        epoch: another one after each time that the directory had lost the node: what was published before does not
            count.
        address: HOST:PORT, where it listens for those who read its blocks.
    """

    name: str
    epoch: str
    address: str


Holders = list[list[Node]]
"""The nodes that hold a block, of each that was asked about."""


class Directory(Protocol):
    """Each call is atomic, and one round trip (in etcd, each hundred blocks).

    Raises (each call):
        DirectoryError: it does not answer.
        ConfigError: it never will, to what was configured.
    """

    def check(self) -> None:
        """Whether it can be used at all."""

    def join(self, node: Node, lease: float) -> bool:
        """Be there for so many seconds from now on; False: the node was not there in this epoch, so it has no
        blocks."""

    def leave(self, node: Node) -> None:
        """Be there no longer."""

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        """The node holds these blocks; False: it is not there in this epoch, and nothing was done."""

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        """The node holds these blocks no longer, if what was published of them was of this epoch."""

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        """Who holds blocks of a chain, up to the first one that nobody holds and that is needed.

        Args:
            needed: of each block, whether those behind it are of no use without; None: each is.
        """

    def nodes(self) -> list[Node]:
        """All that are there."""

    def close(self) -> None:
        """Ask no more."""
