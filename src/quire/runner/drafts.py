"""What passes between the runner and proposers: drafts that are wanted, drafts, and what a step computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.ops import KVCache, KVShape, RaggedBatch


@dataclass(frozen=True, slots=True)
class Wanted:
    """Drafts that a step may verify: at most `count`, for positions from `position` on.

    All tokens before `position` are known, and `token` is the last of them; the model has not computed it yet.
    """

    request: int
    position: int
    token: int
    count: int


@dataclass(slots=True)
class Drafts:
    """Drafted tokens of a request.

    Attributes:
        tokens: drafted ids, at most as many as were wanted.
        parents: for a tree, the row that each draft follows: 0 is the last known token, j the draft `tokens[j - 1]`;
            always smaller than the draft's own row. None: each follows the one before.
        distributions: [drafts, vocabulary] fp32, the distribution that each draft was sampled from, for rejection
            sampling; None if drafts were not sampled.
    """

    tokens: list[int]
    parents: list[int] | None = None
    distributions: Tensor | None = None

    def parent(self, row: int) -> int:
        """The row that row `row`, of draft `tokens[row - 1]`, follows."""
        return row - 1 if self.parents is None else self.parents[row - 1]


@dataclass(slots=True)
class Computed:
    """A step's computation for one request, without rejected drafts.

    Attributes:
        start: position of the first token.
        tokens: the computed tokens, in order of position.
        next_token: the token after them, if the step sampled it; None for a part of a prompt.
        rows: the row of `features` for each token.
    """

    request: int
    start: int
    tokens: list[int]
    next_token: int | None
    rows: Sequence[int]


class Row(NamedTuple):
    """A token to sample, at `position`, after the drafts `ahead`, which take the positions up to `position - 1`."""

    request: int
    position: int
    ahead: Sequence[int] = ()


class Ahead(NamedTuple):
    """Tokens to sample, whose positions and preceding drafts are known on the device only.

    Attributes:
        positions: [rows] int64, of the tokens.
        drafts: [rows, width] int64, the drafts before each token, padded with -1.
    """

    positions: Tensor
    drafts: Tensor


class Branch(NamedTuple):
    """A request's tree of drafts, as a span of a batch.

    Attributes:
        base: position of the tree's root. The KV of a row with slot `i` is stored in the place of position `base + i`.
        slots: of each row.
        paths: per row, the slots from the root to the row itself; their number gives its position.
    """

    request: int
    base: int
    tokens: Sequence[int]
    slots: Sequence[int]
    paths: Sequence[Sequence[int]]


class DraftingModel(Protocol):
    """A model that drafts: EAGLE's heads, `Model.mtp`, and `DraftModel`, which adapts a whole model.

    Where kernels read spans on the device, its methods are recorded: they must not look at numbers.

    Attributes:
        kv_shape: of a token's KV.
    """

    kv_shape: KVShape

    def fuse(self, features: Tensor) -> Tensor:
        """From the target's features [rows, width] to the rows' input `hidden`."""
        ...

    def forward(self, hidden: Tensor, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """One step: [tokens, hidden], the input of `logits`, and the input `hidden` of the next drafted row."""
        ...

    def logits(self, out: Tensor) -> Tensor:
        """From rows of `forward`'s result to [rows, vocabulary of the target] fp32."""
        ...


class Asked(NamedTuple):
    """A request that decodes in a step, while the host does not know the previous step's result.

    Attributes:
        certain: number of its tokens before the previous step.
        most: upper bound of the number of its tokens now. The lower bound is `certain + 1` if it is in the previous
            step, otherwise `certain`.
        drafts: number of drafts wanted.
    """

    request: int
    certain: int
    most: int
    drafts: int


class Ends(NamedTuple):
    """The lengths of some requests, known on the device only.

    Attributes:
        rows: [requests] int32, rows of the block tables and of `DeviceContext.recent`.
        lengths: [requests] int64, number of known tokens.
    """

    rows: Tensor
    lengths: Tensor

    def first(self, count: int) -> Ends:
        """Those of the first `count` requests."""
        return Ends(self.rows[:count], self.lengths[:count])


class Lines(NamedTuple):
    """Drafts without branches: tokens [requests, longest] int64, padded with -1."""

    requests: list[int]
    tokens: Tensor


class Placed(NamedTuple):
    """Rows of a step's features whose positions are known on the device; all [rows] int64.

    Attributes:
        picked: indices of the rows.
        table_rows: their requests' rows in the block tables.
        positions: their positions.
    """

    picked: Tensor
    table_rows: Tensor
    positions: Tensor
