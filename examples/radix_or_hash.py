"""Two prefix caches on random prefixes: "hash" finds whole blocks, "radix" finds every token."""

import random

from quire import LLM, SamplingParams


def prompts() -> list[list[int]]:
    """Each begins as one of four texts, up to a random place, and goes on by itself."""
    draw = random.Random(0)
    texts = [draw.choices(range(100, 4000), k=200) for _ in range(4)]
    made = []
    for _ in range(20):
        made.append(draw.choice(texts)[: draw.randrange(20, 200)] + draw.choices(range(100, 4000), k=10))
    return made


def main() -> None:
    for block_size in (16, 64):
        for kind in ("off", "hash", "radix"):
            with LLM("demo", prefix_cache=kind, block_size=block_size) as llm:
                for prompt in prompts():  # one after the other
                    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
                share = llm.stats.cached_tokens / llm.stats.prompt_tokens
                print(f"blocks of {block_size:2}, {kind:5}: {share:4.0%} of the prompts' tokens were cached")


if __name__ == "__main__":
    main()
