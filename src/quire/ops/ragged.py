"""The shape of one step on the device: which rows belong to whom, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True)
class RaggedBatch:
    """All spans of a step, one after the other, without padding.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64, absolute position of each row in its request.
        slots: [tokens] int64, `block * block_size + offset` where each row's key and value are stored.
        row_starts: first row of each span; one more entry than spans, the last is `tokens`.
        context_lens: per span, positions that hold KV once this step has stored its own (start + rows).
        block_tables: [spans, blocks] int64, contiguous: the block ids of each span's request from position 0
            on. Entries behind its context, and of blocks that a window has passed, are 0, the null block.
        block_size: tokens a block.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    block_size: int
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key: for what all layers of a step share."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
