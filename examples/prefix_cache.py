"""The prefix cache: one system prompt of 512 tokens, three requests at once. It is computed once."""

from quire import LLM, SamplingParams


def main() -> None:
    system = [100 + i % 1000 for i in range(512)]  # token ids, so that its length is exact
    questions = [[1500 + i, 1600 + i, 1700 + i] for i in range(3)]
    with LLM("demo") as llm:
        prompts = [system + question for question in questions]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0))
        for number, output in enumerate(outputs, start=1):
            length, cached = len(output.prompt_token_ids), output.cached_tokens
            print(f"request {number}: {cached} of {length} tokens cached, {length - cached} computed")
        total = llm.stats.prompt_tokens - llm.stats.cached_tokens
        print(f"computed in all: {total} of {llm.stats.prompt_tokens}")


if __name__ == "__main__":
    main()
