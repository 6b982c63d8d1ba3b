"""What a CPU user feels beside the cells: sampling, starting, memory, shared prefixes, long contexts.

Random bf16 weights in the shape of Qwen3-0.6B. Each figure stands beside its goal; where two things are compared
they run in turns in one process, and the best of each counts.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

from benchmarks.common import Options, Result, checkpoint, finish, greedy, main, tell, tokens
from benchmarks.server import with_tokenizer
from quire import LLM
from quire.bench.ceilings import measure_machine
from quire.core.sampling_params import SamplingParams

TURNS = 3
PREFIX, OWN, SHARERS = 1024, 16, 16
NEAR, FAR = 128, 4096
POOL = 256 * 2**20

MEMORY = """
import json, sys
from pathlib import Path
from quire import LLM, SamplingParams
model, pool, threads = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with LLM(model, kv_cache_memory=pool, threads=threads) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    room = llm.memory_plan.kv_tokens // 16 - 32
    prompts = [[one, *range(3, 2 + min(room, 512))] for one in range(16)]
    llm.generate(prompts, params)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"weights": llm.memory_plan.weights, "pool": llm.memory_plan.kv_bytes,
                      "resident": int(status["VmRSS"].split()[0]) * 1024}))
"""


def run(options: Options) -> Result:
    result = Result(("what", "measured", "goal"))
    folder = str(with_tokenizer(checkpoint(options)))
    _first_token(result, options, folder)
    _memory(result, options, folder)
    with LLM(folder, threads=options.threads, prefix_cache="off", max_num_seqs=64) as llm:
        llm.generate([tokens(random.Random(1), 64)], greedy(4))
        _sampling(result, options, llm)
        _long_context(result, options, llm)
    _shared_prefix(result, options, folder)
    return result


def _first_token(result: Result, options: Options, folder: str) -> None:
    """A command that makes one token, from its start to its end, with the files in the page cache."""
    command = [sys.executable, "-m", "quire.cli.main", "generate", folder, "w5 w6 w7 w8"]
    command += ["--max-tokens", "1", "--temperature", "0"]
    if options.threads:
        command += ["--threads", str(options.threads)]
    seconds = []
    for turn in range(TURNS + 1):
        tell(f"cpu: first token, start {turn + 1}")
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - begin)
    result.add(
        ("`quire generate`: from the command to its end after one token", f"{min(seconds[1:]):.2f} s", "<= 3 s"),
        what="first token",
        seconds=[round(one, 3) for one in seconds],
    )


def _memory(result: Result, options: Options, folder: str) -> None:
    """Resident memory after traffic that has touched the KV pool."""
    tell("cpu: memory")
    threads = json.dumps(options.threads)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, folder, str(POOL), threads], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    bound = found["weights"] * 1.15 + found["pool"] + 300e6
    result.add(
        (
            f"resident memory, with {found['weights'] / 1e6:,.0f} MB of weights and a KV pool of "
            f"{found['pool'] / 1e6:,.0f} MB",
            f"{found['resident'] / 1e6:,.0f} MB",
            f"<= {bound / 1e6:,.0f} MB",
        ),
        what="memory",
        **found,
    )


def _decode_seconds(llm: LLM, batch: int, prompt: int, params: SamplingParams, generator: random.Random) -> float:
    """Seconds a step of the steps after the first token of each request."""
    for _ in range(batch):
        llm.add_request(tokens(generator, prompt), params)
    while llm.stats.prefill_tokens < llm.stats.prompt_tokens or llm.stats.waiting:
        llm.step()
    begin, steps = time.perf_counter(), 0
    while not llm.idle:
        llm.step()
        steps += 1
    return (time.perf_counter() - begin) / steps


def _sampling(result: Result, options: Options, llm: LLM) -> None:
    """decode-32 with temperature and top-p against greedy, in turns."""
    generator, count = random.Random(3), 8 if options.quick else 32
    drawn = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=count, ignore_eos=True)
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for turn in range(TURNS):
        tell(f"cpu: sampling, turn {turn + 1} of {TURNS}")
        for name, params in (("greedy", greedy(count)), ("sampled", drawn)):
            times[name].append(_decode_seconds(llm, 32, NEAR, params, generator))
    share = min(times["greedy"]) / min(times["sampled"])
    result.add(
        ("decode-32 with temperature 0.8 and top_p 0.95, speed against greedy", f"{share:.3f}", ">= 0.95"),
        what="sampling",
        seconds_a_step={name: [round(one, 5) for one in values] for name, values in times.items()},
    )


def _long_context(result: Result, options: Options, llm: LLM) -> None:
    """One request's decode steps at a short and at a long context, less the time to read the additional cache."""
    near, far = (16, 256) if options.quick else (NEAR, FAR)
    generator = random.Random(4)
    rate = measure_machine(llm.model.dtype, llm.threads).read_rate
    more = (far - near) * llm.memory_plan.kv_bytes_per_token / rate
    times: dict[int, list[float]] = {near: [], far: []}
    for turn in range(TURNS):
        tell(f"cpu: context, turn {turn + 1} of {TURNS}")
        for context in (near, far):
            times[context].append(_decode_seconds(llm, 1, context, greedy(24), generator))
    short, long = min(times[near]), min(times[far])
    result.add(
        (
            f"a decode step at {far:,} tokens of context ({long * 1e3:.1f} ms), less {more * 1e3:.1f} ms for reading "
            f"the additional cache, against one at {near} ({short * 1e3:.1f} ms)",
            f"{(long - more) / short:.3f}",
            "<= 1.10",
        ),
        what="context",
        read_rate=rate,
        more_s=more,
        seconds_a_step={str(context): [round(one, 5) for one in values] for context, values in times.items()},
    )


