"""The shape of one step on the device: which rows belong to whom, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True)
class Trees:
    """Rows that see ancestors of their own in place of the rows before them.

    A row of a tree at position p sees what every row sees up to its span's base. At position base + d, 0 <= d <= p -
    base, it sees the token whose key and value lie where its request's position base + paths[row, d] would: in slot
    `paths[row, d]` of the tree. The last of these is its own. So rows need not be in the order of their positions, and
    a span may hold some rows of a tree whose other slots were filled by steps before.

    Attributes:
        bases: [spans] int64, position of each tree's root; a span whose rows continue one another has its context
            length there, so that nothing follows a path.
        paths: [tokens, width] int64; entries after a row's own are 0, as are all of rows in no tree.
    """

    bases: torch.Tensor
    paths: torch.Tensor


@dataclass(slots=True)
class DeviceTrees:
    """The same on the device.

    Attributes:
        bases: [spans] int32; anything for spans whose rows continue one another.
        depths: [tokens] int32, a row's position less its span's base; -1 for rows in no tree, and of padding.
        paths: [tokens, width] int32, contiguous.
    """

    bases: torch.Tensor
    depths: torch.Tensor
    paths: torch.Tensor


@dataclass(slots=True)
class DeviceSpans:
    """The spans of a step where kernels read them on the device, so that launching them needs no number of the step's.

    Spans are padded to one of a few counts: padding spans are after the others, have no rows and no context.

    Attributes:
        row_starts: [spans + 1] int32, first row of each span; from the last real span on, the number of real rows.
        starts: [spans] int32, position of each span's first row.
        context_lens: [spans] int32, positions that hold KV once this step has stored its own (start + rows).
        table_rows: [spans] int32, which row of `block_tables` belongs to each span's request.
        block_tables: [requests, blocks] int32, the block ids of all requests from position 0 on.
        trees: of rows that do not continue one another; their span's `starts` is where the first one's key and value
            lie, and the others' follow.
    """

    row_starts: torch.Tensor
    starts: torch.Tensor
    context_lens: torch.Tensor
    table_rows: torch.Tensor
    block_tables: torch.Tensor
    trees: DeviceTrees | None = None


@dataclass(slots=True)
class RaggedBatch:
    """All spans of a step, one after the other.

    There is no padding, unless kernels read the spans on the device (`Kernels.reads_spans`): then `spans` is set,
    `row_starts`, `context_lens` and `block_tables` are empty, and tensors of tokens may have rows after the real
    ones. Those have token 0, position 0 and slot 0, which lies in the null block, and belong to no span.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64, absolute position of each row in its request.
        slots: [tokens] int64, `block * block_size + offset` where each row's key and value are stored.
        row_starts: first row of each span; one more entry than spans, the last is `tokens`.
        context_lens: per span, positions that hold KV once this step has stored its own (start + rows; of a tree, its
            base and all slots up to the last that is read).
        block_tables: [spans, blocks] int64, contiguous: the block ids of each span's request from position 0
            on. Entries after its context, and of blocks that a window has passed, are 0, the null block.
        block_size: tokens a block.
        spans: the same on the device, for kernels that read it there.
        trees: of rows that do not continue one another; None where all do. On the device it is `spans.trees`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: list[int]
    context_lens: list[int]
    block_tables: torch.Tensor
    block_size: int
    spans: DeviceSpans | None = None
    trees: Trees | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first call with this key: for what all layers of a step share."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def in_trees(self) -> list[bool]:
        """Whether each span's rows follow paths of their own.

        Raises ValueError where a path leaves its request's context, or is shorter than its row's position says.
        """
        if self.trees is None:
            return [False] * len(self.context_lens)
        bases, paths = self.trees.bases, self.trees.paths
        room = torch.tensor(self.context_lens) - bases  # slots of each tree
        span_of_row = torch.repeat_interleave(torch.tensor(self.row_starts).diff())
        rows = (room > 0)[span_of_row]  # [tokens]
        depths, slots, most = (self.positions - bases[span_of_row])[rows], paths[rows], room[span_of_row[rows]]
        if ((depths < 0) | (depths >= paths.shape[1])).any():
            raise ValueError(f"rows {depths.tolist()} positions below their trees' roots: paths have {paths.shape[1]}")
        if ((slots < 0) | (slots >= most.unsqueeze(1))).any():
            raise ValueError(f"paths {slots.tolist()} name slots that their trees, of {most.tolist()}, do not have")
        return (room > 0).tolist()
