"""What a choice of servers is worth, simulated: Mooncake's traces on servers that are nothing but a rate and a cache.

    python -m benchmarks.fleet_simulated --trace conversation_trace.jsonl

`benchmarks.fleet` runs real servers, which on a laptop share its cores with the load, the router and everything else:
times say little there. Here the same rules (`quire.fleet`: choice, knowledge, load) decide over servers in simulated
time. Each computes prompts one after the other at RATE tokens a second, keeps the CACHE tokens that were used last, and
holds a request until its output is done. Lengths are the trace's own; times are divided by --speedup, of which several
are tried. With the pool, a server fetches what another one has at FETCH tokens a second, where that takes less than
computing it (`core/cost.py`: 0.8 of it). The router of the simulation knows what it has sent, and hears of evictions.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import OrderedDict
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
class Server:
    """In simulated time: when it is done with all prompts, and what it keeps, the least recently used first."""

    name: str
    free_at: float = 0.0
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


def simulate(requests: Sequence[Request], policy: PolicyName, pool: bool) -> dict[str, Any]:
    """First tokens, and where prompts came from, of all requests under a policy."""
    servers = {f"s{number}": Server(f"s{number}") for number in range(SERVERS)}
    chooser, knowledge = Chooser(policy), Knowledge()
    events: list[tuple[float, int, str, Server, Request, int]] = []  # first tokens and ends, in their order
    waits, cached, fetched = [], 0, 0
    order = itertools.count()  # of events at the same time
    for request in requests:
        while events and events[0][0] <= request.at:
            at, _, what, server, one, missing = heapq.heappop(events)
            if what == "first":
                server.load.begun(one.at, at, missing, computed=0)
                heapq.heappush(events, (at + one.output * TOKEN_SECONDS, next(order), "end", server, one, missing))
            else:
                server.load.ended(missing, has_begun=True)
        candidates = []
        for server in servers.values():
            server.load.tell(RATE)
            held = min(request.tokens, knowledge.held(server.name, request.names) * BLOCK)
            load = server.load
            candidates.append(
                Candidate(
                    name=server.name,
                    rate=RATE,
                    held=held,
                    queued=load.queued,
                    waiting=load.waiting,
                    running=load.waiting + load.running,
                    recent=load.recent(request.at),
                )
            )
        prefix = b"".join(request.names[:2])  # the first block is the same in nearly all
        decision = chooser.choose(request.tokens, prefix, candidates)
        assert decision is not None
        server = servers[decision.server]
        missing = max(1, request.tokens - decision.chosen.held)
        server.load.sent(request.at, missing)
        knowledge.sent(server.name, request.names)
        own = server.held(request.names)
        elsewhere = max(each.held(request.names) for each in servers.values()) if pool else 0
        seconds = max(1, request.tokens - own * BLOCK) / RATE
        if elsewhere > own:
            brought = (elsewhere - own) * BLOCK
            if brought / FETCH < FETCH_BELOW * brought / RATE:
                seconds = brought / FETCH + max(1, request.tokens - elsewhere * BLOCK) / RATE
                fetched += brought
        cached += min(request.tokens, own * BLOCK)
        server.free_at = max(server.free_at, request.at) + seconds
        waits.append(server.free_at - request.at)
        knowledge.dropped(server.name, server.keep(request.names))
        heapq.heappush(events, (server.free_at, next(order), "first", server, request, missing))
    waits.sort()
    return {
        "cached": cached / sum(request.tokens for request in requests),
        "fetched": fetched / sum(request.tokens for request in requests),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[len(waits) * 99 // 100],
        "within_goal": sum(wait <= GOAL_SECONDS for wait in waits) / len(waits),
    }


def run(trace: str, count: int, speedups: Sequence[float]) -> Result:
    result = Result(
        (
            "times divided by",
            "choice",
            "cached",
            "fetched",
            "first token p50, s",
            "p99, s",
            f"within {GOAL_SECONDS:g} s",
        )
    )
    for speedup in speedups:
        requests = read(trace, count, speedup)
        busy = sum(request.tokens for request in requests) / RATE / SERVERS / requests[-1].at
        tell(f"fleet, simulated: times divided by {speedup:g}: {busy:.2f} of what {SERVERS} servers compute uncached")
        for policy, pool in [(policy, False) for policy in POLICIES] + [("cost", True)]:
            found = simulate(requests, policy, pool)
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
    args = parser.parse_args()
    print(run(args.trace, args.requests, args.speedup).table())


if __name__ == "__main__":
    main()
