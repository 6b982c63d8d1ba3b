"""A Hugging Face tokenizer as the metadata of a GGUF file: the reverse of `tokenizer`.

Metadata cannot say all that `tokenizer.json` can, so what they say is read again, and must be that tokenizer. What may
differ is what does not change which ids a text has: whether a token that looks like a control token is one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, TokenizerError
from quire.models.fields import Fields
from quire.models.gguf.pretokenizers import PRE_TOKENIZERS
from quire.models.gguf.tokenizer import NAMED, SPACE, Kind, tokenizer_files

MAX_TOKENIZER_BYTES = 256 << 20
BYTE = re.compile("<0x[0-9A-F]{2}>")
WORST = -1e6
"""The score of a piece that no merge makes."""
WITHOUT_EFFECT = {"trim_offsets", "add_prefix_space"}
"""Of a pre-tokenizer that makes letters of bytes; the second one, if it is false."""
LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
"""Added tokens that llama.cpp's converter takes for control tokens, whatever is said of them."""


def tokenizer_metadata(folder: Path, size: int, templates: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of a checkpoint's tokenizer.

    Args:
        folder: the checkpoint's.
        size: rows of the model's embedding table; tokens beyond them are left out, and rows without one get a name.
        templates: chat templates by name; "default" is the main one.

    Raises:
        ConfigError: there is no tokenizer, or metadata cannot say what it does.
    """
    source = Fields.read(folder / "tokenizer.json", MAX_TOKENIZER_BYTES).given()
    if not source:
        raise ConfigError(f"{folder} has no tokenizer.json, which a GGUF file needs; add it")
    config = Fields.read(folder / "tokenizer_config.json").given()
    try:
        metadata = described(source, config, size)
        again = json.loads(tokenizer_files(metadata)["tokenizer.json"])
    except (KeyError, TypeError, AttributeError, TokenizerError) as error:
        raise ConfigError(f"{folder / 'tokenizer.json'} is not written as GGUF metadata: {error!r}") from error
    if differ := [part for part in _parts(source, size) if _parts(source, size)[part] != _parts(again, size)[part]]:
        raise ConfigError(
            f"{folder / 'tokenizer.json'}: its {', '.join(differ)} would not be the same from GGUF metadata, which "
            "cannot say all that this file does; --to int4 and --to compressed-tensors keep it as it is"
        )
    names = {"default": "tokenizer.chat_template"}
    return metadata | {names.get(name, f"tokenizer.chat_template.{name}"): text for name, text in templates.items()}


def described(source: Mapping[str, Any], config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The metadata of the content of `tokenizer.json` and `tokenizer_config.json`, unchecked.

    Raises:
        ConfigError: its kind, or how it splits texts into words, has no name in GGUF.
    """
    pieces, merges = _is_sentence_piece(source), _merges(source)
    tokens = _Tokens.of(source, size, pieces)
    ids = {text: token for token, text in enumerate(tokens.texts)}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.pre": "default" if pieces else _pre_tokenizer(source),
        "tokenizer.ggml.tokens": tokens.texts,
        "tokenizer.ggml.token_type": tokens.kinds,
        **_around(source, ids),
    }
    for name, key in NAMED.items():
        found = config.get(name)
        text = found["content"] if isinstance(found, dict) else found
        if text in ids and f"tokenizer.ggml.{key}" not in metadata:
            metadata[f"tokenizer.ggml.{key}"] = ids[text]
    if not pieces:
        return metadata | {"tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    return metadata | {
        "tokenizer.ggml.scores": [scores.get(text, WORST) for text in tokens.texts],
        "tokenizer.ggml.add_space_prefix": "Prepend" in [each["type"] for each in _steps(source["normalizer"])],
    }


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Texts and kinds, by id."""

    texts: list[str]
    kinds: list[int]

    @classmethod
    def of(cls, source: Mapping[str, Any], size: int, pieces: bool) -> _Tokens:
        texts = [f"[PAD{token}]" for token in range(size)]
        kinds = [int(Kind.UNUSED)] * size
        for text, token in source["model"]["vocab"].items():
            if token < size:
                texts[token] = text
                kinds[token] = int(Kind.BYTE if pieces and BYTE.fullmatch(text) else Kind.NORMAL)
        for added in source["added_tokens"]:
            token, text = added["id"], added["content"]
            if token < size:
                special = added["special"] or LOOKS_SPECIAL.fullmatch(text)
                texts[token] = text if special or not pieces else text.replace(SPACE, " ")
                kinds[token] = int(Kind.CONTROL if special else Kind.USER_DEFINED)
        if pieces and (unknown := source["model"].get("unk_token")) is not None:
            kinds[texts.index(unknown)] = int(Kind.UNKNOWN)
        return cls(texts, kinds)


def _is_sentence_piece(source: Mapping[str, Any]) -> bool:
    """Whether tokens are pieces of the text, and not of its bytes."""
    if source["model"]["type"] != "BPE":
        raise ConfigError(f"a tokenizer of type {source['model']['type']} is not written as GGUF metadata; BPE is")
    return not any(step["type"] == "ByteLevel" for step in _steps(source["pre_tokenizer"]))


def _merges(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges as pairs; older files have them as lines."""
    merges = source["model"]["merges"]
    return [
        (each.split(" ")[0], each.split(" ")[1]) if isinstance(each, str) else (each[0], each[1]) for each in merges
    ]


