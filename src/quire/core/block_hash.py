"""A block's identity outside its process: a keyed hash chained over the whole prefix.

A predictable hash would let one user serve another a wrong prefix, so the hash is keyed: at random per boot,
or with the cluster's key where tiers are shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from blake3 import blake3


def part_name(block_hash: bytes, group: int) -> bytes:
    """The name of a KV group's block outside the pool; for the first group, it is the block's hash itself."""
    return block_hash if group == 0 else block_hash[:-1] + bytes([block_hash[-1] ^ group])


class BlockHasher:
    """Chained, keyed BLAKE3 over parent hash and key ids.

    Args:
        key: 32 secret bytes.
        fingerprint: what KV bytes depend on besides the tokens: checkpoint, dtype, KV dtype, layout version.
    """

    def __init__(self, key: bytes, fingerprint: str) -> None:
        self._key = key
        self._fingerprint = fingerprint.encode("utf-8", "surrogatepass")  # a path may hold any bytes

    def root(self, scope: str) -> bytes:
        """The root of the chains of one scope (a tenant's salt)."""
        scope_bytes = scope.encode("utf-8", "surrogatepass")
        # Lengths are included so that no two (fingerprint, scope) pairs give the same bytes.
        head = len(self._fingerprint).to_bytes(8, "little") + self._fingerprint
        return blake3(head + scope_bytes, key=self._key).digest()

    def chain(self, parent: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """Hashes of consecutive full blocks; `keys` are the blocks' key ids as bytes."""
        hashes, key = [], self._key
        for block_key in keys:
            parent = blake3(parent + block_key, key=key).digest()
            hashes.append(parent)
        return hashes


def common_blocks(a: array[int], b: array[int], size: int, most: int) -> int:
    """With how many of the same blocks of `size` keys both begin, at most `most`; by bisection, no key twice."""
    same, end = 0, most
    while same < end:
        middle = (same + end + 1) // 2
        if a[same * size : middle * size] == b[same * size : middle * size]:
            same = middle
        else:
            end = middle - 1
    return same
