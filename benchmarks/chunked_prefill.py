"""Chunked prefill: the gaps between the tokens of 8 decoding requests while a prompt of 4,096 tokens arrives.

Random weights of Qwen3-0.6B's shape. Without chunking the whole prompt is one step, in which no other request gets a
token for as long as it takes; with chunking it rides along in steps of a bounded size, or, with a target for
inter-token latency, of the size that meets it.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.common import Options, Result, checkpoint, greedy, main, tell, tokens
from quire import LLM

DECODING, PROMPT = 8, 4096
TARGET_MS = 200.0


def run(options: Options) -> Result:
    result = Result(("prefill", "longest gap", "median gap", "time to the prompt's first token"))
    folder = str(checkpoint(options))
    prompt = 256 if options.quick else PROMPT
    most = prompt + 256
    settings = [("whole", {"enable_chunked_prefill": False, "max_num_batched_tokens": most + DECODING + 1})]
    for chunk in (prompt // 4, prompt // 16):
        settings.append((f"steps of {chunk:,} tokens", {"max_num_batched_tokens": chunk}))
    settings.append((f"target_itl_ms={TARGET_MS:g}", {"target_itl_ms": TARGET_MS}))
    for name, settings_of_it in settings:
        tell(f"chunked prefill: {name}")
        with LLM(
            folder,
            prefix_cache="off",
            max_num_seqs=DECODING + 1,
            max_model_len=most,
            min_chunk=1,
            threads=options.threads,
            **settings_of_it,
        ) as llm:
            gaps, first = _measure(llm, prompt)
        result.add(
            (name, f"{max(gaps) * 1e3:,.0f} ms", f"{statistics.median(gaps) * 1e3:,.0f} ms", f"{first:.2f} s"),
            prefill=name,
            gaps_s=[round(gap, 4) for gap in gaps],
            time_to_first_token_s=round(first, 3),
        )
    return result


def _measure(llm: LLM, prompt: int) -> tuple[list[float], float]:
    """Gaps between tokens from the prompt's arrival to its first token, and the time to that."""
    generator = random.Random(0)
    for _ in range(DECODING):
        llm.add_request(tokens(generator, 32), greedy(200))
    while len(llm.step()) < DECODING:  # until all of them got a token in one step
        pass
    begin = last = time.perf_counter()
    arrived = llm.add_request(tokens(generator, prompt), greedy(1))
    gaps: list[float] = []
    ended = False
    while not ended:
        outputs = llm.step()  # each decoding request gets one token a step
        now = time.perf_counter()
        if len(outputs) < DECODING:
            raise RuntimeError(f"only {len(outputs)} requests got a token; {DECODING} were decoding")
        gaps.append(now - last)
        last = now
        ended = any(output.request_id == arrived and output.finished for output in outputs)
    return gaps, last - begin


if __name__ == "__main__":
    main(run)
