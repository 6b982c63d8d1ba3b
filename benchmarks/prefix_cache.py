"""Prefix caches on conversations: radix against hash against none, on the demo model.

Conversations share a system prompt; each turn's prompt is all that was said before and a new message, whose
lengths fit no block. They take turns, so each comes back after all the others. One request runs at a time: the
time to first token is then the prefill's.
"""

from __future__ import annotations

import random
import statistics

from benchmarks.common import Options, Result, finish, greedy, main, tell, tokens
from quire import LLM

CONVERSATIONS, TURNS, SYSTEM = 8, 6, 203


def run(options: Options) -> Result:
    result = Result(("cache", "block size", "prompt tokens cached", "median time to first token", "mean"))
    conversations, turns = (2, 2) if options.quick else (CONVERSATIONS, TURNS)
    for cache, block_size in (("off", 16), ("hash", 16), ("radix", 16), ("hash", 64), ("radix", 64)):
        tell(f"prefix cache: {cache}, blocks of {block_size}")
        with LLM("demo", prefix_cache=cache, block_size=block_size, threads=options.threads) as llm:
            llm.generate([tokens(random.Random(1), 300)], greedy(4))  # what happens once
            cached, asked, waits = _measure(llm, conversations, turns)
        median, mean = statistics.median(waits), statistics.mean(waits)
        result.add(
            (cache, str(block_size), f"{cached / asked:.1%}", f"{median * 1e3:.1f} ms", f"{mean * 1e3:.1f} ms"),
            cache=cache,
            block_size=block_size,
            cached_tokens=cached,
            prompt_tokens=asked,
            time_to_first_token_s=[round(wait, 5) for wait in waits],
        )
    return result


def _measure(llm: LLM, conversations: int, turns: int) -> tuple[int, int, list[float]]:
    """(cached prompt tokens, prompt tokens, times to first token)."""
    generator = random.Random(0)
    system = tokens(generator, SYSTEM)
    said = [list(system) for _ in range(conversations)]
    cached, asked, waits = 0, 0, []
    for _ in range(turns):
        for history in said:
            history += tokens(generator, generator.randint(11, 70))
            llm.add_request(history, greedy(generator.randint(17, 48)))
            [output] = finish(llm)
            cached += output.cached_tokens
            asked += len(history)
            waits.append(output.metrics.time_to_first_token or 0.0)
            history += output.outputs[0].token_ids
    return cached, asked, waits


if __name__ == "__main__":
    main(run)
