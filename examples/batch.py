"""A batch: prompts go in together, and each step computes a token of all of them."""

from quire import LLM, SamplingParams

PROMPTS = ["def add(a, b):", "class Stack:\n    def push(self,", "import os\n\nfor name in"]


def main() -> None:
    with LLM("demo") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.7, seed=7))
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"{tokens} tokens in {llm.stats.steps} steps")


if __name__ == "__main__":
    main()
