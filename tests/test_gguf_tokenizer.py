"""Tokenizers of GGUF files: the ids and the texts of the published `tokenizer.json`s."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.errors import CheckpointError, TokenizerError
from quire.models.gguf.file import read_gguf
from quire.models.gguf.tokenizer import ending_files, tokenizer_files
from quire.text.tokenizer import Tokenizer
from tests.gguf_vocabularies import as_metadata, texts
from tests.llama_cpp import converter
from tests.published import gemma3_270m, tokenizer_folder

PUBLISHED = {
    "qwen3": ("gpt2", "qwen2"),
    "llama2": ("llama", "default"),
    "llama3_1": ("gpt2", "llama-bpe"),
    "deepseek_v3": ("gpt2", "deepseek-v3"),
    "gptoss": ("gpt2", "gpt-4o"),
    "gpt4o": ("gpt2", "gpt-4o"),
    "gemma3": ("gemma4", "gemma4"),
}


CASES = [(name, 10_000) for name in PUBLISHED] + [("qwen3", 300), ("llama2", 300)]


@pytest.mark.parametrize(("name", "count"), CASES)
@pytest.mark.quick("qwen3-300", "llama2-300")
def test_a_published_tokenizer_survives_the_metadata(name: str, count: int) -> None:
    folder = tokenizer_folder(name)
    files = tokenizer_files(as_metadata(folder, *PUBLISHED[name]))
    ours = Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]))
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    some = texts(count)
    ids = ours.encode_batch(some, parse_special=True)
    expected = [encoding.ids for encoding in oracle.encode_batch(some)]
    for text, found, right in zip(some, ids, expected, strict=True):
        assert found == right, repr(text)
        assert ours.decode(found, skip_special_tokens=False) == oracle.decode(right, skip_special_tokens=False)


FAMILIES = ["command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"]
END = "\n__ggml_vocab_test__\n"
FAMILIES += ["phi-3", "qwen2", "refact", "starcoder"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpps_vocabularies_give_the_ids_that_it_tests_with(family: str) -> None:
    """Those ids are transformers'."""
    file = converter() / "models" / f"ggml-vocab-{family}.gguf"
    tokenizer = Tokenizer(tokenizer_files(read_gguf(file, tokenizer=True).metadata)["tokenizer.json"])
    some = Path(f"{file}.inp").read_bytes().decode().removesuffix(END).split(END)
    expected = [list(map(int, line.split())) for line in Path(f"{file}.out").read_text().splitlines()]
    assert len(some) == len(expected) > 40
    for text, right in zip(some, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == right, repr(text)


@pytest.mark.slow
def test_a_published_file_of_gemma_3_has_the_published_tokenizer() -> None:
    source = json.loads((tokenizer_folder("gemma3") / "tokenizer.json").read_text("utf-8"))
    files = tokenizer_files(read_gguf(gemma3_270m(), tokenizer=True).metadata)
    made = json.loads(files["tokenizer.json"])
    for part in ("vocab", "merges"):
        assert made["model"][part] == source["model"][part]
    ours, oracle = Tokenizer(files["tokenizer.json"]), tokenizers.Tokenizer.from_str(json.dumps(source))
    some = texts(10_000) + [" " * n + "a" for n in range(100)] + ["\n" * n for n in range(100)]
    ids = ours.encode_batch(some, parse_special=True)
    for text, found, right in zip(some, ids, oracle.encode_batch(some), strict=True):
        assert found == right.ids, repr(text)
        assert ours.decode(found, skip_special_tokens=False) == oracle.decode(right.ids, skip_special_tokens=False)


SMALL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>", "[PAD4]"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
"""A vocabulary that is valid."""


def test_ids_without_a_token_have_none() -> None:
    tokenizer = Tokenizer(tokenizer_files(SMALL)["tokenizer.json"])
    assert tokenizer.encode("ab") == [2]
    assert not tokenizer.knows(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert'.*--tokenizer"),
        ({"pre": "new"}, "pre-tokenizer 'new'.*--tokenizer"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "0 tokens"),
        ({"tokens": ["a", b"b", "ab", "x", "y"]}, "list of strings"),
        ({"tokens": ["a", "\udc80", "ab", "x", "y"]}, "not Unicode"),
        ({"tokens": ["a", "a", "ab", "x", "y"]}, "0 and 1 have the same text"),
        ({"token_type": [1]}, "1 entries for 5 tokens"),
        ({"token_type": [1, 1, 1, 9, 5]}, "from 0 to 6"),
        ({"merges": ["a c"]}, r"merges\[0\] is 'a c'"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"eos_token_id": 5}, "from 0 to 4"),
        ({"add_bos_token": True}, "bos_token_id names none"),
        ({"model": "llama"}, "tokenizer.ggml.scores.*list of 5 finite numbers"),
        ({"model": "llama", "scores": [0.0, 0.0, 0.0, float("nan"), 0.0]}, "list of 5 finite numbers"),
        (
            {"model": "llama", "scores": [0.0] * 5, "tokens": ["a", "b", "ab", "x", "aab"], "token_type": [1] * 5},
            "alike",
        ),
        (
            {"model": "llama", "scores": [0.0] * 5, "tokens": ["a", "b", "c", "x", "y" * 300], "token_type": [1] * 5},
            "300 characters",
        ),
    ],
)
def test_metadata_that_is_not_valid_is_refused(change: dict[str, Any], message: str) -> None:
    changed = SMALL | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(changed)


