"""The embedded model: the very text it must give in fp32, on any machine.

The best two logits lie at least 0.1 apart at every position here, far beyond what another machine's rounding moves.
"""

from __future__ import annotations

from importlib.resources import files

import pytest

from quire import LLM, SamplingParams

GOLDEN = {
    "import os\nimport sys\n\n\ndef main(": "idlelib.idle_test.test_idle_test_test_test_test_test_test_test_test"
    "_test_test_test_test_test_test_test_test",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self": ", push):\n"
    "        self._sort()\n        self._sort()\n        self._sort()\n        self",
    "for name in os.listdir(path):\n": "        if os.path.isdir(path):\n"
    "            os.path.join(path, os.path.join(path, os.path.join(path))\n",
    "try:\n    import ssl\nexcept": " ImportError:\n    pass\nelse:\n    import ssl\nelse:\n"
    "    sslcontext = sslcontext\nelse",
}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", threads=1) as llm:
        yield llm


def test_greedy_text_is_the_golden_one(llm):
    outputs = llm.generate(list(GOLDEN), SamplingParams(temperature=0.0, max_tokens=24, logprobs=2))
    assert {output.prompt: output.outputs[0].text for output in outputs} == GOLDEN
    for output in outputs:
        for entry in output.outputs[0].logprobs:
            best, second = sorted((item.logprob for item in entry.values()), reverse=True)[:2]
            assert best - second > 0.1, "this position proves nothing on another machine"


def test_it_finds_real_python_likelier_than_shuffled_python(llm):
    text = "def read_text(self, encoding=None):\n    with open(self.path, encoding=encoding) as f:\n"
    text += "        return f.read()\n"
    ids = llm.tokenizer.encode(text)
    shuffled = [ids[(7 * i) % len(ids)] for i in range(len(ids))]
    losses = []
    for output in llm.generate([ids, shuffled], SamplingParams(max_tokens=1, prompt_logprobs=0)):
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        losses.append(-sum(entry[token].logprob for token, entry in pairs) / (len(ids) - 1))
    assert losses[0] < 3.5 and losses[1] > losses[0] + 2


def test_it_is_small_and_keeps_its_licence():
    folder = files("quire") / "assets" / "demo"
    sizes = [len(item.read_bytes()) for item in folder.iterdir()]
    assert sum(sizes) <= 15_000_000
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (folder / "LICENSE.PSF").read_text()
    assert "held-out" in (folder / "README.md").read_text().lower()
