"""What the demo model learns from: Python source texts, made-up chats, their tokenizer, training windows."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# How Qwen splits text before BPE, case-sensitive contractions left out: code has none.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class TrainingError(Exception):
    """A condition the user can mend: no sources, an unusable folder, a bad option."""


@dataclass
class Corpus:
    """Source texts: what to train on, and what was held out (library files only)."""

    library: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    held_out_names: list[str] = field(default_factory=list)


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> Iterator[Path]:
    """The library's own Python files in a stable order.

    Left out: installed packages, build records with this machine's paths in them, and character tables
    (`encodings/cp1252.py` and its kin are thousands of lines of numbers).
    """
    skipped = {"site-packages", "dist-packages", "__pycache__", "encodings", "cjkencodings"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skipped.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield path


def read_corpus(root: Path, seed: int, held_out_share: float) -> Corpus:
    """Read every usable file under `root`; a seeded draw of the library's files is held out.

    Raises TrainingError if the interpreter comes without sources (a zip or .pyc-only install).
    """
    corpus, draw = Corpus(), np.random.default_rng(seed)
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the test packages hold files that are broken on purpose
        name = path.relative_to(root)
        if {"test", "tests", "idle_test"} & set(name.parts):
            if len(text) < 400_000:  # longer ones are data tables
                corpus.tests.append(text)
        elif draw.random() < held_out_share and len(text) > 500:
            corpus.held_out.append(text)
            corpus.held_out_names.append(str(name))
        elif text.strip():
            corpus.library.append(text)
    if sum(map(len, corpus.library)) < 1_000_000 or not corpus.held_out:
        raise TrainingError(
            f"{root} holds too little Python source to train on: "
            "use an interpreter that was installed with its library's .py files"
        )
    return corpus


def documented_functions(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, first line of the docstring, dedented source) of each short documented function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
            if len(source) < 1500:
                yield node.name, docstring.strip().split("\n")[0], source


def chat_turn(role: str, content: str) -> str:
    """One message as the chat template writes it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def chat_texts(texts: list[str], seed: int) -> list[str]:
    """Synthetic conversations: a request made from a docstring, answered with the function's source."""
    rng, turns = np.random.default_rng([seed, 1]), []
    for text in texts:
        for name, summary, source in documented_functions(text):
            request = (
                f"Write a function `{name}`. {summary}",
                f"Write a function `{name}`.",
                f"Write a Python function: {summary}",
                summary,
            )[rng.choice(4, p=(0.5, 0.2, 0.2, 0.1))]
            turns.append(chat_turn("user", request) + chat_turn("assistant", f"```python\n{source}\n```"))
    order, conversations, start = rng.permutation(len(turns)), [], 0
    while start < len(turns):
        count = int(rng.choice(3, p=(0.6, 0.25, 0.15))) + 1
        conversations.append("".join(turns[i] for i in order[start : start + count]))
        start += count
    return conversations


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with the special tokens as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of token ids, every text followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = np.full(1, end, np.uint16)
    encoded = (tokenizer.encode_batch_fast(texts[i : i + 64]) for i in range(0, len(texts), 64))
    pieces = [np.array([*item.ids, end], np.uint16) for batch in encoded for item in batch]
    return np.concatenate([stream, *pieces])


@dataclass(frozen=True)
class Sampler:
    """Draws training windows; a step's batch depends on the seed and the step alone, so runs can resume."""

    streams: tuple[np.ndarray, ...]  # token ids, one array a source
    weights: tuple[float, ...]  # each source's share of the rows
    seed: int
    tokens: int  # in a batch
    window: int
    long_window: int  # every fourth batch: teaches the positions beyond `window`

    def batch(self, step: int) -> Tensor:
        """Token ids [rows, window + 1]."""
        rng = np.random.default_rng([self.seed, 2, step])
        window = self.long_window if step % 4 == 3 else self.window
        rows = []
        for source in rng.choice(len(self.streams), self.tokens // window, p=self.weights):
            start = rng.integers(len(self.streams[source]) - window)
            rows.append(self.streams[source][start : start + window + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))
