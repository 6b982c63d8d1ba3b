"""The host tier's memory: blocks that the pool has given up, and that are copied back, checked, when they are wanted.

Which block lies in which slot is decided elsewhere (`core/tier.py`). A block is a range of bytes as the pool has it
(`KVCache.memory`), so nothing here knows what is in it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from quire.core.step import Move
from quire.kv.transport.base import Region
from quire.ops.memory import shared

CHECK_BYTES = 32


class HostTier:
    """Slots of one block each, and for each a keyed hash of the block's name and its bytes.

    A load checks the copy in the pool, not the slot: whatever wrote there meanwhile, and whatever may be wrong with the
    memory, what is computed with is what was saved. The key keeps others, who may come to write into slots or files,
    from making up a block.

    Args:
        num_slots, block_bytes: how many, and the size of each.
        key: 32 secret bytes.
        pinned: for a GPU, which copies to and from memory that stays where it is.

    Attributes:
        memory: [num_slots, block_bytes] uint8. On a CPU, pages are only taken once they are used. It is given back when
            nobody has it, or a `region` of it, any more.
        fd: of the memory as a file, which other processes may map; -1: it is none, as where it is pinned.
        checks: by slot; empty where nothing was saved.
    """

    def __init__(self, num_slots: int, block_bytes: int, key: bytes, pinned: bool = False) -> None:
        self.num_slots, self.block_bytes, self.pinned = num_slots, block_bytes, pinned
        size = num_slots * block_bytes
        flat, self.fd = (torch.empty(size, dtype=torch.uint8, pin_memory=True), -1) if pinned else shared(size)
        if self.fd >= 0:
            weakref.finalize(self, os.close, self.fd)
        self.memory = flat.view(num_slots, block_bytes)
        self.checks = [b""] * num_slots
        self._key = blake3(key, derive_key_context="quire 2026 check of a KV block's bytes").digest()

    @property
    def region(self) -> Region:
        """All of it, for those who give it to other engines."""
        return Region(self.memory.view(-1).numpy().data, self.fd)

    def save(self, pool: Tensor, moves: Sequence[Move]) -> None:
        """Copy blocks out of the pool, [num_blocks, block_bytes] uint8 on any device."""
        for block, slot, name in moves:
            self.memory[slot].copy_(pool[block])
            self.checks[slot] = self.check(name, self.memory[slot])

    def load(self, pool: Tensor, moves: Sequence[Move]) -> list[int]:
        """Copy blocks into the pool. Returns the slots whose copies there are not what was saved."""
        for block, slot, _ in moves:
            pool[block].copy_(self.memory[slot], non_blocking=self.pinned)
        return [slot for block, slot, name in moves if self.checks[slot] != self.check(name, pool[block])]

    def check(self, name: bytes, block: Tensor) -> bytes:
        """The keyed hash of a block's name and bytes."""
        return blake3(name, key=self._key).update(block.cpu().numpy().data).digest(CHECK_BYTES)
