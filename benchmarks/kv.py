"""Tiers behind the KV pool: a prefix that comes from host memory or from a disk, against one that is computed; and
requests that give way to others and come back, by loading and by computing again.

Random bf16 weights in the shape of Qwen3-0.6B, and the demo model, whose tokens are cheap to compute. The disk's files
are dropped from the system's cache before they are read.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, checkpoint, finish, greedy, main, tell, tokens
from quire import LLM
from quire.core.cost import Costs
from quire.core.sampling_params import SamplingParams

PREFIX = 4096
REQUESTS, LENGTH, OUTPUT = 16, 512, 32
"""Requests that give way to one another, in a pool for a quarter of them, of so many tokens, the output among them."""

TURNS = 2


class Always(Costs):
    """Loads whatever there is."""

    def prefers_load(self, source: str, blocks: int, block_size: int, first: int) -> bool:
        return True


def run(options: Options) -> Result:
    result = Result(("what", "computed", "loaded", "share"))
    folder = str(checkpoint(options))
    time_prefix(result, folder, options)
    for name, model in (("0.6B", folder), ("demo", "demo")):
        time_swapping(result, name, model, options)
    return result


def time_prefix(result: Result, folder: str, options: Options) -> None:
    """Times to the first token of a long prompt of which all but the end is computed, or in a tier."""
    length = 256 if options.quick else PREFIX
    sizes: dict[str, Any] = {"max_model_len": length + 128, "max_num_seqs": 4, "num_kv_blocks": length // 16 * 4 + 40}
    tiers = {"host_kv_memory": "1GiB", "disk_kv_path": str(Path(options.workdir) / "kv"), "disk_kv_memory": "4GiB"}
    prefix = tokens(random.Random(1), length)
    with LLM(folder, threads=options.threads, **sizes, **tiers) as llm:
        first_token(llm, tokens(random.Random(2), 32), 0)
        tell(f"kv: a prefix of {length:,} tokens is computed")
        cold = first_token(llm, prefix, 1)
        for last in (2, 3):
            first_token(llm, prefix, last)
        pooled = first_token(llm, prefix, 4)
        clear(llm)
        tell("kv: from host memory")
        hosted = first_token(llm, prefix, 5)
    drop_cached(Path(options.workdir) / "kv")
    tell("kv: from the disk, after a restart")
    with LLM(folder, threads=options.threads, **sizes, **tiers) as llm:
        first_token(llm, tokens(random.Random(2), 32), 0)
        stored = first_token(llm, prefix, 6)
        counts = llm.stats.kv_tiers
    if counts["disk"]["loaded"] < length // 16 or counts["host"]["bad"]:
        raise RuntimeError(f"the disk was to have {length // 16} blocks: {counts}")
    for name, seconds in (("the pool", pooled), ("host memory", hosted), ("a disk", stored)):
        label = f"first token after {length:,} tokens, from {name}, s"
        result.add(
            (label, f"{cold:.2f}", f"{seconds:.3f}", f"{seconds / cold:.1%}"), what=label, cold=cold, seconds=seconds
        )


def first_token(llm: LLM, prefix: list[int], last: int) -> float:
    """Seconds to the first token of a prompt with an end of its own."""
    llm.add_request([*prefix, last], greedy(1))
    [output] = finish(llm)
    return output.metrics.time_to_first_token or 0.0


def clear(llm: LLM) -> None:
    """Evict all that no request holds; another request's step carries out the saves."""
    llm._engine.scheduler.kv.cache.clear()
    first_token(llm, tokens(random.Random(3), 32), 0)


def drop_cached(folder: Path) -> None:
    """Have the system forget what it has cached of a folder's files."""
    for file in folder.glob("*.kv"):
        descriptor = os.open(file, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_swapping(result: Result, name: str, model: str, options: Options) -> None:
    """Seconds until all requests have ended, where each that comes takes the place of one that came before."""
    count, length = (8, 64) if options.quick else (REQUESTS, LENGTH)
    ways: dict[str, Costs | None] = {"computed again": None, "always loaded": Always(), "by the rule": Costs()}
    best = dict.fromkeys(ways, float("inf"))
    texts: dict[str, list[tuple[int, ...]]] = {}
    for turn in range(1 if options.quick else TURNS):
        for way, costs in ways.items():
            tell(f"kv: {name}, {count} requests of {length} tokens, {way}, turn {turn + 1}")
            tier = {} if costs is None else {"host_kv_memory": "2GiB"}
            with LLM(
                model,
                threads=options.threads,
                max_model_len=length,
                max_num_seqs=count,
                num_kv_blocks=count // 4 * length // 16 + 1,
                scheduling_policy="priority",
                **tier,
            ) as llm:
                first_token(llm, tokens(random.Random(2), 32), 0)
                if costs is not None:
                    llm._engine.scheduler.kv.fetches.costs = costs
                begin = time.perf_counter()
                texts[way] = take_turns(llm, count, length)
                best[way] = min(best[way], time.perf_counter() - begin)
                stats = llm.stats
            tell(f"kv: {best[way]:.2f} s, {stats.preemptions} preemptions, {stats.kv_tiers}")
    if len(set(map(tuple, texts.values()))) != 1:
        raise RuntimeError("the tokens are not the same")
    again = best.pop("computed again")
    for way, seconds in best.items():
        label = f"{name}: {count} requests of {length} tokens, room for {count // 4}, {way}, s"
        result.add(
            (label, f"{again:.2f}", f"{seconds:.2f}", f"{seconds / again:.1%}"), what=label, cold=again, seconds=seconds
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


if __name__ == "__main__":
    main(run)
