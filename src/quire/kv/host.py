"""The host tier's memory: blocks evicted from the pool, which are copied back and verified when they are needed.

`tiers/tier.py` decides which block is in which slot. All ranks of a machine share the memory, and each copies its share
of a block (`layout.py`).
"""

from __future__ import annotations

import functools
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from blake3 import blake3
from torch import Tensor

from quire.core.step import Move
from quire.errors import ConfigError
from quire.kv.layout import WHOLE, Piece, Share, Split
from quire.kv.prefault import Prefaulter
from quire.kv.transport.base import Region
from quire.ops import memory

HASH_BYTES = 16
HEAD = struct.Struct("<BBBx")
"""Header of a check: how the ranks that saved the block share it (`Split`), and how many hashes follow."""

CHECK_BYTES = 1024
"""Memory for a slot's check."""

MOST_PIECES = (CHECK_BYTES - HEAD.size) // HASH_BYTES


class Checks:
    """The check of each slot's block: a keyed hash of the block's name and bytes for each piece saved by a different
    rank; b"" if nothing was saved. Whoever writes a block into a slot sets its check.

    Nobody can forge a check without the key, so it can be stored and sent along with the block.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory.numpy().data  # [slots * CHECK_BYTES]

    def __getitem__(self, slot: int) -> bytes:
        begin = slot * CHECK_BYTES
        count = self._memory[begin + 2]
        return bytes(self._memory[begin : begin + HEAD.size + count * HASH_BYTES]) if 0 < count <= MOST_PIECES else b""

    def __setitem__(self, slot: int, check: bytes) -> None:
        begin = slot * CHECK_BYTES
        self._memory[begin : begin + CHECK_BYTES] = check.ljust(CHECK_BYTES, b"\0")

    def add(self, slot: int, head: bytes, number: int, found: bytes) -> None:
        """Add the hash of a piece; other ranks add those of other pieces, with the same `head`."""
        begin = slot * CHECK_BYTES
        self._memory[begin : begin + HEAD.size] = head
        begin += HEAD.size + number * HASH_BYTES
        self._memory[begin : begin + HASH_BYTES] = found


@dataclass(frozen=True)
class Slots:
    """The slots for one KV group's blocks.

    Attributes:
        count, block_bytes: number and size of the slots.
        share: the part of each block that this rank has; None for all of it.
    """

    count: int
    block_bytes: int
    share: Share | None = None

    @property
    def split(self) -> Split:
        """How ranks share a block."""
        return WHOLE if self.share is None else self.share.split

    @property
    def num_pieces(self) -> int:
        """Number of pieces of a block."""
        return 1 if self.share is None else self.share.layout.num_pieces(self.share.split)

    @property
    def head(self) -> bytes:
        """The header of their checks."""
        return HEAD.pack(*self.split, self.num_pieces)

    def pieces(self, pool: Tensor, memory: Tensor) -> list[tuple[int, bool, Piece, Piece]]:
        """See `Share.pieces`."""
        return [(0, True, [pool], [memory])] if self.share is None else self.share.pieces(pool, memory)


class HostTier:
    """Slots of one block each, and a check for each slot: keyed hashes of the block's name and bytes. Slot numbers are
    consecutive, with those for the first KV group's blocks first.

    A load verifies the copy in the pool, not the slot, so whatever happened to the slot's memory, the engine computes
    only with what was saved. The key prevents anyone who can write to slots or files from forging a block. Each rank
    verifies what it has loaded; if the block was saved by ranks that share it differently (by another engine, or before
    a restart), it verifies all of it, on a private copy.

    Args:
        groups: each KV group's slots.
        key: 32 secret bytes.
        pinned: use page-locked memory, for copies to and from a GPU.
        fd: of the memory, if it exists already.
        prefaulters: by group, what faults in the pool's memory before blocks are loaded there; may be empty.

    Attributes:
        memory: by group, [count, block_bytes] uint8. On a CPU, pages are allocated on first use. The memory is freed
            when neither it nor a `region` of it is referenced any more.
        fd: of the memory as a file, which other processes can map; -1 if it is not a file, as when it is pinned by a
            single rank.
        checks: by slot.

    Raises:
        ConfigError: there are more ranks than a check has room for.
        MemoryError: so much memory cannot be pinned.
    """

    def __init__(
        self,
        groups: Sequence[Slots],
        key: bytes,
        pinned: bool = False,
        fd: int = -1,
        prefaulters: Sequence[Prefaulter] = (),
    ) -> None:
        self.groups, self.pinned, self._prefaulters = groups, pinned, prefaulters
        if (count := max(each.num_pieces for each in groups)) > MOST_PIECES:
            raise ConfigError(
                f"host_kv_memory with {count} ranks that have different KV; at most {MOST_PIECES} are allowed: "
                "lower pipeline_parallel_size, or leave host_kv_memory out"
            )
        self._begins = [0, *accumulate(each.count for each in groups)]  # slots
        self._offsets = [0, *accumulate(each.count * each.block_bytes for each in groups)]  # bytes
        self.num_slots, blocks = self._begins[-1], self._offsets[-1]
        size = blocks + self.num_slots * CHECK_BYTES
        own = -1 if fd < 0 else os.dup(fd)
        flat, self.fd = (memory.pinned(size, own), own) if pinned else memory.shared(size, own)
        if self.fd >= 0:
            weakref.finalize(self, os.close, self.fd)
        self.memory = [
            flat[offset : offset + each.count * each.block_bytes].view(each.count, each.block_bytes)
            for offset, each in zip(self._offsets, groups, strict=False)
        ]
        self.checks = Checks(flat[blocks:size])
        self._flat = flat[:blocks]
        self._key = blake3(key, derive_key_context="quire 2026 check of a KV block's bytes").digest()

    @property
    def region(self) -> Region:
        """The memory of all slots, for transports."""
        return Region(self._flat.numpy().data, self.fd)

    def place(self, slot: int) -> tuple[int, int]:
        """A slot's offset in the region, and its length."""
        group = bisect_right(self._begins, slot) - 1
        size = self.groups[group].block_bytes
        return self._offsets[group] + (slot - self._begins[group]) * size, size

    def block(self, slot: int) -> Tensor:
        """A slot's contents, [block_bytes] uint8."""
        offset, size = self.place(slot)
        return self._flat[offset : offset + size]

    def save(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> Callable[[], None]:
        """Copy blocks from the groups' pools, each [num_blocks, bytes of this rank's share] uint8 on any device.

        A GPU is only told to. Returns a function that adds the blocks' checks, once the copies are there.
        """
        later: list[Callable[[], None]] = []
        for group, pieces in self._pieces(pools, moves).items():
            slots, begin = self.groups[group], self._begins[group]
            for block, slot, name, _ in (move for move in moves if move.group == group):
                for number, saves, own, kept in pieces:
                    if saves:
                        for there, here in zip(kept, own, strict=True):
                            there[slot - begin].copy_(here[block], non_blocking=self.pinned)
                        saved = _at(kept, slot - begin) if self.pinned else _at(own, block)
                        add = functools.partial(self._add_check, slot, name, slots, number, saved)
                        later.append(add) if self.pinned else add()

        def add_checks() -> None:
            for add in later:
                add()

        return add_checks

    def _add_check(self, slot: int, name: bytes, slots: Slots, number: int, saved: Sequence[Tensor]) -> None:
        self.checks.add(slot, slots.head, number, self._hash(name, slots.split, number, saved))

    def load(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> list[int]:
        """Copy blocks into the pools. Returns the slots whose copies differ from what was saved."""
        pieces = self._pieces(pools, moves)
        for group in pieces if self._prefaulters else ():
            self._prefaulters[group].used(max(move.block for move in moves if move.group == group))
        for block, slot, _, group in moves:
            for _, _, own, kept in pieces[group]:
                for here, there in zip(own, kept, strict=True):
                    here[block].copy_(there[slot - self._begins[group]], non_blocking=self.pinned)
        return [move.slot for move in moves if not self._is_good(move, pieces[move.group])]

    def _pieces(
        self, pools: Sequence[Tensor], moves: Sequence[Move]
    ) -> dict[int, list[tuple[int, bool, Piece, Piece]]]:
        """The pieces to copy, by group; see `Slots.pieces`."""
        moved = dict.fromkeys(move.group for move in moves)
        return {group: self.groups[group].pieces(pools[group], self.memory[group]) for group in moved}

    def _is_good(self, move: Move, pieces: list[tuple[int, bool, Piece, Piece]]) -> bool:
        """Whether what was loaded is what was saved."""
        block, slot, name, group = move
        check = self.checks[slot]
        if not check:
            return False
        split = Split(*check[:2])
        if split != self.groups[group].split:
            return self._take_over(move, pieces, check, split)
        return all(
            self._hash(name, split, number, _at(own, block)) == _of(check, number) for number, _, own, _ in pieces
        )

    def _take_over(self, move: Move, pieces: list[tuple[int, bool, Piece, Piece]], check: bytes, split: Split) -> bool:
        """Load a block that was saved by ranks that share it differently; whether it is good.

        All of it is verified, on a copy that nobody else can write to.
        """
        block, slot, name, group = move
        share = self.groups[group].share
        if share is None or not share.layout.has(split):
            return False
        layout, copy = share.layout, self.block(slot)[None].clone()
        for number, piece in enumerate(layout.pieces(copy, split)):
            if self._hash(name, split, number, _at(piece, 0)) != _of(check, number):
                return False
        theirs = layout.pieces(copy, share.split)
        for number, _, own, _ in pieces:
            for here, there in zip(own, theirs[number], strict=True):
                here[block].copy_(there[0])
        return True

    def _hash(self, name: bytes, split: Split, number: int, piece: Sequence[Tensor]) -> bytes:
        """The keyed hash of a block's piece."""
        found = blake3(HEAD.pack(*split, number) + name, key=self._key)
        for each in piece:
            found.update(each.contiguous().cpu().numpy().data)
        return found.digest(HASH_BYTES)


def _at(piece: Piece, place: int) -> list[Tensor]:
    """What one block or slot has of it."""
    return [each[place] for each in piece]


def slot_bytes(block_bytes: int) -> int:
    """Bytes that a slot takes, with its check."""
    return block_bytes + CHECK_BYTES


def _of(check: bytes, number: int) -> bytes:
    begin = HEAD.size + number * HASH_BYTES
    return check[begin : begin + HASH_BYTES]
