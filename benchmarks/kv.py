"""Tiers behind the KV pool: a prefix that comes from host memory or from a disk, against one that is computed; and
requests that give way to others and come back, by loading and by computing again; conversations that the pool cannot
hold, and prompts of which none comes again. Then prefill and decode apart (`kv_apart.py`).

Random bf16 weights in the shape of Qwen3-0.6B, and the demo model, whose tokens are cheap to compute. The disk's files
are dropped from the system's cache before they are read.

usage: python -m benchmarks.kv [--only prefix,swapping,talks,apart] [--swap REQUESTS,TOKENS] [--turns N]
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
from quire.core.sampling_params import SamplingParams
from quire.kv.tiers.cost import Costs

PREFIX = 4096
OUTPUT = 32
"""Tokens that a request decodes which gives way."""

PARTS = "prefix", "swapping", "talks", "apart"


@dataclass(frozen=True)
class Talks:
    """Conversations that take turns, in a pool for a quarter of what they are in the end; each turn adds so many
    tokens, the reply among them. The best of so many rounds counts."""

    count: int = 16
    turns: int = 7
    added: int = 96
    reply: int = 16
    rounds: int = 2


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
    if "talks" in parts:
        talks = Talks(4, 3, 48, 8, 1) if options.quick else Talks()
        for name, model in (("0.6B", folder), ("demo", "demo")):
            time_talks(result, name, model, options, talks)
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
                    llm._engine.scheduler.kv.external.sources.costs = costs
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


def time_talks(result: Result, name: str, model: str, options: Options, talks: Talks) -> None:
    """Seconds that conversations take which come back, and as many prompts that do not, with a tier and without."""
    length = talks.turns * talks.added
    tiers: dict[str, dict[str, Any]] = {
        "without": {},
        "with": {"host_kv_memory": f"{1 + talks.count * length // 2**13}GiB"},
    }
    for label, again in (("conversations", True), ("prompts that come once", False)):
        best, cached = dict.fromkeys(tiers, float("inf")), dict.fromkeys(tiers, 0.0)
        for turn in range(talks.rounds):
            for way, tier in tiers.items():
                tell(f"kv: {name}, {talks.count} {label}, {way} a host tier, round {turn + 1}")
                sizes = {"max_model_len": length + 16, "num_kv_blocks": talks.count * length // 16 // 4 + 8}
                with LLM(model, threads=options.threads, max_num_seqs=4, **sizes, **tier) as llm:
                    llm.generate(tokens(random.Random(2), 32), greedy(1))
                    seconds, share = talk(llm, talks, again)
                best[way], cached[way] = min(best[way], seconds), share
        what = f"{name}: {talks.count} {label}, {talks.turns} turns of {talks.added} tokens, room for a quarter, s"
        tell(f"kv: {cached['without']:.0%} of the tokens were cached without a tier, {cached['with']:.0%} with it")
        cold, seconds = best.values()
        cells = (what, f"{cold:.2f}", f"{seconds:.2f}", f"{seconds / cold:.1%}")
        result.add(cells, what=what, cold=cold, seconds=seconds, cached=cached["with"])


def talk(llm: LLM, talks: Talks, again: bool) -> tuple[float, float]:
    """One turn of each conversation after the other, four at a time; or, if they do not come again, other prompts of
    the same lengths. Returns seconds, and the share of the prompts' tokens that was cached."""
    prompts: list[list[int]] = [[] for _ in range(talks.count)]
    before, asked, begin = llm.stats.cached_tokens, 0, time.perf_counter()
    for turn in range(talks.turns):
        for number, prompt in enumerate(prompts):
            seed = random.Random(talks.count * turn + number)
            prompts[number] = prompt + tokens(seed, talks.added - (talks.reply if prompt else 0))
            if not again:
                prompts[number] = tokens(seed, len(prompts[number]))
            asked += len(prompts[number])
            llm.add_request(prompts[number], greedy(talks.reply), f"{turn} {number}")
        for output in finish(llm):
            prompts[int(output.request_id.split()[1])] += output.outputs[0].token_ids
    return time.perf_counter() - begin, (llm.stats.cached_tokens - before) / asked


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
