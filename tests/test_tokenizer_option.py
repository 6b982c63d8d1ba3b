"""`--tokenizer`: another tokenizer than the model's own, wherever one is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import CheckpointNotFoundError, ConfigError, TokenizerError
from quire.models.hub import ASSETS, resolve, tokenizer_folder
from quire.text.tokenizer import Tokenizer
from tests.gguf_files import LLAMA, llama, random_blocks, write
from tests.gguf_vocabularies import as_metadata
from tests.http_tools import ServeProcess

DEMO = ASSETS / "demo"
CHOICES = ["fn main", "def main"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer with other ids and another chat template."""
    made = tmp_path_factory.mktemp("other")
    content = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    vocab, added = content["model"]["vocab"], {token["content"] for token in content["added_tokens"]}
    plain = [text for text in vocab if text not in added]
    ids = [vocab[text] for text in plain]
    vocab |= dict(zip(plain, reversed(ids), strict=True))
    (made / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (made / "tokenizer_config.json").write_text((DEMO / "tokenizer_config.json").read_text("utf-8"), "utf-8")
    (made / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!", "utf-8")
    return made


def of(tokenizer: str | None, **options: object) -> EngineConfig:
    return EngineConfig.from_options({"model": str(DEMO), "tokenizer": tokenizer, **options})


def test_a_tokenizer_is_a_folder_or_its_file_and_the_models_own_by_default(folder: Path, tmp_path: Path) -> None:
    assert tokenizer_folder(of(None), DEMO) == tokenizer_folder(of(str(DEMO)), DEMO) == DEMO
    assert (
        tokenizer_folder(of(str(folder)), DEMO) == tokenizer_folder(of(str(folder / "tokenizer.json")), DEMO) == folder
    )
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        tokenizer_folder(of(str(tmp_path)), DEMO)
    with pytest.raises(CheckpointNotFoundError, match=r"^tokenizer: no checkpoint"):
        tokenizer_folder(of(str(tmp_path / "none")), DEMO)
    with pytest.raises(ConfigError, match=r"^tokenizer: revision 'main' was given"):
        tokenizer_folder(of(str(folder), tokenizer_revision="main"), DEMO)


def test_a_gguf_files_tokenizer_may_be_given_and_a_gguf_model_may_be_given_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vocabulary = {**as_metadata(folder, "gpt2", "qwen2"), "tokenizer.chat_template": "x"}
    shape = (len(vocabulary["tokenizer.ggml.tokens"]), 256)
    tensors = llama() | {"token_embd.weight": random_blocks("Q6_K", shape, np.random.default_rng(0))}
    file = write(tmp_path / "m.gguf", LLAMA | vocabulary, tensors)
    given = Tokenizer.load(tokenizer_folder(of(str(file)), DEMO))
    assert given.encode("x = 10") == Tokenizer.load(folder).encode("x = 10")

    eos = vocabulary["tokenizer.ggml.eos_token_id"]
    unknown = write(tmp_path / "u.gguf", LLAMA | vocabulary | {"tokenizer.ggml.pre": "new"}, tensors)
    assert eos in json.loads((resolve(str(unknown)) / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    with LLM(str(unknown), tokenizer=str(folder), max_model_len=64, kv_cache_memory="8MiB") as llm:
        [output] = llm.generate("x = 10", SamplingParams(max_tokens=2))
        assert output.prompt_token_ids == given.encode("x = 10")
        [reply] = llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))
        assert reply.prompt_token_ids == given.encode("x!")


def test_options_that_contradict_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer is empty"):
        of("")
    with pytest.raises(ConfigError, match="tokenizer_revision=main needs tokenizer"):
        of(None, tokenizer_revision="main")
    assert of(None, revision="main", tokenizer_revision="main").tokenizer_revision == "main"
    with pytest.raises(ConfigError, match="tokenizer=other with nnodes=2 is not supported yet"):
        of("other", nnodes=2, tensor_parallel_size=2, token_file="x")


def test_prompts_chats_outputs_and_grammars_are_of_the_tokenizer_that_was_given(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs={"choice": CHOICES})
    with LLM("demo", tokenizer=str(folder)) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        [output] = llm.generate("x = ", params)
        assert output.prompt_token_ids == tokenizer.encode("x = ")
        assert output.outputs[0].text in CHOICES
        assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
        chat = llm.chat([{"role": "user", "content": "x"}], params)[0]
        assert chat.prompt_token_ids == tokenizer.encode("x!")
    with LLM("demo") as llm:
        own = llm.get_tokenizer()
        assert own is not None
        assert own.encode("x = ") != output.prompt_token_ids


def test_a_server_uses_it_in_all_its_processes_and_after_its_engine_died(folder: Path) -> None:
    body = {"model": "demo", "prompt": "x = ", "structured_outputs": {"choice": CHOICES}, "max_tokens": 8}
    with LLM("demo", tokenizer=str(folder)) as llm:
        tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    with ServeProcess("--tokenizer", str(folder / "tokenizer.json")) as server:
        for _ in range(2):
            assert server.json("/tokenize", {"prompt": "x = "})["tokens"] == tokenizer.encode("x = ")
            assert server.json("/v1/completions", body)["choices"][0]["text"] in CHOICES
            server.kill("engine")
            server.wait_ready()


def test_a_draft_model_is_compared_with_it(folder: Path) -> None:
    drafts = {"method": "draft_model", "model": "demo-draft"}
    with pytest.raises(ConfigError, match="its tokenizer differs from the target's"):
        LLM("demo", tokenizer=str(folder), speculative_config=drafts)
