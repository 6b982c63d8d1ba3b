"""The interface of proposers, which draft tokens.

A plan says how many drafts of which requests a step verifies. A `Proposer` provides the tokens when the step begins,
and is told what the step computed when it ends. Drafts change a request's speed, never its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.core.step import RequestInfo
from quire.ops import KVShape
from quire.runner.draft_context import DeviceContext, DraftContext
from quire.runner.drafts import Asked, Computed, DraftingModel, Drafts, Lines, Placed, Wanted


class Proposer(Protocol):
    """Drafts tokens. It keeps its own state for each request."""

    def start(self, info: RequestInfo) -> None:
        """A new request that may get drafts. Requests without `RequestInfo.drafting_enabled` are not announced."""
        ...

    def end(self, request: int) -> None:
        """Forget it."""
        ...

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        """Drafts, one entry per request; an entry may be empty."""
        ...

    def follow(self, computed: Sequence[Computed], features: Tensor, context: DraftContext) -> None:
        """A step has run. A request's spans are in order, except that it may start over (after a preemption), or start
        after a cached prefix.

        Args:
            features: [rows, width] hidden states for drafting, see `Forwarded`.
        """
        ...


class DeviceProposer(ABC):
    """A proposer whose drafts stay on the device, so that the host can launch a step without waiting for the last one.

    Its methods also get requests that it was not told to `start`, and ignore them.

    Attributes:
        keeps: number of recent tokens of each request that it needs in `DeviceContext.recent`.
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
        """A request, new or preempted, is computed from this position on; what is before it is in cached blocks."""

    @abstractmethod
    def propose(self, asked: Sequence[Asked], context: DeviceContext) -> Lines | None:
        """Drafts for requests that want some, or for fewer of them; `asked` has all requests that decode."""

    @abstractmethod
    def follow(
        self, computed: Sequence[Computed], placed: Placed | None, features: Tensor, context: DeviceContext
    ) -> None:
        """A step was launched.

        Args:
            computed: its parts of prompts. The last row of a whole prompt, which is sampled, is in `placed`, too.
            placed: the rows that are sampled; None if there are none.
            features: see `Proposer.follow`.
        """

    @abstractmethod
    def settle(self, request: int, length: int) -> None:
        """The number of a request's known tokens, after the steps before the one of the last `propose`."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A proposer, and its requirements.

    Attributes:
        model: drafts; None if no model does.
        aux_layers: target layers whose inputs are its features; if empty, these are the target's final hidden states.
        weight_bytes: size of the draft model's weights.
        kv_shape: shape of its KV, which is in the same blocks as the target's; None if it has none.
        bytes_per_request: size of its other state, per running request.
        needs_next_token: its KV of a token depends on the next token.
        rejection: drafts are accepted by rejection sampling; otherwise if they equal the sampled tokens.
        fingerprint: identifies the draft model's weights, on which its KV depends.
    """

    proposer: Proposer | DeviceProposer
    model: DraftingModel | None = None
    aux_layers: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_shape: KVShape | None = None
    bytes_per_request: int = 0
    needs_next_token: bool = False
    rejection: bool = False
    fingerprint: str = ""

    @property
    def keeps(self) -> int:
        """Number of recent tokens of each request that the device must keep."""
        return self.proposer.keeps if isinstance(self.proposer, DeviceProposer) else 1
