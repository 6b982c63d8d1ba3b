"""What requests wait for: blocks on their way into the host tier, and from there into the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.external import Found, Loadable
from quire.core.prefix_leaders import BLOCK, ELSEWHERE
from quire.core.request import Request, Status
from quire.kv.tiers.tier import DISK, HOST, PEER, REMOTE

PATIENCE = {DISK: 20.0, PEER: 120.0, REMOTE: 5.0}
"""Seconds without progress after which requests no longer wait; see also `sources.COMPUTED_TIMES`."""


@dataclass(eq=False)
class SlotFetch(Found):
    """Blocks of one prefix being read into the host tier, including those that are in it already; see `Fetch`.

    Attributes:
        source: `DISK`, `PEER` or `REMOTE`.
        filling: slots being filled. wanted: names of their blocks. sizes: of these, in blocks of the first group.
        pinned: slots of blocks that are in the tier already.
        brings: number of blocks of which at least one part is read. block_size: tokens of each.
        begin: when it began.
        num_filled: number of slots that have been filled, the first ones.
        patience: seconds without progress that requests wait. deadline: when they stop waiting.
        late: the deadline has passed.
        request: the request that it was begun for.
        node: the node that has the blocks. Only for `REMOTE`.
        engine: the engine that provided them, for display.
    """

    source: str
    filling: list[int]
    wanted: list[bytes]
    sizes: list[float]
    pinned: list[int]
    brings: int
    block_size: int
    begin: float
    num_filled: int = 0
    patience: float = field(init=False)
    deadline: float = field(init=False)
    late: bool = False
    request: Request | None = None
    node: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        self.kind = ELSEWHERE if self.source == PEER else BLOCK
        self.patience = PATIENCE[self.source]
        self.deadline = self.begin + self.patience

    @property
    def complete(self) -> bool:
        """Whether all slots have been filled."""
        return self.num_filled == len(self.filling)

    def came(self) -> int:
        """Number of blocks that have arrived."""
        return self.brings * self.num_filled // len(self.filling)

    def wait_for(self, seconds: float) -> None:
        """Limit how long requests wait for it."""
        self.patience = min(self.patience, seconds)
        self.deadline = self.begin + self.patience


@dataclass(eq=False)
class Fetch(Loadable):
    """Blocks of one prefix being loaded from the host tier into the pool.

    Attributes:
        size: of all that is loaded, in blocks of the first group.
        brings: how many blocks further requests can begin once they are loaded. block_size: tokens of each.
        request: the request that it was begun for.
    """

    source, engine = HOST, ""

    size: float
    brings: int
    request: Request | None = field(default=None, init=False)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.prefix.cache.block_size

    @property
    def complete(self) -> bool:
        """All came."""
        return self.num_published == len(self.hashes)

    def came(self) -> int:
        """How many blocks further requests can begin now."""
        return min(self.brings, self.num_published)


def begun_for(fetch: SlotFetch | Fetch, request: Request, now: float) -> None:
    """A request waits for a fetch, which was begun for it unless it was for one of another replica."""
    if fetch.request is None:
        fetch.request = request
        request.num_fetches += 1
    if fetch.request is request:
        request.stats.fetching(fetch.source, fetch.brings * fetch.block_size, now)


def ended_for(fetch: SlotFetch | Fetch, seconds: float, moving: float = 0.0) -> None:
    """A fetch has ended: record it in the statistics of its request."""
    if fetch.request is not None and fetch.request.status is not Status.FINISHED:
        fetch.request.stats.fetched(fetch.came() * fetch.block_size, seconds, moving, fetch.engine)
        fetch.request.num_fetches -= fetch.complete
