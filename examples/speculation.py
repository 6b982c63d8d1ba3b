"""Speculation: n-grams of the text so far are drafts, one step verifies several. Fewer steps, and the same tokens."""

from quire import LLM, SamplingParams

PROMPT = "".join(
    f"    def set_{name}(self, {name}):\n        self.{name} = {name}\n\n" for name in ("width", "height", "depth")
)
PARAMS = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


def run(speculative_config: dict | None) -> str:
    with LLM("demo", speculative_config=speculative_config) as llm:
        [output] = llm.generate(PROMPT, PARAMS)
        stats = llm.stats
        print(
            f"{stats.output_tokens} tokens in {stats.steps} steps; {stats.accepted} of {stats.drafted} drafts accepted"
        )
        return output.outputs[0].text


def main() -> None:
    print("the same text:", run(None) == run(NGRAM))


if __name__ == "__main__":
    main()
