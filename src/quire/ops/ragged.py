"""The shape of one step on the device: which rows belong to whom, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True)
class DeviceSpans:
    """The spans of a step where kernels read them on the device, so that launching them needs no number of the step's.

    Spans are padded to one of a few counts: padding spans are behind the others, have no rows and no context.

    Attributes:
        row_starts: [spans + 1] int32, first row of each span; from the last real span on, the number of real rows.
        starts: [spans] int32, position of each span's first row.
        context_lens: [spans] int32, positions that hold KV once this step has stored its own (start + rows).
        table_rows: [spans] int32, which row of `block_tables` belongs to each span's request.
        block_tables: [requests, blocks] int32, the block ids of all requests from position 0 on.
    """

    row_starts: torch.Tensor
    starts: torch.Tensor
    context_lens: torch.Tensor
    table_rows: torch.Tensor
    block_tables: torch.Tensor


@dataclass(slots=True)
class RaggedBatch:
    """All spans of a step, one after the other.

    There is no padding, unless kernels read the spans on the device (`Kernels.reads_spans`): then `spans` is set,
    `row_starts`, `context_lens` and `block_tables` are empty, and tensors of tokens may have rows behind the real
    ones. Those have token 0, position 0 and slot 0, which lies in the null block, and belong to no span.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64, absolute position of each row in its request.
        slots: [tokens] int64, `block * block_size + offset` where each row's key and value are stored.
        row_starts: first row of each span; one more entry than spans, the last is `tokens`.
        context_lens: per span, positions that hold KV once this step has stored its own (start + rows).
        block_tables: [spans, blocks] int64, contiguous: the block ids of each span's request from position 0
            on. Entries behind its context, and of blocks that a window has passed, are 0, the null block.
        block_size: tokens a block.
        spans: the same on the device, for kernels that read it there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    block_size: int
    spans: DeviceSpans | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key: for what all layers of a step share."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