def _shared_prefix(result: Result, options: Options, folder: str) -> None:
    """A hit of a whole prefix, and requests at once that share one, against a cache that is off."""
    prefix = 64 if options.quick else PREFIX
    cold, warm, together = [], [], {"off": [], "radix": []}
    for cache in together:
        with LLM(folder, threads=options.threads, prefix_cache=cache) as llm:
            llm.generate([tokens(random.Random(1), 64)], greedy(4))
            for turn in range(TURNS if cache == "radix" else 1):
                tell(f"cpu: shared prefixes, {cache}, turn {turn + 1}")
                generator = random.Random(turn)
                shared = tokens(generator, prefix)
                if cache == "radix":
                    cold.append(_first(llm, shared))
                    warm.append(_first(llm, shared))
                    shared = tokens(generator, prefix)
                prompts = [shared + tokens(generator, OWN) for _ in range(SHARERS)]
                begin = time.perf_counter()
                llm.generate(prompts, greedy(1))
                together[cache].append(time.perf_counter() - begin)
    result.add(
        (
            f"time to first token at a hit of {prefix:,} tokens, share of the cold time ({min(cold):.2f} s)",
            f"{min(warm) / min(cold):.1%}",
            "<= 5 %",
        ),
        what="prefix hit",
        cold_s=[round(one, 4) for one in cold],
        hit_s=[round(one, 4) for one in warm],
    )
    faster = min(together["off"]) / min(together["radix"])
    result.add(
        (
            f"{SHARERS} requests at once that share {prefix:,} tokens and have {OWN} of their own, against none "
            f"({min(together['off']):.1f} s)",
            f"{faster:.1f} times as fast",
            ">= 8",
        ),
        what="shared at once",
        seconds={name: [round(one, 3) for one in values] for name, values in together.items()},
    )


def _first(llm: LLM, prompt: list[int]) -> float:
    """Seconds to the first token."""
    llm.add_request(prompt, greedy(1))
    [output] = finish(llm)
    return output.metrics.time_to_first_token or 0.0


if __name__ == "__main__":
    main(run)
