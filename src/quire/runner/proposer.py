"""What drafts tokens, and what it is given: all that passes between a step and whoever guesses the next one.

A plan says how many drafts of which requests a step verifies; which tokens they are, a `Proposer` says when the step
begins, and it is told what the step computed when it ends. What it says changes a request's speed, never its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from quire.core.step import RequestInfo
from quire.ops import KVShape

if TYPE_CHECKING:
    from quire.runner.draft_context import DeviceContext, DraftContext


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
    """Guesses of what follows a request's tokens.

    Attributes:
        tokens: guessed ids, at most as many as were wanted.
        parents: per draft, the row that it continues: 0 is the last known token, j the draft `tokens[j - 1]`; each is
            smaller than the draft's own row. None: each continues the one before.
        distributions: [drafts, vocabulary] fp32, what each was drawn from, where rejection sampling needs it;
            None: each was certain.
    """

    tokens: list[int]
    parents: list[int] | None = None
    distributions: Tensor | None = None

    def parent(self, row: int) -> int:
        """The row that row `row`, of draft `tokens[row - 1]`, continues."""
        return row - 1 if self.parents is None else self.parents[row - 1]


@dataclass(slots=True)
class Computed:
    """What a step made of one request; rejected drafts are not part of it.

    Attributes:
        start: position of the first token.
        tokens: those whose rows count, in the order of their positions.
        next_token: the one after them, if the step sampled it: then it is the last that is known. None: a part of a
            prompt.
        rows: of `features`, one a token.
    """

    request: int
    start: int
    tokens: list[int]
    next_token: int | None
    rows: Sequence[int]


class Row(NamedTuple):
    """One token that a request is to sample: at `position`, after `ahead`, drafts that stand before it.

    So `ahead` is for positions up to `position - 1`, and the tokens before those are known.
    """

    request: int
    position: int
    ahead: Sequence[int] = ()


class Ahead(NamedTuple):
    """Rows of which only the device knows where they are and what is drafted before them.

    Attributes:
        positions: [rows] int64, that the tokens take.
        drafts: [rows, width] int64, that stand before them; -1 where there are fewer.
    """

    positions: Tensor
    drafts: Tensor


class Branch(NamedTuple):
    """Rows of a request's tree of drafts, as a span of a batch.

    Attributes:
        base: position of the tree's root; what is before it is linear. Row with slot `i` is stored where position
            `base + i` would be.
        slots: of each row.
        paths: per row, the slots of its ancestors from the root on, its own the last; their number says its position.
    """

    request: int
    base: int
    tokens: Sequence[int]
    slots: Sequence[int]
    paths: Sequence[Sequence[int]]


class Proposer(Protocol):
    """Guesses tokens. It keeps what it must know of each request itself."""

    def start(self, info: RequestInfo) -> None:
        """A request is new, and may be drafted; of others nothing is told (`RequestInfo.drafting_enabled`)."""
        ...

    def end(self, request: int) -> None:
        """Forget it."""
        ...

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        """Guesses, one entry a request; an empty one where there is none."""
        ...

    def follow(self, computed: Sequence[Computed], features: Tensor, context: DraftContext) -> None:
        """A step has run. Spans come in order, but a request may begin again (preemption), or after a cached prefix.

        Args:
            features: [rows, width] what the model gives of its rows: see `Forwarded`.
        """
        ...


class Asked(NamedTuple):
    """A request that decodes in a step, of which the host does not know what the step before it made.

    Attributes:
        certain: tokens that it has had before that step.
        most: tokens that it may have now: from `certain + 1`, if it is in that step, or `certain`, on.
        drafts: so many are wanted after them.
    """

    request: int
    certain: int
    most: int
    drafts: int


class Ends(NamedTuple):
    """Where some requests' texts end, as only the device knows.

    Attributes:
        rows: [requests] int32, of the block tables, and of `DeviceContext.recent`.
        lengths: [requests] int64, tokens that are known.
    """

    rows: Tensor
    lengths: Tensor

    def first(self, count: int) -> Ends:
        """Of the first so many of them."""
        return Ends(self.rows[:count], self.lengths[:count])


class Lines(NamedTuple):
    """Drafts that follow one another: tokens [requests, longest] int64, -1 where there is none."""

    requests: list[int]
    tokens: Tensor


class Placed(NamedTuple):
    """Rows of a step's features whose positions the device knows; all [rows] int64.

    Attributes:
        picked: which rows.
        table_rows: of the block tables, of their requests.
        positions: their own.
    """

    picked: Tensor
    table_rows: Tensor
    positions: Tensor


class DeviceProposer(ABC):
    """A proposer whose drafts the device alone need know, so that the host waits for no step to launch the next.

    It is told of requests that it was not told to start, too, and ignores them.

    Attributes:
        keeps: tokens of each request in `DeviceContext.recent`, at least.
    """

    keeps: int

    @abstractmethod
    def start(self, info: RequestInfo) -> None:
        """See `Proposer`."""

    @abstractmethod
    def end(self, request: int) -> None:
        """See `Proposer`."""

    @abstractmethod
    def restart(self, request: int, start: int) -> None:
        """It is computed from here on: it is new, or was preempted. What is before lies in cached blocks."""

    @abstractmethod
    def propose(self, asked: Sequence[Asked], context: DeviceContext) -> Lines | None:
        """Drafts for those that want some, or for fewer. Every request that decodes is told of."""

    @abstractmethod
    def follow(
        self, computed: Sequence[Computed], placed: Placed | None, features: Tensor, context: DeviceContext
    ) -> None:
        """A step was launched.

        Args:
            computed: its parts of prompts; of a whole one the last row, which samples, is in `placed` too.
            placed: the rows that sample; None: there are none.
            features: see `Proposer.follow`.
        """

    @abstractmethod
    def settle(self, request: int, length: int) -> None:
        """So many tokens of it are known, of the steps before the last one that `propose` was asked for."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A proposer, and what it asks of the engine that it drafts for.

    Attributes:
        aux_layers: layers of the target whose input it is fed; none: the target's hidden states.
        weight_bytes: of what it computes drafts with.
        kv_shape: of what it keeps of each token, in the same blocks as the target; None: nothing.
        bytes_per_request: of what it keeps of each request that runs.
        needs_next_token: what it keeps of a token depends on the next one.
        rejection: drafts are accepted by rejection sampling, in place of being the sampled tokens.
        fingerprint: names the weights that what it keeps depends on, beside the target's own.
    """

    proposer: Proposer | DeviceProposer
    aux_layers: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_shape: KVShape | None = None
    bytes_per_request: int = 0
    needs_next_token: bool = False
    rejection: bool = False
    fingerprint: str = ""

    @property
    def keeps(self) -> int:
        """Tokens of each request that the device must keep."""
        return self.proposer.keeps if isinstance(self.proposer, DeviceProposer) else 1
