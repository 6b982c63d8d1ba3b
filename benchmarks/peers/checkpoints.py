"""The checkpoint in each engine's format: random weights in one model's shape, converted when first asked for."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import tell
from benchmarks.peers.recipes import RECIPES, PeerError, environment, log_file, run
from quire.models.hub import ASSETS
from quire.models.random_checkpoint import random_checkpoint

PEERS = {recipe.name: recipe for recipe in RECIPES}


def make(kind: str, shape: str, work: Path) -> Path:
    """The file or folder of a checkpoint, which is written at the first call.

    Args:
        kind: "hf" (a Hugging Face folder), or one of `Recipe.checkpoints`; with "words-" before it, the same with a
            tokenizer whose tokens are pieces of text, as many as the model has.
        shape: of `quire.models.random_checkpoint`.
        work: the folder that holds them all.

    Raises:
        PeerError: it could not be converted.
    """
    folder = work / "checkpoints"
    if kind == "hf":
        if not (folder / shape).exists():
            tell(f"writing random weights to {folder / shape}")
        with random_checkpoint(shape, str(folder)) as path:
            return path
    if kind == "words-hf":
        return _with_words(make("hf", shape, work))
    path = folder / f"{shape}-{kind}{'.gguf' if 'gguf' in kind else ''}"
    if not path.exists():
        tell(f"converting to {path.name}")
        partial = path.with_name(f"{path.name}.partial")
        _remove(partial)
        _, words, rest = kind.rpartition("words-")
        family, _, form = rest.partition("-")
        convert = {"gguf": _to_gguf, "openvino": _to_openvino, "compressed": _to_compressed}[family]
        convert(form, shape, partial, work, words)
        if not partial.exists():
            raise PeerError(f"converting to {path.name} wrote nothing", work / "logs")
        partial.rename(path)
    return path


def _to_gguf(form: str, shape: str, target: Path, work: Path, words: str) -> None:
    source = make(f"{words}{'hf' if form == 'bf16' else 'gguf-bf16'}", shape, work)
    python = environment(PEERS["llama.cpp"], work)
    quantize = [] if form == "bf16" else ["--to", form]
    command = [str(python), "-m", "benchmarks.peers.make_gguf", str(source), str(target), *quantize]
    run(command, log_file(work, f"convert-gguf-{form}"))


def _to_compressed(form: str, shape: str, target: Path, work: Path, words: str) -> None:
    source = make(f"{words}hf", shape, work)
    command = [sys.executable, "-m", "benchmarks.peers.make_compressed", str(source), str(target), "--to", form]
    run(command, log_file(work, f"convert-compressed-{form}"))


def _to_openvino(form: str, shape: str, target: Path, work: Path, words: str) -> None:
    source = make("words-hf", shape, work) if words else _with_tokenizer(make("hf", shape, work))
    python = environment(PEERS["OpenVINO GenAI"], work)
    export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
    more = ["--task", "text-generation-with-past", "--weight-format", form, str(target)]
    run([*export, *more], log_file(work, f"convert-openvino-{form}"))


def _with_tokenizer(checkpoint: Path) -> Path:
    """The checkpoint with a tokenizer of single bytes beside it: some tools want one, though prompts are token ids."""
    folder = checkpoint.with_name(f"{checkpoint.name}-with-tokenizer")
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        link = folder / name
        if not link.exists():
            os.symlink(checkpoint / name, link)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(["<bos>", "<eos>", *alphabet])}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<bos>", "<eos>"])
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _with_words(checkpoint: Path) -> Path:
    """The checkpoint with the demo model's tokenizer, cut to the model's size or with pairs of its tokens, too."""
    folder = checkpoint.with_name(f"{checkpoint.name}-with-words")
    folder.mkdir(exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    tokenizer = json.loads((ASSETS / "demo" / "tokenizer.json").read_text("utf-8"))
    size, model = config["vocab_size"], tokenizer["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)[:size]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [merge for merge in model["merges"] if "".join(merge) in vocabulary]
    pairs = ((a, b) for a, b in itertools.product(words[300:], words[300:]) if not b.startswith("Ġ"))
    for pair in pairs if len(words) < size else ():
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append([*pair])
        if len(vocabulary) == size:
            break
    model |= {"vocab": vocabulary, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    end = "<|im_end|>"
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": vocabulary[end]}), "utf-8")
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), "utf-8")
    if not (folder / "model.safetensors").exists():
        os.symlink(checkpoint / "model.safetensors", folder / "model.safetensors")
    return folder


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
