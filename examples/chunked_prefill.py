"""Chunked prefill: a long prompt beside a stream. In one piece it holds the stream up; in chunks it does not."""

import time

from quire import LLM, SamplingParams

LONG = [100 + i % 1000 for i in range(1500)]


def longest_gap(budget: int) -> tuple[float, int]:
    """Seconds between two tokens of the stream, at worst; and how many steps the long prompt took."""
    with LLM("demo", max_num_batched_tokens=budget, max_num_seqs=8, prefix_cache="off") as llm:
        llm.add_request("def add(a, b):", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), "stream")
        llm.step()
        llm.add_request(LONG, SamplingParams(max_tokens=1), "long")
        gaps, steps, last = [], 0, time.perf_counter()
        while not llm.idle:
            for output in llm.step():
                if output.request_id == "long":
                    steps = output.metrics.steps
                else:
                    gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()
    return max(gaps), steps


def main() -> None:
    for budget in (2048, 64):
        gap, steps = longest_gap(budget)
        print(
            f"at most {budget} tokens a step: {steps} steps for the prompt, and the stream waited {gap * 1000:.0f} ms"
        )


if __name__ == "__main__":
    main()
