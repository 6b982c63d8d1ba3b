"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder.

A GGUF file has the vocabulary, the kind of each token, and either byte-pair merges (`gpt2`, `gemma4`) or the scores of
SentencePiece's (`llama`), from which the merges follow. How a text is split first is only named: see
`pretokenizers.py`. What the converter drops is lost here too: whether a token that looks special (`<|...|>`) was
one, and whether it takes the spaces beside it.

The metadata is untrusted. Whatever is checked here, the files made of it are loaded in a sandbox first, as all
tokenizers are (`text/tokenizer_trial.py`).

The keys are those of GGUF's specification (ggml's `docs/gguf.md`) and of llama.cpp's converter (`gguf/constants.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quire.errors import TokenizerError
from quire.models.fields import Fields
from quire.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

SOURCE = "the GGUF file's metadata"
GIVE_ANOTHER = "give a tokenizer with --tokenizer, such as the folder or the name of the original model"

MAX_TOKENS = 1 << 20
"""Maximum tokens. The largest known vocabularies have some 262,000."""
MAX_MERGES = 1 << 22
"""Maximum merges. The most known are some 580,000."""
MAX_PIECE = 256
"""Maximum characters of a piece of SentencePiece's; known ones have up to 93."""
MAX_TEXT = 1 << 24
"""Maximum characters of all tokens. Known vocabularies have some 2,000,000."""
MAX_TEMPLATES = 64

SPACE = "\u2581"
"""SentencePiece's letter for a space."""
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


class Kind(IntEnum):
    """Kinds of tokens: `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the specification
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Names in `tokenizer_config.json`, and those of the ids in the metadata."""

SENTENCE_PIECE = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
"""SentencePiece's own ids, where a `llama` file names none."""

ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ids that end a text: of the sequence, of a turn, of a message."""

END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
    | {"<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "[e~["}
    | {"<｜end▁of▁sentence｜>", "<|eot|>", "<|eom|>"}
)
"""Tokens that end a text in every family that has them, since files seldom name more than one id."""

KIND_OF_PHI_3 = {"general.architecture": "phi3", "tokenizer.ggml.model": "llama"}
PHI_3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi-3's added tokens, those that do not take the spaces behind them. The file does not say so (nor does any, for
any other model), and its chats depend on it."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The vocabulary.

    Attributes:
        texts: of each id; None: the id has no token, but pads the model's matrices.
        kinds: of each id.
        named: ids by their name in `tokenizer_config.json`.
    """

    texts: list[str | None]
    kinds: list[int]
    named: dict[str, int]

    def of(self, *kinds: Kind) -> Iterator[tuple[int, str]]:
        """Ids and texts of some kinds."""
        for token, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if text is not None and kind in kinds:
                yield token, text


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The files of the tokenizer by name, relative to the checkpoint's folder.

    Args:
        metadata: the file's, parsed: numbers, strings, truth values and lists of them by key.

    Returns:
        `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`; with chat templates also
        `chat_template.jinja` and `additional_chat_templates/NAME.jinja`.

    Raises:
        TokenizerError: the metadata is not valid, or names a tokenizer that Quire does not know.
        ModelConfigError: one of its fields has a value of another type.
    """
    fields = Fields(metadata, SOURCE)
    model = fields.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise TokenizerError(
            f"{SOURCE}: tokenizer.ggml.model is {model[:80]!r}; 'gpt2', 'llama' and 'gemma4' are known. {GIVE_ANOTHER}"
        )
    tokens = _read_tokens(fields, model)
    source = _byte_level(fields, tokens) if model == "gpt2" else _sentence_piece(fields, tokens, model)
    config = {name: tokens.texts[token] for name, token in tokens.named.items()}
    return {
        "tokenizer.json": _json(source),
        "tokenizer_config.json": _json({**config, "clean_up_tokenization_spaces": False}),
        **_ending(fields, tokens),
        **_templates(fields),
    }


def ending_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Of `tokenizer_files` the `generation_config.json`, which does not depend on how texts are split; for a file whose
    tokenizer is not known. Empty if it has none. Raises as `tokenizer_files` does.
    """
    fields = Fields(metadata, SOURCE)
    if "tokenizer.ggml.model" not in fields or "tokenizer.ggml.tokens" not in fields:
        return {}
    return _ending(fields, _read_tokens(fields, fields.text("tokenizer.ggml.model")))


