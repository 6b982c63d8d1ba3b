"""What a choice of servers is worth, simulated: Mooncake's traces on servers that are nothing but a rate and a cache.

    python -m benchmarks.fleet_simulated --trace conversation_trace.jsonl

`benchmarks.fleet` runs real servers, which on a laptop share its cores with the load, the router and everything else:
times say little there. Here the same rules (`quire.fleet`: choice, knowledge, load) decide over servers in simulated
time. Each computes prompts one after the other at RATE tokens a second, keeps the CACHE tokens that were used last, and
holds a request until its output is done. With --cores, servers share that many, and those that compute are slower while
more of them do. Lengths are the trace's own; times are divided by --speedup, of which several
are tried. With the pool, a server fetches what another one has at FETCH tokens a second, where that takes less than
computing it (`kv/tiers/cost.py`: 0.8 of it). The simulation's router knows what it has sent and hears of evictions.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import Result, tell
from quire.fleet.choice import FETCH_BELOW, POLICIES, Candidate, Chooser, PolicyName
from quire.fleet.knowledge import Knowledge
from quire.fleet.load import Load

SERVERS = 4
BLOCK = 512
"""Tokens of a block of the trace."""

RATE = 12_000.0
"""Prompt tokens that a server computes a second."""

CACHE = 2_000_000
"""Tokens that it keeps."""

FETCH = 100_000.0
TOKEN_SECONDS = 0.03
"""Of a token of output."""

GOAL_SECONDS = 5.0
"""A request is within the goal when its first token comes within so many seconds."""


@dataclass(slots=True)
class Request:
    at: float
    tokens: int
    output: int
    names: list[bytes]


@dataclass(slots=True)
class Prompt:
    """A request at its server: seconds that computing still takes, and tokens that the router thought were missing."""

    request: Request
    left: float
    missing: int


@dataclass(slots=True)
class Server:
    """In simulated time: prompts that it has to compute, each with the seconds that this still takes on a core of its
    own, and what it keeps, the least recently used first."""

    name: str
    prompts: deque[Prompt] = field(default_factory=deque)
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    load: Load = field(default_factory=Load)

    def held(self, names: Sequence[bytes]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.cache), len(names))

    def keep(self, names: Sequence[bytes]) -> list[bytes]:
        """These were used; what had to go."""
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        return [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - CACHE // BLOCK)]


def read(trace: str, count: int, speedup: float) -> list[Request]:
    found = []
    with Path(trace).open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            chained = itertools.accumulate(row["hash_ids"], lambda before, each: hash((before, each)), initial=0)
            names = [each.to_bytes(9, "little", signed=True) for each in list(chained)[1:]]
            found.append(Request(row["timestamp"] / 1000 / speedup, row["input_length"], row["output_length"], names))
    return found


def computed(servers: Sequence[Server], now: float, until: float, cores: float) -> tuple[float, list[Server]]:
    """Compute until then, or until the first prompts are done: the time, and whose are."""
    busy = [server for server in servers if server.prompts]
    if not busy:
        return until, []
    share = min(1.0, cores / len(busy))
    seconds = min(until - now, min(server.prompts[0].left for server in busy) / share)
    for server in busy:
        server.prompts[0].left -= seconds * share
    return now + seconds, [server for server in busy if server.prompts[0].left < 1e-9]


def candidate(server: Server, request: Request, knowledge: Knowledge) -> Candidate:
    """A server, as the router sees it."""
    load = server.load
    return Candidate(
        name=server.name,
        rate=RATE,
        held=min(request.tokens, knowledge.held(server.name, request.names) * BLOCK),
        queued=load.queued,
        waiting=load.waiting,
        running=load.waiting + load.running,
        recent=load.recent(request.at),
    )


def simulate(requests: Sequence[Request], policy: PolicyName, pool: bool, cores: float = SERVERS) -> dict[str, Any]:
    """First tokens, and where prompts came from, of all requests under a policy."""
    servers = [Server(f"s{number}") for number in range(SERVERS)]
    chooser, knowledge = Chooser(policy), Knowledge()
    ends: list[tuple[float, int, Server]] = []  # of outputs
    waits, cached, fetched, now = [], 0, 0, 0.0
    order = itertools.count()  # of events at the same time
    for request in [*requests, None]:
        until = request.at if request else math.inf
        while now < until and (request or any(server.prompts for server in servers)):
            now, done = computed(servers, now, min(until, ends[0][0] if ends and request else until), cores)
            for server in done:
                prompt = server.prompts.popleft()
                waits.append(now - prompt.request.at)
                server.load.begun(prompt.request.at, now, prompt.missing, computed=0)
                heapq.heappush(ends, (now + prompt.request.output * TOKEN_SECONDS, next(order), server))
            while ends and ends[0][0] <= now:
                heapq.heappop(ends)[2].load.ended(0, has_begun=True)
        if request is None:
            break
        candidates = [candidate(server, request, knowledge) for server in servers]
        prefix = b"".join(request.names[:2])  # the first block is the same in nearly all
        decision = chooser.choose(request.tokens, prefix, candidates)
        assert decision is not None
        server = next(each for each in servers if each.name == decision.server)
        missing = max(1, request.tokens - decision.chosen.held)
        server.load.sent(request.at, missing)
        knowledge.sent(server.name, request.names)
        own = server.held(request.names)
        elsewhere = max(each.held(request.names) for each in servers) if pool else 0
        seconds = max(1, request.tokens - own * BLOCK) / RATE
        if elsewhere > own:
            brought = (elsewhere - own) * BLOCK
            if brought / FETCH < FETCH_BELOW * brought / RATE:
                seconds = brought / FETCH + max(1, request.tokens - elsewhere * BLOCK) / RATE
                fetched += brought
        cached += min(request.tokens, own * BLOCK)
        server.prompts.append(Prompt(request, seconds, missing))
        knowledge.dropped(server.name, server.keep(request.names))
    waits.sort()
    return {
        "cached": cached / sum(request.tokens for request in requests),
        "fetched": fetched / sum(request.tokens for request in requests),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[len(waits) * 99 // 100],
        "within_goal": sum(wait <= GOAL_SECONDS for wait in waits) / len(waits),
    }


def run(trace: str, count: int, speedups: Sequence[float], cores: float = SERVERS) -> Result:
    result = Result(
        (
            "times divided by",
            "policy",
            "cached",
            "fetched",
            "first token p50, s",
            "p99, s",
            f"within {GOAL_SECONDS:g} s",
        )
    )
    for speedup in speedups:
        requests = read(trace, count, speedup)
        busy = sum(request.tokens for request in requests) / RATE / cores / requests[-1].at
        tell(
            f"fleet, simulated: times divided by {speedup:g}: {busy:.2f} of what {SERVERS} servers on {cores:g} cores "
            "compute uncached"
        )
        for policy, pool in [(policy, False) for policy in POLICIES] + [("cost", True)]:
            found = simulate(requests, policy, pool, cores)
            name = f"{policy}, pool" if pool else policy
            shown = (
                f"{found['cached']:.1%}",
                f"{found['fetched']:.1%}",
                f"{found['p50_s']:.2f}",
                f"{found['p99_s']:.1f}",
            )
            result.add(
                (f"{speedup:g}", name, *shown, f"{found['within_goal']:.1%}"), what=name, speedup=speedup, **found
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="file of the trace")
    parser.add_argument(
        "--requests", type=int, default=12_031, help="of its beginning (default: all of the conversations)"
    )
    parser.add_argument(
        "--speedup", type=float, nargs="+", default=[0.9, 1.0, 1.1, 1.2, 1.5], help="divide its times by these"
    )
    parser.add_argument(
        "--cores", type=float, default=SERVERS, help=f"that the {SERVERS} servers share (default: one each)"
    )
    args = parser.parse_args()
    print(run(args.trace, args.requests, args.speedup, args.cores).table())


if __name__ == "__main__":
    main()
