"""Four replicas behind a router, which gets Mooncake's traces: our choice by cost beside round-robin, least-loaded and
prefix-hash, each without and with a pool of KV.

    python -m benchmarks.fleet --trace conversation_trace.jsonl [--speedup 8 16]

The traces are those of the Mooncake project (kvcache-ai/Mooncake, FAST25-release/traces). Lengths, and the 512 tokens
of one of their blocks, are divided by --scale, since the demo model has a context of 2,048 tokens, and requests that do
not fit are left out; times are divided by --speedup, of which several are tried.
With --model, servers have another model than the demo, such as qwen3-0.6b with random weights. The demo computes a
block in half a millisecond, which is less than bringing it from elsewhere takes on a busy machine.
Every server has one thread and a pool of KV that holds a small part of the trace. All of them, the router and the
client share this machine's cores, so latencies are those of a busy machine: compare rows, not machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Result, tell
from quire.models.random_checkpoint import SHAPES, random_checkpoint

SCALE = 64
CONTEXT = 2048
SERVERS = 4
KV_TOKENS = 1 << 20
"""Of each server, before they are divided as lengths are: a small part of the trace."""

GOAL_MS = 250.0
"""A request is within the goal when its first token comes within so many milliseconds."""

POLICIES = ("round-robin", "least-loaded", "prefix-hash", "cost")
QUIRE = [sys.executable, "-P", "-m", "quire.cli.main"]


@contextmanager
def process(command: Sequence[str], ready: str) -> Iterator[str]:
    """A process that prints a URL of this machine, until the end; yields the URL."""
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert running.stderr is not None
    try:
        said = []
        for line in running.stderr:
            said.append(line)
            if found := re.search(ready, line):
                break
        else:
            raise RuntimeError("".join(said))
        threading.Thread(target=running.stderr.read, daemon=True).start()
        yield found[0]
    finally:
        running.terminate()
        running.wait()


@contextmanager
def redis() -> Iterator[str]:
    """A Redis of its own, which keeps nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()


@dataclass(frozen=True)
class Bench:
    """What is replayed on what: lengths of the trace are divided by `scale`, times by `speedup`."""

    trace: str
    requests: int
    speedup: float
    scale: float = SCALE
    model: str = "demo"
    goal_ms: float = GOAL_MS
    host_memory: str = "64MiB"
    kv_tokens: int = KV_TOKENS


