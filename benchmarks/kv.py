"""Tiers behind the KV pool: a prefix that comes from host memory or from a disk, against one that is computed; and
requests that give way to others and come back, by loading and by computing again. Then prefill and decode apart
(`kv_apart.py`).

Random bf16 weights in the shape of Qwen3-0.6B, and the demo model, whose tokens are cheap to compute. The disk's files
are dropped from the system's cache before they are read.

usage: python -m benchmarks.kv [--only prefix,swapping,apart] [--swap REQUESTS,TOKENS] [--turns N]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, checkpoint, finish, greedy, options_from, tell, tokens
from benchmarks.kv_apart import time_apart
from quire import LLM
from quire.bench.kv import COMPUTED, DISK, FROM, HOST, POOL, Always, PrefixTimer
from quire.core.cost import Costs
from quire.core.sampling_params import SamplingParams

PREFIX = 4096
OUTPUT = 32
"""Tokens that a request decodes which gives way."""

PARTS = "prefix", "swapping", "apart"


@dataclass(frozen=True)
class Swapping:
    """Requests that give way to one another, in a pool for a quarter of them, of so many tokens, the output among them;
    the best of so many turns counts."""

    requests: int = 16
    length: int = 512
    turns: int = 2


def run(options: Options, parts: Collection[str] = PARTS, swapping: Swapping | None = None) -> Result:
    swapping = swapping or (Swapping(8, 64, 1) if options.quick else Swapping())
    result = Result(("what", "computed", "loaded", "share"))
    folder = str(checkpoint(options))
    if "prefix" in parts:
        time_prefix(result, folder, options)
    if "swapping" in parts:
        for name, model in (("0.6B", folder), ("demo", "demo")):
            time_swapping(result, name, model, options, swapping)
    if "apart" in parts:
        time_apart(result, folder, options)
    return result


def time_prefix(result: Result, folder: str, options: Options) -> None:
    """Times to the first token of a long prompt of which all but the end is computed, or in a tier."""
    length = 256 if options.quick else PREFIX
    sizes: dict[str, Any] = {"max_model_len": length + 128, "max_num_seqs": 4, "num_kv_blocks": length // 16 * 4 + 40}
    tiers = {"host_kv_memory": "1GiB", "disk_kv_path": str(Path(options.workdir) / "kv"), "disk_kv_memory": "4GiB"}
    with LLM(folder, threads=options.threads, **sizes, **tiers) as llm:
        timer = PrefixTimer(llm)
        timer.measure(32, (), 1, lambda what: None)
        seconds = timer.measure(length, (POOL, HOST, DISK), 1, lambda what: tell(f"kv: {what}")).seconds
    cold = seconds.pop(COMPUTED) or 0.0
    for source, loaded in seconds.items():
        if loaded is None:
            raise RuntimeError(f"the prefix did not come from {FROM[source]}")
        label = f"first token after {length:,} tokens, from {FROM[source]}, s"
        result.add(
            (label, f"{cold:.2f}", f"{loaded:.3f}", f"{loaded / cold:.1%}"), what=label, cold=cold, seconds=loaded
        )


def time_swapping(result: Result, name: str, model: str, options: Options, swapping: Swapping) -> None:
    """Seconds until all requests have ended, where each that comes takes the place of one that came before."""
    count, length = swapping.requests, swapping.length
    all_of_them = f"{max(1, count * length // 2**13)}GiB"  # 112 KiB a token of the larger model
    ways: dict[str, Costs | None] = {"computed again": None, "always loaded": Always(), "by the rule": Costs()}
    best = dict.fromkeys(ways, float("inf"))
    texts: dict[str, list[tuple[int, ...]]] = {}
    for turn in range(swapping.turns):
        for way, costs in ways.items():
            tell(f"kv: {name}, {count} requests of {length} tokens, {way}, turn {turn + 1}")
            tier = {} if costs is None else {"host_kv_memory": all_of_them}
            with LLM(
                model,
                threads=options.threads,
                max_model_len=length,
                max_num_seqs=count,
                num_kv_blocks=count // 4 * length // 16 + 1,
                scheduling_policy="priority",
                **tier,
            ) as llm:
                llm.generate(tokens(random.Random(2), 32), greedy(1))
                if costs is not None:
                    llm._engine.scheduler.kv.sources.costs = costs
                begin = time.perf_counter()
                texts[way] = take_turns(llm, count, length)
                best[way] = min(best[way], time.perf_counter() - begin)
                stats = llm.stats
            tell(f"kv: {best[way]:.2f} s, {stats.preemptions} preemptions, {stats.kv_tiers}")
    if len(set(map(tuple, texts.values()))) != 1:
        raise RuntimeError("the tokens are not the same")
    again, loaded, ruled = best.values()
    what = f"{name}: {count} requests of {length} tokens, room for {count // 4}"
    rows = {"always loaded": (again, loaded), "by the rule": (again, ruled)}
    rows["by the rule, beside the better way"] = min(again, loaded), ruled
    for way, (cold, seconds) in rows.items():
        label = f"{what}, {way}, s"
        result.add(
            (label, f"{cold:.2f}", f"{seconds:.2f}", f"{seconds / cold:.1%}"), what=label, cold=cold, seconds=seconds
        )


def take_turns(llm: LLM, count: int, length: int) -> list[tuple[int, ...]]:
    """Each request is more urgent than those before it, and comes when the last one has its first token."""
    output = min(OUTPUT, length // 2)
    texts: dict[str, tuple[int, ...]] = {}
    for number in range(count):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, priority=-number)
        id = llm.add_request(tokens(random.Random(number), length - output), params, str(number))
        begun = False
        while not begun:
            for each in llm.step():
                begun |= each.request_id == id
                if each.finished:
                    texts[each.request_id] = tuple(each.outputs[0].token_ids)
    texts |= {each.request_id: tuple(each.outputs[0].token_ids) for each in finish(llm)}
    return [texts[id] for id in sorted(texts, key=int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--swap", metavar="REQUESTS,TOKENS", help="default: 16,512")
    parser.add_argument("--turns", type=int, default=Swapping.turns, help="of swapping; the best one counts")
    with options_from(parser) as (options, args):
        parts = args.only.split(",")
        if unknown := set(parts) - set(PARTS):
            parser.error(f"unknown part {unknown.pop()!r}; known: {', '.join(PARTS)}")
        requests, length = map(int, args.swap.split(",")) if args.swap else (Swapping.requests, Swapping.length)
        swapping = None if options.quick and not args.swap else Swapping(requests, length, args.turns)
        print(run(options, parts, swapping).table())


if __name__ == "__main__":
    main()
