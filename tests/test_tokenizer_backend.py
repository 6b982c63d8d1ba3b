"""The tokenizers library behind its wall: its panics are errors of ours, and what cannot be bounded is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import TokenizerError, TokenizerFailedError
from quire.text import tokenizer_backend
from quire.text.tokenizer import Tokenizer
from tests.tokenizer_builders import byte_level_json, metaspace_json, panicking_json, unigram_json

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
KNOWN_DECODERS: list[dict[str, Any]] = [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
]


def changed(**parts: Any) -> str:
    return json.dumps(json.loads(byte_level_json()) | parts)


def with_model(**fields: Any) -> str:
    return changed(model=json.loads(byte_level_json())["model"] | fields)


# -- panics --------------------------------------------------------------------------------------------------


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    source, panics = panicking_json()
    tokenizer = Tokenizer(source)
    with pytest.raises(TokenizerFailedError, match="the tokenizer failed: slice index starts at") as caught:
        tokenizer.decode([panics])
    assert not isinstance(caught.value.__cause__, Exception)  # what `except Exception` would have let pass
    assert tokenizer.decode(tokenizer.encode("The quick")) == "The quick"


@pytest.mark.parametrize(
    "source",
    [
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}),
        changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
        changed(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        changed(model={"type": "BPE", "vocab": {"a": 0, "ab": 1}, "merges": [["a", "ab"]],
                       "continuing_subword_prefix": "▁▁▁"}),
    ],
    ids=["normalizer", "pre-tokenizer", "post-processor", "model"],
)  # fmt: skip
def test_a_tokenizer_that_panics_on_any_text_is_refused(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"^here.json (is not a valid tokenizer|fails on plain text)"):
        Tokenizer(source, name="here.json")


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_means_to_end_the_process_is_left_alone(end: type[BaseException]) -> None:
    def stop() -> None:
        raise end

    with pytest.raises(end):
        tokenizer_backend._call(stop)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (with_model(dropout=0.1), r"model\.dropout is 0\.1, .* set it to null"),
        (changed(decoder={"type": "Sequence", "decoders": [DOUBLE] * 34}), r"1\.7\d+e\+10 times as long"),
        (changed(decoder=DOUBLE | {"content": "a" * 5000}), "5000 times as long"),
        (changed(decoder=DOUBLE | {"pattern": {"String": ""}, "content": "x" * 1000}), "1001 times as long"),
        (changed(decoder=DOUBLE | {"pattern": {"Regex": "(a+)+$"}}), "regular expression, whose time has no bound"),
        (changed(decoder={"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 9}), "19683 times"),
        (changed(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 65}), "65 decoders; at most 64"),
        (changed(normalizer={"type": "Sequence", "normalizers": [DOUBLE] * 34}), "more than 64 tokens or characters"),
        (changed(normalizer={"type": "Prepend", "prepend": "x" * 50_000}), "more than 64 tokens or characters"),
        (changed(added_tokens=[{"id": 400, "content": "long" * 1025, "special": False, "single_word": False,
                                "lstrip": False, "rstrip": False, "normalized": False}]), "has 4100 characters"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_bounded_or_repeated_is_refused(source: str, words: str) -> None:
    with pytest.raises(TokenizerError, match=f"^here.json.*{words}"):
        Tokenizer(source, name="here.json")


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_no_dropout_is_fine_in_both_spellings(dropout: float | None) -> None:
    assert Tokenizer(with_model(dropout=dropout)).encode("hello")


@pytest.mark.parametrize("decoder", KNOWN_DECODERS, ids=lambda decoder: str(decoder["type"]))
def test_the_decoders_of_known_checkpoints_are_accepted(decoder: dict[str, Any]) -> None:
    assert Tokenizer(changed(decoder=decoder)).encode("hello")


@pytest.mark.parametrize("source", [byte_level_json(), metaspace_json(), unigram_json()])
def test_known_kinds_of_tokenizers_are_accepted(source: str) -> None:
    tokenizer = Tokenizer(source)
    assert tokenizer.decode(tokenizer.encode("The quick")) == "The quick"


# -- values of the wrong kind --------------------------------------------------------------------------------


def test_an_unknown_id_that_is_no_number_is_not_used() -> None:
    assert Tokenizer(with_model(unk_id=["x"])).encode("hello")


@pytest.mark.parametrize("value", ["\ud800", {"content": "\ud800"}])
def test_a_special_token_that_is_no_unicode_is_named(value: Any) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json beside here\.json: bos_token is not valid"):
        Tokenizer(byte_level_json(), {"bos_token": value}, name="here.json")


def test_a_tokenizer_that_can_encode_no_plain_text_is_refused() -> None:
    model = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "<unk>"}
    with pytest.raises(TokenizerError, match="fails on plain text such as 'a'"):
        Tokenizer(changed(model=model, added_tokens=[]))
