"""Streams: text while it comes, and several of them at once with `AsyncLLM`."""

import asyncio

from quire import LLM, AsyncLLM, SamplingParams

PARAMS = SamplingParams(max_tokens=16, temperature=0)


async def together(prompts: list[str]) -> list[str]:
    """Run streams side by side; the order in which their pieces come is shown."""
    order = []
    async with AsyncLLM("demo") as llm:

        async def read(name: str, prompt: str) -> str:
            text = ""
            async for output in llm.generate(prompt, PARAMS):
                order.append(name)
                text += output.outputs[0].delta
            return text

        texts = await asyncio.gather(*(read("ABC"[i], prompt) for i, prompt in enumerate(prompts)))
    print("pieces came in this order:", "".join(order))
    return texts


def main() -> None:
    prompts = ["def add(a, b):", "class Stack:", "import os"]
    with LLM("demo") as llm:
        pieces = [output.outputs[0].delta for output in llm.stream(prompts[0], PARAMS)]
    print(pieces)
    texts = asyncio.run(together(prompts))
    print("the same text as alone:", texts[0] == "".join(pieces))


if __name__ == "__main__":
    main()
