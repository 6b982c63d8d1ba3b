"""How long a stream stands still when what generates it is killed or hangs (Linux).

    python -m benchmarks.failover [--tokens 1500] [--model demo] [--streams 4]

Streams of one prompt and different seeds run at a server; when the first one has so many tokens, the server, its
engine, or one of its two replicas is killed or stopped (SIGSTOP). The longest time between two events of any stream is
printed, and how many of the streams have the same text as without that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tests.http_tools import EventStream, ServeProcess, wait_until
from tests.test_router_serve import KEY, RouteProcess

PROMPT = "class Tree:\n    def insert(self, key):\n"


class Case:
    """One fleet, and what befalls it."""

    def __init__(self, args: argparse.Namespace, servers: int, replicas: int) -> None:
        self._args, self._stack = args, ExitStack()
        flags = ["--api-key", KEY, "--admin", "--data-parallel-size", str(replicas), "--max-num-seqs", "16"]
        self.servers = [
            self._stack.enter_context(ServeProcess(*flags, model=args.model, key=KEY, deadline=300.0))
            for _ in range(servers)
        ]
        self.door: ServeProcess = self.servers[0]
        if servers > 1:
            given = itertools.chain.from_iterable(("--server", one.url) for one in self.servers)
            self.door = self._stack.enter_context(RouteProcess(*given, "--api-key", KEY, key=KEY))
            wait_until(lambda: len(self.door.up()) == servers)  # type: ignore[attr-defined]
        wait_until(lambda: all(len(one.pids("engine")) == replicas for one in self.servers), 300.0)
        for one in self.servers:
            wait_until(lambda: set(one.json("/health").get("replicas", ["ready"])) == {"ready"}, 300.0)  # noqa: B023

    def close(self) -> None:
        for pid in [pid for one in self.servers for pid in one.pids("engine")]:
            os.kill(pid, signal.SIGCONT)
        self._stack.close()

    def stream(self, seed: int, progress: Callable[[int], None] = lambda count: None) -> tuple[str, float, int]:
        """A stream's text, the longest time between its events, and which event ended that."""
        body = {"prompt": PROMPT, "stream": True, "seed": seed, "temperature": 0.9, "ignore_eos": True}
        body["max_tokens"] = self._args.tokens + 100
        text, longest, where, last = "", 0.0, 0, time.monotonic()
        path = "/v1/completions"
        with EventStream(self.door.port, path, body, {"authorization": f"Bearer {KEY}"}) as events:
            for count, chunk in enumerate(events.chunks()):
                now = time.monotonic()
                if "error" in chunk:
                    return f"{chunk['error']}", now - last, count
                if count and now - last > longest:
                    longest, where = now - last, count
                last = now
                text += "".join(choice["text"] for choice in chunk["choices"])
                progress(count)
        return text, longest, where

    def busy(self) -> ServeProcess:
        """The server with most requests."""
        return max(self.servers, key=lambda one: int(one.json("/load")["running"]))


def kill_server(case: Case) -> None:
    for pid in reversed(case.busy().pids("all")):
        os.kill(pid, signal.SIGKILL)


def kill_engine(case: Case) -> None:
    case.busy().kill("engine")


def stop_engine(case: Case) -> None:
    case.busy().kill("engine", number=signal.SIGSTOP)


CASES: Sequence[tuple[str, int, int, Callable[[Case], None]]] = (
    ("a server is killed, behind a router", 2, 1, kill_server),
    ("an engine is stopped, behind a router", 2, 1, stop_engine),
    ("one of two replicas is killed", 1, 2, kill_engine),
    ("one of two replicas is stopped", 1, 2, stop_engine),
)


def measure(args: argparse.Namespace, servers: int, replicas: int, befall: Callable[[Case], None]) -> tuple[float, int]:
    """The longest gap of all streams, and how many have the right text."""
    case = Case(args, servers, replicas)
    try:
        done: list[Any] = []

        def progress(count: int) -> None:
            if count >= args.tokens and not done:
                done.append(True)
                befall(case)

        with ThreadPoolExecutor(args.streams) as pool:
            expected = [text for text, _, _ in pool.map(case.stream, range(args.streams))]
            first = pool.submit(case.stream, 0, progress)
            others = [pool.submit(case.stream, seed) for seed in range(1, args.streams)]
            found = [each.result() for each in (first, *others)]
        right = sum(text == other for (text, _, _), other in zip(found, expected, strict=True))
        return max(longest for _, longest, _ in found), right
    finally:
        case.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--only", type=int, help="the number of one case, from 0")
    args = parser.parse_args()
    print(f"| what happens at token {args.tokens} | longest gap, s | same text |\n|---|--:|--:|")
    for number, (name, servers, replicas, befall) in enumerate(CASES):
        if args.only in (None, number):
            longest, right = measure(args, servers, replicas, befall)
            print(f"| {name} | {longest:.1f} | {right} of {args.streams} |", flush=True)


if __name__ == "__main__":
    main()
