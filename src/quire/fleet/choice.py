"""Which server a request goes to: the one where it costs the fewest seconds.

The cost is what the request waits for before its first token, as far as it depends on the server, and what others
wait for it:

    cost = compute + others + fetch + queue
    compute = prompt tokens that are not cached there / rate
    others  = compute x (requests that wait for their first tokens, on average of the servers)
    queue   = (prompt tokens that wait there + RUNNING_TOKENS x requests there) / rate

While a prompt is computed, those that come after it wait: by Little's law about as many as wait now. Without that, what
is best for each request is worst for all: where more comes than can be computed, requests leave their caches for
shorter queues, so there is more to compute, and all queues grow. So that a prompt is cached somewhere, and that
somebody has little to do, are seconds of one sum. Where another place can give the blocks (a prefill server, a pool),
fetching takes the place of computing if it is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

RUNNING_TOKENS = 64
"""A request that decodes, or will, takes its share of every step: counted like so many prompt tokens that wait."""

FETCH_BELOW = 0.8
"""A fetch is worth it where it takes less than this share of what it saves, as in `core/cost.py`."""

NEAR = 1.25
"""A cost of up to so many times the least one is as good: rates are estimates."""

PolicyName = Literal["cost", "round-robin", "least-loaded", "prefix-hash"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server, as one request sees it.

    Attributes:
        is_up: False: it failed lately.
        rate: prompt tokens that it computes a second; above 0.
        held: tokens of the prompt, from its beginning, that are cached there.
        queued: prompt tokens of requests that were sent there and have no first token yet.
        waiting: how many these are.
        running: requests there that have not ended, with or without one: all of them decode sooner or later.
        recent: requests that it got lately; of servers that are as good, the one with the fewest is taken.
        weight: what a second of computing there counts for, even where nobody waits: more than 1 where it holds up
            streams that others compute prompts for.
        fetchable: tokens of the prompt, from its beginning, that it could have from elsewhere, in `fetch_seconds`.
    """

    name: str
    rate: float
    is_up: bool = True
    held: int = 0
    queued: int = 0
    waiting: int = 0
    running: int = 0
    recent: float = 0.0
    weight: float = 1.0
    fetchable: int = 0
    fetch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request costs on one server, in seconds: see above. `held`: tokens that are cached there."""

    server: str
    held: int
    compute: float
    others: float
    fetch: float
    queue: float

    @property
    def total(self) -> float:
        return self.seconds + self.others

    @property
    def seconds(self) -> float:
        """Until the request's own first token."""
        return self.compute + self.fetch + self.queue

    def __str__(self) -> str:
        some = "".join(
            f" + {name} {_shown(each)}" for name, each in (("others", self.others), ("fetch", self.fetch)) if each
        )
        parts = f"compute {_shown(self.compute)}{some} + queue {_shown(self.queue)}, {self.held} held"
        return f"{self.server} {_shown(self.total)} ({parts})"


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and what it would have cost anywhere. `chosen` is one of `costs`."""

    chosen: Cost
    costs: tuple[Cost, ...]

    @property
    def server(self) -> str:
        return self.chosen.server


def cost_of(tokens: int, candidate: Candidate, waiting: float = 0.0) -> Cost:
    """What a prompt of so many tokens costs there. Its last token is computed in any case.

    Args:
        waiting: requests that wait for their first tokens at a server, on average.
    """
    rate, held = candidate.rate, min(candidate.held, tokens)
    compute, fetch, weight = max(1, tokens - held) / rate, 0.0, candidate.weight + waiting
    if candidate.fetchable > held:
        rest = max(1, tokens - candidate.fetchable) / rate
        if candidate.fetch_seconds < FETCH_BELOW * weight * (compute - rest):
            compute, fetch = rest, candidate.fetch_seconds
    queue = (candidate.queued + RUNNING_TOKENS * candidate.running) / rate
    return Cost(candidate.name, held, compute, (weight - 1.0) * compute, fetch, queue)


class Chooser:
    """Chooses by a policy; "cost" is the one to use, and the others are there to compare it with.

    round-robin: one after the other. least-loaded: who has the fewest requests. prefix-hash: prompts that begin alike
    go to the same server (rendezvous hashing: when a server goes, only its prompts move).
    """

    def __init__(self, policy: PolicyName = "cost") -> None:
        self.policy = policy
        self._turn = 0

    def choose(self, tokens: int, prefix: bytes, candidates: Sequence[Candidate]) -> Decision | None:
        """Where a prompt goes; None where there are no candidates. One that is not up is taken only if none is.

        Args:
            prefix: what prompts that begin alike have in common, such as the hash of their first block.
        """
        able = [one for one in candidates if one.is_up] or candidates
        if not able:
            return None
        waiting = sum(one.waiting for one in able) / len(able)
        costs = tuple(cost_of(tokens, one, waiting) for one in able)
        return Decision(costs[self._index(prefix, able, costs)], costs)

    def _index(self, prefix: bytes, able: Sequence[Candidate], costs: Sequence[Cost]) -> int:
        if self.policy == "cost":
            return _cheapest(able, costs)
        self._turn += 1
        indices = range(len(able))
        if self.policy == "round-robin":
            return self._turn % len(able)
        if self.policy == "least-loaded":
            return min(indices, key=lambda i: (able[i].running, able[i].queued, able[i].recent))
        return max(indices, key=lambda i: blake2b(able[i].name.encode(), key=prefix[:64], digest_size=8).digest())


def _cheapest(able: Sequence[Candidate], costs: Sequence[Cost]) -> int:
    """The cheapest, or of those that are nearly so and hold as much of the prompt, who got the fewest lately."""
    best = min(costs, key=lambda cost: (cost.total, -cost.held))
    as_good = [i for i, cost in enumerate(costs) if cost.held >= best.held and cost.total <= NEAR * best.total]
    return min(as_good, key=lambda i: (able[i].recent, costs[i].total, costs[i].server))
