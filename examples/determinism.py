"""The contract: the same request gives the same tokens and log-probabilities, bit by bit, whatever else runs."""

from quire import LLM, SamplingParams

PROMPT = "def read_lines(path):\n    with open("
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=11, logprobs=0)
OTHERS = [f"class C{i}:\n    def __init__(self" for i in range(7)]
WAYS = {
    "alone": {},
    "among others": {},
    "in chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "without a cache": {"prefix_cache": "off"},
    "larger blocks": {"block_size": 64},
    "few blocks": {"num_kv_blocks": 16, "max_model_len": 128},
    "drafting": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two threads": {"threads": 2},
}


def main() -> None:
    seen = set()
    for name, options in WAYS.items():
        with LLM("demo", **options) as llm:
            prompts = [PROMPT] if name == "alone" else [*OTHERS, PROMPT]
            choice = llm.generate(prompts, PARAMS)[-1].outputs[0]
            seen.add((choice.text, choice.cumulative_logprob))
            print(f"{name:16} {choice.cumulative_logprob!r}")
    print("one result:", len(seen) == 1)


if __name__ == "__main__":
    main()