def _ending(fields: Fields, tokens: _Tokens) -> dict[str, str]:
    return {"generation_config.json": _json({"eos_token_id": _ends(fields, tokens)})}


# --- the two families -------------------------------------------------------------------------------------


def _byte_level(fields: Fields, tokens: _Tokens) -> dict[str, Any]:
    """A tokenizer whose tokens spell bytes, as GPT-2's."""
    rule = _pre_tokenizer(fields)
    return _tokenizer(
        fields,
        tokens,
        add_bos=rule.add_bos,
        merges=_merges(fields, tokens),
        normalizer=None if rule.normal_form is None else {"type": rule.normal_form},
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(rule.steps)},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        ignore_merges=rule.whole_words,
    )


def _sentence_piece(fields: Fields, tokens: _Tokens, model: str) -> dict[str, Any]:
    """A tokenizer whose tokens are pieces of the text itself, as SentencePiece's; bytes stand for other characters."""
    has_merges = model == "gemma4"
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=not has_merges)
    to_pieces: list[Any] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    to_text: list[Any] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        to_pieces.insert(0, {"type": "Prepend", "prepend": SPACE})
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = tokens.texts[tokens.named["unk_token"]] if "unk_token" in tokens.named else None
    return _tokenizer(
        fields,
        tokens,
        add_bos=True,
        merges=_merges(fields, tokens) if has_merges else _merges_of_scores(fields, tokens),
        normalizer={"type": "Sequence", "normalizers": to_pieces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": to_text},
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=set(BYTE_PIECES) <= {text for _, text in tokens.of(Kind.BYTE)},
    )


def _tokenizer(
    fields: Fields,
    tokens: _Tokens,
    *,
    add_bos: bool,
    merges: list[tuple[str, str]],
    normalizer: Any,
    pre_tokenizer: Any,
    decoder: Any,
    **model: Any,
) -> dict[str, Any]:
    """The content of `tokenizer.json`. Added tokens are in the model's vocabulary too, so that each has its own id
    whatever ids have no token."""
    vocab = {text: token for token, text in enumerate(tokens.texts) if text is not None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(fields, tokens),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(fields, tokens, add_bos),
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": None, **model, "vocab": vocab, "merges": merges},
    }


def _pre_tokenizer(fields: Fields) -> PreTokenizer:
    """What the file's name of a pre-tokenizer stands for."""
    name = fields.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in fields else ""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = f"names the pre-tokenizer {name[:80]!r}" if name else "has no tokenizer.ggml.pre"
    raise TokenizerError(
        f"{SOURCE} {found}, so how texts are split into words is not known; {GIVE_ANOTHER}. Known names: "
        f"{', '.join(sorted(PRE_TOKENIZERS))}"
    )


# --- tokens -----------------------------------------------------------------------------------------------


def _read_tokens(fields: Fields, model: str) -> _Tokens:
    """The checked vocabulary."""
    texts = fields.strings("tokenizer.ggml.tokens") or []
    size = len(texts)
    if not 0 < size <= MAX_TOKENS or sum(map(len, texts)) > MAX_TEXT:
        raise TokenizerError(
            f"{SOURCE}: tokenizer.ggml.tokens has {size} tokens of {sum(map(len, texts))} characters; from 1 to "
            f"{MAX_TOKENS} tokens and at most {MAX_TEXT} characters are allowed. Convert the model again"
        )
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{SOURCE}: tokenizer.ggml.tokens is not Unicode ({error.reason}); {GIVE_ANOTHER}"
        ) from None
    kinds = _kinds(fields, size)
    named = {
        name: fields.integer(f"tokenizer.ggml.{key}", min=0, max=size - 1)
        for name, key in NAMED.items()
        if f"tokenizer.ggml.{key}" in fields
    }
    if model == "llama":
        named = {
            name: token for name, token in SENTENCE_PIECE.items() if kinds[token:] and kinds[token] != Kind.NORMAL
        } | named
    for token in (*named.values(), *_named_ends(fields, size)):
        if kinds[token] in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED):
            kinds[token] = Kind.CONTROL
    kept = [
        None if not text or kind == Kind.UNUSED or (kind != Kind.NORMAL and text == f"[PAD{token}]") else text
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]
    if model == "llama":  # the converter writes its spaces plainly
        kept = [
            text.replace(" ", SPACE) if text and kind == Kind.USER_DEFINED else text
            for text, kind in zip(kept, kinds, strict=True)
        ]
    _refuse_twins(kept)
    return _Tokens(kept, kinds, {name: token for name, token in named.items() if kept[token] is not None})


