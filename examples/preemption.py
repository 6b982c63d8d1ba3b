"""Preemption: a pool too small for all requests. Some give way and are computed again, and no token shows it."""

from quire import LLM, SamplingParams

PROMPTS = [f"def f{i}(a, b):\n    " for i in range(6)]
PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)


def run(num_kv_blocks: int) -> list[str]:
    with LLM("demo", num_kv_blocks=num_kv_blocks, max_model_len=128) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        gave_way = {output.prompt.split("(")[0]: output.metrics.preemptions for output in outputs}
        print(
            f"{num_kv_blocks} blocks, at most {llm.stats.peak_blocks} in use: {llm.stats.preemptions} preemptions",
            gave_way,
        )
        return [output.outputs[0].text for output in outputs]


def main() -> None:
    print("the same texts:", run(100) == run(16))


if __name__ == "__main__":
    main()
