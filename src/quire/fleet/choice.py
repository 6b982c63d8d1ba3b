"""Chooses the server for a request: the one where it costs the fewest seconds.

The cost is the part of the request's time to first token that depends on the server, plus the delay that it causes for
other requests:

    cost = compute + others + fetch + queue
    compute = prompt tokens that are not cached there / rate
    others  = compute x (requests waiting for their first token, averaged over the servers)
    queue   = (prompt tokens queued there + RUNNING_TOKENS x requests there) / rate

While a prompt is computed, requests that arrive after it wait; by Little's law, about as many as wait now. Without this
term, what is best for each request would be worst for all: under overload, requests would leave the servers that have
their prefixes for shorter queues, so there would be more to compute, and all queues would grow. Cached prefixes and
short queues are weighed in the same unit, seconds. If the blocks can be fetched from elsewhere (a prefill server, a
pool), fetching replaces computing if it is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

RUNNING_TOKENS = 64
"""A decoding request takes its share of every step, which counts like this many queued prompt tokens."""

FETCH_BELOW = 0.8
"""A fetch must take less than this share of the time that it saves, as in `kv/tiers/cost.py`."""

NEAR = 1.25
"""Costs up to this many times the lowest one count as equal, since rates are estimates."""

MOST_SHOWN = 8
"""Of a fleet of hundreds, all costs of each request would fill the log."""

PolicyName = Literal["cost", "round-robin", "least-loaded", "prefix-hash"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A server to which a request could be sent.

    Attributes:
        is_up: False if it failed recently.
        rate: prompt tokens that it computes per second; above 0.
        held: length of the prompt's cached prefix, in tokens.
        queued: prompt tokens of requests that were sent there and have no first token yet.
        waiting: number of these requests.
        running: number of requests there that have not ended, including waiting ones, since all of them will decode.
        recent: number of requests that it got recently; among equally good servers, the lowest is chosen.
        weight: weight of a second of prefill there, even if no request waits: more than 1 on decode servers, where it
            delays streams.
        fetchable: length of the prefix, in tokens, that it could fetch from elsewhere in `fetch_seconds`.
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
    """The cost of a request on one server, in seconds: see above. `held`: tokens that are cached there."""

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
        """The estimated time to first token."""
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
    """The choice for a request: the chosen server's cost, and those of all candidates."""

    chosen: Cost
    costs: tuple[Cost, ...]

    @property
    def server(self) -> str:
        return self.chosen.server

    @property
    def shown(self) -> list[Cost]:
        """The costs for people, in order: the chosen server's and the lowest ones, at most `MOST_SHOWN`."""
        if len(self.costs) <= MOST_SHOWN:
            return list(self.costs)
        ranked = sorted(self.costs, key=lambda cost: (cost is not self.chosen, cost.total))
        kept = {cost.server for cost in ranked[:MOST_SHOWN]}
        return [cost for cost in self.costs if cost.server in kept]


def cost_of(tokens: int, candidate: Candidate, waiting: float = 0.0) -> Cost:
    """The cost of a prompt with this many tokens there. Its last token is computed in any case.

    Args:
        waiting: mean number of requests per server that wait for their first token.
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
    """Chooses servers by a policy: "cost", or one of the others to compare it with.

    round-robin: in turn. least-loaded: the one with the fewest requests. prefix-hash: prompts with the same prefix go
    to the same server (rendezvous hashing: if a server leaves, only its prompts move).
    """

    def __init__(self, policy: PolicyName = "cost") -> None:
        self.policy = policy
        self._turn = 0

    def choose(self, tokens: int, prefix: bytes, candidates: Sequence[Candidate]) -> Decision | None:
        """Choose a server for a prompt; None if there are no candidates. One that is not up is used only if none is.

        Args:
            prefix: identifies the prompt's prefix, such as the hash of its first block.
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
    """The one with the fewest recent requests, of those that cost nearly the least and hold as much of the prompt."""
    best = min(costs, key=lambda cost: (cost.total, -cost.held))
    as_good = [i for i, cost in enumerate(costs) if cost.held >= best.held and cost.total <= NEAR * best.total]
    return min(as_good, key=lambda i: (able[i].recent, costs[i].total, costs[i].server))
