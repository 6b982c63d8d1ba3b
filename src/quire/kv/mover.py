"""Who moves blocks between the pools and where they are kept, in the order of the plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from quire.core.step import Move

CHECK_BYTES = 16
"""Bytes of the check before each value."""


class Mover(Protocol):
    """Moves blocks; `host.HostTier` is one. Pools are, by KV group, [num_blocks, bytes] uint8 on any device."""

    def save(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> Callable[[], None]:
        """Save blocks. Returns a function to call once the step has run, before it commits."""

    def load(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> list[int]:
        """Load blocks. Returns the slots of those whose bytes are not those that were saved."""


class Values(Protocol):
    """Values by name, as a connector keeps them. Called by the thread that computes steps."""

    def put(self, name: bytes, value: bytes) -> None:
        """Keep a value. It may be lost, or be there already."""

    def get(self, name: bytes) -> bytes | None:
        """The value; None if it is not there."""


class NamedMover:
    """Moves blocks as values. Each has a keyed hash of its name and bytes, and the copy in the pool is what is checked:
    whatever becomes of a value, the engine computes only with what was saved.

    Args:
        values: where they are kept.
        key: 32 secret bytes.
    """

    def __init__(self, values: Values, key: bytes) -> None:
        self._values = values
        self._key = blake3(key, derive_key_context="quire 2026 check of a KV value's bytes").digest()

    def save(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> Callable[[], None]:
        """See `Mover`."""
        for block, _, name, group in moves:
            data = pools[group][block].cpu().numpy().tobytes()
            self._values.put(name, self._check(name, data) + data)
        return _nothing

    def load(self, pools: Sequence[Tensor], moves: Sequence[Move]) -> list[int]:
        """See `Mover`."""
        return [slot for block, slot, name, group in moves if not self._load(pools[group][block], name)]

    def _load(self, block: Tensor, name: bytes) -> bool:
        value = self._values.get(name)
        if value is None or len(value) != CHECK_BYTES + block.numel():
            return False
        block.copy_(torch.frombuffer(bytearray(value[CHECK_BYTES:]), dtype=torch.uint8))
        return self._check(name, block.cpu().numpy().tobytes()) == value[:CHECK_BYTES]

    def _check(self, name: bytes, data: bytes) -> bytes:
        return blake3(name + data, key=self._key).digest(CHECK_BYTES)


def _nothing() -> None:
    """There is nothing to do."""
