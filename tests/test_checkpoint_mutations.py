"""Damaged checkpoints: whatever stands in their files, they load, or there is an error of ours that names the file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.core.sampling_params import SamplingParams
from quire.errors import (
    ChatTemplateError,
    CheckpointError,
    RequestError,
    TokenizerError,
    TokenizerFailedError,
)
from quire.llm import LLM
from quire.models.checkpoint import Checkpoint, choose_dtype
from quire.models.registry import read_config
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_trial import TokenizerTrial
from tests.mutations import SNIPPETS, mutate_json, mutate_text
from tests.oracle import CLASSES, TOWERS, save_checkpoint
from tests.test_chat_template import TEMPLATES
from tests.tokenizer_builders import CHATML_CONFIG, LLAMA_CONFIG, byte_level_json, metaspace_json, unigram_json

TOKENIZERS = [
    (byte_level_json, CHATML_CONFIG | {"added_tokens_decoder": {"400": {"content": "<think>", "special": False}}}),
    (metaspace_json, LLAMA_CONFIG),
    (unigram_json, LLAMA_CONFIG),
]
MODELS = ["llama", "qwen3"]
EVERY_FAMILY = [
    name if name in (*MODELS, "granite") else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(CLASSES.keys() - TOWERS.keys() - {"granitemoehybrid"})  # by default without attention: refused
]
GENERATION = '{"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [2, 3]}'
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.0}


def damaged_tokenizer(folder: Path, seed: int) -> None:
    """The files of a tokenizer, one of which is damaged."""
    draw = random.Random(seed)
    make, config = TOKENIZERS[seed % len(TOKENIZERS)]
    files = {
        "tokenizer.json": make(),
        "tokenizer_config.json": json.dumps(config),
        "chat_template.jinja": draw.choice(list(TEMPLATES.values())),
    }
    name = draw.choice(["tokenizer.json"] * 4 + ["tokenizer_config.json", "chat_template.jinja"])
    changed = mutate_json(files[name], draw) if "json" in name else mutate_text(files[name], draw, SNIPPETS)
    for each, text in (files | {name: changed}).items():
        (folder / each).write_bytes(text.encode("utf-8", "surrogatepass"))


def check_tokenizer(folder: Path) -> str:
    """How its trial ends. Once it has succeeded, whatever is done with it succeeds or ends in an error of ours."""
    try:
        with TokenizerTrial(folder) as trial:
            trial.check()
    except (TokenizerError, ChatTemplateError) as error:
        assert str(folder) in str(error), error
        return "refused"
    tokenizer = Tokenizer.load(folder)
    for use in (
        lambda: tokenizer.encode("The quick brown fox: 123, été."),
        lambda: [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)],
        lambda: tokenizer.decode(range(tokenizer.vocab_size), skip_special_tokens=False),
        lambda: tokenizer.apply_chat_template([{"role": "user", "content": "Hello <s>"}]),
    ):
        try:
            use()
        except (TokenizerFailedError, RequestError, ChatTemplateError):
            continue
    return "loaded"


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 308), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.timeout(1800)
def test_a_damaged_tokenizer_loads_or_is_refused_by_name(seeds: range, tmp_path: Path) -> None:
    ends = []
    for seed in seeds:
        (folder := tmp_path / str(seed)).mkdir()
        damaged_tokenizer(folder, seed)
        ends.append(check_tokenizer(folder))
    assert min(ends.count("refused"), ends.count("loaded")) > len(seeds) // 12, "the damage is too little or too much"


def damaged_model(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    config, generation = folder / "config.json", folder / "generation_config.json"
    if draw.random() < 0.3:
        fields = json.loads(config.read_text())
        config.write_text(json.dumps({**fields, "rope_scaling": ROPE}))
    generation.write_text(GENERATION)
    file = draw.choice([config, config, config, generation])
    file.write_bytes(mutate_json(file.read_text(), draw).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_damaged_configuration_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, name)
    (original := tmp_path / "config.json.bak").write_text((tmp_path / "config.json").read_text())
    ends = []
    for seed in range(150):
        (tmp_path / "config.json").write_text(original.read_text())
        damaged_model(tmp_path, seed)
        try:
            checkpoint = Checkpoint(tmp_path)
            choose_dtype(checkpoint, "auto")
            config = read_config(checkpoint.config, checkpoint.generation)
            assert len(config.tensor_shapes()) > 0
            ends.append("read")
        except CheckpointError as error:
            assert "config.json" in str(error), error
            ends.append("refused")
    assert min(ends.count("refused"), ends.count("read")) > 15, "the damage is too little or too much"


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 206), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.timeout(1800)
def test_a_model_with_a_damaged_configuration_answers_or_is_refused_by_name(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        folder = save_checkpoint(tmp_path / str(seed), MODELS[seed % len(MODELS)])
        damaged_model(folder, seed)
        try:
            with LLM(str(folder), threads=1, kv_cache_memory="8MiB") as llm:
                [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, seed=1))
                assert output.finished
        except CheckpointError as error:
            assert str(folder) in str(error), error
