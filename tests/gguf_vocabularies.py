"""A published tokenizer as a GGUF file's metadata has it, and texts to compare tokenizers on."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNUSED_IDS = 70
"""Ids without a token behind the vocabulary's end, as padded matrices have them."""

SNIPPETS = [
    *("I'm", "he'LL", "we've", "'Re", "123456", "3.14159", "x=1;\n\n\ty", "  ", "    return", "\r\n", " \n ", "\t\t\t"),
    *("caf\u00e9", "cafe\u0301", "\u1fbe\u0308\u0301", "na\u00efve", "Stra\u00dfe", "\u212b", "\ufb01ne", "\u0130I"),
    *(
        "\u4f60\u597d\u4e16\u754c",
        "\u3053\u3093\u306b\u3061\u306f",
        "\uc548\ub155",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
    ),
    *(
        "\u0645\u0631\u062d\u0628\u0627",
        "\u0e2a\u0e27\u0e31\u0e2a",
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u17a0\u17c1",
    ),
    *("\U0001f642\u200d\U0001f32b", "\U0001d400", "\u2581\u2581", "\u00a0", "\u3000", "\ue000", "\u0085", "\u2028"),
    *("<|im_end|>", "</s>", "<0x0A>", "<think>", "[INST]", "==========", "//////", "camelCaseWORDS", "A1b2"),
    *("\u0661\u0662\u0663", "\u00b2\u2077", "\u2163", "!!!", "\u201cq\u201d", "a/b\\c", "\u0660\u0660\u0660\u0660"),
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of many scripts, of code, and of this project's pages."""
    rng = random.Random(seed)
    pages = [(ROOT / name).read_text("utf-8") for name in ("README.md", "tests/gguf_vocabularies.py")]
    made = []
    for _ in range(count):
        page = rng.choice(pages)
        start, kind = rng.randrange(len(page)), rng.randrange(4)
        if kind == 0:
            made.append(page[start : start + rng.randrange(1, 200)])
        elif kind == 1:
            made.append("".join(chr(_letter(rng)) for _ in range(rng.randrange(1, 30))))
        else:
            made.append(rng.choice(["", " ", "\n"]).join(rng.choices(SNIPPETS, k=rng.randrange(1, 12))))
    return made


def _letter(rng: random.Random) -> int:
    """A code point, seldom beyond the first plane, and no surrogate."""
    code = rng.choice([rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x110000)])
    return code if not 0xD800 <= code < 0xE000 else 32


def as_metadata(folder: Path, model: str, pre: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter makes of a published tokenizer's folder.

    Args:
        model, pre: `tokenizer.ggml.model` and `.pre`.
    """
    source = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    by_id = {token: text for text, token in source["model"]["vocab"].items()}
    added = {each["id"]: each for each in source["added_tokens"]}
    by_id |= {token: each["content"] for token, each in added.items()}
    tokens, kinds = [], []
    for token in range(max(by_id) + 1 + UNUSED_IDS):
        text = by_id.get(token)
        if text is None:
            tokens.append(f"[PAD{token}]")
            kinds.append(5)
        elif token in added and (added[token]["special"] or _looks_special(text)):
            tokens.append(text)
            kinds.append(3)
        elif token in added:
            tokens.append(text.replace("\u2581", " ") if model == "llama" else text)
            kinds.append(4)
        else:
            tokens.append(text)
            kinds.append(6 if re.fullmatch("<0x[0-9A-F]{2}>", text) else 1)
    ids = {text: token for token, text in by_id.items()}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": "TemplateProcessing" in json.dumps(source["post_processor"]),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found = config.get(f"{name}_token")
        found = found["content"] if isinstance(found, dict) else found
        if found is not None:
            metadata[f"tokenizer.ggml.{key}_token_id"] = ids[found]
    merges = [each.split(" ") if isinstance(each, str) else each for each in source["model"]["merges"]]
    if model != "llama":
        return {**metadata, "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    return {
        **metadata,
        "tokenizer.ggml.scores": [scores.get(text, -1e6) for text in tokens],
        "tokenizer.ggml.add_space_prefix": "Prepend" in json.dumps(source["normalizer"]),
    }


def _looks_special(text: str) -> bool:
    """Whether the converter takes an added token for a special one."""
    brackets = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    named = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    return named or any(text.startswith(start) and text.endswith(end) for start, end in brackets)