def _kinds(fields: Fields, size: int) -> list[int]:
    """The kind of each token; all are normal where the file does not say."""
    kinds = fields.integers("tokenizer.ggml.token_type", below=max(Kind) + 1)
    if kinds and len(kinds) != size:
        raise TokenizerError(
            f"{SOURCE}: tokenizer.ggml.token_type has {len(kinds)} entries for {size} tokens; convert the model again"
        )
    return [*kinds] or [Kind.NORMAL] * size


def _refuse_twins(texts: list[str | None]) -> None:
    """Raise for a text that two ids have: one of them could never be written."""
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text is not None and seen.setdefault(text, token) != token:
            raise TokenizerError(
                f"{SOURCE}: the tokens {seen[text]} and {token} have the same text, {text[:80]!r}; {GIVE_ANOTHER}"
            )


def _added_tokens(fields: Fields, tokens: _Tokens) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else is done to it."""
    found = tokens.of(Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    greedy = fields.picked(KIND_OF_PHI_3).items() >= KIND_OF_PHI_3.items()
    return [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": greedy and text not in PHI_3_PLAIN,
            "normalized": False,
            "special": tokens.kinds[token] != Kind.USER_DEFINED,
        }
        for token, text in found
    ]


def _post_processor(fields: Fields, tokens: _Tokens, add_bos: bool) -> Any:
    """What puts the first and the last token around a text; None if there are none."""
    around: dict[str, list[str]] = {}
    special: dict[str, Any] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        around[name] = []
        if not fields.flag(f"tokenizer.ggml.add_{name}_token", default=default):
            continue
        token = tokens.named.get(f"{name}_token")
        text = None if token is None else tokens.texts[token]
        if text is None:
            raise TokenizerError(
                f"{SOURCE}: a text has a {name.upper()} token, but tokenizer.ggml.{name}_token_id names none; "
                f"{GIVE_ANOTHER}"
            )
        around[name] = [text]
        special[text] = {"id": text, "ids": [token], "tokens": [text]}
    if not special:
        return None

    def sequence(name: str, kind: int) -> list[Any]:
        before, after = ([{"SpecialToken": {"id": text, "type_id": kind}} for text in around[end]] for end in around)
        return [*before, {"Sequence": {"id": name, "type_id": kind}}, *after]

    single, second = sequence("A", 0), sequence("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": special}


# --- merges -----------------------------------------------------------------------------------------------


def _merges(fields: Fields, tokens: _Tokens) -> list[tuple[str, str]]:
    """The file's merges: each is two tokens with a space between."""
    lines = fields.strings("tokenizer.ggml.merges") or []
    if len(lines) > MAX_MERGES:
        raise TokenizerError(f"{SOURCE}: tokenizer.ggml.merges has {len(lines)} entries; {MAX_MERGES} are allowed")
    known = {text for text in tokens.texts if text is not None}
    merges = []
    for index, line in enumerate(lines):
        left, _, right = line[1:].partition(" ")
        left = line[:1] + left
        if not {left, right, left + right} <= known:
            raise TokenizerError(
                f"{SOURCE}: tokenizer.ggml.merges[{index}] is {line[:80]!r}, which does not join two tokens to a "
                f"third; {GIVE_ANOTHER}"
            )
        merges.append((left, right))
    return merges


