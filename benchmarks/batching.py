"""Continuous against static batching: requests of many lengths, on random weights of Qwen3-0.6B's shape.

Both have the same engine and at most SLOTS requests at once. Static: a batch is submitted when the one before has
ended to its last request, so short requests leave their places empty. Continuous: all are submitted at once, and
whoever ends makes room.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.common import Options, Result, checkpoint, finish, greedy, main, tell, tokens
from quire import LLM

REQUESTS, SLOTS, LONGEST = 32, 8, 128


def run(options: Options) -> Result:
    result = Result(("batching", "seconds", "output tok/s", "tokens a step", "median time to a request's end"))
    generator = random.Random(0)
    count = 12 if options.quick else REQUESTS
    slots = 4 if options.quick else SLOTS
    longest = 16 if options.quick else LONGEST
    folder = str(checkpoint(options))
    work = [
        (tokens(generator, generator.randint(8, 64)), min(longest, 4 + int(generator.expovariate(1 / (longest / 4)))))
        for _ in range(count)
    ]
    for name, size in (("static", slots), ("continuous", count)):
        tell(f"batching: {name}")
        with LLM(folder, prefix_cache="off", max_num_seqs=slots, threads=options.threads) as llm:
            llm.generate([tokens(generator, 16)], greedy(4))  # what happens once
            _measure(result, llm, name, [work[first : first + size] for first in range(0, count, size)])
    return result


def _measure(result: Result, llm: LLM, name: str, batches: list[list[tuple[list[int], int]]]) -> None:
    steps, made, ends = llm.stats.steps, 0, []
    begin = time.perf_counter()
    for batch in batches:
        began = time.perf_counter() - begin
        for prompt, output in batch:
            llm.add_request(prompt, greedy(output))
        for output in finish(llm):
            made += len(output.outputs[0].token_ids)
            ends.append(began + output.metrics.total_seconds)
    seconds = time.perf_counter() - begin
    steps = llm.stats.steps - steps
    median = statistics.median(ends)
    result.add(
        (name, f"{seconds:.2f}", f"{made / seconds:,.0f}", f"{made / steps:.1f}", f"{median:.2f} s"),
        batching=name,
        seconds=seconds,
        output_tokens=made,
        steps=steps,
        median_end_s=median,
    )


if __name__ == "__main__":
    main(run)
