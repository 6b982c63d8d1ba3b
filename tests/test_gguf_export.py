"""Models written as GGUF: read again, by Quire, by the package gguf and by llama.cpp, they are the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoint import Checkpoint, resolve
from quire.models.gguf.encode import blocks_of, encoded
from quire.models.gguf.export import export
from quire.models.gguf.file import TYPES, read_gguf
from quire.models.gguf.search import GRIDS, quantized
from quire.models.gguf.tokenizer_metadata import tokenizer_metadata
from quire.models.gguf.types import decoded
from quire.models.gguf.write import BY_NAME, GgufWriter, Planned
from quire.models.layout import LaidOutCheckpoint, Layout
from quire.models.registry import read_config
from tests.gguf_files import random_blocks
from tests.gguf_vocabularies import UNUSED_IDS
from tests.llama_cpp import convert
from tests.oracle import save_checkpoint
from tests.published import gemma3_270m, smollm2, tokenizer_folder
from tests.test_gguf_families import CASES

WRITTEN = ("llama", "llama-3", "llama-linear", "llama-yarn-tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
WRITTEN += ("gemma3_text", "granite", "smollm3", "olmo2", "olmo3", "exaone4", "seed_oss")
REFUSED = {
    "gpt_oss": "GptOssForCausalLM is not written as GGUF; known are",
    "deepseek_v3": "DeepseekV3ForCausalLM is not written",
    "phi3": "Phi3ForCausalLM is not written",
    "mistral-window": "cannot say all of this model: it would have windows",
    "yarn-mscale": "cannot say all of this model: it would have mscale",
}
TINY = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]]},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(checkpoint: Path, file: Path) -> Path:
    export(Checkpoint(checkpoint), file, {}, lambda done, total: None)
    return file


def tiny(folder: Path, architecture: str, **options: Any) -> Path:
    model = save_checkpoint(folder, architecture, **options)
    (model / "tokenizer.json").write_text(json.dumps(TINY))
    return model


@pytest.mark.parametrize("kind", GRIDS)
def test_blocks_are_the_codes_again(kind: str) -> None:
    form = TYPES[BY_NAME[kind]]
    stored = random_blocks(kind, (5, 512), np.random.default_rng(0))
    blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(5, -1, form.size)
    weight: Any = decoded(form, blocks)
    assert weight.scheme == GRIDS[kind].scheme
    assert torch.equal(blocks_of(weight), blocks)


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.073), ("Q6_K", 0.0175), ("Q5_0", 0.041), ("Q8_0", 0.0056)])
def test_what_a_type_loses_is_what_llama_cpp_loses(kind: str, most: float) -> None:
    """Of normal numbers, its Q4_K loses 0.0713, Q6_K 0.0177, Q5_0 0.0427 and Q8_0 0.0054 (ggml_quantize_chunk)."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    assert (quantized(kind, x).restored() - x).norm() < most * x.norm()
    importance = torch.rand(1024, generator=torch.Generator().manual_seed(1)) ** 4
    plain, weighed = ((quantized(kind, x, of).restored() - x).square() @ importance for of in (None, importance))
    assert kind == "Q8_0" or weighed.sum() < 0.9 * plain.sum()
    assert quantized(kind, torch.zeros(2, 256)).restored().count_nonzero() == 0
    for broken in (torch.nan, torch.inf):
        with pytest.raises(CheckpointError, match="not finite"):
            quantized(kind, torch.cat([x[:2, :255], torch.full((2, 1), broken)], 1))


