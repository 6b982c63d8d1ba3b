"""Several ranks: two processes share each matrix (tensor parallelism), and their sums are those of one."""

from quire import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, logprobs=0)


def run(ranks: int) -> tuple[str, float | None]:
    with LLM("demo", tensor_parallel_size=ranks, threads=1) as llm:
        [output] = llm.generate("def add(a, b):", PARAMS)
        choice = output.outputs[0]
        print(f"{ranks} rank(s): log-probability {choice.cumulative_logprob!r}")
        return choice.text, choice.cumulative_logprob


def main() -> None:
    print("equal sums:", run(1) == run(2))


if __name__ == "__main__":
    main()