def _merges_of_scores(fields: Fields, tokens: _Tokens) -> list[tuple[str, str]]:
    """The merges of SentencePiece's scores: whatever two pieces make a third, the better scores first.

    The order among equal scores is that of `generate_merges` in transformers, with which published files are made.
    """
    scores = _scores(fields, len(tokens.texts))
    pieces = {text: token for token, text in tokens.of(Kind.NORMAL, Kind.USER_DEFINED)}
    joined = [scores[token] for token, text in tokens.of(Kind.NORMAL) if len(text) > 1]
    if len(joined) > len(set(joined)) == 1:
        raise TokenizerError(f"{SOURCE}: tokenizer.ggml.scores are all alike, so no order follows; {GIVE_ANOTHER}")
    if len(longest := max(pieces, key=len, default="")) > MAX_PIECE:
        raise TokenizerError(
            f"{SOURCE}: the token {longest[:40]!r}... has {len(longest)} characters; {MAX_PIECE} are allowed"
        )
    found: list[tuple[float, int, int, str, str]] = []
    for text, token in pieces.items():
        score = 0.0 if tokens.kinds[token] == Kind.USER_DEFINED else scores[token]
        halves = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(left, right) for left, right in halves if left in pieces and right in pieces]
        known.sort(key=lambda half: (pieces[half[0]], pieces[half[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in known]
        if len(found) > MAX_MERGES:
            raise TokenizerError(f"{SOURCE}: the tokens make more than {MAX_MERGES} merges; {GIVE_ANOTHER}")
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _scores(fields: Fields, size: int) -> list[float]:
    """The score of each token."""
    scores = fields.picked(["tokenizer.ggml.scores"]).get("tokenizer.ggml.scores")
    listed = scores if isinstance(scores, list) else []
    if len(listed) == size and all(type(each) in (int, float) and math.isfinite(each) for each in listed):
        return listed
    raise fields.error("tokenizer.ggml.scores", f"a list of {size} finite numbers")


# --- the other files --------------------------------------------------------------------------------------


def _named_ends(fields: Fields, size: int) -> list[int]:
    """Ids that the file says end a text."""
    keys = [f"tokenizer.ggml.{name}" for name in ENDS]
    return [fields.integer(key, min=0, max=size - 1) for key in keys if key in fields]


def _ends(fields: Fields, tokens: _Tokens) -> list[int]:
    """Ids that end a text: those that the file names, and those known by their text."""
    added = {text: token for token, text in tokens.of(Kind.CONTROL, Kind.USER_DEFINED)}
    known = END_TEXTS & added.keys()
    if "<|return|>" in known:
        known -= {"<|end|>"}  # in Harmony it ends a message, after which the next one begins
    named = _named_ends(fields, len(tokens.texts))
    return list(dict.fromkeys([*named, *sorted(added[text] for text in known)]))


def _templates(fields: Fields) -> dict[str, str]:
    """The chat templates by file."""
    prefix = "tokenizer.chat_template"
    names = sorted(name for name in fields.names() if name == prefix or name.startswith(f"{prefix}."))
    if len(names) > MAX_TEMPLATES:
        raise TokenizerError(f"{SOURCE} has {len(names)} chat templates; {MAX_TEMPLATES} are allowed")
    files = {}
    for name in names:
        short = name[len(prefix) + 1 :]
        if short and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", short):
            raise TokenizerError(
                f"{SOURCE}: {name[:120]!r} names a chat template; a name has up to 64 letters, digits, '_' and '-'"
            )
        files[f"additional_chat_templates/{short}.jinja" if short else "chat_template.jinja"] = fields.text(name)
    return files


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