def test_the_package_gguf_reads_what_is_written(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    metadata = {"general.architecture": "x", "a": 7, "b": -7, "c": 0.5, "d": True, "e": "\u00e4", "f": [1, -2], "g": []}
    metadata |= {"h": ["x", ""], "i": [0.5, 1.5], "j": [True, False]}
    weights = {kind: torch.randn(4, 512) for kind in (*GRIDS, "F32", "F16")}
    planned = [Planned(f"w.{kind}", kind, (4, 512)) for kind in weights]
    with GgufWriter(tmp_path / "x.gguf", metadata, planned) as writer:
        for kind, weight in weights.items():
            writer.write(f"w.{kind}", encoded(kind, weight))
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {key: reader.fields[key].contents() for key in metadata if key != "g"} | {"g": []} == metadata
    for tensor in reader.tensors:
        numbers = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name[2:]
        wanted = quantized(kind, weights[kind]).restored() if kind in GRIDS else encoded(kind, weights[kind]).float()
        assert torch.equal(numbers.float().view(4, 512), wanted), kind


@pytest.mark.quick("llama-3", "gemma3_text", "mixtral", "granite")
@pytest.mark.parametrize("case", WRITTEN)
def test_a_written_model_is_the_model(case: str, tmp_path: Path) -> None:
    """Configuration, names and rows; numbers but for what quantizing loses (or fp16 where no block divides a row)."""
    architecture, options = CASES[case]
    folder = tiny(tmp_path / "model", architecture, **options)
    own, theirs = Checkpoint(resolve(str(write(folder, tmp_path / "out.gguf")))), Checkpoint(folder)
    config, expected = (read_config(each.config, each.generation) for each in (own, theirs))
    assert replace(config, layout=None, eos_token_ids=()) == replace(expected, layout=None, eos_token_ids=())
    laid = LaidOutCheckpoint(theirs, expected.layout or Layout())
    for name in config.tensor_shapes():
        found, wanted = own.tensor(name).float(), laid.tensor(name).float()
        assert (found - wanted).norm() <= 0.09 * wanted.norm(), name
        assert wanted.dim() > 1 or (found - wanted).abs().max() <= 1e-6, name


@pytest.mark.slow
def test_metadata_and_tensors_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    jobs = []
    for case in WRITTEN:
        folder = tiny(tmp_path / case, CASES[case][0], **CASES[case][1])
        jobs.append((folder, tmp_path / f"{case}.gguf", ()))
    convert(jobs)
    for folder, file, _ in jobs:
        theirs, own = read_gguf(file), read_gguf(write(folder, tmp_path / f"{folder.name}-own.gguf"))
        table = {"token_embd.weight"}  # Gemma's is cut to the tokenizer's length
        shapes = [{name: each.tensors[name].shape for name in each.tensors.keys() - table} for each in (own, theirs)]
        assert shapes[0] == shapes[1], file
        said = {key: value for key, value in theirs.metadata.items() if not key.startswith(("general.", "tokenizer."))}
        differ = {key: (value, own.metadata.get(key)) for key, value in said.items() if own.metadata.get(key) != value}
        assert {key: pair for key, pair in differ.items() if pair[1] is not None} == {}, file


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say_is_refused(case: str, tmp_path: Path) -> None:
    yarn = CASES["deepseek_v2-yarn"][1]["rope_parameters"]
    special = {
        "mistral-window": ("mistral", {"sliding_window": 20}),
        "yarn-mscale": ("llama", {"rope_parameters": yarn}),
    }
    architecture, options = special.get(case) or CASES[case]
    folder = tiny(tmp_path / "model", architecture, **options)
    with pytest.raises(ConfigError, match=REFUSED[case]):
        write(folder, tmp_path / "out.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not be the same|is not written"),
        ({"normalizer": {"type": "Lowercase"}}, "splits texts into words in a way that has no name"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "of type WordPiece is not written"),
        ({"added_tokens": [{"id": 3, "content": "c", "special": True, "lstrip": True, "rstrip": False,
                            "single_word": False}]}, "its added tokens would not be the same"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_metadata_cannot_say_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | change))
    with pytest.raises(ConfigError, match=words):
        tokenizer_metadata(tmp_path, 4, {})


@pytest.mark.parametrize("name", ["qwen3", "llama2", "llama3_1", "gemma3", "gptoss", "deepseek_v3"])
@pytest.mark.quick("llama2")
def test_a_published_tokenizer_is_written(name: str) -> None:
    """What is written is read again, and compared; that ids are the same is in `test_gguf_tokenizer`."""
    folder = tokenizer_folder(name)
    source = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    size = max([*source["model"]["vocab"].values(), *(each["id"] for each in source["added_tokens"])]) + 1
    metadata = tokenizer_metadata(folder, size + UNUSED_IDS, {"default": "x", "tool_use": "y"})
    assert metadata["tokenizer.chat_template"] == "x" and metadata["tokenizer.chat_template.tool_use"] == "y"


@pytest.mark.slow
@pytest.mark.parametrize("published", [smollm2, gemma3_270m])
def test_llama_cpp_says_what_quire_says_of_a_written_file(published: Any, tmp_path: Path) -> None:
    """Greedily, up to the first near tie: both round activations, in their own ways."""
    file = tmp_path / "out.gguf"
    assert main(["quantize", str(published()), "--to", "gguf-q4_k", "--output", str(file), "--quiet"]) == 0
    made = file.read_bytes()
    before, after = (read_gguf(each, tokenizer=True).metadata for each in (published(), file))
    for key in ("chat_template", "ggml.tokens", "ggml.eos_token_id", "ggml.bos_token_id"):
        assert before.get(f"tokenizer.{key}") == after.get(f"tokenizer.{key}"), key
    prompts = ["The capital of France is", "Once upon a time, there was a", "def fibonacci(n):\n"]
    greedy = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
    with LLM(str(file), kv_cache_memory="64MiB", max_model_len=512) as llm:
        outputs = llm.generate(prompts, greedy)
    assert file.read_bytes() == made
    llama_cpp = pytest.importorskip("llama_cpp")
    other = llama_cpp.Llama(str(file), n_ctx=512, verbose=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = other.tokenize(prompt.encode(), special=True)
        assert ids == output.prompt_token_ids
        other.reset()
        other.eval(ids)
        completion = output.outputs[0]
        for token, scores in zip(completion.token_ids, completion.logprobs or (), strict=True):
            theirs = other.sample(temp=0.0)
            first, second = sorted((each.logprob for each in scores.values()), reverse=True)[:2]
            if theirs != token:
                assert first - second < 0.6, (prompt, theirs, token)
                break
            other.eval([token])
