"""A chat: messages become a prompt by the model's own template. (The demo model completes code and is no assistant.)"""

from quire import LLM, SamplingParams


def main() -> None:
    messages = [{"role": "system", "content": "You write Python."}]
    with LLM("demo") as llm:
        for question in ("Write a function that adds.", "And one that subtracts."):
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, SamplingParams(max_tokens=24, temperature=0))
            messages.append({"role": "assistant", "content": output.outputs[0].reply.content})
            print(f"{question} -> {messages[-1]['content']!r}")
            length = len(output.prompt_token_ids)
            print(f"  {length} tokens of prompt, {output.cached_tokens} of them from the turn before")


if __name__ == "__main__":
    main()