JUNK: list[Any] = [
    *(None, True, -1, 0, 3, 1 << 70, 0.5, float("inf"), "", "a", "x" * 5000, b"a", {}, {"a": 1}, [], [[]], [None]),
    *(["a"] * 5, ["", "b", "ab", "a b", " "], ["\udfff"] * 5, [3] * 5, [-1] * 5, [6] * 5, [0.0, 1.0, 2.0, 3.0, 4.0]),
]


def test_metadata_of_any_kind_makes_a_tokenizer_or_an_error_of_quires() -> None:
    rng = random.Random(0)
    names = [
        "model",
        "pre",
        "tokens",
        "token_type",
        "merges",
        "scores",
        "add_bos_token",
        "add_space_prefix",
        "eot_token_id",
    ]
    names += ["eos_token_id", "bos_token_id", "unknown_token_id"]
    made = 0
    for _ in range(2000):
        changed = {f"tokenizer.ggml.{name}": rng.choice(JUNK) for name in rng.sample(names, rng.randrange(4))}
        kind = {"tokenizer.ggml.model": rng.choice(["gpt2", "llama", "gemma4"]), "tokenizer.ggml.scores": [0.0] * 5}
        try:
            files = tokenizer_files(SMALL | kind | changed)
            Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]))
            made += 1
        except CheckpointError:
            pass
    assert made > 100


def test_chat_templates_keep_their_names() -> None:
    files = tokenizer_files(SMALL | {"tokenizer.chat_template": "x", "tokenizer.chat_template.tool_use": "y"})
    assert files["chat_template.jinja"] == "x"
    assert files["additional_chat_templates/tool_use.jinja"] == "y"
    with pytest.raises(TokenizerError, match="letters, digits"):
        tokenizer_files(SMALL | {"tokenizer.chat_template.../x": "y"})


def test_what_ends_a_turn_is_known_by_its_text_too() -> None:
    tokens = ["<eos>", "<end_of_turn>", "a", "<|end|>", "<|return|>"]
    metadata = SMALL | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert json.loads(tokenizer_files(metadata)["generation_config.json"]) == {"eos_token_id": [0, 1, 4]}
    unknown = metadata | {"tokenizer.ggml.pre": "new"}
    assert json.loads(ending_files(unknown)["generation_config.json"]) == {"eos_token_id": [0, 1, 4]}
    assert ending_files({}) == {}


def test_the_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    metadata = SMALL | {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>", "<|end|>", "<unk>"],
        "tokenizer.ggml.token_type": [1, 3, 4, 3, 2],
        "tokenizer.ggml.scores": [0.0] * 5,
        "tokenizer.ggml.bos_token_id": 1,
    }
    added = json.loads(tokenizer_files(metadata)["tokenizer.json"])["added_tokens"]
    assert [token["content"] for token in added if token["rstrip"]] == ["</s>", "<|end|>"]
