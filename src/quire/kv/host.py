"""The host tier's memory: blocks that the pool has given up, and that are copied back, checked, when they are wanted.

Which block lies in which slot is decided elsewhere (`core/tier.py`), and what is in a block is not known here. All
ranks of a machine have the same memory, and each copies its share of a block (`layout.py`).
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from quire.core.step import Move
from quire.errors import ConfigError
from quire.kv.layout import WHOLE, Share, Split
from quire.kv.transport.base import Region
from quire.ops.memory import shared

HASH_BYTES = 16
HEAD = struct.Struct("<BBBx")
"""A check's beginning: how the ranks that saved the block share it (`Split`), and how many hashes follow."""

CHECK_BYTES = 1024
"""Memory for the check of a slot."""

MOST_PIECES = (CHECK_BYTES - HEAD.size) // HASH_BYTES


class Checks:
    """By slot, what a block's bytes are checked with, a keyed hash of the block's name and bytes for each piece that
    another rank has saved; b"" where nothing was saved. Whoever brings a block into a slot sets its check.

    Without the key nobody can make one up, so it may lie, and travel, where the block does.
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
        """The hash of a piece; other ranks add those of others, and the same `head`."""
        begin = slot * CHECK_BYTES
        self._memory[begin : begin + HEAD.size] = head
        begin += HEAD.size + number * HASH_BYTES
        self._memory[begin : begin + HASH_BYTES] = found


class HostTier:
    """Slots of one block each, and for each a check: keyed hashes of the block's name and its bytes.

    A load checks the copy in the pool, not the slot: whatever wrote there meanwhile, and whatever may be wrong with the
    memory, what is computed with is what was saved. The key keeps others, who may come to write into slots or files,
    from making up a block. Each rank checks what it has loaded; where the block was saved by ranks that share it
    otherwise (by another engine, or before a restart), it checks all of it, on a copy of its own.

    Args:
        num_slots, block_bytes: how many, and the size of each.
        key: 32 secret bytes.
        pinned: for a GPU, which copies to and from memory that stays where it is.
        share: this rank's; None: it has all of a block, and so had whoever saved it.
        fd: of the memory, if it is there already.

    Attributes:
        memory: [num_slots, block_bytes] uint8. On a CPU, pages are only taken once they are used. It is given back when
            nobody has it, or a `region` of it, any more.
        fd: of the memory as a file, which other processes may map; -1: it is none, as where it is pinned.
        checks: by slot.

    Raises:
        ConfigError: there are more ranks than a check has room for.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        key: bytes,
        pinned: bool = False,
        share: Share | None = None,
        fd: int = -1,
    ) -> None:
        self.num_slots, self.block_bytes, self.pinned, self._share = num_slots, block_bytes, pinned, share
        self._split, count = (WHOLE, 1) if share is None else (share.split, share.layout.num_pieces(share.split))
        if count > MOST_PIECES:
            raise ConfigError(
                f"host_kv_memory with {count} ranks that have different KV; at most {MOST_PIECES} may: "
                "lower pipeline_parallel_size, or leave host_kv_memory out"
            )
        self._head = HEAD.pack(*self._split, count)
        size = num_slots * slot_bytes(block_bytes)
        own = -1 if fd < 0 else os.dup(fd)
        flat, self.fd = (torch.zeros(size, dtype=torch.uint8, pin_memory=True), -1) if pinned else shared(size, own)
        if self.fd >= 0:
            weakref.finalize(self, os.close, self.fd)
        self.memory = flat[: num_slots * block_bytes].view(num_slots, block_bytes)
        self.checks = Checks(flat[num_slots * block_bytes : size])
        self._key = blake3(key, derive_key_context="quire 2026 check of a KV block's bytes").digest()

    @property
    def region(self) -> Region:
        """All slots, for those who give them to other engines."""
        return Region(self.memory.view(-1).numpy().data, self.fd)

    def save(self, pool: Tensor, moves: Sequence[Move]) -> None:
        """Copy blocks out of the pool, [num_blocks, bytes of this rank's share] uint8 on any device."""
        pieces = self._pieces(pool) if moves else []
        for block, slot, name in moves:
            for number, saves, own, kept in pieces:
                if saves:
                    kept[slot].copy_(own[block])
                    saved = kept[slot] if self.pinned else own[block]
                    found = self._hash(name, self._split, number, saved)
                    self.checks.add(slot, self._head, number, found)

    def load(self, pool: Tensor, moves: Sequence[Move]) -> list[int]:
        """Copy blocks into the pool. Returns the slots whose copies there are not what was saved."""
        pieces = self._pieces(pool) if moves else []
        for block, slot, _ in moves:
            for _, _, own, kept in pieces:
                own[block].copy_(kept[slot], non_blocking=self.pinned)
        return [move.slot for move in moves if not self._is_good(move, pieces)]

    def _pieces(self, pool: Tensor) -> list[tuple[int, bool, Tensor, Tensor]]:
        """See `Share.pieces`."""
        return [(0, True, pool, self.memory)] if self._share is None else self._share.pieces(pool, self.memory)

    def _is_good(self, move: Move, pieces: list[tuple[int, bool, Tensor, Tensor]]) -> bool:
        """Whether what was loaded is what had been saved."""
        block, slot, name = move
        check = self.checks[slot]
        if not check:
            return False
        split = Split(*check[:2])
        if split != self._split:
            return self._take_over(move, pieces, check, split)
        return all(self._hash(name, split, number, own[block]) == _of(check, number) for number, _, own, _ in pieces)

    def _take_over(
        self, move: Move, pieces: list[tuple[int, bool, Tensor, Tensor]], check: bytes, split: Split
    ) -> bool:
        """Load a block that was saved by ranks that shared it otherwise; whether it is good.

        All of it is checked, on a copy that nobody else can write to.
        """
        block, slot, name = move
        if self._share is None or not self._share.layout.has(split):
            return False
        layout, copy = self._share.layout, self.memory[slot : slot + 1].clone()
        for number, piece in enumerate(layout.pieces(copy, split)):
            if self._hash(name, split, number, piece[0]) != _of(check, number):
                return False
        theirs = layout.pieces(copy, self._split)
        for number, _, own, _ in pieces:
            own[block].copy_(theirs[number][0])
        return True

    def _hash(self, name: bytes, split: Split, number: int, piece: Tensor) -> bytes:
        """The keyed hash of a piece."""
        begin = blake3(HEAD.pack(*split, number) + name, key=self._key)
        return begin.update(piece.contiguous().cpu().numpy().data).digest(HASH_BYTES)


def slot_bytes(block_bytes: int) -> int:
    """That a slot takes, with its check."""
    return block_bytes + CHECK_BYTES


def _of(check: bytes, number: int) -> bytes:
    begin = HEAD.size + number * HASH_BYTES
    return check[begin : begin + HASH_BYTES]
