"""The tokenizers library behind its wall: its panics are errors of ours, and what cannot be bounded is refused."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import PromptTooLongError, TokenizerError, TokenizerFailedError
from quire.text import tokenizer_backend
from quire.text.tokenizer import Tokenizer
from tests.tokenizer_builders import (
    CHATML_CONFIG,
    CHATML_SPECIALS,
    byte_level_json,
    metaspace_json,
    panicking_json,
    unigram_json,
)

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


# -- the most bytes of a token -------------------------------------------------------------------------------


MODEL = json.loads(byte_level_json())["model"]
CHATML = {"default": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"}


@cache
def with_long_token(nfc: bool) -> Tokenizer:
    known = [*json.loads(byte_level_json())["added_tokens"], *added(content="#" * 40)]
    return Tokenizer(changed(normalizer={"type": "NFC"} if nfc else None, added_tokens=known), CHATML_CONFIG, CHATML)


NEAR = ["#" * 40, " Stopping", *CHATML_SPECIALS, "\u1fbe\u0308\u0301", "\u212a"]
"""Texts that come close to the bound: long tokens, and what normal form C shortens most."""


@given(st.booleans(), st.lists(st.sampled_from(NEAR) | st.text(max_size=3), min_size=1, max_size=20).map("".join))
@example(False, "#" * 400)
def test_a_text_that_fits_is_never_refused_by_its_size(nfc: bool, text: str) -> None:
    tokenizer = with_long_token(nfc)
    ids = tokenizer.encode(text)
    assert tokenizer.encode_batch([text], max_tokens=len(ids)) == [ids]
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages)
    assert tokenizer.apply_chat_template(messages, max_tokens=len(chat.token_ids)) == chat


def test_a_text_that_cannot_fit_is_refused_without_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_json(), CHATML_CONFIG, CHATML)
    most = max(map(len, (*MODEL["vocab"], "<|endoftext|>")))
    assert len(tokenizer.encode_batch(["x" * (64 * most)], max_tokens=64)[0]) > 64  # what it has is found out later
    monkeypatch.setattr(tokenizer_backend.Backend, "encode_batch", lambda *_, **__: pytest.fail("it was encoded"))
    for refused in (
        lambda text: tokenizer.encode_batch([text], max_tokens=64),
        lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}], max_tokens=64),
    ):
        with pytest.raises(PromptTooLongError, match=r"length is 64 tokens.*bytes.*shorten the prompt"):
            refused("x" * (64 * most + 1))


def split(behavior: str) -> dict[str, Any]:
    found = {"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [found, byte_level]}


def added(**fields: Any) -> list[dict[str, Any]]:
    one = {"id": 999, "content": "<x>", "single_word": False, "normalized": False, "special": False}
    return [{**one, "lstrip": False, "rstrip": False, **fields}]


@pytest.mark.parametrize(
    ("source", "bounded"),
    [
        (byte_level_json(), True),
        (changed(normalizer={"type": "NFC"}), True),
        (changed(pre_tokenizer=split("Isolated")), True),
        (changed(added_tokens=added()), True),
        (changed(normalizer={"type": "NFKC"}), False),  # one character for many
        (changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), False),
        (changed(pre_tokenizer=split("Removed")), False),
        (changed(pre_tokenizer={"type": "Whitespace"}), False),
        (changed(added_tokens=added(lstrip=True)), False),  # it takes all the spaces before it
        (changed(added_tokens=added(rstrip=True)), False),
        (with_model(vocab={text: id for text, id in MODEL["vocab"].items() if text != "Ā"}), False),  # drops a byte
        (metaspace_json(), False),
        (unigram_json(), False),
    ],
)
def test_a_token_has_a_most_of_bytes_only_where_nothing_of_a_text_is_dropped(source: str, bounded: bool) -> None:
    text = " " * 100_000
    if bounded:
        with pytest.raises(PromptTooLongError):
            Tokenizer(source).encode_batch([text], max_tokens=10)
    else:
        Tokenizer(source).encode_batch([text], max_tokens=10)


def test_normal_form_c_shortens_no_text_by_more() -> None:
    def size(text: str) -> int:
        return len(text.encode())

    known = [chr(code) for code in range(0x30000) if unicodedata.decomposition(chr(code))]
    longest = {unicodedata.normalize("NFD", each): each for each in sorted(known, key=size)}
    for composed in known:
        parts = [max(longest.get(part, part), part, key=size) for part in unicodedata.normalize("NFD", composed)]
        made = unicodedata.normalize("NFC", "".join(parts))
        assert size("".join(parts)) <= tokenizer_backend.NFC_SHRINKS * size(made)
