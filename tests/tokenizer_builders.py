"""Small tokenizers of the two families that matter, built in a moment, for the tests."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "hello world, hello user, hello assistant, stop here. Stopping is not a stop.",
    "naive cafe resume, été, straße, 你好世界, привет мир",
]

CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json() -> str:
    """A byte-level BPE like GPT-2's and Qwen's, with ChatML's special tokens and a plain added one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CHATML_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer.to_str()


@cache
def metaspace_json() -> str:
    """A BPE like Llama 2's: spaces as U+2581, byte fallback, <s> put first by the post-processor."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer.to_str()


@cache
def panicking_json() -> tuple[str, int]:
    """A tokenizer whose decoder panics on one id, a single tilde, and that id."""
    content = json.loads(byte_level_json())
    strip = {"type": "Strip", "content": "~", "start": 1, "stop": 1}
    content["decoder"] = {"type": "Sequence", "decoders": [strip, content["decoder"]]}
    return json.dumps(content), content["model"]["vocab"]["~"]


@cache
def unigram_json() -> str:
    """A Unigram like T5's: pieces with scores, spaces as U+2581, everything normalized."""
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("\u2581", -2.0),
        *((chr(code), -3.0) for code in range(33, 127)),
    ]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("\u2581the", -1.5), ("qu", -2.5)], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str()


CHATML_CONFIG: dict[str, object] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
LLAMA_CONFIG: dict[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}
