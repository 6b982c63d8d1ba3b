"""Real tokenizers: prompts that a client rendered, and the text that follows a prompt, as in `tokenizers` itself."""

from __future__ import annotations

import random

import pytest
import tokenizers

from quire.text.detokenizer import TextStream
from quire.text.tokenizer import Tokenizer
from tests.published import tokenizer_folder

PROMPTS = {
    "qwen3": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] hi [/INST] there</s>",
}
BEGINNINGS = ["Hello", "def f(x):\n", "x = [\n", "caf\u00e9 ", "\u4f60\u597d"]
ENDS = [" world", "    return x", "\u4e16\u754c\U0001f642 !", "\n    y", "abc"]


@pytest.mark.parametrize("name", PROMPTS)
def test_raw_prompts_and_their_continuations_are_those_of_the_library(name: str) -> None:
    folder = tokenizer_folder(name)
    tokenizer = Tokenizer.load(folder)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(PROMPTS[name], parse_special=True) == oracle.encode(PROMPTS[name]).ids
    rng = random.Random(1)
    for _ in range(100):
        prompt = tokenizer.encode(rng.choice(BEGINNINGS))
        some = [rng.randrange(oracle.get_vocab_size()) for _ in range(6)]
        output = rng.choice([tokenizer.encode(rng.choice(ENDS), add_special_tokens=False), some])
        stream = TextStream(tokenizer, prompt=prompt)
        text = "".join(map(stream.push, output)) + stream.settle()
        assert text == oracle.decode(prompt + output)[len(oracle.decode(prompt)) :]