def replay(policy: str, pool: bool, bench: Bench) -> dict[str, Any]:
    """One policy under the trace, with servers that know nothing yet: the report of `quire bench serve`."""
    with ExitStack() as stack:
        options = ["--threads", "1", "--max-num-seqs", "16", "--no-log-requests", "--max-model-len", str(CONTEXT)]
        options += ["--num-kv-blocks", str(round(bench.kv_tokens / bench.scale / 16))]
        if pool:
            key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
            key.write_text("0123456789abcdef" * 2)
            key.chmod(0o600)
            options += ["--kv-directory", stack.enter_context(redis()), "--cluster-key-file", str(key)]
            options += ["--role", "both", "--host-kv-memory", bench.host_memory]
        command = [*QUIRE, "serve", bench.model, "--port", "0", *options]
        urls = [stack.enter_context(process(command, r"http://127.0.0.1:\d+")) for _ in range(SERVERS)]
        for url in urls:
            wait_for(url)
        named = [part for url in urls for part in ("--server", url)]
        router = [*QUIRE, "route", "--port", "0", "--policy", policy, "--no-log-requests", *named]
        url = stack.enter_context(process(router, r"http://127.0.0.1:\d+"))
        wait_for(url)
        report = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "report.json"
        load = [*QUIRE, "bench", "serve", "--url", url, "--trace", bench.trace, "--scale", str(bench.scale)]
        load += ["--wait", "30", "--num-requests", str(bench.requests), "--speedup", str(bench.speedup)]
        load += ["--goodput", f"ttft:{bench.goal_ms:g}", "--return-token-ids"]  # random weights make no text
        ended = subprocess.run([*load, "--json", str(report)], capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
        loaded = [tier_loads(each) for each in urls]
        found: dict[str, Any] = json.loads(report.read_text())["result"]
        return found | {"loaded_blocks": sum(loaded)}


def wait_for(url: str) -> None:
    """Until a server is well."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{url} is not well")


def tier_loads(url: str) -> int:
    """Blocks that this server had from a tier or from another server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return sum(
        int(float(value)) for value in re.findall(r'kv_tier_blocks_total\{[^}]*event="loaded"[^}]*\} ([\d.e+]+)', text)
    )


def that_fit(trace: str, scale: float, folder: Path) -> str:
    """A copy of a trace without the requests that are longer than the model's context."""
    lines = Path(trace).read_text("utf-8").splitlines()
    fitting = [
        line
        for line, told in zip(lines, map(json.loads, lines), strict=True)
        if (told["input_length"] + told["output_length"]) / scale < CONTEXT - 2
    ]
    tell(f"fleet: lengths divided by {scale:g}; {len(fitting):,} of {len(lines):,} requests fit")
    copy = folder / Path(trace).name
    copy.write_text("\n".join(fitting), "utf-8")
    return str(copy)


def run(bench: Bench, speedups: Sequence[float], choices: Sequence[str] = POLICIES) -> Result:
    result = Result(
        (
            "times divided by",
            "policy",
            "cached",
            "first token p50, ms",
            "p99, ms",
            f"within {bench.goal_ms:g} ms",
            "fetched from others",
        )
    )
    pools = (False, True) if shutil.which("redis-server") else (False,)
    for speedup, pool, policy in itertools.product(speedups, pools, choices):
        name = f"{policy}, pool" if pool else policy
        tell(f"fleet: {Path(bench.trace).stem}, times divided by {speedup:g}: {name}")
        found = replay(policy, pool, replace(bench, speedup=speedup))
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} requests failed: {found['failures']}")
        ttft = found["latencies"]["ttft"]
        share = (found["cached_tokens"] or 0) / found["input_tokens"]
        row = (
            f"{speedup:g}",
            name,
            f"{share:.1%}",
            f"{ttft['p50']:.0f}",
            f"{ttft['p99']:.0f}",
            f"{found['goodput']['share']:.1%}",
        )
        row = (*row, f"{found['loaded_blocks']:,} blocks")
        tell("fleet: " + " | ".join(row))
        result.add(row, what=name, speedup=speedup, trace=Path(bench.trace).stem, **found)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="file of the trace")
    parser.add_argument("--requests", type=int, default=600, help="of its beginning (default: 600)")
    parser.add_argument(
        "--speedup", type=float, nargs="+", default=[8.0, 16.0], help="divide its times by these (default: 8 and 16)"
    )
    parser.add_argument("--scale", type=float, default=SCALE, help=f"divide its lengths by this (default: {SCALE})")
    parser.add_argument(
        "--choices", nargs="+", default=POLICIES, choices=POLICIES, help="of the router (default: all of them)"
    )
    parser.add_argument(
        "--model", default="demo", help="a checkpoint, or a shape that gets random weights, such as qwen3-0.6b"
    )
    parser.add_argument("--goal", type=float, default=GOAL_MS, help=f"for first tokens, in ms (default: {GOAL_MS:g})")
    parser.add_argument("--host-memory", default="64MiB", help="of each server, for the pool of KV (default: 64MiB)")
    parser.add_argument(
        "--kv-tokens", type=int, default=KV_TOKENS, help=f"of each server, before --scale (default: {KV_TOKENS})"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = args.model
        if model in SHAPES:
            model = str(stack.enter_context(random_checkpoint(model, folder)))
        trace = that_fit(args.trace, args.scale, Path(folder))
        bench = Bench(trace, args.requests, 1.0, args.scale, model, args.goal, args.host_memory, args.kv_tokens)
        print(run(bench, args.speedup, args.choices).table())


if __name__ == "__main__":
    main()
