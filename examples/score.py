"""Scoring a dataset: the log-probability of each text as a prompt, without sampling, and the perplexity of all."""

import math

from quire import LLM, SamplingParams

DATASET = [
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n    print(i)\n",
    "b or :c range return ((\n",
]


def main() -> None:
    with LLM("demo") as llm:
        total = tokens = 0.0
        for output in llm.generate(DATASET, SamplingParams(max_tokens=0, prompt_logprobs=0)):
            ids, entries = output.prompt_token_ids, output.prompt_logprobs
            values = [
                entry[token].logprob for token, entry in zip(ids, entries, strict=True) if entry
            ]  # the first has none
            total, tokens = total + sum(values), tokens + len(values)
            print(f"{sum(values) / len(values):7.2f} a token  {output.prompt!r}")
        print(f"perplexity {math.exp(-total / tokens):.2f} over {tokens:.0f} tokens")


if __name__ == "__main__":
    main()