def _steps(step: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a plain sequence, without options that have no effect."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        inner = step.get("pretokenizers") or step.get("normalizers") or ()
        return [each for part in inner for each in _steps(part)]
    one = dict(step)
    if one["type"] == "ByteLevel":
        one = {name: value for name, value in one.items() if name not in WITHOUT_EFFECT or (name, value) ==
               ("add_prefix_space", True)}  # fmt: skip
        one.setdefault("use_regex", True)
    if isinstance(pattern := one.get("pattern"), dict) and "Regex" in pattern:
        one["pattern"] = {"Regex": pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")}
    return [one]


def _rule(normal_form: str | None, steps: Sequence[Mapping[str, Any]], whole_words: bool) -> str:
    found = [each for step in steps for each in _steps(step)]
    return json.dumps([normal_form, found, whole_words], sort_keys=True)


def _pre_tokenizer(source: Mapping[str, Any]) -> str:
    """The name of how a tokenizer splits texts into words."""
    normal = [step["type"] for step in _steps(source["normalizer"])]
    whole = bool(source["model"].get("ignore_merges"))
    if len(normal) < 2:
        wanted = _rule(normal[0] if normal else None, [source["pre_tokenizer"]], whole)
        for name, rule in PRE_TOKENIZERS.items():
            if _rule(rule.normal_form, rule.steps, rule.whole_words) == wanted:
                return name
    raise ConfigError(
        "the tokenizer splits texts into words in a way that has no name in GGUF that Quire knows; "
        f"known are those of {', '.join(sorted(PRE_TOKENIZERS))}"
    )


def _around(source: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Whether texts get a first and a last token, and which."""
    found: dict[str, Any] = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    before, after = _template(source)
    for name, texts in (("bos", before), ("eos", after)):
        if texts:
            found |= {f"tokenizer.ggml.add_{name}_token": True, f"tokenizer.ggml.{name}_token_id": ids[texts[0]]}
    return found


def _template(source: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The tokens before and after a text."""
    processor = source["post_processor"]
    steps = [] if processor is None else processor.get("processors", [processor])
    around: tuple[list[str], list[str]] = ([], [])
    for step in steps:
        if step["type"] == "TemplateProcessing":
            ended = False
            for part in step["single"]:
                ended |= "Sequence" in part
                if "SpecialToken" in part:
                    around[ended].append(part["SpecialToken"]["id"])
    return around


def _parts(source: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What determines the ids of a text, in one form whatever the file."""
    added = {each["content"]: each for each in source["added_tokens"] if each["id"] < size}
    vocabulary = source["model"]["vocab"] | {text: each["id"] for text, each in added.items()}
    return {
        "vocabulary": {text: token for text, token in vocabulary.items() if token < size},
        "merges": _order(source, added),
        "added tokens": {
            text: [each[side] for side in ("lstrip", "rstrip", "single_word")] for text, each in added.items()
        },
        "normalizer": _steps(source["normalizer"]),
        "pre-tokenizer": _words(source),
        "first and last tokens": _template(source),
        "options": [bool(source["model"].get(option)) for option in ("byte_fallback", "ignore_merges")],
    }


def _order(source: Mapping[str, Any], added: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """The merges, those that make the same token and follow each other in any order. Without those that make an added
    token, which is found in a text before them."""
    merges = (pair for pair in _merges(source) if "".join(pair) not in added)
    return [sorted(pairs) for _, pairs in itertools.groupby(merges, key="".join)]


def _words(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the pre-tokenizer. A split at spaces has no effect after all spaces were replaced."""
    steps = _steps(source["pre_tokenizer"])
    replaced = any(step == SPACES_REPLACED for step in _steps(source["normalizer"]))
    return [step for step in steps if not (replaced and step.get("pattern") == {"String": " "})]


SPACES_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
